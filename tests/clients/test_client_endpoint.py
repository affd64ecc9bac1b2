"""Addresses, credentials and what is sent with each call."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from contract_peer import Peer
from flavours import Flavour
from kvfork_client import Client, Tls
from kvfork_client.endpoint import endpoint, is_local, normal_target


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("unix:/run/kvfork.sock", "unix:/run/kvfork.sock"),
        ("unix:///run/kvfork.sock", "unix:///run/kvfork.sock"),
        ("/run/kvfork.sock", "unix:/run/kvfork.sock"),
        ("[::1]:1", "[::1]:1"),
    ],
)
def test_addresses_are_taken_as_people_write_them(given: str, target: str) -> None:
    assert normal_target(given) == target
    assert is_local(target)


@pytest.mark.parametrize("target", ["example.org:443", "10.0.0.1:50051", "localhost.example.org:1", "[2001:db8::1]:1"])
def test_what_may_be_elsewhere_is_not_local(target: str) -> None:
    assert not is_local(target)


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:1", "https://x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Client(address)


def test_a_token_does_not_cross_a_network_in_the_clear() -> None:
    for clear in (None, False):
        with pytest.raises(ValueError, match="without TLS"):
            endpoint("example.org:1", token="secret", tls=clear, retry=True)
    secure = endpoint("example.org:1", token="secret", tls=True, retry=True)
    local = endpoint("127.0.0.1:1", token="secret", tls=None, retry=True)
    assert (secure.tls, local.tls) == (Tls(), None)
    assert secure.metadata() == local.metadata() == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize("token", ["secret\n", "two words", "päss", "a\x00b"])
def test_a_token_that_no_header_can_carry_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        endpoint("127.0.0.1:1", token=token, tls=None, retry=True)
    assert token not in str(caught.value)


def test_the_token_goes_with_every_call(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address, token="secret")
    flavour.do(client.server_info)
    flavour.do(flavour.do(client.generate, "x").result)
    assert [metadata["authorization"] for metadata in peer.metadata] == ["Bearer secret"] * 2


def test_one_connection_carries_calls_in_several_names(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address, token="secret")
    other, nobody = client.with_token("other"), client.with_token(None)
    for each in (other, nobody, other.with_token("third"), client):
        flavour.do(each.server_info)
    flavour.do(flavour.do(other.generate, "x").result)
    flavour.do(other.close)  # the connection is the first one's
    flavour.do(client.server_info)
    named = ["Bearer other", None, "Bearer third", "Bearer secret", "Bearer other", "Bearer secret"]
    assert [metadata.get("authorization") for metadata in peer.metadata] == named
    with pytest.raises(ValueError, match="printable ASCII"):
        client.with_token("two words")


def test_a_unix_socket_will_do(flavour: Flavour) -> None:
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 bytes
        path = Path(folder) / "s"
        with Peer(f"unix:{path}") as peer:
            client = flavour.client(str(path))
            assert flavour.do(flavour.do(client.generate, "x").result).text == peer.answer


def test_missing_certificates_are_told_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        Client("example.org:1", tls=Tls(ca="/no/such/file"))


def test_a_client_can_be_made_outside_a_loop() -> None:
    from kvfork_client import AsyncClient

    assert repr(AsyncClient("127.0.0.1:1")) == "<AsyncClient 127.0.0.1:1>"
