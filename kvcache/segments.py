"""Append-only segment files under one byte budget. Owns which record bytes lie where and which of them still count.

It decides when space must be won and says so as a `Step`; what to evict is its owner's choice. Used by one thread at a
time. Invariants: the files together never exceed the budget; a written record is never changed, only copied on and
left behind; a file is removed as soon as nothing in it counts.

With an `Identity` the log is durable: it finds again what it wrote (`recover`), says when records are safe (`sync`),
and removes a file only after the copies of what was in it are. Segments of other models are counted and never read.

Room is kept back for cleaning: an ordinary append leaves `segment_bytes` of the budget free, so that a segment's live
records can be copied on before the file they came from is dropped.
"""

from __future__ import annotations

import enum
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvcache.errors import CorruptRecord, DiskFull, FormatError, UnreadableRecord
from kvcache.format import (
    MAX_PAYLOAD_BYTES,
    NO_NAMESPACE,
    RECORD_OVERHEAD,
    SEGMENT_HEADER,
    SegmentHeader,
    encode_segment_header,
)
from kvcache.inventory import Inventory
from kvcache.records import Buffer, ListedName, Name, NoteId, NoteKind
from kvcache.recovery import Foreign, OtherModel, Recovered, missing_segments, read_other, read_segments
from kvcache.seal import Scratch, Seal, check_header
from kvcache.storage import ReadOnly, Storage
from kvcache.store_dir import Identity

log = logging.getLogger(__name__)

MAX_SEGMENTS = 128  # each is an open file; macOS allows 256 by default

# Clean only when this share of the budget is dead, and two segments' worth: before that, evicting a little more
# usually empties the oldest segment, which costs nothing.
CLEANING_SHARE = 1 / 10
# A segment with less dead in it than this share of its size is never worth copying.
WORTH_CLEANING_SHARE = 1 / 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one whole record, header and trailer included, in bytes."""

    segment: int
    offset: int
    length: int


class Step(enum.Enum):
    """What must happen next for an append to fit."""

    READY = enum.auto()  # nothing: append
    EVICT = enum.auto()  # give up one record
    CLEAN = enum.auto()  # copy the live records of `cleaning_victim` on
    DROP_FOREIGN = enum.auto()  # remove a segment of another model
    FULL = enum.auto()  # none of it would help


@dataclass(slots=True)
class _Segment:
    number: int
    size: int
    live: int = 0
    records: dict[int, tuple[Name, int]] = field(default_factory=dict)  # offset: record, length
    ghosts: set[bytes] = field(default_factory=set)  # keys of handles of which an outdated version lies here

    @property
    def dead(self) -> int:
        return self.size - SEGMENT_HEADER.size - self.live


class SegmentLog:
    """Appends, reads, releases and copies on sealed records."""

    def __init__(
        self,
        storage: Storage,
        seal: Seal,
        *,
        budget_bytes: int,
        segment_bytes: int,
        min_free_bytes: int,
        identity: Identity | None = None,
        inventory: Inventory | None = None,
        wrote: Callable[[int], None] = lambda size: None,
    ) -> None:
        """`inventory`: a durable log's list of what should be there, which is told of every segment.

        `wrote` is told the bytes of every write that was made whole.
        """
        self._storage = storage
        self._seal = seal
        self._wrote = wrote
        self._budget = budget_bytes
        self._min_free = min_free_bytes
        # A sixteenth at most, as three segments' worth is kept free; not so small that files outnumber MAX_SEGMENTS.
        self._segment_bytes = max(min(segment_bytes, budget_bytes // 16), budget_bytes // MAX_SEGMENTS)
        self._identity = identity
        self._durable = identity is not None
        self._inventory = inventory
        self._store_id = identity.store_id if identity is not None else os.urandom(16)
        self._namespace = identity.namespace if identity is not None else NO_NAMESPACE
        self._scratch = Scratch()
        self._segments: dict[int, _Segment] = {}
        self._active: _Segment | None = None
        self._next_number = 0
        self._foreign: dict[int, Foreign] = {}  # by number, oldest first
        self._kept: frozenset[int] = frozenset()  # of those the ones that stay, whatever the need
        self._listed: set[int] = set()
        self._unsynced: set[int] = set()
        self._suspect: set[int] = set()  # a sync failed: what the system holds of them may never reach the disk
        self._condemned: set[int] = set()  # to be removed as soon as a sync succeeds
        self._ghosts: Counter[bytes] = Counter()
        self.file_bytes = 0
        self.live_bytes = 0

    @property
    def segments(self) -> int:
        return len(self._segments) + len(self._foreign)

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that an empty store takes; negative if it takes none."""
        room = self._budget - self._segment_bytes - SEGMENT_HEADER.size - RECORD_OVERHEAD
        return min(room, MAX_PAYLOAD_BYTES)

    def plan_room(self, record_bytes: int, *, limit: int | None = None, can_evict: bool) -> Step:
        """What must happen for a record of this size, overhead included, to fit under `limit`; 0 for no record.

        `limit` is in bytes of all files together; None for the budget and the free-space floor.

        Following the steps until READY or FULL always ends: every one makes the files or the live bytes smaller.
        """
        capacity = self._capacity()
        slack = 0.0  # for a limit that was asked for, as little is evicted as it takes
        if limit is None:
            limit = capacity - self._segment_bytes
            slack = max(limit * CLEANING_SHARE, 2 * self._segment_bytes)
        need = record_bytes
        if need and self._must_roll():
            need += SEGMENT_HEADER.size
        if self.file_bytes + need <= limit:
            return Step.READY
        if self._droppable() is not None:
            return Step.DROP_FOREIGN
        if can_evict and self.live_bytes + need > limit - slack:
            return Step.EVICT
        victim = self._least_live()
        if victim is not None and self.file_bytes + victim.live + 2 * SEGMENT_HEADER.size <= capacity:
            return Step.CLEAN
        return Step.EVICT if can_evict else Step.FULL

    def recover(self) -> Recovered[Extent]:
        """Take over what earlier openings wrote, once, before anything else. OSError, or StoreUnusable on old nonces.

        Of several records of one name the newest counts. What is returned counts until it is released.
        """
        assert self._identity is not None, "an ephemeral log has no past"
        assert self._inventory is not None
        listed = self._inventory.segments()
        numbers, foreign, found = read_segments(self._storage, self._seal, self._identity, listed)
        missing = missing_segments(self._storage, listed, {*numbers, *foreign}, found)
        for number, size in numbers.items():
            self._segments[number] = _Segment(number=number, size=size)
        self._foreign = dict(sorted(foreign.items()))
        self.file_bytes = sum(numbers.values()) + sum(segment.size for segment in foreign.values())
        # The number of a segment that is missing stays its own: its file may come back.
        self._next_number = max([*numbers, *foreign, *listed, *self._storage.strange()], default=-1) + 1
        records: dict[Name, tuple[Extent, int]] = {}
        for name, place in found.records.items():
            segment = self._segments[place.segment]
            segment.records[place.offset] = (name, place.length)
            segment.live += place.length
            self.live_bytes += place.length
            records[name] = (Extent(place.segment, place.offset, place.length), place.key_id)
        for number, key in found.ghosts:
            self._haunt(self._segments[number], key)
        newest = max(numbers, default=None)
        if newest is not None and newest not in found.damaged_segments:
            self._active = self._segments[newest]
        self._take_in(set(listed) - set(missing))
        for segment in [s for s in self._segments.values() if not s.records and s is not self._active]:
            self._remove(segment)
        return Recovered(
            records=records,
            damaged=found.damaged,
            cut_bytes=found.cut_bytes,
            unreadable=found.unreadable,
            missing=missing,
            damaged_segments=frozenset(found.damaged_segments),
        )

    def _take_in(self, listed: set[int]) -> None:
        """Lists what an earlier opening wrote and did not come to list, or what was put back, once it is on disk."""
        self._listed = listed
        self._unsynced = set(self._segments)  # a process that was killed may have left something to sync
        self.sync()
        by_model: dict[bytes, list[int]] = {}
        for number, segment in self._foreign.items():
            if segment.namespace is not None and number not in listed:
                self._storage.sync(number)
                by_model.setdefault(segment.namespace, []).append(number)
        assert self._inventory is not None
        for namespace, numbers in by_model.items():
            self._inventory.add_segments(numbers, namespace)
            self._listed.update(numbers)

    def others(self) -> list[OtherModel]:
        """What the segments of other models hold, a model at a time; nothing of them is changed. OSError."""
        assert self._identity is not None
        by_model: dict[bytes, set[int]] = {}
        for number, segment in self._foreign.items():
            if segment.namespace is not None:
                by_model.setdefault(segment.namespace, set()).add(number)
        return [
            read_other(ReadOnly(self._storage, numbers), self._seal, replace(self._identity, namespace=namespace))
            for namespace, numbers in by_model.items()
        ]

    def keep_foreign(self, numbers: Iterable[int]) -> int:
        """Segments of other models that are not given up for room from now on; their bytes."""
        self._kept = frozenset(numbers) & self._foreign.keys()
        return sum(self._foreign[number].size for number in self._kept)

    def release_foreign(self, numbers: Iterable[int]) -> None:
        """They may be given up again."""
        self._kept -= frozenset(numbers)

    @property
    def budget(self) -> int:
        """Bytes that all files together may have."""
        return self._budget

    def append(self, record: Name, payload: Buffer, key_id: int = 0) -> Extent:
        """Seal and write one record; nothing of it counts if this raises (OSError, or DiskFull on the budget)."""
        parts = self._seal.seal(record, payload, self._scratch, key_id=key_id)
        return self._append(parts, record, len(payload) + RECORD_OVERHEAD)

    def sync(self) -> None:
        """Return once everything appended so far would survive a power cut. OSError: nobody knows what would."""
        for number in sorted(self._unsynced):
            try:
                self._storage.sync(number)
            except OSError:
                # The system may have dropped the pages and call the next sync a success: never build on them again.
                self._suspect.add(number)
                self._unsynced.discard(number)
                if self._active is not None and self._active.number == number:
                    self._active = None
                raise
            self._unsynced.discard(number)
        if self._inventory is not None:
            numbers = {n for n, segment in self._segments.items() if segment.size > SEGMENT_HEADER.size}
            new = sorted(numbers - self._listed - self._suspect - self._condemned)
            if new:
                self._inventory.add_segments(new, self._namespace)
                self._listed.update(new)
        for number in list(self._condemned):
            self._condemned.discard(number)
            self._delete(self._segments[number])

    def add_names(self, names: Mapping[bytes, tuple[str, str]]) -> None:
        """Lists durable snapshots, owner and id by the key of their note, which is safe already. OSError."""
        if self._inventory is not None:
            listed = {k: ListedName(namespace=self._namespace, owner=o, id=i) for k, (o, i) in names.items()}
            self._inventory.add_names(listed)

    def drop_names(self, keys: Sequence[bytes]) -> None:
        """Lists names no more that are about to end. OSError."""
        if self._inventory is not None:
            self._inventory.drop_names(keys)

    def is_suspect(self, extent: Extent) -> bool:
        """Whether a sync failed over this record, so that it has to be written elsewhere to be safe."""
        return extent.segment in self._suspect

    def is_haunted(self, key: bytes) -> bool:
        """Whether an outdated version of this handle still lies in some file."""
        return self._ghosts[key] > 0

    def drop_foreign(self) -> int:
        """Remove the oldest segment of another model; its size in bytes."""
        number = self._droppable()
        assert number is not None
        size = self._foreign.pop(number).size
        self._unlist(number)
        self._storage.remove(number)
        self.file_bytes -= size
        return size

    def _droppable(self) -> int | None:
        return next((number for number in self._foreign if number not in self._kept), None)

    def _unlist(self, number: int) -> None:
        """Tells the list of a file's end, before it. One that was damaged stays listed: it may be put back."""
        if number not in self._listed or self._inventory is None:
            return
        self._listed.discard(number)
        try:
            self._inventory.drop_segments([number])
        except OSError as error:
            # Room may be made just because there is none to write; the next change brings it along.
            log.warning("the list of what the store holds could not be written: %s", error)

    def read(self, record: Name, extent: Extent, scratch: Scratch | None = None) -> Buffer:
        """The payload. CorruptRecord if `extent` does not hold what was written as `record`; UnreadableRecord.

        Two threads may read at once if one of them brings a `scratch` of its own, and nothing else runs meanwhile.
        """
        try:
            return self._seal.open(
                record, extent.length, lambda at, into: self._fill(record, extent, at, into), scratch or self._scratch
            )
        except FormatError as error:
            raise CorruptRecord(record, str(error)) from error

    def copy_on(self, record: Name, extent: Extent) -> Extent:
        """Write the record's bytes again at the log's end, as they are: a record does not know where it lies.

        The header is checked here (CorruptRecord, UnreadableRecord), the payload when it is next read. OSError and
        DiskFull as in `append`.
        """
        data = self._scratch.take(extent.length)
        self._fill(record, extent, 0, data)
        try:
            check_header(record, data, extent.length, flags=self._seal.flags)
        except FormatError as error:
            raise CorruptRecord(record, str(error)) from error
        return self._append((data,), record, extent.length)

    def release(self, extent: Extent) -> None:
        """The record at `extent` counts no more; its file goes with its last record."""
        segment = self._segments[extent.segment]
        record, _ = segment.records.pop(extent.offset)
        if self._durable and isinstance(record, NoteId) and record.kind is NoteKind.SNAPSHOT:
            self._haunt(segment, record.key)
        segment.live -= extent.length
        self.live_bytes -= extent.length
        if not segment.records:
            self._remove(segment)

    def cleaning_victim(self) -> list[tuple[Name, Extent]]:
        """The records to copy on, with their places; the segment takes no more appends from here on."""
        victim = self._least_live()
        if victim is None:
            return []
        if victim is self._active:
            self._active = None
        return [(r, Extent(victim.number, at, length)) for at, (r, length) in victim.records.items()]

    def close(self) -> None:
        """Forget everything. An ephemeral log removes its files, a durable one makes them safe; never an OSError."""
        if self._durable:
            with suppress(OSError):
                self.sync()
        self._segments.clear()
        self._foreign.clear()
        self._active = None
        self.file_bytes = self.live_bytes = 0
        self._storage.close()

    def _append(self, parts: Sequence[Buffer], record: Name, length: int) -> Extent:
        segment = self._active if self._active is not None and not self._must_roll() else None
        if self.file_bytes + length + (SEGMENT_HEADER.size if segment is None else 0) > self._budget:
            raise DiskFull(f"{length} bytes would exceed the budget of {self._budget}")
        if segment is None:
            segment = self._roll()
        offset = segment.size
        try:
            self._write(segment, parts, length)
        except OSError:
            if segment is not self._active and not segment.records:
                self._remove(segment)
            raise
        segment.records[offset] = (record, length)
        segment.live += length
        self.live_bytes += length
        return Extent(segment.number, offset, length)

    def _must_roll(self) -> bool:
        return self._active is None or self._active.size >= self._segment_bytes

    def _roll(self) -> _Segment:
        segment = _Segment(number=self._next_number, size=0)
        self._next_number += 1
        self._storage.create(segment.number)
        self._segments[segment.number] = segment
        header = encode_segment_header(
            SegmentHeader(number=segment.number, store_id=self._store_id, namespace=self._namespace)
        )
        try:
            self._write(segment, (header,), len(header))
        except OSError:
            self._remove(segment)
            raise
        self._active = segment
        return segment

    def _write(self, segment: _Segment, parts: Sequence[Buffer], length: int) -> None:
        """Write at the segment's end. After a failure the torn bytes are cut off, or else counted and left behind."""
        self._unsynced.add(segment.number)
        try:
            self._storage.write(segment.number, segment.size, parts)
        except OSError:
            try:
                self._storage.truncate(segment.number, segment.size)
            except OSError:
                self._abandon_tail(segment, length)
            raise
        segment.size += length
        self.file_bytes += length
        self._wrote(length)

    def _abandon_tail(self, segment: _Segment, length: int) -> None:
        """Neither written nor cut: take no more appends, and count the worst case against the budget."""
        segment.size += length
        self.file_bytes += length
        if self._active is segment:
            self._active = None

    def _remove(self, segment: _Segment) -> None:
        if self._active is segment:
            self._active = None
        self._unsynced.discard(segment.number)
        if self._durable and self._unsynced:
            # What was copied on from it, or what says that it is outdated, must be safe first.
            self._condemned.add(segment.number)
            with suppress(OSError):  # then the next sync that succeeds removes it
                self.sync()
            return
        self._delete(segment)

    def _delete(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._suspect.discard(segment.number)
        self.file_bytes -= segment.size
        self._unlist(segment.number)
        self._storage.remove(segment.number)
        for key in segment.ghosts:
            self._ghosts[key] -= 1
            if not self._ghosts[key]:
                del self._ghosts[key]

    def _haunt(self, segment: _Segment, key: bytes) -> None:
        if key not in segment.ghosts:
            segment.ghosts.add(key)
            self._ghosts[key] += 1

    def _fill(self, record: Name, extent: Extent, at: int, into: memoryview) -> None:
        try:
            found = self._storage.read_into(extent.segment, extent.offset + at, into)
        except OSError as error:
            raise UnreadableRecord(record, str(error)) from error
        if found < len(into):
            raise CorruptRecord(record, f"the file ends {extent.length - at - found} bytes early")

    def _capacity(self) -> int:
        """Bytes that the files may have now: the budget, or less if the file system is nearly full."""
        return min(self._budget, self.file_bytes + self._storage.free_bytes() - self._min_free)

    def _least_live(self) -> _Segment | None:
        worth = (
            segment
            for segment in self._segments.values()
            if segment.number not in self._condemned
            and segment.dead > max(2 * SEGMENT_HEADER.size, segment.size * WORTH_CLEANING_SHARE)
        )
        return min(worth, key=lambda segment: segment.live, default=None)
