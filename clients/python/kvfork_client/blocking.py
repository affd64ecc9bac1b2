"""Snapshots and generations for threads. Thin: `calls.py` says what to send, `folding.py` adds up what comes."""

from __future__ import annotations

import datetime as dt
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from . import calls
from .connection import Connection, translate
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

Event = Started | Progress | Marked["Snapshot"] | Delta | Finished["Snapshot"]


class Snapshot(SnapshotHandle):
    """A handle to an immutable prefix. As a context manager it releases the snapshot at the end."""

    def __init__(
        self,
        connection: Connection,
        info: SnapshotInfo,
        *,
        usage: Usage | None = None,
        marks: Mapping[int, Snapshot] | None = None,
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
    ) -> Generation:
        """Continues from here; see `Client.generate`."""
        request = generate_request(input, self, **options)
        return Generation(self._connection, request.SerializeToString(), timeout, source=self, instance=self.instance)

    def fork(
        self,
        branches: int | Sequence[InputLike | None],
        *,
        options: SaveOptions | Sequence[SaveOptions | None] | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> ForkResult[Snapshot]:
        """That many copies, or one child per input to append (None: plain copy). All or none."""
        return forked(
            self._connection,
            self._ask(calls.fork(self, branches, options=options, request_id=request_id), timeout),
        )

    def rollback(
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
    ) -> Snapshot:
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
        return rolled_back(self._connection, self._ask(call, timeout))

    def refresh(self) -> Self:
        """Reads `info` again. Does not count as use."""
        self.info = self._ask(calls.get_snapshot(self))
        return self

    def tokens(self) -> tuple[int, ...]:
        """The prefix as token ids."""
        return self._ask(calls.snapshot_tokens(self))

    def extend(self, ttl: Seconds | None = None) -> Self:
        """More time to live from now; None: its own idle time again. Raises SnapshotNotFound if it is gone."""
        extended = self._ask(calls.extend_snapshots([self], ttl=ttl))
        if not extended.snapshots:
            raise self.vanished()
        self.info = extended.snapshots[0]
        return self

    def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        ttl: Seconds | None = None,
        expire_time: dt.datetime | None = None,
        pinned: bool | None = None,
    ) -> Self:
        """Changes what is given; empty labels take them all away. An expiry is a ttl or a moment with a time zone."""
        call = calls.update_snapshot(self, labels=labels, ttl=ttl, expire_time=expire_time, pinned=pinned)
        self.info = self._ask(call)
        return self

    def release(self, *, descendants: bool = False, stop_active: bool = False) -> tuple[str, ...]:
        """Drops the name; state shared with others stays. No error if it is gone already."""
        return self._ask(
            calls.delete_snapshot(self, descendants=descendants, stop_active=stop_active, allow_missing=True)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release(stop_active=True)
        except KVForkError:
            if kind is None:  # else the body's own error says more
                raise

    def _ask(self, call: calls.Call[calls.R], timeout: float | None = None) -> calls.R:
        try:
            return self._connection.unary(call, timeout)
        except KVForkError as error:
            self.noted(error)
            raise


def created(connection: Connection, made: Created) -> Snapshot:
    marks = {index: Snapshot(connection, info) for index, info in enumerate(made.marked)}
    return Snapshot(connection, made.snapshot, usage=made.usage, marks=marks)


def forked(connection: Connection, made: Forked) -> ForkResult[Snapshot]:
    return ForkResult([Snapshot(connection, info, usage=made.usage) for info in made.snapshots], made.usage)


def rolled_back(connection: Connection, made: RolledBack) -> Snapshot:
    return Snapshot(connection, made.snapshot, usage=made.usage, released=made.released)


class Generation(GenerationHandle[Snapshot]):
    """A running generation: iterate it for Deltas, `events()` for everything, or take `result()`.

    Leaving the loop, the `with` block, or dropping the object cancels it on the server. To end it early but keep its
    snapshot and receipt, call `stop()` and read on. One thread reads; `stop` and `cancel` may come from any.
    """

    def __init__(
        self,
        connection: Connection,
        request: bytes,
        timeout: float | None,
        *,
        source: SnapshotHandle | None = None,
        instance: str = "",
    ) -> None:
        """`source`: the handle it goes on from; `instance`: the server that holds it, where that is known."""
        super().__init__(Folding(lambda info: Snapshot(connection, info)), time.monotonic())
        self._connection = connection
        self._source = source
        self._stop_wanted = False
        self._stream = connection.generate(request, timeout, instance)
        # The channel keeps a call going that nobody holds any more; the server would generate for nobody.
        self._abandon = weakref.finalize(self, self._stream.cancel)
        self._abandon.atexit = False

    def events(self) -> Iterator[Event]:
        """Everything the server says, in order. Leaving the loop cancels."""
        try:
            while (event := self._next()) is not None:
                yield event
        finally:
            self.cancel()

    def __iter__(self) -> Iterator[Delta]:
        for event in self.events():
            if isinstance(event, Delta):
                yield event

    def __next__(self) -> Delta:
        while (event := self._next()) is not None:
            if isinstance(event, Delta):
                return event
        raise StopIteration

    def result(self) -> GenerationResult[Snapshot]:
        """Reads to the end. Raises the KVForkError that ended it."""
        while not self._folding.ended and self._next() is not None:
            pass
        return self._folding.result()

    def stop(self) -> bool:
        """Asks the server to end cleanly: Finished and snapshot still come. False if it had ended.

        Before Started there is nothing to name yet; the wish is then sent on as soon as there is.
        """
        if self._folding.ended:
            return False
        self._stop_wanted = True
        started = self._folding.started
        return self._connection.unary(_stop(started)) if started else True

    def cancel(self) -> None:
        """Gives up at once; nothing more will come. Does nothing after the end."""
        if not self._folding.ended:
            self._folding.fail(Cancelled("cancelled by the caller"))
        self._abandon()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _next(self) -> Event | None:
        """The next event, None after Finished. Raises the error that ended the stream, each time it is asked."""
        folding = self._folding
        while not folding.ended:
            try:
                message = next(self._stream)
            except StopIteration:
                raise folding.cut_short() from None
            except grpc.RpcError as error:
                raise self._failed(translate(error)) from None
            except BaseException:  # an interrupt: the half-read stream cannot be taken up again
                self.cancel()
                raise
            event = read_event(message)
            if event is None:
                continue
            seen = folding.add(event, time.monotonic())
            if isinstance(seen, Started) and self._stop_wanted:
                self._connection.unary(_stop(seen))
            elif isinstance(seen, Finished):
                self._drain()
            return seen
        if folding.error is not None:
            raise folding.error
        return None

    def _drain(self) -> None:
        """Takes the status after Finished, so that the server does not see a cancellation."""
        try:
            for _ in iter(lambda: next(self._stream, None), None):
                pass
        except grpc.RpcError:  # Finished was whole; a status after it takes nothing back
            pass
        self._abandon.detach()

    def _failed(self, error: KVForkError) -> KVForkError:
        self._abandon.detach()
        if self._source is not None:
            self._source.noted(error)
        self._folding.fail(error)
        return self._folding.error or error


def _stop(started: Started) -> calls.Call[bool]:
    return calls.stop(started.generation, started.instance)
