"""HTTP/2 by hand: what no well-behaved client sends. Owns frames and a socket; judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field, neither indexed nor compressed; shorter than 127 bytes each."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_headers(path: str, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *extra,
    ]
    return b"".join(literal(name, value) for name, value in fields)


def message_head(size: int) -> bytes:
    """What announces a message of `size` bytes."""
    return b"\x00" + struct.pack(">I", size)


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, address: str, *, greet: bool = True) -> Wire:
        """Connects; `greet`: as a client of HTTP/2."""
        host, _, port = address.rpartition(":")
        wire = cls(*await asyncio.open_connection(host, int(port)))
        if greet:
            await wire.send(PREFACE + frame(SETTINGS))
        return wire

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def next(self, *kinds: int) -> tuple[int, int, bytes] | None:
        """The next frame of one of `kinds` as (kind, stream, payload); None if the connection ends before it."""
        while True:
            try:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if head[3] in kinds:
                return head[3], int.from_bytes(head[5:9], "big"), payload

    async def ended(self) -> None:
        """Waits until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
