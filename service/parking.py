"""State that the store has not taken yet, because too much waits for the disk. Owns the waiting and its bounds.

Engine thread only, and nothing here blocks: a place that somebody asked for is parked with its payloads and offered
again when the writer has got on, until its time is over. A row whose place is parked is not prefilled further, so a row
parks little; the others go on. All rows together park a bounded number of bytes: those that only wait for their end to
be stored have no slot among the running ones, so nothing else bounds them. As many rows as may run at once park a place
and their end each whatever the size, which is about what their working caches take. The places of one row are settled
in the order in which they were passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvcache.cache import PrefixCache
from kvcache.records import PutResult, RecordKind
from kvcache.tree import Node
from service.plan import Payloads, RowId

PARKED_PER_ROW = 4
"""Decoding goes on while a boundary is parked: a row may come to the next one. More than this is lost at once, but for
the row's end, which is always its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One commit that waits, or waits behind one; the hold on `node` goes with it."""

    node: Node
    end: int
    final: bool
    payloads: Payloads
    in_memory: tuple[RecordKind, ...] = ()
    until: float  # give up then, in the loop's seconds
    offered: bool = False  # for the last time: it only waits for its turn
    lost: PutResult | None = None  # what came of that

    @property
    def bytes(self) -> int:
        return sum(len(data) for data in self.payloads.values())


@dataclass(frozen=True, slots=True)
class Settled:
    """A parked place that waits no longer. `lost`: why the store did not take it."""

    row: RowId
    place: Place
    lost: PutResult | None


class Parking:
    """Parked places of all rows."""

    def __init__(self, cache: PrefixCache, limit_bytes: int, rows: int = 1) -> None:
        """`limit_bytes`: of parked payloads, where more rows than `rows` park something or one of them more."""
        self._cache = cache
        self._limit_bytes = limit_bytes
        self._free_rows = rows
        self._bytes = 0
        self._rows: dict[RowId, deque[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def holds(self, row: RowId) -> bool:
        return row in self._rows

    def park(self, row: RowId, place: Place) -> bool:
        """False if the row, or all rows, have too much parked already; then nothing has changed.

        Beyond the bytes of all rows, a row's end behind other places of its row is offered for the last time at once,
        and waits for its turn without its payloads.
        """
        places = self._rows.get(row, deque())
        if len(places) >= PARKED_PER_ROW and not place.final:
            return False
        is_free = len(places) <= place.final and len(self._rows.keys() | {row}) <= self._free_rows
        if not is_free and self._bytes + place.bytes > self._limit_bytes:
            if not (places and place.final):
                return False
            place = replace(place, offered=True, lost=self._offer(place, last=True), payloads={})
        self._cache.follow(place.node)  # what the store has taken of it is not evicted while the rest waits
        self._rows.setdefault(row, places).append(place)
        self._bytes += place.bytes
        return True

    def next_deadline(self) -> float | None:
        """When the first place in line gives up."""
        return min((places[0].until for places in self._rows.values()), default=None)

    def settle(self, now: float) -> Iterator[Settled]:
        """Offers every row's first places again; what is taken, or out of time, is given out and parked no more.

        Each is the caller's to deal with before the next is offered, which may need its room: what was taken is not
        evicted before that. To be read to its end.
        """
        for row, places in list(self._rows.items()):
            while places:
                place = places[0]
                lost = place.lost if place.offered else self._offer(place, last=now >= place.until)
                if not place.offered and lost is not None and lost.may_pass and now < place.until:
                    break
                self._bytes -= place.bytes
                places.popleft()
                if not places:
                    self._rows.pop(row, None)
                yield Settled(row, place, lost)
                self._cache.unfollow(place.node)

    def drop(self, row: RowId) -> None:
        """The row ends: nobody waits for its places any more."""
        places = self._rows.pop(row, deque())
        while places:
            place = places.popleft()
            self._bytes -= place.bytes
            self._cache.unfollow(place.node)
            self._cache.let_go(place.node)

    def _offer(self, place: Place, *, last: bool) -> PutResult | None:
        return self._cache.put(
            place.node,
            place.payloads,
            explicit=True,
            in_memory=place.in_memory,
            patient=not last,
        )
