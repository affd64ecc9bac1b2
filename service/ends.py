"""How a sequence comes to its end: its text is over, it is stopped, cancelled or out of time. Owns what is saved then.

Which end it is follows from the scheduler's state of the row; the event that tells it is `rows`'.
"""

from __future__ import annotations

from collections.abc import Callable

from service.errors import RowFailed
from service.events import FinishReason
from service.keeping import Keeping
from service.parking import Parking
from service.plan import RowId
from service.rows import Rows
from service.scheduler import Scheduler, State
from service.sequence import Sequence
from service.work import Admitted, Failed, Generation


class Ends:
    """Engine thread only."""

    def __init__(
        self, scheduler: Scheduler, parking: Parking, rows: Rows, keeping: Keeping, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._parking = parking
        self._rows = rows
        self._keeping = keeping
        self._clock = clock

    def finish(self, seq: Sequence, reason: FinishReason, *, save: bool, flush: bool = True) -> None:
        """A decoding row is at its end; with `save` its last token is fed before it goes.

        `flush`: text that was held back has not been said yet.
        """
        generation = seq.work.generation
        assert generation is not None
        save = save or seq.mark_at == len(seq.tokens)
        if save and seq.waits_for_pick:
            seq.overdue = reason  # a state is saved by feeding the token before it, and this row's was fed already
            return
        if flush:
            reason = self._last_words(seq, generation, reason)
        seq.finish_reason = reason
        self._scheduler.finish(seq.row, save=save)
        if not save:
            self._rows.complete(seq, reason)

    def asked(self, row: RowId, *, clean: bool, save: bool) -> None:
        """A caller stops a work (`clean`) or gives it up; `save` keeps what it asked to be kept of the work done."""
        seq = self._rows.get(row)
        if seq is None:
            return
        state = self._scheduler.state(row)
        generation = seq.work.generation
        if state is State.SAVING or (seq.ending and (clean or save)):
            return  # its last call is due in this very step, or is made and being stored
        wants = save and generation is not None and (generation.save or generation.save_on_cancel)
        if state is State.DECODE and (clean or wants):
            self.finish(seq, FinishReason.STOPPED, save=wants)
        elif clean and generation is not None:
            self._end_early(seq, FinishReason.STOPPED)
        elif wants and self._parking.holds(row):
            seq.cancelled = seq.hands_out_last = True  # what was asked to be saved is told once it is stored
            self._rows.complete(seq, FinishReason.STOPPED)
        else:
            if wants:
                self._keeping.hand_out_last_block(seq)
            self._rows.end(row, Failed(RowFailed.given_up()))

    def check_time_limits(self, now: float) -> None:
        """Ends every generation that has run for as long as it may."""
        for seq in self._rows:
            generation = seq.work.generation
            limit = generation.stopping.time_limit if generation else None
            if limit is not None and now - seq.admitted >= limit:
                self._rows.guard(seq.row, self._out_of_time, seq)

    def _out_of_time(self, seq: Sequence) -> None:
        generation = seq.work.generation
        state = self._scheduler.state(seq.row)
        if state is State.DECODE and generation is not None:
            self.finish(seq, FinishReason.TIME_LIMIT, save=generation.save)
        elif state is State.PREFILL:
            self._end_early(seq, FinishReason.TIME_LIMIT)

    def _end_early(self, seq: Sequence, reason: FinishReason) -> None:
        """Stopped while no state stands: the full blocks done so far are what can be kept."""
        if seq.completion and seq.work.generation is not None:
            reason = self._last_words(seq, seq.work.generation, reason)
        seq.hands_out_last = seq.keeps_state and self._parking.holds(seq.row)
        if seq.keeps_state and not seq.hands_out_last:
            self._keeping.hand_out_last_block(seq)
        if not seq.announced:
            seq.announced = True
            seq.emit(Admitted(self._clock() - seq.arrived))
        self._rows.complete(seq, reason)

    @staticmethod
    def _last_words(seq: Sequence, generation: Generation, reason: FinishReason) -> FinishReason:
        """Text that was held back, now that nothing follows; the reason, which it may change."""
        piece = generation.text.end(reason)
        if piece.finish is not None:
            reason, seq.stop = piece.finish, piece.stop
        seq.say(piece, [])
        return reason
