"""The only module that does I/O: carries out calls over a channel and turns statuses into exceptions.

`Connection` for threads, `AsyncConnection` for an event loop. Both own a channel and nothing else; what a call means is
in `calls.py`. A call's `timeout` (seconds) wins over the connection's; None means no deadline of the client's own.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from .calls import Call
from .endpoint import Endpoint, in_name_of, routed
from .errors import Cancelled, KVForkError, WrongInstance
from .exchange_wire import EXPORT
from .generating import GENERATE
from .status import from_status
from .watch_wire import WATCH

R = TypeVar("R")


class ByteStream(Protocol):
    """A running server stream of serialized messages (sync)."""

    def __next__(self) -> bytes: ...

    def cancel(self) -> Any: ...


class AsyncByteStream(Protocol):
    """A running server stream of serialized messages (async)."""

    async def read(self) -> Any: ...

    def cancel(self) -> Any: ...


def translate(error: grpc.RpcError) -> KVForkError:
    """The typed exception of any error a gRPC call raises."""
    status: Any = error  # sync: the call itself; async: AioRpcError. Both have these three
    return from_status(status.code(), status.details() or "", status.trailing_metadata() or ())


def _lost(call: Call[R], error: KVForkError) -> R:
    """A call's answer where it has one for this error. Raises it otherwise."""
    if call.lost is not None and isinstance(error, WrongInstance):
        return call.lost
    raise error from None


def locally_cancelled() -> bool:
    """Tells a CancelledError that stands for a cancelled RPC from one that cancels the running task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() == 0


class Connection:
    """A channel for use from any thread."""

    def __init__(self, where: Endpoint, timeout: float | None, *, over: Connection | None = None) -> None:
        """`over`: use that one's channel, for calls in another name; it stays that one's to close."""
        self.where = where
        self._timeout = timeout
        self._over = over
        self._lost = False  # a call's end, which gRPC waits for when it closes the channel
        self.channel: grpc.Channel
        if over is not None:
            self.channel = over.channel
        elif where.tls:
            self.channel = grpc.secure_channel(where.target, where.tls.credentials(), options=where.options)
        else:
            self.channel = grpc.insecure_channel(where.target, options=where.options)

    def in_name_of(self, token: str | None) -> Connection:
        """The same channel with another token. Raises ValueError."""
        return Connection(in_name_of(self.where, token), self._timeout, over=self)

    def routed(self, instance: str | None, session: str | None) -> Connection:
        """The same channel with another route. Raises ValueError."""
        return Connection(routed(self.where, instance=instance, session=session), self._timeout, over=self)

    def unary(self, call: Call[R], timeout: float | None = None) -> R:
        """Blocks until the reply. Raises KVForkError."""
        method: Any = self.channel.unary_unary(call.path)
        try:
            metadata = self.where.metadata(call.instance)
            reply = method(call.request, timeout=self.deadline(timeout), metadata=metadata)
        except grpc.RpcError as error:
            return _lost(call, translate(error))
        return call.parse(reply)

    def generate(self, request: bytes, timeout: float | None, instance: str = "") -> ByteStream:
        """Starts a generation; errors come out of the stream. `instance`: as in a `Call`."""
        return self._stream(GENERATE, request, self.deadline(timeout), instance)

    def watch(self, request: bytes, timeout: float | None) -> ByteStream:
        """Starts a watch, which ends with `timeout` alone: the connection's is for calls that end."""
        return self._stream(WATCH, request, timeout, "")

    def export(self, request: bytes, timeout: float | None, instance: str = "") -> ByteStream:
        """Starts an export. `instance`: as in a `Call`."""
        return self._stream(EXPORT, request, self.deadline(timeout), instance)

    def _stream(self, path: str, request: bytes, timeout: float | None, instance: str) -> ByteStream:
        method: Any = self.channel.unary_stream(path)
        stream: ByteStream = method(request, timeout=timeout, metadata=self.where.metadata(instance))
        return stream

    def lose(self) -> None:
        """Notes that a call on the channel never came to its end."""
        if self._over is None:
            self._lost = True
        else:
            self._over.lose()

    def close(self) -> None:
        """Cancels what runs; does nothing to a channel that is another's."""
        if self._over is None and self._lost:  # waits in vain, where nobody waits for it
            threading.Thread(target=self.channel.close, name="kvfork-close", daemon=True).start()
        elif self._over is None:
            self.channel.close()

    def deadline(self, timeout: float | None) -> float | None:
        """A call's timeout, or else the connection's."""
        return self._timeout if timeout is None else timeout


class AsyncConnection:
    """A channel for use from one event loop: the one that runs when it is first used."""

    def __init__(self, where: Endpoint, timeout: float | None, *, over: AsyncConnection | None = None) -> None:
        """`over`: use that one's channel, for calls in another name; it stays that one's to close."""
        self.where = where
        self._timeout = timeout
        self._over = over
        self._channel: grpc.aio.Channel | None = None

    def in_name_of(self, token: str | None) -> AsyncConnection:
        """The same channel with another token. Raises ValueError."""
        return AsyncConnection(in_name_of(self.where, token), self._timeout, over=self._over or self)

    def routed(self, instance: str | None, session: str | None) -> AsyncConnection:
        """The same channel with another route. Raises ValueError."""
        where = routed(self.where, instance=instance, session=session)
        return AsyncConnection(where, self._timeout, over=self._over or self)

    async def unary(self, call: Call[R], timeout: float | None = None) -> R:
        """Raises KVForkError. Cancelling the task cancels the call."""
        method: Any = self.open().unary_unary(call.path)
        try:
            metadata = self.metadata(call.instance)
            reply = await method(call.request, timeout=self.deadline(timeout), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return _lost(call, translate(error))
        except asyncio.CancelledError:
            if locally_cancelled():  # the channel was closed under the call
                raise Cancelled("the client was closed") from None
            raise
        return call.parse(reply)

    def generate(self, request: bytes, timeout: float | None, instance: str = "") -> AsyncByteStream:
        """Starts a generation; errors come out of the stream. `instance`: as in a `Call`."""
        return self._stream(GENERATE, request, self.deadline(timeout), instance)

    def watch(self, request: bytes, timeout: float | None) -> AsyncByteStream:
        """Starts a watch, which ends with `timeout` alone: the connection's is for calls that end."""
        return self._stream(WATCH, request, timeout, "")

    def export(self, request: bytes, timeout: float | None, instance: str = "") -> AsyncByteStream:
        """Starts an export. `instance`: as in a `Call`."""
        return self._stream(EXPORT, request, self.deadline(timeout), instance)

    def _stream(self, path: str, request: bytes, timeout: float | None, instance: str) -> AsyncByteStream:
        method: Any = self.open().unary_stream(path)
        stream: AsyncByteStream = method(request, timeout=timeout, metadata=self.metadata(instance))
        return stream

    async def close(self) -> None:
        """Cancels what runs; does nothing to a channel that is another's."""
        if self._channel is not None:
            await self._channel.close()

    def open(self) -> grpc.aio.Channel:
        """The channel, made by the first call."""
        if self._over is not None:
            return self._over.open()
        if self._channel is None:
            # Opened here and not in the constructor: a grpc.aio channel belongs to the running loop.
            where = self.where
            self._channel = (
                grpc.aio.secure_channel(where.target, where.tls.credentials(), options=where.options)
                if where.tls
                else grpc.aio.insecure_channel(where.target, options=where.options)
            )
        return self._channel

    def metadata(self, instance: str = "") -> grpc.aio.Metadata:
        """What every call carries. `instance`: as in a `Call`."""
        return grpc.aio.Metadata(*self.where.metadata(instance))

    def deadline(self, timeout: float | None) -> float | None:
        """A call's timeout, or else the connection's."""
        return self._timeout if timeout is None else timeout
