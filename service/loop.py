"""The engine thread: drain the mailbox, plan, step, apply, publish. The only caller of scheduler and engine.

One wake-up of the event loop a step carries every row's events (`Outlet.flush`). Restores are read by the store's I/O
thread and come back through the mailbox, so they run beside decode and not in front of it.

A row that fails ends alone. An exception out of the engine itself ends every row and the thread: `is_alive` turns False
and health with it. `restart` begins a new thread. A thread that hangs inside the engine cannot be ended: `give_up` ends
its works instead, and should it come back it goes on without them. `service.watchdog` decides when.
"""

from __future__ import annotations

import logging
import secrets
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
from kvcache.records import FetchResult
from kvcache.schedule import Call
from service.engine import Engine
from service.errors import CallError, EngineDown, EngineFailed, QueueFull, RecomputeLimit, RowFailed
from service.events import FinishReason
from service.plan import Capture, Decode, OpenRow, Picked, Prefill, RowId, StepPlan, StepResult
from service.scheduler import QueueIsFull, Scheduler, State, Tick
from service.sequence import Sequence
from service.work import Admitted, Ended, Failed, Generation, NodeAt, Prefilled, Tokens, Work, WorkEvent

log = logging.getLogger("kvfork.loop")

TEARDOWN_SECONDS = 2.0  # milliseconds are usual
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
class _Read:
    row: RowId
    lookup: Lookup
    result: FetchResult


class EngineLoop:
    """`submit`, `stop` and `cancel` may be called from any thread and never wait."""

    def __init__(
        self,
        load: Callable[[], tuple[Engine, PrefixCache]],
        scheduler: Scheduler,
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._scheduler = scheduler
        self._flush = flush
        self._clock = clock
        self._inbox: deque[_Submit | _End | _Read | None] = deque()
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
            kept: deque[_Submit | _End | _Read | None] = deque()
            for message in self._inbox:
                if isinstance(message, _Submit):
                    message.emit(Failed(_not_begun(error)))
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

    def _post(self, message: _Submit | _End | _Read | None) -> None:
        with self._wake:
            ended = self._end_error is not None
            if not ended:
                self._inbox.append(message)
                self._wake.notify()
        if ended and isinstance(message, _Read):
            self._cache.release(message.lookup)

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
        self._engine: Engine | None = None
        with self._wake:
            left, self._inbox = list(self._inbox), deque()
            self._end_error = _not_begun(error)  # from here on nobody reads the mailbox
        for message in left:
            if isinstance(message, _Submit):
                message.emit(Failed(self._end_error))
            elif isinstance(message, _Read):
                self._cache.release(message.lookup)
        self._flush()

    def _serve(self) -> CallError:
        """Loads and steps until told to stop; returns what later calls are told."""
        try:
            self._engine, self._cache = self._load()
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

    def _told(self, row: RowId, error: CallError) -> CallError:
        """What a row hears when all end: one that waited cannot be the cause, and may try again as it is."""
        return _not_begun(error) if self._scheduler.state(row) is State.QUEUED else error

    def _drain(self) -> None:
        with self._wake:
            while not self._inbox and self._scheduler.is_idle and not self._to_close:
                self._wake.wait()
            messages, self._inbox = list(self._inbox), deque()
        for message in messages:
            match message:
                case None:
                    self._stopping = True
                case _Submit():
                    self._accept(message)
                case _End():
                    self._guard(message.row, self._asked_to_end, message)
                case _Read():
                    self._guard(message.row, self._was_read, message)

    def _accept(self, message: _Submit) -> None:
        generation = message.work.generation
        try:
            self._scheduler.submit(message.row, priority=message.work.priority, samples=generation is not None)
        except QueueIsFull as full:
            facts = {"queued": str(full.queued), "limit": str(full.limit)}
            message.emit(Failed(QueueFull(str(full), hint="try again later", metadata=facts, retry_after=1.0)))
            return
        try:
            seq = Sequence(message.row, message.work, self._cache, message.emit, self._clock())
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
        if state is State.SAVING:
            return  # its last call is due in this very step
        wants = message.save and generation is not None and (generation.save or generation.save_on_cancel)
        if state is State.DECODE and (message.clean or wants):
            self._finish(seq, FinishReason.STOPPED, save=wants)
        elif message.clean and generation is not None:
            self._end_early(seq, FinishReason.STOPPED)
        else:
            if wants:
                self._hand_out_last_block(seq)
            self._end(message.row, Failed(RowFailed("cancelled")))

    # -- restore --------------------------------------------------------------------------------------------------

    def _begin_restore(self, seq: Sequence) -> None:
        seq.admitted = self._clock()
        work = seq.work
        lookup = self._cache.lookup(work.owner, work.tokens, base=work.base, keep=work.keep)
        over = self._over_limit(work, lookup)
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
            self._open(seq, lookup, None)
            return
        row = seq.row
        self._cache.store.fetch(lookup.plan.records, lambda result: self._post(_Read(row, lookup, result)))

    @staticmethod
    def _over_limit(work: Work, lookup: Lookup) -> RecomputeLimit | None:
        limit = work.max_recompute_tokens
        needed = (work.base.end if work.base else lookup.known) - lookup.position
        if limit is None or needed <= limit:
            return None
        return RecomputeLimit.over(needed, limit, lookup.position)

    def _was_read(self, message: _Read) -> None:
        bad = message.result.failed
        if bad is not None and isinstance(message.result.error, CorruptRecord):
            self._cache.note_corrupt(bad)
        self._cache.release(message.lookup)
        seq = self._sequences.get(message.row)
        if seq is None:
            return
        if not message.result.ok:
            seq.restore_tries += 1
            log.warning("row %d: restore failed (%s)", seq.row, message.result.error)
            if seq.restore_tries < RESTORE_TRIES:
                (self._look_back if seq.rebuilding else self._begin_restore)(seq)
            else:
                self._open(seq, message.lookup.without_state(), None)
            return
        self._open(seq, message.lookup, message.result)

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
        tick = self._scheduler.plan()
        for row in tick.admit:
            self._guard(row, self._begin_restore, self._sequences[row])
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
        opened, self._to_open = self._to_open, []
        closing, self._to_close = self._to_close, []
        return StepPlan(
            leave=tuple(row for row in tick.save if row in live),
            open=tuple(self._open_order(seq) for seq in opened if seq.row in live),
            prefill=tuple(prefill),
            sample=tuple(row for row in tick.finish_prefill if row in live and live[row].samples_next),
            decode=Decode(rows=decode, captures=captures) if decode else None,
            close=tuple(closing),
        )

    def _order_call(self, orders: list[Prefill], row: RowId, call: Call) -> None:
        orders.append(self._prefill_order(self._sequences[row], call.start, call.end, stop=call.stop))

    def _order_last_call(self, orders: list[Prefill], row: RowId) -> None:
        seq = self._sequences[row]
        seq.recorder.called(len(seq.tokens), decoded=True)
        orders.append(self._prefill_order(seq, len(seq.tokens) - 1, len(seq.tokens), stop=True, saving=True))

    def _order_decode(self, captures: dict[RowId, Capture], row: RowId) -> None:
        """A row that this step takes across a block boundary, and whose state may be asked for again, is captured."""
        seq = self._sequences[row]
        end = seq.position + 1
        if seq.keeps_decoded:
            seq.recorder.called(end, decoded=True)
            if end % BLOCK_TOKENS == 0:
                captures[row] = seq.recorder.capture(end, logits=False)

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
        )

    @staticmethod
    def _prefill_order(seq: Sequence, start: int, end: int, *, stop: bool, saving: bool = False) -> Prefill:
        if seq.rebuilding:
            return Prefill(row=seq.row, tokens=seq.tokens[start:end], logits=False, capture=None)
        seq.recorder.called(end)
        kept = saving or seq.keeps(end)
        take: Capture | None = None
        if kept or end % BLOCK_TOKENS == 0:
            take = seq.recorder.capture(end, logits=kept)
        return Prefill(row=seq.row, tokens=seq.tokens[start:end], logits=stop, capture=take)

    def _apply(self, tick: Tick, plan: StepPlan, result: StepResult) -> None:
        now = self._clock()
        self.tokens_prefilled += result.prefill_tokens
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
        """The state at `end` goes to the cache; a place that somebody asked for is handed out."""
        node, lost = seq.recorder.commit(end, result.captured.get(seq.row, {}), explicit=seq.explicit)
        if final or end in seq.work.keep:
            seq.emit(NodeAt(node, lost, final=final))
        elif seq.rehomes and seq.work.base is not None and end == seq.work.base.end:
            seq.emit(NodeAt(node, lost, final=False, rehome=True))
        else:
            self._cache.let_go(node)

    def _picked(self, seq: Sequence, pick: Picked, now: float) -> None:
        generation = seq.work.generation
        assert generation is not None
        if seq.first_token is None:
            seq.first_token = now
        seq.last_token = now
        seq.tokens.append(pick.token)
        seq.completion += 1
        piece = generation.text.push(pick.token)
        seq.emit(Tokens(piece.text, len(seq.tokens) - 1, [pick]))
        if piece.finish is not None:
            seq.stop, seq.stop_token_id = piece.stop, piece.stop_token_id
            self._finish(seq, piece.finish, save=generation.save, flush=False)

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
        self._scheduler.finish(seq.row, save=save)
        if not save:
            self._ended(seq, reason)

    @staticmethod
    def _last_words(seq: Sequence, generation: Generation, reason: FinishReason) -> FinishReason:
        """Text that was held back, now that nothing follows; the reason, which it may change."""
        piece = generation.text.end(reason)
        if piece.finish is not None:
            reason, seq.stop = piece.finish, piece.stop
        if piece.text:
            seq.emit(Tokens(piece.text, len(seq.tokens), []))
        return reason

    def _end_early(self, seq: Sequence, reason: FinishReason) -> None:
        """Stopped while no state stands: the full blocks done so far are what can be kept."""
        if seq.completion and seq.work.generation is not None:
            reason = self._last_words(seq, seq.work.generation, reason)
        if seq.keeps_state:
            self._hand_out_last_block(seq)
        if not seq.announced:
            seq.announced = True
            seq.emit(Admitted(self._clock() - seq.arrived))
        self._ended(seq, reason)

    def _hand_out_last_block(self, seq: Sequence) -> None:
        node = seq.recorder.last_block
        if node.parent is not None:
            seq.emit(NodeAt(self._cache.hold(node), "", final=True))

    def _ended(self, seq: Sequence, reason: FinishReason | None) -> None:
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
        self._end(row, Failed(_row_failure(failure, seq, state)), closed=closed)

    def _end(self, row: RowId, event: Ended | Failed, *, closed: bool = False) -> None:
        """The one terminal event of a sequence."""
        seq = self._sequences.pop(row)
        self._scheduler.drop(row)
        seq.recorder.close()
        if not closed:
            self._to_close.append(row)
        seq.emit(event)


def _wait_for_teardown(thread: threading.Thread) -> None:
    """Waits until the system's thread is gone, which Python's own `join` does not.

    MLX ends a thread's streams in that last moment, and a process that ends meanwhile aborts.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    give_up = time.monotonic() + TEARDOWN_SECONDS
    while task.exists() and time.monotonic() < give_up:
        time.sleep(0.001)


def _not_begun(error: CallError) -> EngineDown:
    """`error` for a call that nothing was done for."""
    return EngineDown(error.text, hint="try again", retry_after=2.0)


def _row_failure(failure: Exception, seq: Sequence, state: State) -> CallError:
    """What the caller of a failed row is told; our own errors pass, the words of others stay in the log."""
    if isinstance(failure, CallError):
        return failure
    incident = secrets.token_hex(16)
    log.error("row %d failed in %s, incident %s", seq.row, state.value, incident, exc_info=failure)
    facts = {"row": str(seq.row), "call": state.value, "position": str(seq.position), "incident": incident}
    return RowFailed(
        f"the sequence failed in {state.value} at token {seq.position}: {type(failure).__name__}",
        hint="the others go on; the server's log has the incident",
        metadata=facts,
    )
