"""Snapshots and generations for an event loop. Thin: `calls.py` says what to send, `folding.py` adds up what comes."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

import grpc
import grpc.aio

from . import calls
from .connection import AsyncByteStream, AsyncConnection, locally_cancelled, translate
from .errors import Cancelled, KVForkError
from .folding import Folding
from .generating import GenerateOptions, generate_request, read_event
from .handles import ForkResult, GenerationHandle, SnapshotHandle
from .messages import InputLike, Release, Rounding, SaveOptions, Seconds, SnapshotRef
from .values import (
    Created,
    Delta,
    Finished,
    Forked,
    GenerationResult,
    Marked,
    Progress,
    RolledBack,
    SnapshotInfo,
    Started,
    Usage,
)

T = TypeVar("T")
Event = Started | Progress | Marked["AsyncSnapshot"] | Delta | Finished["AsyncSnapshot"]


class AsyncSnapshot(SnapshotHandle):
    """A handle to an immutable prefix. As a context manager it releases the snapshot at the end."""

    def __init__(
        self,
        connection: AsyncConnection,
        info: SnapshotInfo,
        *,
        usage: Usage | None = None,
        marks: Mapping[int, AsyncSnapshot] | None = None,
        released: tuple[str, ...] = (),
    ) -> None:
        super().__init__(info, usage=usage, marks=marks, released=released)
        self._connection = connection

    def generate(
        self,
        input: InputLike | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Continues from here; see `AsyncClient.generate`."""
        request = generate_request(input, self, **options)
        return AsyncGeneration(
            self._connection, request.SerializeToString(), timeout, source=self, instance=self.instance
        )

    async def fork(
        self,
        branches: int | Sequence[InputLike | None],
        *,
        options: SaveOptions | Sequence[SaveOptions | None] | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> ForkResult[AsyncSnapshot]:
        """That many copies, or one child per input to append (None: plain copy). All or none."""
        return forked(
            self._connection,
            await self._ask(calls.fork(self, branches, options=options, request_id=request_id), timeout),
        )

    async def rollback(
        self,
        *,
        token_count: int | None = None,
        drop_tokens: int | None = None,
        ancestor: SnapshotRef | None = None,
        rounding: Rounding = Rounding.EXACT,
        release: Release = Release.NONE,
        options: SaveOptions | None = None,
        max_recompute_tokens: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncSnapshot:
        """A snapshot of a shorter prefix; exactly one of the three targets. `.released` lists what was let go of."""
        call = calls.rollback(
            self,
            token_count=token_count,
            drop_tokens=drop_tokens,
            ancestor=ancestor,
            rounding=rounding,
            release=release,
            options=options,
            max_recompute_tokens=max_recompute_tokens,
            request_id=request_id,
        )
        return rolled_back(self._connection, await self._ask(call, timeout))

    async def refresh(self) -> Self:
        """Reads `info` again. Does not count as use."""
        self.info = await self._ask(calls.get_snapshot(self))
        return self

    async def tokens(self) -> tuple[int, ...]:
        """The prefix as token ids."""
        return await self._ask(calls.snapshot_tokens(self))

    async def extend(self, ttl: Seconds | None = None) -> Self:
        """More time to live from now; None: its own idle time again. Raises SnapshotNotFound if it is gone."""
        extended = await self._ask(calls.extend_snapshots([self], ttl=ttl))
        if not extended.snapshots:
            raise self.vanished()
        self.info = extended.snapshots[0]
        return self

    async def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        ttl: Seconds | None = None,
        expire_time: dt.datetime | None = None,
        pinned: bool | None = None,
    ) -> Self:
        """Changes what is given; empty labels take them all away. An expiry is a ttl or a moment with a time zone."""
        call = calls.update_snapshot(self, labels=labels, ttl=ttl, expire_time=expire_time, pinned=pinned)
        self.info = await self._ask(call)
        return self

    async def release(self, *, descendants: bool = False, stop_active: bool = False) -> tuple[str, ...]:
        """Drops the name; state shared with others stays. No error if it is gone already."""
        return await self._ask(
            calls.delete_snapshot(self, descendants=descendants, stop_active=stop_active, allow_missing=True)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release(stop_active=True)
        except KVForkError:
            if kind is None:  # else the body's own error says more
                raise

    async def _ask(self, call: calls.Call[calls.R], timeout: float | None = None) -> calls.R:
        try:
            return await self._connection.unary(call, timeout)
        except KVForkError as error:
            self.noted(error)
            raise


def created(connection: AsyncConnection, made: Created) -> AsyncSnapshot:
    marks = {index: AsyncSnapshot(connection, info) for index, info in enumerate(made.marked)}
    return AsyncSnapshot(connection, made.snapshot, usage=made.usage, marks=marks)


def forked(connection: AsyncConnection, made: Forked) -> ForkResult[AsyncSnapshot]:
    return ForkResult([AsyncSnapshot(connection, info, usage=made.usage) for info in made.snapshots], made.usage)


def rolled_back(connection: AsyncConnection, made: RolledBack) -> AsyncSnapshot:
    return AsyncSnapshot(connection, made.snapshot, usage=made.usage, released=made.released)


class AsyncGeneration(GenerationHandle[AsyncSnapshot]):
    """A running generation: iterate it for Deltas, `events()` for everything, or await `result()`.

    Leaving the loop, the `async with` block, or dropping the object cancels it on the server. To end it early but keep
    its snapshot and receipt, await `stop()` and read on. One task reads; others may stop or cancel.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        request: bytes,
        timeout: float | None,
        *,
        source: SnapshotHandle | None = None,
        instance: str = "",
    ) -> None:
        """`source`: the handle it goes on from; `instance`: the server that holds it, where that is known."""
        super().__init__(Folding(lambda info: AsyncSnapshot(connection, info)), time.monotonic())
        self._connection = connection
        self._source = source
        self._stop_wanted = False
        self._stream = connection.generate(request, timeout, instance)
        # grpc.aio since 1.83 neither collects nor cancels a call that nobody holds any more (grpc/grpc#43462).
        self._abandon = weakref.finalize(self, give_up, asyncio.get_running_loop(), self._stream)
        self._abandon.atexit = False

    def events(self) -> AsyncIterator[Event]:
        """Everything the server says, in order. Leaving the loop cancels."""
        return _Loop(self._next, self.cancel)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Loop(self._next_delta, self.cancel)

    async def __anext__(self) -> Delta:
        delta = await self._next_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def result(self) -> GenerationResult[AsyncSnapshot]:
        """Reads to the end. Raises the KVForkError that ended it."""
        while not self._folding.ended and await self._next() is not None:
            pass
        return self._folding.result()

    async def stop(self) -> bool:
        """Asks the server to end cleanly: Finished and snapshot still come. False if it had ended.

        Before Started there is nothing to name yet; the wish is then sent on as soon as there is.
        """
        if self._folding.ended:
            return False
        self._stop_wanted = True
        started = self._folding.started
        return await self._connection.unary(_stop(started)) if started else True

    def cancel(self) -> None:
        """Gives up at once; nothing more will come. Does nothing after the end."""
        if not self._folding.ended:
            self._folding.fail(Cancelled("cancelled by the caller"))
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

    async def _next_delta(self) -> Delta | None:
        while (event := await self._next()) is not None:
            if isinstance(event, Delta):
                return event
        return None

    async def _next(self) -> Event | None:
        """The next event, None after Finished. Raises the error that ended the stream, each time it is asked."""
        folding = self._folding
        while not folding.ended:
            try:
                message = await self._stream.read()
            except grpc.aio.AioRpcError as error:
                raise self._failed(translate(error)) from None
            except asyncio.CancelledError:
                self.cancel()  # whoever cancelled, this stream is over
                if not locally_cancelled():
                    raise
                assert folding.error is not None
                raise folding.error from None
            if message is grpc.aio.EOF:
                raise folding.cut_short()
            event = read_event(message)
            if event is None:
                continue
            seen = folding.add(event, time.monotonic())
            if isinstance(seen, Started) and self._stop_wanted:
                await self._connection.unary(_stop(seen))
            elif isinstance(seen, Finished):
                await self._drain()
            return seen
        if folding.error is not None:
            raise folding.error
        return None

    async def _drain(self) -> None:
        """Takes the status after Finished, so that the server does not see a cancellation."""
        try:
            while await self._stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:  # Finished was whole; a status after it takes nothing back
            pass
        self._abandon.detach()

    def _failed(self, error: KVForkError) -> KVForkError:
        self._abandon.detach()
        if self._source is not None:
            self._source.noted(error)
        self._folding.fail(error)
        return self._folding.error or error


class _Loop(Generic[T]):
    """One `async for` over a generation. Dies with the loop that uses it, and then cancels what is not over."""

    def __init__(self, advance: Callable[[], Awaitable[T | None]], leave: Callable[[], None]) -> None:
        self._advance = advance
        self._leave = leave

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        item = await self._advance()
        if item is None:
            raise StopAsyncIteration
        return item

    def __del__(self) -> None:
        self._leave()


def give_up(loop: asyncio.AbstractEventLoop, stream: AsyncByteStream) -> None:
    """Cancels a stream from whatever thread drops it."""
    try:
        here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        stream.cancel()
    elif not loop.is_closed():
        loop.call_soon_threadsafe(stream.cancel)


def _stop(started: Started) -> calls.Call[bool]:
    return calls.stop(started.generation, started.instance)
