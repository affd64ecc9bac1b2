"""Carrying out steps: what the scheduler decides becomes orders, what the engine answers becomes events.

Owns one engine's working life: the rows under way, and the order of things within a step. It has no thread, waits for
nothing and never sees the engine but through `step`; a new thread (`loop`) begins with a new `Steps`, and what comes
late for the old one finds no rows there.

    settle what is parked ─► plan ─► begin restores ─► orders ─► engine ─► results: captures, picks, ends, rebuilds

What images need beside that is `sight`'s.

A row that fails ends alone. What the engine itself raises is the loop's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcache.cache import PrefixCache
from kvcache.checkpoints import Take
from service.ends import Ends
from service.errors import ActiveMemory, CallError, DeadlineUnmet, QueueFull, RowFailed
from service.events import Forecast, RowView
from service.footprint import Footprint
from service.keeping import Keeping
from service.loan import Loan
from service.opening import Opening
from service.orders import Orders, orders
from service.parking import Parking
from service.plan import Picked, Prefill, RowId, StepPlan, StepResult
from service.rows import Rows
from service.scheduler import Demand, NeverFits, QueueIsFull, Scheduler, State, Tick
from service.sequence import Sequence
from service.sight import Sight
from service.totals import Totals
from service.work import Failed, Prefilled, Work, WorkEvent

log = logging.getLogger("kvfork.steps")

PARKED_QUEUES = 4  # times what the store's queue takes may wait for it in all
LOAN_RETRY = 0.02  # seconds after which the store is asked again for memory that it could not lend


class Steps:
    """Engine thread only, but for `end_all` while that is inside `step`."""

    def __init__(
        self,
        step: Callable[[StepPlan], StepResult | None],
        footprint: Footprint,
        cache: PrefixCache,
        scheduler: Scheduler,
        totals: Totals,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        *,
        snapshot_wait: float,
    ) -> None:
        """`step` has the engine carry out a plan; None if everything was ended (`end_all`) meanwhile.

        `post` has a thing done between steps; it may be called from any thread. `snapshot_wait`: seconds that state
        which somebody asked for may wait for a full store to take it; 0 waits for none.
        """
        scheduler.footprint = footprint
        self._step = step
        self._cache = cache
        self._scheduler = scheduler
        self._totals = totals
        self._clock = clock
        self._loan = Loan(cache.store)
        self.parking = Parking(cache, PARKED_QUEUES * cache.store.queue_bytes, scheduler.max_rows)
        self._sight = Sight(cache, scheduler, totals, post, lambda row, error: self.rows.fail(row, error))
        self.rows = Rows(scheduler, self.parking, self._loan, totals, self._sight)
        self._keeping = Keeping(cache, scheduler, self.parking, self.rows, totals, post, clock, snapshot_wait)
        self._ends = Ends(scheduler, self.parking, self.rows, self._keeping, clock)
        self._opening = Opening(cache, scheduler, self.rows, totals, self._sight, post, clock)

    # -- between steps --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `tick` would do something now."""
        return self.rows.is_closing or not self._scheduler.is_idle

    def look_again_in(self) -> float | None:
        """Seconds after which `tick` has something to do, whatever comes: a wait of some row is over then."""
        parked = self.parking.next_deadline()
        waits = [] if parked is None else [max(0.0, parked - self._clock())]
        if self._scheduler.waits_for_loan:
            waits.append(LOAN_RETRY)
        return min(waits, default=None)

    def submit(self, row: RowId, work: Work, emit: Callable[[WorkEvent], None]) -> None:
        """Queues a work, or tells it at once why not."""
        now = self._clock()
        try:
            self._scheduler.submit(row, _demand(work), now)
        except QueueIsFull as full:
            facts = {"queued": str(full.queued), "limit": str(full.limit)}
            emit(Failed(QueueFull(str(full), hint="try again later", metadata=facts, retry_after=1.0)))
            return
        except NeverFits as over:
            facts = {"needBytes": str(over.needed), "limitBytes": str(over.limit)}
            hint = "ask for fewer new tokens, or give the server more --active-bytes"
            emit(Failed(ActiveMemory(str(over), hint=hint, metadata=facts)))
            return
        try:
            seq = Sequence(row, work, self._cache, emit, now)
        except Exception as error:  # as in `Rows.guard`: a work that cannot even begin is nobody else's end
            log.exception("row %d was not begun", row)
            self._scheduler.drop(row)
            emit(Failed(RowFailed(f"the sequence could not begin: {type(error).__name__}")))
            return
        self.rows.add(seq)

    def end(self, row: RowId, *, clean: bool, save: bool) -> None:
        """Stops a work (`clean`) or gives it up; `save` keeps the work done under a last NodeAt."""
        self.rows.guard(row, lambda: self._ends.asked(row, clean=clean, save=save))

    def views(self, owner: str) -> list[RowView]:
        """The owner's sequences, oldest first, at some recent moment. On any thread."""
        now = self._clock()
        return [
            RowView(
                row=seq.row,
                phase=phase_of(self._scheduler.state(seq.row)),
                prompt_tokens=seq.prompt_tokens,
                done_tokens=min(seq.position, seq.prompt_tokens),
                completion_tokens=seq.completion,
                age=now - seq.arrived,
                priority=seq.work.priority,
            )
            for seq in self.rows
            if seq.work.owner == owner
        ]

    def foresee(self, demand: Demand, count: int) -> Forecast:
        """What so many sequences would meet if they came at about this moment. On any thread."""
        return self._scheduler.foresee(demand, count, self._clock())

    def start_restores(self) -> None:
        """Orders the reads that are wanted by now."""
        self._opening.start()

    def end_all(self, error: CallError) -> int:
        """Ends every sequence with `error`; how many."""
        ended = self.rows.end_all(error)
        self._opening.take_opened()
        return ended

    def close(self, error: CallError) -> None:
        """The engine is gone, or about to go: every sequence ends with `error`, and the store has its memory back."""
        self.end_all(error)
        self._loan.set(0)

    # -- one step -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """One step, if there is anything to do."""
        self._keeping.settle()
        tick = self._scheduler.plan(self._clock(), self._loan.raise_to)
        for row in tick.expired:
            self.rows.end(row, Failed(DeadlineUnmet("the deadline passed before the call's turn came")))
        for row in tick.unlent:
            message = "kept state that is in use leaves no memory for the call"
            hint = "try again later, delete snapshots, or give the server more --active-bytes"
            self.rows.end(row, Failed(ActiveMemory(message, hint=hint, retry_after=1.0)))
        self._loan.set(tick.borrowed)
        for row in tick.admit:
            self.rows.guard(row, self._opening.begin, row)
        self._opening.start()
        ordered = orders(tick, self.rows, self._opening.take_opened(), self._sight)
        if not ordered.plan:
            return
        result = self._step(ordered.plan)
        if result is not None:
            self._apply(tick, ordered, result)

    def _apply(self, tick: Tick, ordered: Orders, result: StepResult) -> None:
        now = self._clock()
        rows, plan = self.rows, ordered.plan
        self._totals.stepped(plan, result)
        for row in self._sight.waiting_for([*result.encoded, *result.encoding]):
            if row in rows:
                rows[row].prefill_seconds += result.encode_seconds
        self._sight.encodings(result)
        for row, failure in result.failed.items():
            if row in rows:
                rows.fail(row, failure, closed=True)
        for order in plan.prefill:
            seq = rows.get(order.row)
            if seq is not None and not seq.rebuilding:
                seq.prefill_seconds += result.prefill_seconds  # what the row waited for, neighbours included
                rows.guard(order.row, self._prefilled, seq, order, ordered, result)
        for row in tick.finish_prefill:
            seq = rows.get(row)
            if seq is not None:
                seq.rebuilding = False  # if it was, it stands again
                if seq.work.generation is None:
                    rows.guard(row, rows.complete, seq, None)
        if plan.decode is not None:
            for row in plan.decode.rows:
                seq = rows.get(row)
                if row in result.unfed:
                    self._scheduler.unfed(row)
                elif seq is not None and row not in result.lost:
                    seq.position += 1
                    if row in plan.decode.captures:
                        rows.guard(row, self._keep, seq, ordered.takes[row], result)
        for row, pick in result.picked.items():
            if row in rows:
                rows.guard(row, self._picked, rows[row], pick, now)
        for row in tick.save:
            seq = rows.get(row)
            if seq is not None:
                self._scheduler.saved(row)
                rows.guard(row, rows.complete, seq, seq.finish_reason)
        for row in result.lost:
            if row in rows:
                rows.guard(row, self._opening.rebuild, rows[row])
        self._opening.start()  # for those
        self._ends.check_time_limits(now)

    def _prefilled(self, seq: Sequence, order: Prefill, ordered: Orders, result: StepResult) -> None:
        saving = self._scheduler.state(seq.row) is State.SAVING
        seq.position += len(order.tokens)
        self._sight.passed(seq.row, seq.position)
        if not saving:
            seq.computed += len(order.tokens)
        if order.passed:
            passed = zip(order.passed, ordered.passed[seq.row], result.passed[seq.row], strict=True)
            for capture, take, payloads in passed:
                self._keeping.commit(seq, capture.end, payloads, take)
        if order.capture is not None:
            self._keep(seq, ordered.takes[seq.row], result, final=saving)
        if seq.work.progress and not saving:
            seq.emit(Prefilled(seq.position))

    def _keep(self, seq: Sequence, take: Take, result: StepResult, *, final: bool = False) -> None:
        self._keeping.commit(seq, seq.position, result.captured.get(seq.row, {}), take, final=final)

    def _picked(self, seq: Sequence, pick: Picked, now: float) -> None:
        generation = seq.work.generation
        assert generation is not None
        piece = seq.picked(pick, now)
        if piece.finish is not None:
            seq.stop, seq.stop_token_id = piece.stop, piece.stop_token_id
            self._ends.finish(seq, piece.finish, save=generation.save, flush=False)
        elif seq.overdue is not None:
            self._ends.finish(seq, seq.overdue, save=True)


def phase_of(state: State) -> str:
    """Where callers see a sequence; one that is through and about to go still has something to keep."""
    return str((State.SAVING if state is State.DONE else state).value)


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
