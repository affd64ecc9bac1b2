"""The gateway as an ASGI application: routes, bodies, event streams. Owns HTTP; what an answer says is others'.

A caller that goes away cancels what runs for it. Pages of a browser get no answer that they could read: no headers
allow another origin, a body has to be called JSON, and on loopback the Host has to be loopback's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

import kvfork_client as kv

from . import request as requests
from .completions import Completions
from .errors import Header, Refused, refused_by
from .fields import document
from .keeping import Caller

log = logging.getLogger("kvfork.gateway")

BODY_SECONDS = 60.0  # for a request's body to arrive

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application:
    """What an ASGI server calls. `loopback`: it listens on this machine alone."""

    def __init__(
        self, client: kv.AsyncClient, completions: Completions, *, loopback: bool, most_body_bytes: int
    ) -> None:
        self._client = client
        self._completions = completions
        self._loopback = loopback
        self._most = most_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, receive, send, self._most)
        try:
            await self._route(exchange)
        except _Gone:
            pass
        except asyncio.CancelledError:  # the process ends, and nothing but that cancels a call from without
            await exchange.refuse(Refused(503, "the gateway is ending", code="shutting_down"))
        except Exception as error:  # whatever it was, the caller gets an answer
            await exchange.refuse(_refused(error))

    async def _route(self, exchange: _Exchange) -> None:
        self._guard(exchange)
        path = exchange.path.rstrip("/")
        if path == "/health":
            exchange.require("GET")
            status = await self._client.health("InferenceService", timeout=5.0)
            well = status is kv.HealthStatus.SERVING
            await exchange.answer(200 if well else 503, {"status": status.name.lower()})
            return
        caller = self._completions.caller(exchange.bearer())
        if path == "/v1/models":
            exchange.require("GET")
            models = await caller.client.models()
            await exchange.answer(200, {"object": "list", "data": [_model(model) for model in models]})
        elif path.startswith("/v1/models/"):
            exchange.require("GET")
            model = await self._completions.model(path.removeprefix("/v1/models/"), caller)
            await exchange.answer(200, _model(model))
        elif path == "/v1/chat/completions":
            exchange.require("POST")
            await exchange.attended(self._complete(exchange, caller))
        else:
            raise Refused(404, f"there is no {exchange.method} {exchange.path[:200]} here", code="unknown_url")

    async def _complete(self, exchange: _Exchange, caller: Caller) -> None:
        await self._completions.let_in(caller)  # before anything of the body is held
        request = requests.read(document(await exchange.body()))
        completion = await self._completions.start(request, caller)
        try:
            if request.stream:
                async with aclosing(completion.parts()) as parts:
                    await exchange.stream(parts, completion.id)
            else:
                await exchange.answer(200, await completion.whole(), ("x-request-id", completion.id))
        finally:
            await completion.close()

    def _guard(self, exchange: _Exchange) -> None:
        host = exchange.header("host")
        if self._loopback and not _is_loopback(host):
            raise Refused(421, "the Host header names another server", code="wrong_host")
        if exchange.method == "POST":
            kind = exchange.header("content-type").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "the Content-Type has to be application/json", code="unsupported_media_type")


class _Gone(Exception):
    """The caller went away."""


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._most = most_body_bytes
        self._whole = asyncio.Event()  # the body has been read
        self._begun = False
        self._streams = False

    def header(self, name: str) -> str:
        """The only value of a header; empty where there is none, or several."""
        values = [value for key, value in self._headers if key == name.encode()]
        return values[0].decode("latin-1") if len(values) == 1 else ""

    def bearer(self) -> str | None:
        """The caller's token."""
        scheme, _, token = self.header("authorization").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def require(self, method: str) -> None:
        if self.method != method and not (method == "GET" and self.method == "HEAD"):
            raise Refused(405, f"use {method}", code="method_not_allowed")

    async def body(self) -> bytes:
        """Raises Refused for one that is too large or too slow."""
        pieces = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    pieces += message.get("body", b"")
                    if len(pieces) > self._most:
                        raise Refused(413, f"a body may have {self._most:,} bytes", code="body_too_large")
                    if not message.get("more_body", False):
                        self._whole.set()
                        return bytes(pieces)
        except TimeoutError:
            raise Refused(408, "the body took too long to arrive", code="body_too_slow") from None

    async def attended(self, work: Awaitable[None]) -> None:
        """Does `work` as long as the caller is there. Raises what it raises, or _Gone."""
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise _Gone
            doing.result()
        finally:
            for task in (doing, leaving):
                task.cancel()
            await asyncio.wait((doing, leaving))
            for task in (doing, leaving):
                if not task.cancelled():
                    task.exception()  # seen

    async def _left(self) -> None:
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: Any, *headers: Header) -> None:
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        await self._begin(status, ("content-length", str(len(data))), *headers, kind="application/json")
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else data})

    async def stream(self, parts: Any, request_id: str) -> None:
        """Server-sent events, an error among them where it comes in the middle."""
        await self._begin(200, ("x-request-id", request_id), kind="text/event-stream; charset=utf-8")
        self._streams = True
        async for part in parts:
            await self._event(None if part is None else json.dumps(part, ensure_ascii=False, separators=(",", ":")))
        await self._end_of_stream("[DONE]")

    async def refuse(self, refused: Refused) -> None:
        """As a status, or as a stream's last event: one that only ends looks like an answer."""
        if not self._begun:
            await self.answer(refused.status, refused.body(), *refused.headers())
        elif self._streams:
            await self._end_of_stream(json.dumps(refused.body()))

    async def _end_of_stream(self, data: str) -> None:
        self._streams = False
        await self._event(data)
        await self._send({"type": "http.response.body", "body": b""})

    async def _event(self, data: str | None) -> None:
        text = ": still here\n\n" if data is None else f"data: {data}\n\n"
        await self._send({"type": "http.response.body", "body": text.encode(errors="replace"), "more_body": True})

    async def _begin(self, status: int, *headers: Header, kind: str) -> None:
        self._begun = True
        fields = (
            ("content-type", kind),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            *headers,
        )
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _model(model: kv.ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name.removeprefix("models/"),
        "object": "model",
        "created": 0,
        "owned_by": "kvfork",
        "kvfork": {
            "fingerprint": model.fingerprint,
            "state": model.state.name.lower(),
            "context_tokens": model.context_tokens,
            "vision": model.vision,
        },
    }


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refused(error: Exception) -> Refused:
    """What the caller is told. Of a bug that there was one; the log has where. Its words may quote a prompt."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, kv.KVForkError):
        return refused_by(error)
    log.error("%s", _place_of(error))
    return Refused(500, "the gateway failed", code="internal_error")


def _place_of(error: BaseException) -> str:
    """Kind and place of a bug, without its words."""
    frames = traceback.extract_tb(error.__traceback__)
    return "a bug: " + type(error).__name__ + "".join(f"\n  {f.filename}:{f.lineno} {f.name}" for f in frames)
