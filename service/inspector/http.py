"""A small HTTP/1.1 server on asyncio. Owns connections, their bounds and their end; h11 owns the protocol.

Bounds: so many connections, closed at once beyond it, handshakes included; so long for a request to arrive and for a
silent connection to stay; so many bytes of head and body; so long for a peer that does not read. A peer that goes away
cancels what answers it. What an answer may hold is not for the log: of a bug only its kind and place are told.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import h11

log = logging.getLogger("kvfork.inspector")

CONNECTIONS = 64
HEAD_BYTES = 16 * 1024
BODY_BYTES = 1 << 20
REQUEST_SECONDS = 10.0  # for a request to arrive, the first one or the next one of a connection; for a handshake
STALL_SECONDS = 30.0  # that a peer may leave what was sent to it unread
CLOSE_SECONDS = 1.0
CHUNK = 64 * 1024

Header = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What came. Names of headers are in small letters."""

    method: str
    path: str
    headers: tuple[Header, ...]
    body: bytes

    def all(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]


class Parts(Protocol):
    """A body whose parts are sent as they come."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Called however the answer ends, also before the first part."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What goes."""

    status: int
    headers: tuple[Header, ...] = ()
    body: bytes | Parts = b""


class BadRequest(Exception):
    """A request that is not answered by anybody but this module."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class HttpServer:
    """`start`, then `close`."""

    def __init__(
        self,
        respond: Callable[[Request], Awaitable[Response]],
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        always: Iterable[Header] = (),
    ) -> None:
        """`tls` is asked at each connection; None: in the clear. `always`: headers of every answer."""
        self._respond = respond
        self._tls = tls
        self._always = tuple(always)
        self._tasks: dict[asyncio.Task[None], _Connection | None] = {}  # None: before its handshake is over
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens; returns the address with the port in use. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, reuse_port=False)
        self._listener.settimeout(0)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        bound = self._listener.getsockname()
        return f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        """Closes the listener and every connection; what is being answered may come to its end within CLOSE_SECONDS."""
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        for task, connection in self._tasks.items():
            if connection is None or not connection.finish():
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or a peer that has gone already
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) >= CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._connected(connection))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _connected(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = self._tls() if self._tls is not None else None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=REQUEST_SECONDS if tls is not None else None,
            )
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError: no handshake, and nobody to tell
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            task = asyncio.current_task()
            assert task is not None
            self._tasks[task] = served = _Connection(reader, writer, self._respond, self._always)
            await served.serve()
            async with asyncio.timeout(CLOSE_SECONDS):
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, h11.ProtocolError):
            pass  # the peer is gone, slow, or no client
        finally:
            transport.abort()


class _Connection:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        respond: Callable[[Request], Awaitable[Response]],
        always: tuple[Header, ...],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._respond = respond
        self._always = always
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._answering = False
        self._last = False  # after this answer there is no other

    def finish(self) -> bool:
        """Ends the connection behind the answer under way. False if there is none."""
        self._last = True
        return self._answering

    async def serve(self) -> None:
        """One request after the other, until either side has had enough."""
        while True:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    request = await self._request()
            except BadRequest as bad:
                await self._answer("GET", Response(status=bad.status))
                await self._pass_over()
                return
            except h11.RemoteProtocolError as error:
                if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._answer("GET", Response(status=error.error_status_hint))
                    await self._pass_over()
                return
            if request is None:
                return
            self._answering = True
            if not await self._attended(self._serve_one(request)) or self._last:
                return
            self._answering = False
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                return
            self._h11.start_next_cycle()

    async def _attended(self, work: Awaitable[None]) -> bool:
        """Does `work` as long as the peer is there. False if it went away first."""
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._reader.read(CHUNK))
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done() and not leaving.cancelled() and leaving.exception() is None and leaving.result():
                self._h11.receive_data(leaving.result())  # the next request already, for which this one is not given up
                await asyncio.wait((doing,))
            if not doing.done():
                return False
            doing.result()
            return True
        finally:
            for task in (doing, leaving):
                task.cancel()
            await asyncio.wait((doing, leaving))
            for task in (doing, leaving):
                if not task.cancelled():
                    task.exception()  # seen: a peer that resets is no news

    async def _request(self) -> Request | None:
        """The next one, whole. None at the end of the connection; raises BadRequest, h11.RemoteProtocolError."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._h11.receive_data(await self._reader.read(CHUNK))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY_BYTES:
                    raise BadRequest(413)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return Request(
                    method=head.method.decode("ascii"),
                    path=head.target.decode("ascii").partition("?")[0],
                    headers=tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers),
                    body=bytes(body),
                )
            else:  # closed, or paused behind an upgrade that nobody offers
                return None

    async def _pass_over(self) -> None:
        """Reads on for a moment: a connection that is closed over unread bytes takes the answer with it."""
        async with asyncio.timeout(CLOSE_SECONDS):
            while await self._reader.read(CHUNK):
                pass

    async def _serve_one(self, request: Request) -> None:
        try:
            response = await self._respond(request)
        except Exception as error:  # a bug: the peer learns that there was one, the log where
            log.error("%s", _place_of(error))
            response = Response(status=500)
        await self._answer(request.method, response)

    async def _answer(self, method: str, response: Response) -> None:
        body = response.body
        headers = [*self._always, *response.headers]
        if isinstance(body, bytes):
            headers.append(("content-length", str(len(body))))
        try:
            reason = _REASONS.get(response.status, "")
            await self._send(h11.Response(status_code=response.status, headers=headers, reason=reason))
            if isinstance(body, bytes):
                if body and method != "HEAD":
                    await self._send(h11.Data(data=body))
            else:
                async for part in body:
                    await self._send(h11.Data(data=part))
            await self._send(h11.EndOfMessage())
        except (OSError, TimeoutError, h11.ProtocolError):
            raise
        except Exception as error:  # a bug in the middle of a stream: cut off, so that it does not look whole
            log.error("%s", _place_of(error))
            self._writer.transport.abort()
        finally:
            if not isinstance(body, bytes):
                await body.aclose()

    async def _send(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if data:
            self._writer.write(data)
            async with asyncio.timeout(STALL_SECONDS):
                await self._writer.drain()


_REASONS = {400: "Bad Request", 413: "Content Too Large", 431: "Request Header Fields Too Large", 500: "Server Error"}


def _place_of(error: BaseException) -> str:
    """Kind and place of a bug, without its words, which may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return "a bug: " + type(error).__name__ + "".join(f"\n  {f.filename}:{f.lineno} {f.name}" for f in frames)
