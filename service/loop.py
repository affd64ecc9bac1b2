"""The engine thread: drain the mailbox, plan, step, apply, publish. The only caller of scheduler and engine.

One wake-up of the event loop a step carries every row's events (`Outlet.flush`). Restores are read by the store's I/O
thread and come back through the mailbox, so they run beside decode and not in front of it; rows that want the same
records share a read (`restores`).

A row that fails ends alone. An exception out of the engine itself ends every row and the thread: `is_alive` turns False
and health with it. `restart` begins a new thread. A thread that hangs inside the engine cannot be ended: `give_up` ends
its works instead, and should it come back it goes on without them. `service.watchdog` decides when.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Lookup, PrefixCache
from kvcache.errors import CorruptRecord
from kvcache.records import FetchResult, Tier
from kvcache.schedule import Call
from kvcache.tree import Node
from service.engine import Engine
from service.errors import (
    ActiveMemory,
    CallError,
    DeadlineUnmet,
    EngineFailed,
    QueueFull,
    RecomputeLimit,
    RowFailed,
)
from service.events import FinishReason, RowView
from service.failures import not_begun, row_failure
from service.forecast import Forecast
from service.metering import Meter
from service.parking import Parking, Place, Settled
from service.plan import Capture, Decode, OpenRow, Picked, Prefill, RowId, StepPlan, StepResult
from service.restores import Read, Restore, Restores
from service.scheduler import Demand, NeverFits, QueueIsFull, Scheduler, State, Tick
from service.sequence import Sequence
from service.text.stream import Piece
from service.work import Admitted, Ended, Failed, Generation, NodeAt, Prefilled, Tokens, Work, WorkEvent

log = logging.getLogger("kvfork.loop")

RELAX_AFTER = 5.0  # seconds without work after which working memory goes back to the system
SNAPSHOT_WAIT = 10.0  # seconds
TEARDOWN_SECONDS = 2.0  # milliseconds are usual
PARKED_QUEUES = 4  # times what the store's queue takes may wait for it in all
LOAN_RETRY = 0.02  # seconds after which the store is asked again for memory that it could not lend
NOT_STORED = "NOT_STORED"  # why a place does not stand, where the store refused nothing: it was evicted since
RESTORE_TRIES = 5  # a record can be lost between planning and reading; each try plans anew without it


@dataclass(frozen=True, slots=True)
class _Submit:
    row: RowId
    work: Work
    emit: Callable[[WorkEvent], None]


@dataclass(frozen=True, slots=True)
class _End:
    """Stop cleanly (`clean`) or give up; `save` keeps the work done under a last NodeAt."""

    row: RowId
    clean: bool
    save: bool


@dataclass(frozen=True, slots=True)
class _Arrived:
    read: Read
    result: FetchResult


@dataclass(frozen=True, slots=True)
class _Written:
    """A record left the store's queue: what is parked may be taken now."""


class EngineLoop:
    """`submit`, `stop` and `cancel` may be called from any thread and never wait."""

    def __init__(
        self,
        load: Callable[[], tuple[Engine, PrefixCache]],
        scheduler: Scheduler,
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        snapshot_wait: float = SNAPSHOT_WAIT,
        meter: Meter | None = None,
    ) -> None:
        """`snapshot_wait`: seconds that state which somebody asked for may wait for a full store to take it."""
        self._meter = meter or Meter()
        self._load = load
        self._scheduler = scheduler
        self._flush = flush
        self._clock = clock
        self._snapshot_wait = snapshot_wait
        self._engine: Engine | None = None
        self._parking: Parking
        self._waits_for_writer = False
        self._inbox: deque[_Submit | _End | _Arrived | _Written | None] = deque()
        self._wake = threading.Condition()
        self._sequences: dict[RowId, Sequence] = {}
        self._next_row = 0
        self._thread = self._new_thread()
        self._busy_since: float | None = None
        self._in_engine = False  # under the lock: while it is set, the thread touches nothing but the engine
        self._given_up = False  # under the lock: while in the engine, its works were ended
        self._failed = False
        self._stopping = False
        self._end_error: CallError | None = None  # set once the thread takes no more messages
        self._to_open: list[Sequence] = []
        self._to_close: list[RowId] = []
        self._restores = Restores(
            lambda records, done: self._cache.store.fetch(records, done),
            lambda read, result: self._post(_Arrived(read, result)),
        )
        self._pace = 0.0  # least seconds that a token of a whole block's prefill has taken
        self._borrowed = 0
        self.tokens_prefilled = 0  # counted where the model is called
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0

    # -- any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def restart(self, load: Callable[[], tuple[Engine, PrefixCache]], scheduler: Scheduler) -> None:
        """A new thread in place of one that has failed; row ids and counters go on."""
        assert self.has_failed
        self._thread.join()
        with self._wake:
            self._load, self._scheduler = load, scheduler
            self._busy_since, self._failed, self._end_error = None, False, None
            self._to_open, self._to_close = [], []
            self._waits_for_writer = False
            self._thread = self._new_thread()
            self._thread.start()

    def close(self, patience: float | None = None) -> bool:
        """Ends the thread; running works fail. False if it has not come back within `patience` seconds."""
        self._post(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            return False
        _wait_for_teardown(self._thread)
        return True

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="engine", daemon=True)

    def submit(self, work: Work, emit: Callable[[WorkEvent], None]) -> RowId:
        """Queues a work. `emit` is called on the engine thread (on the caller's once that has ended).

        Exactly one Ended or Failed comes last.
        """
        with self._wake:
            self._next_row += 1
            row = RowId(self._next_row)
            error = self._end_error
            if error is None:
                self._inbox.append(_Submit(row, work, emit))
                self._wake.notify()
        if error is not None:
            emit(Failed(error))
            self._flush()
        return row

    def stop(self, row: RowId) -> None:
        """Ends a work cleanly, with what it has."""
        self._post(_End(row, clean=True, save=True))

    def cancel(self, row: RowId, *, save: bool = False) -> None:
        """Gives a work up within one step."""
        self._post(_End(row, clean=False, save=save))

    def is_alive(self, stuck_after: float) -> bool:
        """False once the thread has died, or when one step has taken longer than `stuck_after` seconds."""
        return self._thread.is_alive() and not self._failed and not self._is_stuck(stuck_after)

    @property
    def has_failed(self) -> bool:
        """The thread is over, or about to be, and nobody asked it to end."""
        return self._failed and not self._stopping

    def give_up(self, stuck_after: float) -> int:
        """Ends every work if the thread has been inside the engine for longer than that; how many."""
        with self._wake:
            if not self._in_engine or not self._is_stuck(stuck_after):
                return 0
            self._given_up = True
            # The lock, and looking at `_given_up` before all else, is what keeps the thread away from all of this.
            error = EngineFailed("the model did not answer in time", hint="the server's log says for how long")
            ended = len(self._sequences)
            for row in list(self._sequences):
                self._end(row, Failed(self._told(row, error)))
            self._to_open = []
            kept: deque[_Submit | _End | _Arrived | _Written | None] = deque()
            for message in self._inbox:
                if isinstance(message, _Submit):
                    message.emit(Failed(not_begun(error)))
                    ended += 1
                else:
                    kept.append(message)
            self._inbox = kept
        self._flush()
        return ended

    def _is_stuck(self, after: float) -> bool:
        busy = self._busy_since
        return busy is not None and self._clock() - busy > after

    def count(self, *states: State) -> int:
        """How many sequences are in one of `states`, at some recent moment."""
        try:
            return self._scheduler.count(*states)
        except RuntimeError:  # the engine thread changed the dictionary meanwhile; a number a moment old will do
            return len(self._sequences)

    @property
    def reserved_bytes(self) -> int:
        """Working memory reserved by rows under way, at some recent moment."""
        while True:
            with contextlib.suppress(RuntimeError):  # the engine thread changed the dictionary meanwhile
                return self._scheduler.reserved_bytes

    def foresee(self, demand: Demand, count: int) -> Forecast:
        """What so many sequences would meet if they came at about this moment."""
        while True:
            with contextlib.suppress(RuntimeError):  # as above
                return self._scheduler.foresee(demand, count, self._clock())

    def rows(self, owner: str) -> list[RowView]:
        """The owner's sequences, oldest first, at some recent moment."""
        now = self._clock()
        found: list[RowView] = []
        for seq in sorted(self._sequences.copy().values(), key=lambda seq: seq.row):
            if seq.work.owner == owner:
                state = self._scheduler.state(seq.row)
                found.append(
                    RowView(
                        row=seq.row,
                        phase=State.SAVING.value if state is State.DONE else state.value,  # or about to go
                        prompt_tokens=seq.prompt_tokens,
                        done_tokens=min(seq.position, seq.prompt_tokens),
                        completion_tokens=seq.completion,
                        age=now - seq.arrived,
                        priority=seq.work.priority,
                    )
                )
        return found

    def _post(self, message: _Submit | _End | _Arrived | _Written | None) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    # -- engine thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            error = self._serve()
        except BaseException as failure:  # the engine is broken, or somebody ends threads: say so to everybody
            log.exception("the engine thread ends")
            # Its frames hold the model's memory, which a new thread will need.
            traceback.clear_frames(failure.__traceback__)
            self._failed = True
            error = EngineFailed("the model thread failed", hint="the server's log says why")
        for row in list(self._sequences):
            self._end(row, Failed(self._told(row, error)))
        self._engine = None
        self._lend(0)
        with self._wake:
            left, self._inbox = list(self._inbox), deque()
            self._end_error = not_begun(error)  # from here on nobody reads the mailbox
        for message in left:
            if isinstance(message, _Submit):
                message.emit(Failed(self._end_error))
            elif isinstance(message, _Arrived):
                for restore in self._restores.arrived(message.read, message.result):
                    self._cache.release(restore.lookup)
        self._flush()

    def _serve(self) -> CallError:
        """Loads and steps until told to stop; returns what later calls are told."""
        try:
            self._take_over(*self._load())
        except Exception:  # whatever is wrong with a model; whoever loads it says so in the log
            log.debug("the model was not loaded", exc_info=True)
            self._failed = True
            return EngineFailed("the model could not be loaded", hint="see the server's log")
        while not self._stopping:
            self._drain()
            self._busy_since = self._clock()
            self._tick()
            self._busy_since = None
            self._flush()
        return EngineFailed("the server has stopped")

    def _take_over(self, engine: Engine, cache: PrefixCache) -> None:
        self._engine = engine
        self._cache, self._parking = cache, Parking(cache, PARKED_QUEUES * cache.store.queue_bytes)
        self._scheduler.footprint = engine.footprint

    def _told(self, row: RowId, error: CallError) -> CallError:
        """What a row hears when all end: one that waited cannot be the cause, and may try again as it is."""
        return not_begun(error) if self._scheduler.state(row) is State.QUEUED else error

    def _drain(self) -> None:
        if not self._wait_for_work(RELAX_AFTER):
            assert self._engine is not None
            self._engine.relax()
            self._wait_for_work(None)
        with self._wake:
            messages, self._inbox = list(self._inbox), deque()
        for message in messages:
            match message:
                case None:
                    self._stopping = True
                case _Submit():
                    self._accept(message)
                case _End():
                    self._guard(message.row, self._asked_to_end, message)
                case _Arrived():
                    for restore in self._restores.arrived(message.read, message.result):
                        self._guard(restore.row, self._was_read, restore)
                case _Written():
                    self._waits_for_writer = False
        self._restores.start()  # for rows whose restore has to be planned anew

    def _wait_for_work(self, seconds: float | None) -> bool:
        """False after `seconds`, or as soon as a parked row has waited long enough."""
        with self._wake:
            deadline = self._parking.next_deadline()
            if deadline is not None:
                left = max(0.0, deadline - self._clock())
                seconds = left if seconds is None else min(seconds, left)
            if self._scheduler.waits_for_loan:
                seconds = LOAN_RETRY if seconds is None else min(seconds, LOAN_RETRY)
            return self._wake.wait_for(
                lambda: bool(self._inbox or self._to_close) or not self._scheduler.is_idle, seconds
            )

    def _accept(self, message: _Submit) -> None:
        now = self._clock()
        try:
            self._scheduler.submit(message.row, _demand(message.work), now)
        except QueueIsFull as full:
            facts = {"queued": str(full.queued), "limit": str(full.limit)}
            message.emit(Failed(QueueFull(str(full), hint="try again later", metadata=facts, retry_after=1.0)))
            return
        except NeverFits as over:
            facts = {"needBytes": str(over.needed), "limitBytes": str(over.limit)}
            hint = "ask for fewer new tokens, or give the server more --active-bytes"
            message.emit(Failed(ActiveMemory(str(over), hint=hint, metadata=facts)))
            return
        try:
            seq = Sequence(message.row, message.work, self._cache, message.emit, now)
        except Exception as error:  # as in `_guard`: a work that cannot even begin is nobody else's end
            log.exception("row %d was not begun", message.row)
            self._scheduler.drop(message.row)
            message.emit(Failed(RowFailed(f"the sequence could not begin: {type(error).__name__}")))
            return
        self._sequences[message.row] = seq

    def _asked_to_end(self, message: _End) -> None:
        seq = self._sequences.get(message.row)
        if seq is None:
            return
        state = self._scheduler.state(message.row)
        generation = seq.work.generation
        if state is State.SAVING or (seq.ending and (message.clean or message.save)):
            return  # its last call is due in this very step, or is made and being stored
        wants = message.save and generation is not None and (generation.save or generation.save_on_cancel)
        if state is State.DECODE and (message.clean or wants):
            self._finish(seq, FinishReason.STOPPED, save=wants)
        elif message.clean and generation is not None:
            self._end_early(seq, FinishReason.STOPPED)
        elif wants and self._parking.holds(seq.row):
            seq.cancelled = seq.hands_out_last = True  # what was asked to be saved is told once it is stored
            self._ended(seq, FinishReason.STOPPED)
        else:
            if wants:
                self._hand_out_last_block(seq)
            self._end(message.row, Failed(RowFailed("cancelled")))

    # -- restore --------------------------------------------------------------------------------------------------

    def _begin_restore(self, seq: Sequence) -> None:
        seq.admitted = self._clock()
        work = seq.work
        lookup = self._cache.lookup(work.owner, work.tokens, base=work.base, keep=work.keep)
        over = self._over_limit(work, lookup) or self._too_late(work, lookup, seq.admitted)
        if over is not None:
            self._cache.release(lookup)
            self._end(seq.row, Failed(over))
            return
        if not seq.announced:
            seq.announced = True
            seq.emit(Admitted(seq.admitted - seq.arrived))
        self._read(seq, lookup)

    def _read(self, seq: Sequence, lookup: Lookup) -> None:
        """Asks for a lookup's records; the row is opened when they are there."""
        if lookup.plan is None:
            try:
                self._open(seq, lookup, None)
            finally:
                self._cache.release(lookup)
            return
        self._restores.want(seq.row, lookup)

    @staticmethod
    def _over_limit(work: Work, lookup: Lookup) -> RecomputeLimit | None:
        limit = work.max_recompute_tokens
        needed = (work.base.end if work.base else lookup.known) - lookup.position
        if limit is None or needed <= limit:
            return None
        return RecomputeLimit.over(needed, limit, lookup.position)

    def _too_late(self, work: Work, lookup: Lookup, now: float) -> DeadlineUnmet | None:
        """Work that cannot end in time is not begun, unless what is done of it is kept. The pace is the best seen."""
        generation = work.generation
        if work.deadline is None or (generation is not None and generation.save_on_cancel):
            return None
        needed, left = (len(work.tokens) - lookup.position) * self._pace, work.deadline - now
        if needed < left:
            return None
        facts = {"neededSeconds": f"{needed:.3f}", "leftSeconds": f"{max(0.0, left):.3f}"}
        hint = "allow more time, or go on from a snapshot"
        return DeadlineUnmet("the prompt cannot be computed before the deadline", hint=hint, metadata=facts)

    def _was_read(self, restore: Restore) -> None:
        bad = restore.result.failed
        if bad is not None and isinstance(restore.result.error, CorruptRecord):
            self._cache.note_corrupt(bad)
        try:
            self._go_on(restore)
        finally:
            self._cache.release(restore.lookup)  # not before what it found is handed out

    def _go_on(self, restore: Restore) -> None:
        seq = self._sequences.get(restore.row)
        if seq is None:
            return
        if not restore.result.ok:
            seq.restore_tries += 1
            log.warning("row %d: restore failed (%s)", seq.row, restore.result.error)
            if seq.restore_tries < RESTORE_TRIES:
                (self._look_back if seq.rebuilding else self._begin_restore)(seq)
            else:
                self._open(seq, restore.lookup.without_state(), None)
            return
        self._open(seq, restore.lookup, restore.result)

    def _rebuild(self, seq: Sequence) -> None:
        """The state of a decoding row is gone, through no fault of its own: it is restored or computed again."""
        self._scheduler.lost(seq.row)
        seq.rebuilding, seq.restore_tries = True, 0
        self._look_back(seq)

    def _look_back(self, seq: Sequence) -> None:
        last = seq.recorder.last_block
        base = last if last.parent is not None else None
        self._read(seq, self._cache.lookup(seq.work.owner, seq.tokens[: seq.position], base=base, keep=seq.work.keep))

    def _open(self, seq: Sequence, lookup: Lookup, read: FetchResult | None) -> None:
        if read is not None and not seq.rebuilding:
            self._meter.restored(
                memory_bytes=read.bytes_from(Tier.MEMORY),
                disk_bytes=read.bytes_from(Tier.DISK),
                seconds=self._clock() - seq.admitted,
            )
        if seq.rebuilding:
            calls = seq.rebuilt_from(lookup, read)
        else:
            seq.opened = self._clock()
            calls = seq.found(lookup, read)
            for node in lookup.kept:
                seq.emit(NodeAt(self._cache.hold(node), "", final=False))
        self._scheduler.restored(seq.row, calls)
        self._to_open.append(seq)

    # -- one step -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._settle_parked()
        tick = self._scheduler.plan(self._clock(), self._borrow)
        for row in tick.expired:
            self._end(row, Failed(DeadlineUnmet("the deadline passed before the call's turn came")))
        for row in tick.unlent:
            message = "kept state that is in use leaves no memory for the call"
            hint = "try again later, delete snapshots, or give the server more --active-bytes"
            self._end(row, Failed(ActiveMemory(message, hint=hint, retry_after=1.0)))
        self._lend(tick.borrowed)
        for row in tick.admit:
            self._guard(row, self._begin_restore, self._sequences[row])
        self._restores.start()
        plan = self._orders(tick)
        if not plan:
            return
        result = self._step(plan)
        if result is not None:
            self._apply(tick, plan, result)

    def _step(self, plan: StepPlan) -> StepResult | None:
        """Makes a step; None if its works were given up meanwhile."""
        assert self._engine is not None
        with self._wake:
            self._in_engine = True
        try:
            result = self._engine.step(plan)
        finally:
            with self._wake:
                given_up, self._in_engine, self._given_up = self._given_up, False, False
        if given_up:
            log.warning("the model answers again; the works of that step are gone")
            return None
        return result

    def _orders(self, tick: Tick) -> StepPlan:
        prefill: list[Prefill] = []
        for row, call in tick.prefill:
            self._guard(row, self._order_call, prefill, row, call)
        for row in tick.save:
            self._guard(row, self._order_last_call, prefill, row)
        captures: dict[RowId, Capture] = {}
        for row in tick.decode:
            self._guard(row, self._order_decode, captures, row)
        live = self._sequences  # those that failed right now are closed at the end of the step
        decode = tuple(row for row in tick.decode if row in live)
        shared = tuple(tuple(row for row in call if row in live) for call in tick.shared)
        opened, self._to_open = self._to_open, []
        closing, self._to_close = self._to_close, []
        return StepPlan(
            leave=tuple(row for row in tick.save if row in live),
            open=tuple(self._open_order(seq) for seq in opened if seq.row in live),
            prefill=tuple(prefill),
            sample=tuple(row for row in tick.finish_prefill if row in live and live[row].samples_next),
            decode=Decode(rows=decode, shared=shared, captures=captures) if decode else None,
            close=tuple(closing),
        )

    def _order_call(self, orders: list[Prefill], row: RowId, call: Call) -> None:
        orders.append(self._prefill_order(self._sequences[row], call.start, call.end, stop=call.stop))

    def _order_last_call(self, orders: list[Prefill], row: RowId) -> None:
        seq = self._sequences[row]
        seq.recorder.called(len(seq.tokens), decoded=True)
        orders.append(self._prefill_order(seq, len(seq.tokens) - 1, len(seq.tokens), stop=True, saving=True))

    def _order_decode(self, captures: dict[RowId, Capture], row: RowId) -> None:
        """Captures a row that this step takes across a block boundary or to a mark, where its state may be wanted."""
        seq = self._sequences[row]
        end = seq.position + 1
        if seq.keeps_decoded:
            seq.recorder.called(end, decoded=True)
            kept = seq.keeps(end)
            if kept or end % BLOCK_TOKENS == 0:
                kinds = None if kept else seq.take_at(end).kinds
                captures[row] = seq.recorder.capture(end, logits=kept, kinds=kinds)

    @staticmethod
    def _open_order(seq: Sequence) -> OpenRow:
        generation = seq.work.generation
        restored, seq.restored = seq.restored, None
        return OpenRow(
            row=seq.row,
            restored=restored,
            sampling=generation.sampling if generation else None,
            top_logprobs=generation.top_logprobs if generation else None,
            context=seq.work.tokens,
            constraint=generation.constraint if generation else None,
        )

    @staticmethod
    def _prefill_order(seq: Sequence, start: int, end: int, *, stop: bool, saving: bool = False) -> Prefill:
        if seq.rebuilding:
            return Prefill(row=seq.row, tokens=seq.tokens[start:end], logits=False, capture=None)
        seq.recorder.called(end)
        kept = saving or seq.keeps(end)
        take: Capture | None = None
        if kept or end % BLOCK_TOKENS == 0:
            take = seq.recorder.capture(end, logits=kept, kinds=None if kept else seq.take_at(end).kinds)
        return Prefill(row=seq.row, tokens=seq.tokens[start:end], logits=stop, capture=take)

    def _apply(self, tick: Tick, plan: StepPlan, result: StepResult) -> None:
        now = self._clock()
        self.tokens_prefilled += result.prefill_tokens
        self._meter.stepped(
            rows=len(plan.decode.rows) if plan.decode is not None else 0,
            prefill_tokens=result.prefill_tokens,
            prefill_seconds=result.prefill_seconds,
            decode_seconds=result.decode_seconds,
        )
        if result.prefill_tokens >= BLOCK_TOKENS:
            pace = result.prefill_seconds / result.prefill_tokens
            self._pace = min(self._pace, pace) if self._pace else pace
        for row, failure in result.failed.items():
            if row in self._sequences:
                self._fail(row, failure, closed=True)
        for order in plan.prefill:
            seq = self._sequences.get(order.row)
            if seq is not None and not seq.rebuilding:
                seq.prefill_seconds += result.prefill_seconds  # what the row waited for, neighbours included
                self._guard(order.row, self._prefilled, seq, order, result)
        for row in tick.finish_prefill:
            seq = self._sequences.get(row)
            if seq is not None:
                seq.rebuilding = False  # if it was, it stands again
                if seq.work.generation is None:
                    self._guard(row, self._ended, seq, None)
        if plan.decode is not None:
            for row in plan.decode.rows:
                seq = self._sequences.get(row)
                if seq is not None and row not in result.lost:
                    seq.position += 1
                    if row in plan.decode.captures:
                        self._guard(row, self._commit, seq, seq.position, result)
        for row, pick in result.picked.items():
            if row in self._sequences:
                self._guard(row, self._picked, self._sequences[row], pick, now)
        for row in tick.save:
            seq = self._sequences.get(row)
            if seq is not None:
                self._scheduler.saved(row)
                self._guard(row, self._ended, seq, seq.finish_reason)
        for row in result.lost:
            if row in self._sequences:
                self._guard(row, self._rebuild, self._sequences[row])
        self._restores.start()  # for those
        self._check_time_limits(now)

    def _prefilled(self, seq: Sequence, order: Prefill, result: StepResult) -> None:
        saving = self._scheduler.state(seq.row) is State.SAVING
        seq.position += len(order.tokens)
        if not saving:
            seq.computed += len(order.tokens)
        if order.capture is not None:
            self._commit(seq, seq.position, result, final=saving)
        if seq.work.progress and not saving:
            seq.emit(Prefilled(seq.position))

    def _commit(self, seq: Sequence, end: int, result: StepResult, *, final: bool = False) -> None:
        """The state at `end` goes to the cache; what it does not take yet, and somebody asked for, is parked."""
        payloads = result.captured.get(seq.row, {})
        take = None if final else seq.take_at(end)
        passing, in_memory = (take.passing, take.in_memory) if take is not None else ((), ())
        waits = seq.explicit and self._snapshot_wait > 0
        commit = seq.recorder.commit(
            end, payloads, explicit=seq.explicit, passing=passing, in_memory=in_memory, patient=waits
        )
        lost = commit.lost
        if waits and ((lost is not None and lost.may_pass) or self._parking.holds(seq.row)):
            place = Place(
                node=commit.node,
                end=end,
                final=final,
                payloads={kind: data for kind, data in payloads.items() if kind not in passing},
                passing=passing,
                in_memory=in_memory,
                until=self._clock() + self._snapshot_wait,
            )
            if self._parking.park(seq.row, place):
                self._meter.store_waits += 1
                self._scheduler.pause(seq.row)
                self._ask_when_written()
                return
            # The last try counts as skipped.
            lost = self._cache.put(place.node, place.payloads, explicit=True, in_memory=in_memory)
        self._kept(seq, commit.node, end, lost.name if lost and seq.explicit else "", final=final)

    def _settle_parked(self) -> None:
        """Offers what is parked to the store again, and goes on where it was taken or its time is over."""
        if not self._parking:
            return
        rows: dict[RowId, None] = {}
        for settled in self._parking.settle(self._clock()):
            rows[settled.row] = None
            self._guard(settled.row, self._settled, settled)
        for row in rows:
            if row in self._sequences and not self._parking.holds(row):
                self._guard(row, self._all_stored, self._sequences[row])
        self._ask_when_written()

    def _ask_when_written(self) -> None:
        if self._parking and not self._waits_for_writer:
            self._waits_for_writer = True
            self._cache.store.when_written(lambda: self._post(_Written()))

    def _settled(self, settled: Settled) -> None:
        seq, place = self._sequences.get(settled.row), settled.place
        if seq is None:  # a place before this one has ended the row
            self._cache.let_go(place.node)
            return
        self._kept(seq, place.node, place.end, settled.lost.name if settled.lost else "", final=place.final)

    def _all_stored(self, seq: Sequence) -> None:
        """Nothing of the row is parked any more."""
        self._scheduler.resume(seq.row)
        if seq.ending:
            if seq.hands_out_last:
                self._hand_out_last_block(seq)
            self._ended(seq, seq.finish_reason)

    def _kept(self, seq: Sequence, node: Node, end: int, lost: str, *, final: bool) -> None:
        """State was stored, or lost for a reason; a place that somebody asked for is handed out."""
        seq.lost = seq.lost or lost
        rehome = seq.rehomes and seq.work.base is not None and end == seq.work.base.end
        is_end = final and seq.keeps_state
        asked = is_end or end == seq.mark_at or end in seq.work.keep or rehome
        if asked and not lost and not self._cache.stands(node):
            lost = seq.lost or NOT_STORED  # something before this place is missing
        if end == seq.mark_at and not seq.mark_told:
            seq.mark_told = True
            seq.emit(NodeAt(self._cache.hold(node), lost, final=False, reasoning_end=True))
        if not is_end and end not in seq.work.keep and not rehome:
            self._cache.let_go(node)
            return
        seq.emit(NodeAt(node, lost, final=final, rehome=rehome and not final and end not in seq.work.keep))

    def _picked(self, seq: Sequence, pick: Picked, now: float) -> None:
        generation = seq.work.generation
        assert generation is not None
        if seq.first_token is None:
            seq.first_token = now
        seq.last_token = now
        seq.tokens.append(pick.token)
        seq.completion += 1
        piece = generation.text.push(pick.token, last=pick.last)
        self._say(seq, piece, [pick])
        if piece.reasoning_ended and generation.mark_reasoning:
            seq.mark_at = len(seq.tokens)
        if piece.finish is not None:
            seq.stop, seq.stop_token_id = piece.stop, piece.stop_token_id
            self._finish(seq, piece.finish, save=generation.save, flush=False)

    @staticmethod
    def _say(seq: Sequence, piece: Piece, picked: list[Picked]) -> None:
        """The piece's text by channel; `picked` goes with its own."""
        end = len(seq.tokens)
        for spoken in piece.before:
            seq.emit(Tokens(spoken.text, end - len(picked), [], spoken.channel))
        if picked or piece.text:
            seq.emit(Tokens(piece.text, end - len(picked), picked, piece.channel))
        for spoken in piece.after:
            seq.emit(Tokens(spoken.text, end, [], spoken.channel))

    def _check_time_limits(self, now: float) -> None:
        for seq in list(self._sequences.values()):
            generation = seq.work.generation
            limit = generation.stopping.time_limit if generation else None
            if limit is None or now - seq.admitted < limit:
                continue
            self._guard(seq.row, self._out_of_time, seq)

    def _out_of_time(self, seq: Sequence) -> None:
        generation = seq.work.generation
        state = self._scheduler.state(seq.row)
        if state is State.DECODE and generation is not None:
            self._finish(seq, FinishReason.TIME_LIMIT, save=generation.save)
        elif state is State.PREFILL:
            self._end_early(seq, FinishReason.TIME_LIMIT)

    def _guard(self, row: RowId, act: Callable[..., None], *args: object) -> None:
        """Runs one row's part of a step; what it raises ends that row alone."""
        try:
            act(*args)
        except Exception as error:  # a bug met by one row (its text, its stops, its records) must not end the others
            if row in self._sequences:
                self._fail(row, error)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason, *, save: bool, flush: bool = True) -> None:
        """A decoding row is at its end; with `save` its last token is fed before it goes."""
        generation = seq.work.generation
        assert generation is not None
        if flush:
            reason = self._last_words(seq, generation, reason)
        seq.finish_reason = reason
        save = save or seq.mark_at == len(seq.tokens)
        self._scheduler.finish(seq.row, save=save)
        if not save:
            self._ended(seq, reason)

    def _last_words(self, seq: Sequence, generation: Generation, reason: FinishReason) -> FinishReason:
        """Text that was held back, now that nothing follows; the reason, which it may change."""
        piece = generation.text.end(reason)
        if piece.finish is not None:
            reason, seq.stop = piece.finish, piece.stop
        self._say(seq, piece, [])
        return reason

    def _end_early(self, seq: Sequence, reason: FinishReason) -> None:
        """Stopped while no state stands: the full blocks done so far are what can be kept."""
        if seq.completion and seq.work.generation is not None:
            reason = self._last_words(seq, seq.work.generation, reason)
        seq.hands_out_last = seq.keeps_state and self._parking.holds(seq.row)
        if seq.keeps_state and not seq.hands_out_last:
            self._hand_out_last_block(seq)
        if not seq.announced:
            seq.announced = True
            seq.emit(Admitted(self._clock() - seq.arrived))
        self._ended(seq, reason)

    def _hand_out_last_block(self, seq: Sequence) -> None:
        """As the end: the deepest place passed that stands; if none does, the last block with why it does not."""
        last = seq.recorder.last_block
        if last.parent is None:
            return
        node, lost = self._cache.hold_base(last, last.end), ""
        if node.parent is None:
            self._cache.let_go(node)
            node, lost = self._cache.hold(last), seq.lost or NOT_STORED
        seq.emit(NodeAt(node, lost, final=True))

    def _ended(self, seq: Sequence, reason: FinishReason | None) -> None:
        if self._parking.holds(seq.row):  # the row is free for others; its end is told once its state is stored
            if not seq.ending:
                seq.ending, seq.finish_reason = True, reason
                self._scheduler.drop(seq.row)
                self._to_close.append(seq.row)
            return
        if seq.cancelled:
            self._end(seq.row, Failed(RowFailed("cancelled")))
            return
        usage = seq.usage()
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.recomputed_tokens += usage.recomputed_tokens
        ended = Ended(
            usage=usage,
            timing=seq.timing(),
            reason=reason,
            stop=seq.stop,
            stop_token_id=seq.stop_token_id,
        )
        self._end(seq.row, ended)

    def _fail(self, row: RowId, failure: Exception, *, closed: bool = False) -> None:
        seq = self._sequences[row]
        state = self._scheduler.state(row)
        if state is State.DECODE and seq.position < seq.prompt_tokens:
            state = State.PREFILL  # the plan was ahead of the step
        error = row_failure(failure, row=row, call=state.value, position=seq.position)
        self._end(row, Failed(error), closed=closed)

    def _end(self, row: RowId, event: Ended | Failed, *, closed: bool = False) -> None:
        """The one terminal event of a sequence."""
        seq = self._sequences.pop(row)
        self._scheduler.drop(row)
        self._parking.drop(row)
        seq.recorder.close()
        if not closed and not seq.ending:
            self._to_close.append(row)
        if closed and not self._scheduler.rows():
            self._lend(0)  # there may be no further plan
        seq.emit(event)

    def _borrow(self, size: int) -> int:
        """Borrows so much of the store in all, at least; how much is missing."""
        return 0 if size <= self._borrowed else self._lend(size)

    def _lend(self, size: int) -> int:
        """Sets the loan; how much is missing, and then it is what it was."""
        if size == self._borrowed:
            return 0
        missing = self._cache.store.lend(size)
        if missing and size > self._borrowed:
            self._cache.store.lend(self._borrowed)
            return missing
        self._borrowed = size
        return 0


def _wait_for_teardown(thread: threading.Thread) -> None:
    """Waits until the system's thread is gone, which Python's own `join` does not.

    MLX ends a thread's streams in that last moment, and a process that ends meanwhile aborts.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    give_up = time.monotonic() + TEARDOWN_SECONDS
    while task.exists() and time.monotonic() < give_up:
        time.sleep(0.001)


def _demand(work: Work) -> Demand:
    return Demand(
        prompt_tokens=len(work.tokens),
        known_tokens=work.base.end if work.base is not None else 0,
        new_tokens=work.most_new_tokens,
        samples=work.generation is not None,
        priority=work.priority,
        group=work.group,
        deadline=work.deadline,
    )
