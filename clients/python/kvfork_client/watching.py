"""Following snapshots, for threads and for an event loop. Owns the place to go on from; starting over is the caller's.

    with client.watch(labels={"task": "42"}) as watch:
        for event in watch:
            match event:
                case Changed(snapshot): ...
                case Gone(name, reason): ...
                case Synced(): ...  # all that was there has been told

A watch never ends by itself. When it fails, `watch.resume_token` leads on from there: `client.watch(resume_token=…)`
with the same labels. ResumeTokenExpired means that it does not: watch without one, and drop what the new listing lacks.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from .asynchronous import AsyncSnapshot, give_up
from .blocking import Snapshot
from .connection import AsyncConnection, Connection, locally_cancelled, translate
from .errors import Cancelled, KVForkError, Unavailable
from .values import Changed, Gone, Synced
from .watch_wire import read_told

CUT_SHORT = "the stream ended without a status"


class Watch(Iterator[Changed[Snapshot] | Gone | Synced]):
    """A running watch: iterate it. One thread reads; others may cancel.

    `resume_token` is the place behind what was read last; empty until Synced.
    """

    def __init__(self, connection: Connection, request: bytes, timeout: float | None, resume_token: str) -> None:
        self._connection = connection
        self.resume_token = resume_token
        self._cancelled = False
        self._stream = connection.watch(request, timeout)

    def __next__(self) -> Changed[Snapshot] | Gone | Synced:
        """Waits for the next event. Raises the KVForkError that ended the watch; after `cancel`, StopIteration."""
        while not self._cancelled:
            try:
                told = read_told(next(self._stream))
            except StopIteration:
                raise Unavailable(CUT_SHORT) from None
            except grpc.RpcError as error:
                if self._cancelled:
                    break
                raise translate(error) from None
            self.resume_token = told.resume_token or self.resume_token
            if isinstance(told.event, Changed):
                return Changed(Snapshot(self._connection, told.event.snapshot))
            if told.event is not None:
                return told.event
        raise StopIteration

    def cancel(self) -> None:
        """Ends the watch, also while another thread waits in it."""
        self._cancelled = True
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncWatch(AsyncIterator[Changed[AsyncSnapshot] | Gone | Synced]):
    """A running watch: iterate it. One task reads; others may cancel. Dropping it ends it.

    `resume_token` is the place behind what was read last; empty until Synced.
    """

    def __init__(self, connection: AsyncConnection, request: bytes, timeout: float | None, resume_token: str) -> None:
        self._connection = connection
        self.resume_token = resume_token
        self._cancelled = False
        self._stream = connection.watch(request, timeout)
        # As with generations: grpc.aio does not cancel a call that nobody holds any more.
        self._abandon = weakref.finalize(self, give_up, asyncio.get_running_loop(), self._stream)
        self._abandon.atexit = False

    async def __anext__(self) -> Changed[AsyncSnapshot] | Gone | Synced:
        """Waits for the next event. Raises the KVForkError that ended the watch; after `cancel`, StopAsyncIteration."""
        while not self._cancelled:
            try:
                message = await self._stream.read()
            except grpc.aio.AioRpcError as error:
                raise self._failed(translate(error)) from None
            except asyncio.CancelledError:
                ours = self._cancelled
                self.cancel()
                if not locally_cancelled():
                    raise
                if ours:
                    break
                raise Cancelled("the client was closed") from None
            if message is grpc.aio.EOF:
                raise self._failed(Unavailable(CUT_SHORT))
            told = read_told(message)
            self.resume_token = told.resume_token or self.resume_token
            if isinstance(told.event, Changed):
                return Changed(AsyncSnapshot(self._connection, told.event.snapshot))
            if told.event is not None:
                return told.event
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the watch, also while another task waits in it."""
        self._cancelled = True
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

    def _failed(self, error: KVForkError) -> KVForkError:
        self._abandon.detach()
        return error
