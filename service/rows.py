"""The sequences under way, by row. Owns the one terminal event of each, and that what one raises ends it alone.

Why and when a sequence ends is decided elsewhere (`ends`, `opening`, `steps`); what is left to be stored of one that is
through, `parking` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from service.errors import CallError, RowFailed
from service.events import FinishReason
from service.failures import not_begun, row_failure
from service.loan import Loan
from service.parking import Parking
from service.plan import RowId
from service.scheduler import Scheduler, State
from service.sequence import Sequence
from service.sight import Sight
from service.totals import Totals
from service.work import Ended, Failed


class Rows:
    """Engine thread only, but for `end_all` while that is inside the engine (see `loop`)."""

    def __init__(self, scheduler: Scheduler, parking: Parking, loan: Loan, totals: Totals, sight: Sight) -> None:
        self._scheduler = scheduler
        self._parking = parking
        self._loan = loan
        self._totals = totals
        self._sight = sight
        self._sequences: dict[RowId, Sequence] = {}
        self._closing: list[RowId] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """As they are now: the body may end any of them."""
        return iter(list(self._sequences.values()))

    def __contains__(self, row: RowId) -> bool:
        return row in self._sequences

    def __getitem__(self, row: RowId) -> Sequence:
        return self._sequences[row]

    def get(self, row: RowId) -> Sequence | None:
        """None once the sequence has ended."""
        return self._sequences.get(row)

    def add(self, seq: Sequence) -> None:
        self._sequences[seq.row] = seq

    @property
    def is_closing(self) -> bool:
        """Whether rows wait for the engine to forget them."""
        return bool(self._closing)

    def take_closing(self) -> tuple[RowId, ...]:
        """Those rows; the next plan closes them."""
        closing, self._closing = self._closing, []
        return tuple(closing)

    def guard(self, row: RowId, act: Callable[..., None], *args: object) -> None:
        """Runs one row's part of a step; what it raises ends that row alone."""
        try:
            act(*args)
        except Exception as error:  # a bug met by one row (its text, its stops, its records) must not end the others
            if row in self._sequences:
                self.fail(row, error)

    # -- ends -----------------------------------------------------------------------------------------------------

    def complete(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Nothing is left to compute. While state of the row is parked its end is not told: call it once more then."""
        if self._parking.holds(seq.row):  # the row is free for others
            if not seq.ending:
                seq.ending, seq.finish_reason = True, reason
                self._scheduler.drop(seq.row)
                self._closing.append(seq.row)
            return
        if seq.cancelled:
            self.end(seq.row, Failed(RowFailed.given_up()))
            return
        usage = seq.usage()
        self._totals.ended(usage)
        ended = Ended(
            usage=usage,
            timing=seq.timing(),
            reason=reason,
            stop=seq.stop,
            stop_token_id=seq.stop_token_id,
        )
        self.end(seq.row, ended)

    def fail(self, row: RowId, failure: Exception, *, closed: bool = False) -> None:
        """`closed`: the engine has forgotten the row already."""
        seq = self._sequences[row]
        state = self._scheduler.state(row)
        if state in (State.DECODE, State.DONE) and seq.position < seq.prompt_tokens:
            state = State.PREFILL  # the plan was ahead of the step
        error = row_failure(failure, row=row, call=state.value, position=seq.position)
        self.end(row, Failed(error), closed=closed)

    def end(self, row: RowId, event: Ended | Failed, *, closed: bool = False) -> None:
        """The one terminal event of a sequence, wherever it is."""
        seq = self._sequences.pop(row)
        self._scheduler.drop(row)
        self._parking.drop(row)
        self._sight.forget(row)
        seq.recorder.close()
        if not closed and not seq.ending:
            self._closing.append(row)
        if closed and not self._scheduler.reserved_bytes:
            self._loan.set(0)  # there may be no further plan
        seq.emit(event)

    def end_all(self, error: CallError) -> int:
        """Ends every sequence; how many. One that waited cannot be the cause, and hears that it may try again."""
        rows = list(self._sequences)
        for row in rows:
            waited = self._scheduler.state(row) is State.QUEUED
            self.end(row, Failed(not_begun(error) if waited else error))
        return len(rows)
