"""State on its way from a step to the cache. Owns what becomes of it: stored, parked or lost, and who is told.

What is worth keeping at a place is decided before the step (`sequence`, `kvcache.checkpoints`); how long and how much
may wait for a full store is `parking`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache.cache import PrefixCache
from kvcache.checkpoints import Take
from kvcache.media import cut_inside, spans_of
from kvcache.tree import Node
from service.failures import why_lost
from service.parking import Parking, Place, Settled
from service.plan import Payloads, RowId
from service.rows import Rows
from service.scheduler import Scheduler
from service.sequence import Sequence
from service.totals import Totals
from service.work import NodeAt


class Keeping:
    """Engine thread only. Nothing here waits: the store says through `post` when it may be asked again."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        parking: Parking,
        rows: Rows,
        totals: Totals,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        patience: float,
    ) -> None:
        """`post` has a thing done on the engine thread. `patience`: seconds that state somebody asked for may wait."""
        self._cache = cache
        self._scheduler = scheduler
        self._parking = parking
        self._rows = rows
        self._totals = totals
        self._post = post
        self._clock = clock
        self._patience = patience
        self._waits_for_writer = False

    def commit(self, seq: Sequence, end: int, payloads: Payloads, take: Take, *, final: bool = False) -> None:
        """The state at `end` goes to the cache; what it does not take yet, and somebody asked for, is parked.

        `final`: it is the row's last.
        """
        waits = seq.explicit and self._patience > 0
        commit = seq.recorder.commit(
            end, payloads, explicit=seq.explicit, passing=take.passing, in_memory=take.in_memory, patient=waits
        )
        lost = commit.lost
        if waits and ((lost is not None and lost.may_pass) or self._parking.holds(seq.row)):
            place = Place(
                node=commit.node,
                end=end,
                final=final,
                payloads={kind: data for kind, data in payloads.items() if kind not in take.passing},
                in_memory=take.in_memory,
                until=self._clock() + self._patience,
            )
            if self._parking.park(seq.row, place):
                self._totals.store_waits += 1
                self._scheduler.pause(seq.row)
                self._ask_when_written()
                return
            # The last try counts as skipped.
            lost = self._cache.put(place.node, place.payloads, explicit=True, in_memory=take.in_memory)
        self._tell(seq, commit.node, end, lost.name if lost and seq.explicit else "", final=final)

    def settle(self) -> None:
        """Offers what is parked to the store again, and goes on where it was taken or its time is over."""
        if not self._parking:
            return
        rows: dict[RowId, None] = {}
        for each in self._parking.settle(self._clock()):
            rows[each.row] = None
            self._rows.guard(each.row, self._settled, each)
        for row in rows:
            if row in self._rows and not self._parking.holds(row):
                self._rows.guard(row, self._all_stored, self._rows[row])
        self._ask_when_written()

    def hand_out_last_block(self, seq: Sequence) -> None:
        """As the end: the deepest place passed that stands; if none does, the last block with why it does not."""
        last = seq.recorder.last_block
        if last.parent is None:
            return
        node, lost = self._base_outside_images(last, seq), ""
        if node.parent is None:
            self._cache.let_go(node)
            node, lost = self._cache.hold(last), why_lost(self._cache.why_not(last), seq.lost)
        seq.emit(NodeAt(node, lost, final=True))

    def _base_outside_images(self, last: Node, seq: Sequence) -> Node:
        """The deepest place that stands and cuts no image; the root if there is none. Held."""
        spans = spans_of(seq.tokens)
        position = last.end
        while True:
            node = self._cache.hold_base(last, position)
            inside = cut_inside(spans, node.end)
            if inside is None:
                return node
            self._cache.let_go(node)
            position = inside.start

    def _ask_when_written(self) -> None:
        if self._parking and not self._waits_for_writer:
            self._waits_for_writer = True
            self._cache.store.when_written(lambda: self._post(self._written))

    def _written(self) -> None:
        """A record left the store's queue: what is parked may be taken now."""
        self._waits_for_writer = False

    def _settled(self, settled: Settled) -> None:
        seq, place = self._rows.get(settled.row), settled.place
        if seq is None:  # a place before this one has ended the row
            self._cache.let_go(place.node)
            return
        self._tell(seq, place.node, place.end, settled.lost.name if settled.lost else "", final=place.final)

    def _all_stored(self, seq: Sequence) -> None:
        """Nothing of the row is parked any more."""
        self._scheduler.resume(seq.row)
        if seq.ending:
            if seq.hands_out_last:
                self.hand_out_last_block(seq)
            self._rows.complete(seq, seq.finish_reason)

    def _tell(self, seq: Sequence, node: Node, end: int, lost: str, *, final: bool) -> None:
        """State was stored, or lost for a reason; a place that somebody asked for is handed out."""
        seq.lost = seq.lost or lost
        asked = seq.asked_at(end, final=final)
        if asked and not lost and not self._cache.stands(node):
            lost = why_lost(self._cache.why_not(node), seq.lost)  # something before this place is missing
        if asked.reasoning_end:
            seq.mark_told = True
            seq.emit(NodeAt(self._cache.hold(node), lost, final=False, reasoning_end=True))
        if not (asked.end or asked.declared or asked.rehomed):
            self._cache.let_go(node)
            return
        rehome = asked.rehomed and not asked.declared and not final
        seq.emit(NodeAt(node, lost, final=final, rehome=rehome))
