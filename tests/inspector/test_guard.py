"""Which requests are a page of this server's own, and which only look like one."""

from __future__ import annotations

import pytest

from service.inspector.guard import refusal
from service.inspector.http import Request

NAMES = ("kvfork.example.org", "*.gpu.example.org")


def why(*, tls: bool = False, loopback: bool = True, method: str = "POST", **headers: str) -> str:
    given = {"host": "127.0.0.1:8080"} | ({"content-type": "application/json"} if method == "POST" else {})
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(method=method, path="/", headers=tuple((k, v) for k, v in given.items() if v), body=b"")
    return refusal(request, tls=tls, loopback=loopback, names=NAMES if tls else ())


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost:9000", "localhost", "[::1]:8080", "127.1.2.3", "LOCALHOST"]
)
def test_names_of_this_machine_are_its_own(host: str):
    assert why(host=host) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "kvfork.example.org:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
        "192.168.1.5:8080", "[fe80::1]:8080", "0.0.0.0:8080", "2130706433:8080", "127.1", "localhost:80:80", "a b", "",
        "[::1", "x@127.0.0.1",
    ],
)  # fmt: skip
def test_a_name_that_somebody_pointed_here_is_not(host: str):
    assert why(host=host)


def test_two_hosts_are_none():
    request = Request(method="GET", path="/", headers=(("host", "localhost"), ("host", "evil.example")), body=b"")
    assert refusal(request, tls=False, loopback=True, names=())


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("kvfork.example.org:8443", True),
        ("KVFORK.example.org", True),
        ("a.gpu.example.org", True),
        ("192.168.1.5:8443", True),  # an address cannot be pointed elsewhere
        ("a.b.gpu.example.org", False),
        ("gpu.example.org", False),
        ("evil.example", False),
        ("example.org", False),
    ],
)
def test_beyond_this_machine_the_certificate_says_what_its_names_are(host: str, ours: bool):
    assert (why(tls=True, loopback=False, host=host) == "") == ours


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8080"},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:8081"},
        {"origin": "http://localhost:8080"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=application/json"},
        {"content_type": ""},
    ],
)
def test_a_foreign_page_gets_nothing_done(headers: dict[str, str]):
    assert why(**headers)


def test_the_servers_own_page_does():
    assert why(origin="http://127.0.0.1:8080", sec_fetch_site="same-origin") == ""
    assert why(host="Localhost:1", origin="http://localhost:1", content_type="application/json; charset=utf-8") == ""
    assert why(tls=True, host="kvfork.example.org", origin="https://kvfork.example.org") == ""


def test_a_link_from_elsewhere_shows_the_page_and_no_more():
    assert why(method="GET", sec_fetch_site="cross-site") == ""
    assert why(method="GET", sec_fetch_site="cross-site", origin="http://evil.example")
