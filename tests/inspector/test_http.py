"""The listener and the calls behind it, over a scripted core and a real door: bounds, errors, TLS, who is let in."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from service import app
from service.auth.tokens import new_token
from service.config import Config
from service.errors import SnapshotInUse, SnapshotNotFound
from service.events import Synced, Watched
from service.inspector import guard, http
from service.inspector.inspector import Inspector
from service.rpc.access import Access
from service.rpc.server import RpcServer
from tests.certificates import Authority
from tests.e2e.live import until
from tests.inspector.browser import Page, Reply
from tests.rpc.conftest import FINISHED, STARTED, ScriptedCore, delta, eventually, run, snapshot

POST = b"POST /api/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OWN_HEADERS = {name for name, _ in guard.HEADERS}


@asynccontextmanager
async def inspected(core: ScriptedCore | None = None, **settings: Any) -> AsyncIterator[tuple[Page, ScriptedCore]]:
    """A server with an inspector beside it, as `service.app` puts them together."""
    core = core or ScriptedCore()
    config = Config(**{"address": "127.0.0.1:0", "inspector": ":0", **settings})
    access = Access(config)
    tls = access.tls
    inspector = Inspector(context=tls.context if tls else None, names=tls.names if tls else tuple)
    server = RpcServer(core, config, access, inspector.door)
    url = await inspector.start("127.0.0.1", 0)
    await server.start()
    try:
        yield Page(url), core
    finally:
        await server.stop()  # with the grace that calls have to tell how they end
        await inspector.close()
        assert not inspector.door.parent.exists()


async def asked(ask: Callable[..., Reply], *arguments: Any, **headers: Any) -> Reply:
    return await asyncio.to_thread(ask, *arguments, **headers)


async def raw(page: Page, data: bytes, *, then: bytes = b"") -> bytes:
    """What the server says to bytes on a connection, until it closes it."""
    host, _, port = page.url.removeprefix("http://").rstrip("/").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        begun = b""
        if then:
            begun = await reader.read(1)  # what was asked first is being answered
            writer.write(then)
        return begun + await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_the_page_and_all_it_needs_come_from_the_server_alone():
    async def story() -> None:
        async with inspected() as (page, _):
            index = await asked(page.get)
            assert index.status == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
            text = index.body.decode()
            assert "//" not in text.replace("<!--", "") and "style=" not in text and "<script>" not in text
            names = [part.split('"')[0] for part in text.split('href="')[1:] + text.split('src="')[1:]]
            for name in [*names, "api.js", "tree.js", "words.js", "actions.js"]:
                file = await asked(page.get, f"/{name}")
                assert file.status == 200, name
                for imported in [
                    line.split('"')[-2] for line in file.body.decode().splitlines() if line[:7] == "import "
                ]:
                    assert (await asked(page.get, imported.removeprefix("."))).status == 200
            for reply in (
                index,
                await asked(page.get, "/none"),
                await asked(page.call, "None"),
                await asked(page.call, "GetServerInfo"),
            ):
                assert reply.headers.keys() >= OWN_HEADERS
                assert not reply.headers.keys() & {"set-cookie", "server", "access-control-allow-origin"}
            assert "default-src 'none'" in index.headers["content-security-policy"]

    run(story)


def test_paths_and_methods_that_are_none_are_refused():
    async def story() -> None:
        async with inspected() as (page, core):
            for path in ("/x", "/../config.py", "/%2e%2e/http.py", "/__init__.py", "/api", "//", "/index.html"):
                assert (await asked(page.get, path)).status == 404, path
            assert (await asked(page.get, "/api/GetServerInfo")).status == 405
            assert (await asked(page.ask, "POST", "/", b"{}", {})).status == 405
            assert (await asked(page.ask, "OPTIONS", "/api/Generate", b"", {})).status == 405
            for name in ("TrimCache", "UpdateSnapshot", "ExtendSnapshots", "Nope", "", "../Generate"):
                assert (await asked(page.call, name)).status == 404, name
            head = await asked(page.ask, "HEAD", "/", b"", {})
            assert (head.status, head.body) == (200, b"") and int(head.headers["content-length"]) > 1000
            assert core.calls == []

    run(story)


def test_foreign_pages_are_refused_before_anything_is_done():
    async def story() -> None:
        async with inspected() as (page, core):
            for headers in (
                {"host": "evil.example"},
                {"origin": "http://evil.example"},
                {"origin": "null"},
                {"sec_fetch_site": "cross-site"},
                {"content_type": "text/plain"},
            ):
                reply = await asked(page.call, "DeleteSnapshot", {"name": "snapshots/one"}, **headers)
                assert reply.status == 403, headers
            assert (await asked(page.get, host="evil.example")).status == 403
            assert core.calls == []
            assert (await asked(page.call, "DeleteSnapshot", {"name": "snapshots/one"})).status == 200
            assert [call[0] for call in core.calls] == ["delete_snapshot"]

    run(story)


def test_messages_are_the_contracts_and_so_are_refusals():
    async def story() -> None:
        core = ScriptedCore(snapshots=[snapshot()])
        async with inspected(core) as (page, _):
            got = await asked(page.call, "GetSnapshot", {"name": "snapshots/one"})
            assert got.json["snapshot"]["tokenCount"] == 5 and got.json["snapshot"]["residency"] == "RESIDENCY_MEMORY"
            core.failing["delete_snapshot"] = SnapshotInUse("in use", metadata={"activeUses": "2"})
            busy = await asked(page.call, "DeleteSnapshot", {"name": "snapshots/one"})
            assert busy.reason == (409, "FAILED_PRECONDITION", "SNAPSHOT_IN_USE")
            assert busy.json["error"]["facts"] == {"activeUses": "2"}
            missing = await asked(page.call, "GetSnapshot", {"name": "snapshots/two"})
            assert missing.reason == (404, "NOT_FOUND", "SNAPSHOT_NOT_FOUND")
            wrong = await asked(page.call, "Fork", {"parent": "snapshots/one"})
            assert wrong.reason == (400, "INVALID_ARGUMENT", "INVALID_FIELD") and wrong.json["error"]["fields"] == [
                "branches"
            ]

    run(story)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"\xff", b'{"parent": 1}', b'{"nope": 1}', b"[" * 100_000, b'{"a":' * 5_000, b'"text"', b"7",
        b'{"parent": "\\ud800"}', b'{"parent": "a", "parent": "b"}', b"\x00" * 100,
        b'{"stopping": {"maxTokens": 1e99}}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_told_so(body: bytes, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        async with inspected() as (page, core):
            for name in ("Generate", "Fork", "text"):
                reply = await asked(page.ask, "POST", f"/api/{name}", body, {})
                assert reply.reason == (400, "INVALID_ARGUMENT", "INVALID_FIELD"), (name, reply)
            assert core.calls == []

    run(story)
    assert caplog.records == []


def test_a_stream_comes_as_it_is_made_and_ends_with_what_went_wrong():
    async def story() -> None:
        more = asyncio.Event()
        core = ScriptedCore(script=(STARTED, delta("Hi"), more.wait, delta(" there", 6), SnapshotNotFound("gone")))
        async with inspected(core) as (page, _):
            question = {"input": {"raw": {"parts": [{"text": "x"}]}}}
            lines = page.stream("Generate", question)
            first, second = await asyncio.to_thread(lambda: (next(lines), next(lines)))
            assert first["started"]["generation"] == STARTED.generation and second["delta"]["text"] == "Hi"
            more.set()
            rest = await asyncio.to_thread(list, lines)
            assert rest[0]["delta"]["text"] == " there" and rest[1]["error"]["reason"] == "SNAPSHOT_NOT_FOUND"
            core.script = (SnapshotNotFound("gone"),)
            early = await asked(page.call, "Generate", question)
            assert early.reason == (404, "NOT_FOUND", "SNAPSHOT_NOT_FOUND"), "nothing was begun: a status says it"
            core.script = (STARTED, FINISHED)
            assert [next(iter(line)) for line in await asyncio.to_thread(list, page.stream("Generate", question))] == [
                "started", "finished",
            ]  # fmt: skip

    run(story)


def test_whoever_leaves_ends_what_was_made_for_it():
    async def story() -> None:
        never = asyncio.Event()
        core = ScriptedCore(script=(STARTED, never.wait), watched=(Watched(Synced(), "r"),))
        async with inspected(core) as (page, _):
            lines = page.stream("Generate", {"input": {"raw": {"parts": [{"text": "x"}]}}})
            await asyncio.to_thread(next, lines)
            assert core.running == 1
            lines.close()
            await eventually(lambda: core.running == 0)
            assert core.ended == ["cancelled"]
            # Before the first message too, when no status has been sent.
            core.script = (never.wait,)
            host, _, port = page.url.removeprefix("http://").rstrip("/").rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"input": {"raw": {"parts": [{"text": "x"}]}}}).encode()
            writer.write(POST % b"Generate" + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: core.running == 1)
            writer.close()
            await eventually(lambda: core.running == 0)

    run(story)


def test_a_connection_serves_one_request_after_the_other():
    one = POST % b"GetServerInfo" + b"Content-Length: 2\r\n\r\n{}"

    async def story() -> None:
        async with inspected() as (page, _):
            last = one.replace(b"Host", b"Connection: close\r\nHost")
            for data in (one * 3 + last, b""):
                said = await raw(page, data or one, then=b"" if data else one + last)
                assert said.count(b"HTTP/1.1 200") == (4 if data else 3) and said.count(b'"instance"') == (
                    4 if data else 3
                )
            old = one.replace(b"HTTP/1.1", b"HTTP/1.0")
            assert (await raw(page, old)).count(b"HTTP/1.1 200") == 1

    run(story)


def test_requests_beyond_the_bounds_are_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "CLOSE_SECONDS", 0.2)
    head = POST % b"Generate"

    async def story() -> None:
        async with inspected() as (page, core):
            with monkeypatch.context() as soon:
                soon.setattr(http, "REQUEST_SECONDS", 0.3)
                assert await raw(page, b"") == b"", "silent"
                assert await raw(page, b"GET / HTTP/1.1\r\nHost: loc") == b"", "a head that does not end"
                assert await raw(page, head + b"Content-Length: 100\r\n\r\n{") == b"", "a body that does not end"
            large = await raw(page, head + b"Content-Length: 9999999\r\n\r\n" + b" " * (http.BODY_BYTES + 100_000))
            assert large.startswith(b"HTTP/1.1 413")
            chunked = b"Transfer-Encoding: chunked\r\n\r\n" + (b"20000\r\n" + b" " * 0x20000 + b"\r\n") * 10
            assert (await raw(page, head + chunked)).startswith(b"HTTP/1.1 413")
            long = await raw(page, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * http.HEAD_BYTES))
            assert long.startswith(b"HTTP/1.1 431")
            for bad in (
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"GET\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ):
                assert (await raw(page, bad))[9:12] in (b"400", b"403", b"505", b""), bad
            assert core.calls == []
            assert (await asked(page.call, "GetServerInfo")).status == 200

    run(story)


def test_connections_beyond_the_bound_are_closed_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "CONNECTIONS", 3)

    async def story() -> None:
        async with inspected() as (page, _):
            host, _, port = page.url.removeprefix("http://").rstrip("/").rpartition(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            assert await raw(page, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
            for _, writer in held:
                writer.close()
            await asyncio.to_thread(until, lambda: _patiently(page).status == 200, what="a place")

    run(story)


def _patiently(page: Page) -> Reply:
    try:
        return page.get()
    except (OSError, HTTPException):  # closed before it has answered
        return Reply(0, {}, b"")


def test_a_bug_is_told_to_nobody_but_the_log_and_without_its_words(caplog: pytest.LogCaptureFixture):
    async def broken(request: http.Request) -> http.Response:
        raise ValueError("a prompt of somebody")

    async def story() -> None:
        server = http.HttpServer(broken)
        page = Page(f"http://{await server.start('127.0.0.1', 0)}/")
        try:
            reply = await asked(page.get)
            assert (reply.status, reply.body) == (500, b"")
        finally:
            await server.close()

    run(story)
    [record] = caplog.records
    assert "ValueError" in record.getMessage() and "prompt" not in caplog.text


def test_without_a_token_nothing_is_answered_and_with_one_the_owners_own(tmp_path: Path):
    made = {name: new_token(name) for name in ("alice", "bob")}
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{line}\n" for _, line in made.values()))
    tokens.chmod(0o600)

    async def story() -> None:
        core = ScriptedCore(snapshots=[snapshot()])
        async with inspected(core, tokens=tokens) as (page, _):
            assert (await asked(page.get)).status == 200, "the page asks for the token"
            none = await asked(page.call, "GetSnapshot", {"name": "snapshots/one"})
            assert none.reason == (401, "UNAUTHENTICATED", "TOKEN_MISSING")
            assert none.headers["www-authenticate"] == "Bearer"
            for value in ("Bearer nope", "Basic YTpi", "Bearer \xe9\xe9", "Bearer", f"Bearer {made['alice'][0]} x"):
                wrong = await asked(page.call, "GetSnapshot", {"name": "snapshots/one"}, authorization=value)
                assert wrong.reason == (401, "UNAUTHENTICATED", "TOKEN_UNKNOWN"), value
            assert (await asked(page.call, "text", {"name": "snapshots/one"})).status == 401
            assert core.calls == []
            for name, (token, _line) in made.items():
                page.token = token
                assert (await asked(page.call, "GetSnapshot", {"name": "snapshots/one"})).status == 200
                assert core.calls[-1] == ("get_snapshot", "snapshots/one", name)

    run(story)


def over_tls(folder: Path) -> tuple[Authority, str, dict[str, Path]]:
    """An authority (its certificate is `ca.pem`), alice's token, and the settings of a server with both."""
    authority = Authority()
    certificate, key = authority.server().write(folder, "server")
    (folder / "ca.pem").write_bytes(authority.pem)
    token, line = new_token("alice")
    (folder / "tokens").write_text(f"{line}\n")
    (folder / "tokens").chmod(0o600)
    return authority, token, {"tls_cert": certificate, "tls_key": key, "tokens": folder / "tokens"}


def test_a_certificate_is_served_with_and_a_changed_one_taken_up(tmp_path: Path):
    authority, token, settings = over_tls(tmp_path)

    def serial(page: Page) -> int:
        connection = page._connection()
        connection.connect()
        found = connection.sock.getpeercert()["serialNumber"]
        connection.close()
        return int(found, 16)

    async def story() -> None:
        async with inspected(**settings) as (page, _):
            assert page.url.startswith("https://")
            with pytest.raises(ssl.SSLCertVerificationError):
                await asked(Page(page.url, context=ssl.create_default_context()).get)
            with pytest.raises(OSError):
                await asked(Page(page.url.replace("https", "http")).get)
            page.context, page.token = ssl.create_default_context(cafile=str(tmp_path / "ca.pem")), token
            assert (await asked(page.call, "GetServerInfo")).status == 200
            port = page.url.rstrip("/").rpartition(":")[2]
            for host, status in ((f"localhost:{port}", 200), ("kvfork.elsewhere:1", 403), ("10.0.0.7", 403)):
                reply = await asked(page.call, "GetServerInfo", None, host=host, origin=f"https://{host}")
                assert reply.status == status, host
            before = await asyncio.to_thread(serial, page)
            authority.server().write(tmp_path, "server")
            await asyncio.to_thread(until, lambda: serial(page) != before, what="the new certificate")
            assert (await asked(page.call, "GetServerInfo")).status == 200

    run(story)


def test_an_authority_for_clients_counts_here_too(tmp_path: Path):
    authority, token, settings = over_tls(tmp_path)
    settings["tls_client_ca"] = tmp_path / "ca.pem"

    async def story() -> None:
        async with inspected(**settings) as (page, core):
            page.context, page.token = ssl.create_default_context(cafile=str(tmp_path / "ca.pem")), token
            with pytest.raises(OSError):
                await asked(page.call, "GetServerInfo")
            page.context.load_cert_chain(*authority.client("bob").write(tmp_path, "client"))
            await asked(page.call, "GetSnapshot", {"name": "snapshots/one"})
            assert core.calls[-1] == ("get_snapshot", "snapshots/one", "alice"), "the token says who it is"

    run(story)


def test_the_end_of_the_server_ends_every_connection(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)

    async def story() -> None:
        core = ScriptedCore(watched=(Watched(Synced(), "r"),))
        async with inspected(core) as (page, _):
            lines = page.stream("WatchSnapshots")
            assert (await asyncio.to_thread(next, lines))["resumeToken"] == "r"
            rest = asyncio.create_task(asyncio.to_thread(list, lines))
        assert [line["error"]["reason"] for line in await rest] == ["SERVER_DRAINING"]

    run(story)
    assert caplog.records == []


def test_an_address_that_is_taken_is_told():
    async def story() -> None:
        async with inspected() as (page, _):
            where = page.url.removeprefix("http://").rstrip("/")
            config = Config(address="127.0.0.1:0", inspector=where)
            with pytest.raises(app.CannotStart, match=f"cannot listen on {where} for the inspector"):
                await app._inspector(config, Access(config))
            free = Config(address="127.0.0.1:0", inspector="localhost:0")
            inspector = await app._inspector(free, Access(free))
            assert inspector is not None
            await inspector.close()

    run(story)
