"""What the store holds: which records, in which tier, how large, how recently used, pinned how often.

What left is kept until it is asked for: extents that the disk tier may free, and records whose loss the owner has not
heard of.

Pure bookkeeping without I/O and without a lock of its own; the store calls it under its lock. Invariants: a record is
in one tier; only unpinned records are offered for eviction; usage per tier and kind always adds up to the entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvcache.eviction import EvictionOrder, Member, Place
from kvcache.recency import RecencyQueue
from kvcache.records import Buffer, Loss, RecordId, RecordKind, Tier
from kvcache.segments import Extent
from kvcache.stats import Usage


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One held record. `payload` is set in MEMORY and PENDING, `extent` on DISK."""

    record: RecordId
    size: int  # payload bytes
    tier: Tier
    explicit: bool
    tick: int
    key_id: int = 0  # which sealing key
    payload: Buffer | None = None
    extent: Extent | None = None

    @property
    def waits(self) -> bool:
        """Whether its payload is in the queue for the disk."""
        return self.tier is Tier.PENDING and self.payload is not None


@dataclass(slots=True)
class _Count:
    records: int = 0
    bytes: int = 0


class RecordIndex:
    """Entries by record, with accounting. Evictable tiers are MEMORY and DISK; PENDING leaves by being written."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._entries: dict[RecordId, Entry] = {}
        self._pins: dict[RecordId, int] = {}
        self._claims: dict[RecordId, int] = {}  # how many names stand on a record, held or not
        self._order = EvictionOrder(self.is_pinned, clock)
        self._resident: RecencyQueue[Entry] = RecencyQueue()  # entries in MEMORY, to be spilled from the oldest
        self._resting: set[RecordId] = set()  # pinned ones of them that came up and were put aside
        self._counts = {(tier, kind): _Count() for tier in Tier for kind in RecordKind}
        self._totals = {tier: _Count() for tier in Tier}
        self._evicted = {tier: _Count() for tier in Tier}
        self._ticks = itertools.count()
        self._released: list[Extent] = []
        self._lost: dict[RecordId, Loss] = {}

    def get(self, record: RecordId) -> Entry | None:
        return self._entries.get(record)

    def is_current(self, entry: Entry) -> bool:
        """False once the entry was removed, even if the record was put again."""
        return self._entries.get(entry.record) is entry

    def clear(self) -> None:
        """Forget every entry; pins and claims stay, for their owners will take them back."""
        while self._entries:
            self.remove(next(iter(self._entries.values())))
        self._released.clear()
        self._lost.clear()

    def bytes_in(self, tier: Tier) -> int:
        return self._totals[tier].bytes

    def records_in(self, tier: Tier) -> int:
        return self._totals[tier].records

    def usage(self) -> dict[tuple[Tier, RecordKind], Usage]:
        return {where: Usage(count.records, count.bytes) for where, count in self._counts.items()}

    def __iter__(self) -> Iterator[RecordId]:
        return iter(list(self._entries))

    def adopt(self, record: RecordId, size: int, extent: Extent, key_id: int) -> None:
        """Add a record that is on disk already."""
        entry = Entry(
            record=record,
            size=size,
            tier=Tier.DISK,
            explicit=True,
            tick=next(self._ticks),
            key_id=key_id,
            extent=extent,
        )
        self._entries[record] = entry
        self._enter(entry)

    def add(self, record: RecordId, payload: Buffer, tier: Tier, *, explicit: bool, key_id: int = 0) -> Entry:
        entry = Entry(
            record=record,
            size=len(payload),
            tier=tier,
            explicit=explicit or record in self._claims,
            tick=next(self._ticks),
            key_id=key_id,
            payload=payload,
        )
        self._entries[record] = entry
        self._lost.pop(record, None)  # the owner need not hear of a loss that was made good
        self._enter(entry)
        return entry

    def arrange(self, places: Iterable[Place]) -> None:
        """Say where records that are held stand on their chain, which decides what goes first and what with it."""
        for place in places:
            self._order.arrange(place)

    def move(self, entry: Entry, tier: Tier, *, extent: Extent | None = None) -> None:
        """Change tier; with an extent the payload is let go."""
        self._leave(entry)
        before, entry.tier = entry.tier, tier
        entry.extent = extent
        if extent is not None:
            entry.payload = None
        self._settle(entry)
        self._order.moved(entry, before)

    def remove(self, entry: Entry) -> None:
        """Forget an entry as its owner wishes; its extent waits in `take_released`. What it made useful is evicted."""
        self._drop(entry)
        self._evict(self._order.leave(entry.record))

    def evict(self, tier: Tier) -> list[Entry]:
        """Forget the unpinned entries of least value to free bytes of a tier, and what is useless without them."""
        return self._evict(self._order.pop(tier))

    def evicted(self) -> dict[Tier, Usage]:
        """What was evicted since the start."""
        return {tier: Usage(count.records, count.bytes) for tier, count in self._evicted.items()}

    def lose(self, entry: Entry, why: Loss) -> None:
        """Forget an entry that its owner did not give up; it waits in `take_lost`."""
        self.remove(entry)
        self._lost[entry.record] = why

    def forgive(self, record: RecordId) -> None:
        """Do not report this loss: the owner has given the record up meanwhile."""
        self._lost.pop(record, None)

    def release(self, extent: Extent) -> None:
        """An extent that no entry refers to any more, or never did."""
        self._released.append(extent)

    def take_released(self) -> list[Extent]:
        released, self._released = self._released, []
        return released

    def take_lost(self) -> dict[RecordId, Loss]:
        lost, self._lost = self._lost, {}
        return lost

    def touch(self, records: Iterable[RecordId]) -> None:
        for record in records:
            entry = self._entries.get(record)
            if entry is not None:
                entry.tick = next(self._ticks)
                self._resident.touch(entry, entry.tick)
                self._order.used(record, entry.tick)

    def pin(self, record: RecordId) -> None:
        """Count one more use; allowed before the record is there."""
        self._pins[record] = self._pins.get(record, 0) + 1

    def unpin(self, record: RecordId) -> None:
        """Take one `pin` back; ValueError if there is none."""
        uses = self._pins.get(record, 0)
        if uses == 0:
            raise ValueError(f"{record} is not pinned")
        if uses > 1:
            self._pins[record] = uses - 1
            return
        del self._pins[record]
        if record in self._resting:
            self._resting.discard(record)
            entry = self._entries.get(record)
            if entry is not None and entry.tier is Tier.MEMORY:
                self._resident.add(entry, entry.tick)
        self._evict(self._order.unpinned(record))

    def claim(self, record: RecordId) -> Entry | None:
        """Count one more name that stands on it; the entry, if it is held."""
        entry = self._entries.get(record)
        names = self._claims.get(record, 0)
        self._claims[entry.record if entry is not None and not names else record] = names + 1  # one object for both
        return entry

    def disclaim(self, record: RecordId) -> None:
        """Take one `claim` back; after the last, nobody asks for the record any more."""
        names = self._claims[record] - 1
        if names:
            self._claims[record] = names
            return
        del self._claims[record]
        entry = self._entries.get(record)
        if entry is not None:
            entry.explicit = False

    def guard(self, place: Place) -> None:
        """Evict nothing of this key, nor what stands before it."""
        self._order.guard(place)

    def unguard(self, key: bytes) -> bool:
        """Whether that makes room, or may."""
        kept = self._order.keeps_something(key)
        self._evict(self._order.unguard(key))
        return kept

    def is_pinned(self, record: RecordId) -> bool:
        return record in self._pins

    @property
    def pinned(self) -> int:
        return len(self._pins)

    def pinned_bytes_in_memory(self) -> int:
        entries = [self._entries.get(record) for record in self._pins]
        return sum(entry.size for entry in entries if entry is not None and entry.tier is Tier.MEMORY)

    def has_victim(self, tier: Tier) -> bool:
        return self._order.has_victim(tier)

    def pop_oldest_resident(self) -> Entry | None:
        """The unpinned entry in MEMORY used longest ago, no longer offered: the caller moves it, or calls `keep`."""
        while (entry := self._resident.pop_oldest()) is not None:
            if entry.record not in self._pins:
                return entry
            self._resting.add(entry.record)
        return None

    def keep(self, entry: Entry) -> None:
        """Offer an entry in MEMORY again."""
        self._resident.add(entry, entry.tick)

    def _enter(self, entry: Entry) -> None:
        self._settle(entry)
        self._order.enter(entry, entry.tick)

    def _settle(self, entry: Entry) -> None:
        self._count(entry, 1)
        if entry.tier is Tier.MEMORY:
            self._resident.add(entry, entry.tick)

    def _leave(self, entry: Entry) -> None:
        self._count(entry, -1)
        self._resident.discard(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.record]
        self._leave(entry)
        if entry.extent is not None:
            self._released.append(entry.extent)
        entry.payload = None  # a queued write may still hold the entry

    def _evict(self, members: Iterable[Member]) -> list[Entry]:
        """Forget what the order gave up."""
        gone: list[Entry] = []
        for member in members:
            entry = self._entries[member.record]
            self._evicted[entry.tier].records += 1
            self._evicted[entry.tier].bytes += entry.size
            self._drop(entry)
            self._lost[entry.record] = Loss.EVICTED
            gone.append(entry)
        return gone

    def _count(self, entry: Entry, sign: int) -> None:
        for count in (self._counts[entry.tier, entry.record.kind], self._totals[entry.tier]):
            count.records += sign
            count.bytes += sign * entry.size
