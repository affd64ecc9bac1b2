"""Snapshots from one server to another, for threads and for an event loop. Owns the copying; what is copied is opaque.

    with Client("one:50051") as one, Client("two:50051") as two:
        copied = one.copy_snapshot("snapshots/plan-0001", to=two)
        print(copied.snapshot.generate("Go on").result().text)

An export is a string of bytes: to be written to a file, and to be given to `import_snapshot` in pieces of any size.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from .asynchronous import AsyncSnapshot, give_up
from .blocking import Snapshot
from .connection import AsyncConnection, Connection, locally_cancelled, translate
from .errors import Cancelled, DeadlineExceeded
from .exchange_wire import IMPORT, data_requests, first_request, read_imported, read_piece
from .messages import SaveOptions
from .values import ExportSummary, Imported, SnapshotInfo

LOST_SECONDS = 1.0  # behind a deadline: gRPC now and then never tells the end of a call whose messages are still sent
_LOST = "Internal error from Core"  # in grpc.aio's own words, where it is the deadline that ended what it wrote

H = TypeVar("H")


class Export(Iterator[bytes]):
    """A running export: iterate it for its bytes, or `read` them all. `summary` is there with the first.

    Leaving the `with` block, or dropping the object, cancels it on the server.
    """

    def __init__(self, connection: Connection, request: bytes, timeout: float | None, instance: str = "") -> None:
        self.summary: ExportSummary | None = None
        self._stream = connection.export(request, timeout, instance)
        self._abandon = weakref.finalize(self, self._stream.cancel)
        self._abandon.atexit = False

    def __next__(self) -> bytes:
        """Waits for the next bytes. Raises the KVForkError that ended the export; at its end, StopIteration."""
        try:
            data, summary = read_piece(next(self._stream))
        except StopIteration:
            self._abandon.detach()
            raise
        except grpc.RpcError as error:
            self._abandon.detach()
            raise translate(error) from None
        self.summary = summary or self.summary
        return data

    def read(self) -> bytes:
        """All of it that has not been read yet."""
        return b"".join(self)

    def cancel(self) -> None:
        """Gives up. Does nothing after the end."""
        self._abandon()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def imported(
    connection: Connection, data: bytes | Iterable[bytes], options: SaveOptions | None, timeout: float | None
) -> Imported[Snapshot]:
    """Sends `data`. What it raises comes out of here, and ends the import."""
    first = first_request(options)
    failed: list[BaseException] = []

    def requests() -> Iterator[bytes]:
        yield first
        try:
            for piece in _in_pieces(data):
                yield from data_requests(piece)
        except GeneratorExit:  # the call has ended
            raise
        except BaseException as error:  # whatever it is: gRPC, whose thread this is, would only log it
            failed.append(error)
            stop[0]()

    stop: list[Callable[[], object]] = [lambda: None]
    method: Any = connection.channel.stream_unary(IMPORT)
    deadline = connection.deadline(timeout)
    call = method.future(requests(), timeout=deadline, metadata=connection.where.metadata())
    try:
        stop[0] = call.cancel
        if failed:
            call.cancel()
        told = read_imported(call.result(None if deadline is None else deadline + LOST_SECONDS))
    except grpc.FutureTimeoutError:
        connection.lose()
        call.cancel()
        raise failed[0] if failed else DeadlineExceeded("the deadline passed while the import was sent") from None
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        if failed:
            raise failed[0] from None
        raise (translate(error) if isinstance(error, grpc.RpcError) else Cancelled("the client was closed")) from None
    except BaseException:  # an interrupt: nobody waits for the reply any more
        call.cancel()
        raise
    return _handed(told, Snapshot(connection, told.snapshot))


class AsyncExport(AsyncIterator[bytes]):
    """A running export: iterate it for its bytes, or `read` them all. `summary` is there with the first.

    Leaving the `async with` block, or dropping the object, cancels it on the server.
    """

    def __init__(self, connection: AsyncConnection, request: bytes, timeout: float | None, instance: str = "") -> None:
        self.summary: ExportSummary | None = None
        self._stream = connection.export(request, timeout, instance)
        self._abandon = weakref.finalize(self, give_up, asyncio.get_running_loop(), self._stream)
        self._abandon.atexit = False

    async def __anext__(self) -> bytes:
        """Waits for the next bytes. Raises the KVForkError that ended the export; at its end, StopAsyncIteration."""
        try:
            message = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            self._abandon.detach()
            raise translate(error) from None
        except asyncio.CancelledError:
            self.cancel()
            if not locally_cancelled():
                raise
            raise Cancelled("the client was closed") from None
        if message is grpc.aio.EOF:
            self._abandon.detach()
            raise StopAsyncIteration
        data, summary = read_piece(message)
        self.summary = summary or self.summary
        return data

    async def read(self) -> bytes:
        """All of it that has not been read yet."""
        return b"".join([piece async for piece in self])

    def cancel(self) -> None:
        """Gives up. Does nothing after the end."""
        self._abandon()

    async def aclose(self) -> None:
        """The same as `cancel`, for `contextlib.aclosing`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


async def async_imported(
    connection: AsyncConnection,
    data: bytes | Iterable[bytes] | AsyncIterable[bytes],
    options: SaveOptions | None,
    timeout: float | None,
) -> Imported[AsyncSnapshot]:
    """Sends `data`. What it raises comes out of here, and ends the import."""
    first = first_request(options)
    method: Any = connection.open().stream_unary(IMPORT)
    deadline, began = connection.deadline(timeout), asyncio.get_running_loop().time()
    call = method(timeout=deadline, metadata=connection.metadata())
    try:
        await _send(call, first, data)
    except BaseException:  # of `data`, or this task's end
        call.cancel()
        raise
    try:
        told = read_imported(await call)
    except grpc.aio.AioRpcError as error:
        late = deadline is not None and asyncio.get_running_loop().time() >= began + deadline
        if late and error.details() == _LOST:
            raise DeadlineExceeded("the deadline passed while the import was sent") from None
        raise translate(error) from None
    except asyncio.CancelledError:
        if locally_cancelled():
            raise Cancelled("the client was closed") from None
        call.cancel()
        raise
    return _handed(told, AsyncSnapshot(connection, told.snapshot))


def _in_pieces(data: bytes | Iterable[bytes]) -> Iterable[bytes]:
    """A whole export is one piece; the integers that its bytes are would be none."""
    return (bytes(data),) if isinstance(data, bytes | bytearray | memoryview) else data


def _handed(told: Imported[SnapshotInfo], handle: H) -> Imported[H]:
    """The same with the caller's handle."""
    return Imported(
        snapshot=handle,
        received_records=told.received_records,
        received_bytes=told.received_bytes,
        held_records=told.held_records,
    )


async def _send(call: Any, first: bytes, data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> None:
    """Until all is sent, or nobody takes it any more; the call's status says why. Raises what `data` raises."""
    # Written from here and not from an iterator of gRPC's, so that what `data` raises is raised in this task.
    if not await _taken(call.write(first)):
        return
    async for piece in _async(data):
        for request in data_requests(piece):
            if not await _taken(call.write(request)):
                return
    await _taken(call.done_writing())


async def _taken(writing: Awaitable[None]) -> bool:
    """False if the call has ended meanwhile. Raises CancelledError of this task."""
    try:
        await writing
    except Exception:  # of whatever kind it is: gRPC has some of its own for a call that ends while it writes
        return False
    except asyncio.CancelledError:
        if not locally_cancelled():
            raise
        return False
    return True


async def _async(data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, AsyncIterable):
        async for piece in data:
            yield piece
    else:
        for piece in _in_pieces(data):
            yield piece
