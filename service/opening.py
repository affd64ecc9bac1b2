"""From admission to a row that the engine can open: what is stored is looked up, read, and read anew where it was lost.

Owns whether a call is worth beginning, and what its restore leads to. Which rows share a read is `restores`'; what is
left to call, `sequence`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcache.cache import Lookup, PrefixCache
from kvcache.errors import CorruptRecord
from kvcache.records import FetchResult
from service.errors import DeadlineUnmet, RecomputeLimit
from service.plan import RowId
from service.restores import Read, Restore, Restores
from service.rows import Rows
from service.scheduler import Scheduler
from service.sequence import Sequence
from service.sight import Sight
from service.totals import Totals
from service.work import Admitted, Failed, NodeAt, Work

log = logging.getLogger("kvfork.opening")

RESTORE_TRIES = 5  # a record can be lost between planning and reading; each try plans anew without it


class Opening:
    """Engine thread only. Nothing here waits: what was read comes back through `post`."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        rows: Rows,
        totals: Totals,
        sight: Sight,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        """`post` has a thing done on the engine thread."""
        self._cache = cache
        self._scheduler = scheduler
        self._rows = rows
        self._totals = totals
        self._sight = sight
        self._clock = clock
        self._opened: list[Sequence] = []
        self._restores = Restores(cache.store.fetch, lambda read, result: post(lambda: self._arrived(read, result)))

    def begin(self, row: RowId) -> None:
        """The row's turn has come."""
        seq = self._rows[row]
        seq.admitted = self._clock()
        work = seq.work
        lookup = self._cache.lookup(work.owner, work.tokens, base=work.base, keep=work.keep)
        over = over_limit(work, lookup) or too_late(seq, lookup, self._totals.prefill_pace, seq.admitted)
        if over is not None:
            self._cache.release(lookup)
            self._rows.end(row, Failed(over))
            return
        if not seq.announced:
            seq.announced = True
            seq.emit(Admitted(seq.admitted - seq.arrived))
        self._read(seq, lookup)

    def rebuild(self, seq: Sequence) -> None:
        """The state of a decoding row is gone, through no fault of its own: it is restored or computed again."""
        self._scheduler.lost(seq.row)
        seq.rebuilding, seq.restore_tries = True, 0
        self._look_back(seq)

    def start(self) -> None:
        """Orders the reads that rows have come to want."""
        self._restores.start()

    def take_opened(self) -> list[Sequence]:
        """Those whose restore has come to its end; the next plan opens them."""
        opened, self._opened = self._opened, []
        return opened

    def _look_back(self, seq: Sequence) -> None:
        last = seq.recorder.last_block
        base = last if last.parent is not None else None
        self._read(seq, self._cache.lookup(seq.work.owner, seq.tokens[: seq.position], base=base, keep=seq.work.keep))

    def _read(self, seq: Sequence, lookup: Lookup) -> None:
        """Asks for a lookup's records; the row is opened when they are there."""
        if lookup.plan is None:
            try:
                self._open(seq, lookup, None)
            finally:
                self._cache.release(lookup)
            return
        self._restores.want(seq.row, lookup)

    def _arrived(self, read: Read, result: FetchResult) -> None:
        for restore in self._restores.arrived(read, result):
            self._rows.guard(restore.row, self._was_read, restore)

    def _was_read(self, restore: Restore) -> None:
        bad = restore.result.failed
        if bad is not None and isinstance(restore.result.error, CorruptRecord):
            self._cache.note_corrupt(bad)
        try:
            self._go_on(restore)
        finally:
            self._cache.release(restore.lookup)  # not before what it found is handed out

    def _go_on(self, restore: Restore) -> None:
        seq = self._rows.get(restore.row)
        if seq is None:
            return
        if not restore.result.ok:
            seq.restore_tries += 1
            log.warning("row %d: restore failed (%s)", seq.row, restore.result.error)
            if seq.restore_tries >= RESTORE_TRIES:
                self._open(seq, restore.lookup.without_state(), None)
            elif seq.rebuilding:
                self._look_back(seq)
            else:
                self.begin(seq.row)
            return
        self._open(seq, restore.lookup, restore.result)

    def _open(self, seq: Sequence, lookup: Lookup, read: FetchResult | None) -> None:
        if seq.rebuilding:
            calls = seq.rebuilt_from(lookup, read)
        else:
            seq.opened = self._clock()
            if read is not None:
                self._totals.restored(read, seq.opened - seq.admitted)
            calls = seq.found(lookup, read)
            for node in lookup.kept:
                seq.emit(NodeAt(self._cache.hold(node), "", final=False))
        self._scheduler.restored(seq.row, calls)
        self._sight.want(seq, lookup.position)
        self._opened.append(seq)


def over_limit(work: Work, lookup: Lookup) -> RecomputeLimit | None:
    """Why a work is not begun that would compute more again than its caller allows."""
    limit = work.max_recompute_tokens
    needed = max(work.known_tokens, work.base.end if work.base else lookup.known) - lookup.position
    if limit is None or needed <= limit:
        return None
    return RecomputeLimit.over(needed, limit, lookup.position)


def too_late(seq: Sequence, lookup: Lookup, pace: float, now: float) -> DeadlineUnmet | None:
    """Why a work is not begun that cannot end in time, where nothing that is done of it would be kept.

    Where a place is reached in time that is kept, the same call made again begins there, and so comes to its end.
    `pace`: seconds a token, the best that was seen.
    """
    work = seq.work
    if work.deadline is None or (work.generation is not None and work.generation.save_on_cancel):
        return None
    needed, left = (len(work.tokens) - lookup.position) * pace, work.deadline - now
    if needed < left:
        return None
    kept = seq.first_kept(lookup)
    if kept is not None and (kept - lookup.position) * pace < left:
        return None
    facts = {"neededSeconds": f"{needed:.3f}", "leftSeconds": f"{max(0.0, left):.3f}"}
    hint = "allow more time, or go on from a snapshot"
    message = "the prompt cannot be computed before the deadline, nor any part of it that would be kept"
    return DeadlineUnmet(message, hint=hint, metadata=facts)
