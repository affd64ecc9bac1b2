"""What the inspector answers: the page's files, and POST /api/METHOD. Owns the paths; a wrong one costs nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection
from importlib import resources
from typing import cast

import grpc
from google.protobuf.message import Message

from service.inspector import gateway as gate
from service.inspector import guard
from service.inspector.gateway import Gateway, Metadata, Refused
from service.inspector.http import Request, Response
from service.inspector.texts import own_text

API = "/api/"
JSON = ("content-type", "application/json")
LINES = ("content-type", "application/x-ndjson")
TEXT = ("content-type", "text/plain; charset=utf-8")

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def files() -> dict[str, tuple[str, bytes]]:
    """The page's own files by path, with their types."""
    found = {}
    for file in resources.files("service.inspector").joinpath("page").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            found["/" + ("" if file.name == "index.html" else file.name)] = kind, file.read_bytes()
    return found


class Site:
    """`respond` is for `HttpServer`."""

    def __init__(
        self, gateway: Gateway, *, tls: bool, loopback: bool, names: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`names`: of the certificate in use."""
        self._gateway = gateway
        self._tls = tls
        self._loopback = loopback
        self._names = names
        self._files = files()

    async def respond(self, request: Request) -> Response:
        why = guard.refusal(request, tls=self._tls, loopback=self._loopback, names=self._names())
        if why:
            return Response(status=403, headers=(TEXT,), body=f"{why}\n".encode())
        if request.path.startswith(API):
            if request.method != "POST":
                return Response(status=405, headers=(("allow", "POST"), TEXT), body=b"POST it\n")
            return await self._called(request.path.removeprefix(API), request)
        if request.method not in ("GET", "HEAD"):
            return Response(status=405, headers=(("allow", "GET, HEAD"), TEXT), body=b"GET it\n")
        if request.path not in self._files:
            return Response(status=404, headers=(TEXT,), body=b"there is no such page\n")
        kind, body = self._files[request.path]
        return Response(status=200, headers=(("content-type", kind),), body=body)

    async def _called(self, name: str, request: Request) -> Response:
        try:
            metadata = gate.metadata_of(request)
            if name == "text":
                return await self._text(request.body, metadata)
            if name not in gate.METHODS:
                return Response(status=404, headers=(TEXT,), body=b"there is no such call here\n")
            message = gate.read(name, request.body)
            if not gate.METHODS[name].streams:
                reply = await self._gateway.unary(name, message, metadata)
                return Response(status=200, headers=(JSON,), body=gate.written(reply))
            return await self._streamed(self._gateway.stream(name, message, metadata))
        except Refused as refused:
            challenge = (("www-authenticate", "Bearer"),) if refused.status == 401 else ()
            return Response(status=refused.status, headers=(JSON, *challenge), body=gate.told(refused))

    async def _streamed(self, replies: AsyncGenerator[Message, None]) -> Response:
        # The status goes out with the first message: what is refused before it is refused as any other call is.
        first = await anext(replies, None)
        return Response(status=200, headers=(LINES,), body=_Lines(first, replies))

    async def _text(self, body: bytes, metadata: Metadata) -> Response:
        try:
            asked = json.loads(body)
            name, most = asked["name"], asked.get("most", 512)
            right = isinstance(name, str) and isinstance(most, int)
            name.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            right = False
        if not right:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, 'asks for {"name": TEXT, "most": NUMBER}', reason="INVALID_FIELD"
            )
        text = await own_text(self._gateway, cast(str, name), cast(int, most), metadata)
        return Response(status=200, headers=(JSON,), body=json.dumps(text).encode())


class _Lines:
    """Messages as lines; what ends them otherwise than well is the last one. Closing it ends the call, read or not."""

    def __init__(self, first: Message | None, rest: AsyncGenerator[Message, None]) -> None:
        self._next = first  # None: to be waited for
        self._rest = rest
        self._over = first is None

    def __aiter__(self) -> _Lines:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        try:
            message = self._next if self._next is not None else await anext(self._rest)
        except Refused as refused:
            self._over = True
            return gate.told(refused) + b"\n"
        self._next = None
        return gate.written(message) + b"\n"

    async def aclose(self) -> None:
        await self._rest.aclose()
