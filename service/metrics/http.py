"""A listener that answers GET /metrics and nothing else. Owns its bounds: no client costs more than a few buffers.

On the server's event loop; the page is made on a thread. Small on purpose: no keep-alive, no compression, no routes.

A page of another site can have a browser ask any address, also by a name that it makes point here. So on loopback only
requests for loopback are answered; elsewhere nobody knows what the machine is called, and whoever reaches it may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
from collections.abc import Callable

log = logging.getLogger("kvfork.metrics")

REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0
CONNECTIONS = 16
_HOST = re.compile(rb"^host:[ \t]*([^\r\n]*?)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_NAME = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")


class MetricsServer:
    """`start`, then `close`."""

    def __init__(self, page: Callable[[], bytes], content_type: str) -> None:
        """`page` runs on a thread."""
        self._page = page
        self._content_type = content_type
        self._open = 0
        self._loopback = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens; returns the address with the port in use. Raises OSError."""
        self._loopback = ipaddress.ip_address(host).is_loopback
        self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES, reuse_port=False)
        bound = self._server.sockets[0].getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > CONNECTIONS:
                return  # cut off: reading on is what costs
            async with asyncio.timeout(REQUEST_SECONDS):
                writer.write(await self._reply(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asks like that gets no answer
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _reply(self, request: bytes) -> bytes:
        line = request.split(b"\r\n", 1)[0].split(b" ")
        if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
            return self._answer("400 Bad Request", b"not HTTP\n")
        if self._loopback and not all(_is_loopback(name) for name in _HOST.findall(request)):
            return self._answer("403 Forbidden", b"the Host header names another server\n")
        if line[0] not in (b"GET", b"HEAD"):
            return self._answer("405 Method Not Allowed", b"GET it\n", "Allow: GET, HEAD\r\n")
        if line[1].split(b"?", 1)[0] != b"/metrics":
            return self._answer("404 Not Found", b"metrics are at /metrics\n")
        try:
            page = await asyncio.to_thread(self._page)
        except Exception:  # a number that cannot be had must not take the listener down; the log has why
            log.exception("metrics could not be gathered")
            return self._answer("500 Internal Server Error", b"see the server's log\n")
        made = self._answer("200 OK", page, f"Content-Type: {self._content_type}\r\n")
        return made if line[0] == b"GET" else made[: made.index(b"\r\n\r\n") + 4]

    @staticmethod
    def _answer(status: str, body: bytes, headers: str = "Content-Type: text/plain\r\n") -> bytes:
        head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body


def _is_loopback(host: bytes) -> bool:
    """Whether a Host header's value is an address of this machine alone."""
    match = _NAME.fullmatch(host.decode("latin-1"))
    if match is None:
        return False
    name = match[1].lower().removeprefix("[").removesuffix("]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
