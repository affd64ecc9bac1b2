"""TLS and tokens while the server runs: who is trusted, what a changed file changes, and for whom."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork_client import AsyncClient, CertificateUnusable, Tls, TlsFailed, TokenMissing, TokenUnknown, Unavailable

from service.auth.tokens import new_token
from service.config import Config
from service.rpc.access import Access, AccessUnusable
from tests.certificates import Authority, Pair

from .conftest import ScriptedCore, Serving, eventually, run, serving


class World:
    """An authority, and the files of a server that it has signed for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.pem)
        self.certificate, self.key = self.authority.server().write(folder, "server")
        self.tokens = folder / "tokens"

    @property
    def settings(self) -> dict[str, Any]:
        return {"tls_cert": self.certificate, "tls_key": self.key}

    def allow(self, *owners: str) -> list[str]:
        """Writes a tokens file with one token for each; the tokens."""
        made = [new_token(owner) for owner in owners]
        self.tokens.write_text("".join(f"{line}\n" for _, line in made))
        return [token for token, _ in made]

    def tls(self, pair: Pair | None = None, ca: Path | None = None) -> Tls:
        """How a client sees it; `pair`: as a caller with this certificate."""
        if pair is None:
            return Tls(ca=ca or self.ca)
        certificate, key = pair.write(self.folder, "client")
        return Tls(ca=ca or self.ca, certificate=certificate, key=key)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@asynccontextmanager
async def client(s: Serving, tls: Tls | None, token: str | None = None) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(s.addresses[0], tls=tls, token=token, retry=False, timeout=20.0) as connected:
        yield connected


async def owner_seen(s: Serving, tls: Tls | None, token: str | None = None) -> str:
    """In whose name a new connection's call runs."""
    async with client(s, tls, token) as connected:
        _ = [each async for each in connected.list_snapshots()]
    owner = s.core.calls[-1][1]
    assert isinstance(owner, str)
    return owner


async def served_certificate(s: Serving, ca: Path) -> int:
    """The serial number that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    host, _, port = s.addresses[0].rpartition(":")
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def serial(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(pair.certificate).serial_number


def test_tls_serves_whoever_trusts_the_authority_and_nobody_in_the_clear(world: World):
    [token] = world.allow("alice")

    async def story() -> None:
        async with serving(**world.settings, tokens=world.tokens) as s:
            assert await owner_seen(s, world.tls(), token) == "alice"
            with pytest.raises(Unavailable):
                await owner_seen(s, None, token)
            elsewhere = world.folder / "elsewhere.pem"
            elsewhere.write_bytes(Authority("elsewhere").pem)
            with pytest.raises(TlsFailed) as caught:
                await owner_seen(s, world.tls(ca=elsewhere), token)
            assert "certificate" in caught.value.advice
            assert len([call for call in s.core.calls if call[0] == "list_snapshots"]) == 1

    run(story)


def test_a_client_that_speaks_tls_to_a_clear_port_is_told_so(world: World):
    async def story() -> None:
        async with serving() as s:
            with pytest.raises(TlsFailed):
                await owner_seen(s, world.tls())

    run(story)


def test_the_unix_socket_beside_it_stays_clear_and_wants_a_token(world: World, tmp_path: Path):
    [token] = world.allow("alice")

    async def story() -> None:
        async with serving(**world.settings, tokens=world.tokens, unix_socket=tmp_path / "s") as s:
            async with AsyncClient(s.addresses[1], token=token) as connected:
                _ = [each async for each in connected.list_snapshots()]
            assert s.core.calls[-1][1] == "alice"
            async with AsyncClient(s.addresses[1]) as stranger:
                with pytest.raises(TokenMissing):
                    await stranger.server_info()

    run(story)


def test_a_new_certificate_is_served_without_a_restart_and_streams_go_on(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "service")
    [token] = world.allow("alice")
    core = ScriptedCore()
    release = asyncio.Event()
    core.script = (*core.script[:1], lambda: release.wait(), *core.script[1:])
    first, second = world.authority.server(), world.authority.server()

    async def story() -> None:
        first.write(world.folder, "server")
        async with serving(core, **world.settings, tokens=world.tokens) as s:
            assert await served_certificate(s, world.ca) == serial(first)
            credentials = grpc.ssl_channel_credentials(world.authority.pem)
            async with grpc.aio.secure_channel(s.addresses[0], credentials) as channel:
                metadata = (("authorization", f"Bearer {token}"),)
                stream = aiter(
                    InferenceServiceStub(channel).Generate(
                        pb.GenerateRequest(parent="snapshots/one"), metadata=metadata
                    )
                )
                await anext(stream)
                # Half of it: the new certificate with the old key. What fits stays in use.
                world.certificate.write_bytes(second.certificate)
                await eventually(lambda: "is not that of the certificate" in caplog.text)
                assert await served_certificate(s, world.ca) == serial(first)
                world.key.write_bytes(second.key)
                await eventually(lambda: "was read again" in caplog.text)  # noticed by itself
                assert await served_certificate(s, world.ca) == serial(second)
                release.set()
                assert len([message async for message in stream]) == 2
            assert await owner_seen(s, world.tls(), token) == "alice"
            assert caplog.text.count("is not that of the certificate") == 1

    run(story)


# Client certificates


def test_a_client_certificate_is_an_owner(world: World):
    async def story() -> None:
        async with serving(**world.settings, tls_client_ca=world.ca, admins=("spiffe://here/ops",)) as s:
            names = {
                "alice": world.authority.client("alice"),
                "web-1": world.authority.client("ignored", dns=("web-1",)),
                "spiffe://here/job/7": world.authority.client("", uri=("spiffe://here/job/7",)),
            }
            for owner, pair in names.items():
                assert await owner_seen(s, world.tls(pair)) == owner
            several = world.tls(world.authority.client("a", dns=("a", "b")))
            with pytest.raises(CertificateUnusable, match="several names"):
                await owner_seen(s, several)
            with pytest.raises(CertificateUnusable, match="no name"):
                await owner_seen(s, world.tls(world.authority.client()))
            before = len(s.core.calls)
            for stranger in (None, Authority("elsewhere").client("alice")):
                with pytest.raises(Unavailable):
                    await owner_seen(s, world.tls(stranger))
            assert len(s.core.calls) == before

    run(story)


def test_a_token_beside_a_certificate_decides(world: World):
    [token] = world.allow("bob")

    async def story() -> None:
        async with serving(**world.settings, tls_client_ca=world.ca, tokens=world.tokens) as s:
            alice = world.tls(world.authority.client("alice"))
            assert await owner_seen(s, alice) == "alice"
            assert await owner_seen(s, alice, token) == "bob"
            with pytest.raises(TokenUnknown):
                await owner_seen(s, alice, "kvf_wrong")
            with pytest.raises(Unavailable):  # the token alone does not open the connection
                await owner_seen(s, world.tls(), token)

    run(story)


def test_another_authority_for_clients_counts_from_the_next_connection_on(world: World):
    async def story() -> None:
        trusted = world.folder / "clients.pem"
        trusted.write_bytes(world.authority.pem)
        async with serving(**world.settings, tls_client_ca=trusted) as s:
            alice = world.tls(world.authority.client("alice"))
            assert await owner_seen(s, alice) == "alice"
            other = Authority("other")
            trusted.write_bytes(other.pem)
            s.server.look_again()
            async with asyncio.timeout(10):
                while True:
                    try:
                        await owner_seen(s, alice)
                    except Unavailable:
                        break
                    await asyncio.sleep(0.05)
            certificate, key = other.client("bob").write(world.folder, "bob")
            assert await owner_seen(s, Tls(ca=world.ca, certificate=certificate, key=key)) == "bob"

    run(story)


# Tokens


async def known(s: Serving, token: str) -> str | None:
    """Whose the server takes `token` for."""
    async with client(s, None, token) as connected:
        try:
            _ = [each async for each in connected.list_snapshots()]
        except TokenUnknown:
            return None
    owner = s.core.calls[-1][1]
    assert isinstance(owner, str)
    return owner


async def until_known(s: Serving, token: str) -> None:
    """Waits until the server has taken `token` up; the test's own time limit is the bound."""
    while await known(s, token) is None:  # noqa: ASYNC110  asking is the only way to tell
        await asyncio.sleep(0.05)


def test_a_token_is_replaced_without_a_gap_and_taken_away_for_the_next_call(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "service")
    old, first = new_token("alice")
    new, second = new_token("alice")

    async def until(count: int) -> None:
        await eventually(lambda: caplog.text.count("was read again") == count)

    async def story() -> None:
        world.tokens.write_text(f"{first}\n")
        core = ScriptedCore()
        release = asyncio.Event()
        core.script = (*core.script[:1], lambda: release.wait(), *core.script[1:])
        async with serving(core, tokens=world.tokens) as s:
            assert [await known(s, token) for token in (old, new)] == ["alice", None]
            with world.tokens.open("a") as file:
                file.write(f"{second}\n")
            await until(1)  # noticed by itself
            assert [await known(s, token) for token in (old, new)] == ["alice", "alice"]
            stream = aiter(
                s.inference.Generate(
                    pb.GenerateRequest(parent="snapshots/one"), metadata=(("authorization", f"Bearer {old}"),)
                )
            )
            await anext(stream)
            world.tokens.write_text(f"{second}\n")
            s.server.look_again()
            await until(2)
            assert [await known(s, token) for token in (old, new)] == [None, "alice"]
            release.set()
            assert len([message async for message in stream]) == 2  # what runs is not cut off
            # A file that cannot be meant leaves everything as it was, and is complained of once.
            world.tokens.write_text(f"alice {new}\n")
            await eventually(lambda: "what was in use stays in use" in caplog.text)
            assert await known(s, new) == "alice"
            await asyncio.sleep(2.5)
            assert caplog.text.count("what was in use stays in use") == 1
            world.tokens.unlink()
            await eventually(lambda: caplog.text.count("what was in use stays in use") == 2)
            assert await known(s, new) == "alice"
            world.tokens.write_text(f"{first}\n")
            await until(3)
            assert [await known(s, token) for token in (old, new)] == ["alice", None]

    run(story)
    assert new not in caplog.text and old not in caplog.text


def test_a_token_command_is_run_again_in_its_time(world: World):
    old, first = new_token("alice")
    new, second = new_token("alice")
    script = world.folder / "print.py"

    async def story() -> None:
        script.write_text(f"print('{first}')")
        async with serving(token_command=f"{sys.executable} {script}", token_refresh=0.2) as s:
            assert [await known(s, token) for token in (old, new)] == ["alice", None]
            script.write_text(f"print('{second}')")
            await until_known(s, new)
            assert await known(s, old) is None

    run(story)


# What a server does not start with


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda w: w.certificate.unlink(), "server.pem cannot be read: No such file"),
        (lambda w: w.certificate.write_text("nothing"), "there is no certificate in .*server.pem"),
        (lambda w: w.key.write_text("nothing"), "there is no private key in .*server.key"),
        (lambda w: w.key.write_bytes(w.authority.server().key), "the key .*server.key is not that of the certificate"),
        (lambda w: w.ca.write_text("nothing"), "there is no certificate in .*ca.pem"),
        (lambda w: w.tokens.write_text("alice kvf_SECRET"), "tokens, line 1"),
        (lambda w: w.tokens.unlink(), "the tokens file .*tokens cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_else(world: World, damage: Any, says: str):
    world.allow("alice")
    config = Config(**world.settings, tls_client_ca=world.ca, tokens=world.tokens)
    Access(config)
    damage(world)
    with pytest.raises(AccessUnusable, match=says) as caught:
        Access(config)
    assert "SECRET" not in str(caught.value)


def test_an_encrypted_key_and_an_expired_certificate_are_told(world: World, caplog: pytest.LogCaptureFixture):
    world.allow("alice")
    config = Config(**world.settings, tokens=world.tokens)
    expired = world.authority.server(expired=True)
    expired.write(world.folder, "server")
    Access(config)
    assert "has expired" in caplog.text
    key = serialization.load_pem_private_key(expired.key, None)
    world.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"SECRET"),
        )
    )
    with pytest.raises(AccessUnusable, match="is encrypted"):
        Access(config)
