"""What the I/O thread does for the store: writes, room for them, reads, and what follows when the disk fails.

Its methods are jobs: they run on the I/O thread (or on nobody else in its place) and take the store's lock only for
bookkeeping, never across I/O or encryption. Those marked REQUIRES are for the front, which holds that lock.
A record is published as DISK only after it was written whole.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvcache.errors import CorruptRecord, DiskFull, FormatError, MissingRecord, RecordError, StoreClosed, StoreError
from kvcache.format import RECORD_OVERHEAD
from kvcache.index import Entry, RecordIndex
from kvcache.notes import NoteBook
from kvcache.reading import Reader
from kvcache.records import Buffer, FetchResult, Loss, Name, Note, NoteId, NoteKind, PutResult, RecordId, Tier
from kvcache.segments import Extent, SegmentLog, Step
from kvcache.stats import Tally
from kvcache.writer import CircuitBreaker, IoThread

log = logging.getLogger(__name__)

Source: TypeAlias = tuple[Entry, Tier, Buffer | None, Extent | None]  # where an entry was at one moment


@dataclass(slots=True)
class Ledger:
    """What both halves of the store know. Every field but `lock` is read and changed under the lock."""

    index: RecordIndex
    lock: threading.Lock = field(default_factory=threading.Lock)
    settled: threading.Condition = field(init=False)  # on the same lock: something left PENDING
    tally: Tally = field(default_factory=Tally)
    waiting: list[Callable[[], None]] = field(default_factory=list)  # to be called when something left the queue
    closed: bool = False

    def __post_init__(self) -> None:
        self.settled = threading.Condition(self.lock)

    def take_waiting(self) -> list[Callable[[], None]]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def find(self, records: tuple[RecordId, ...]) -> list[Source] | FetchResult:
        """Where each record is at this moment, or the refusal of the first that is nowhere."""
        if self.closed:
            return FetchResult.refused(StoreClosed("the store is closed"))
        found: list[Source] = []
        for record in records:
            entry = self.index.get(record)
            if entry is None:
                self.tally.missing += 1
                return FetchResult.refused(MissingRecord(record, "not held"))
            found.append((entry, entry.tier, entry.payload, entry.extent))
        return found

    def served(self, sources: list[Source], payloads: list[Buffer]) -> FetchResult:
        for entry, tier, _, _ in sources:
            self.tally.add(("read", tier), entry.size)
        return FetchResult(
            payloads=payloads,
            tiers=[tier for _, tier, _, _ in sources],
            sizes=[entry.size for entry, _, _, _ in sources],
        )

    def evict(self, tier: Tier) -> bool:
        """Free bytes of a tier by what is worth least; False if pins forbid it."""
        gone = self.index.evict(tier)
        self.settled.notify_all()  # some may have been PENDING
        return bool(gone)


class DiskTier:
    """Segment files behind the I/O thread, with a pause after failures in a row."""

    def __init__(
        self,
        ledger: Ledger,
        segments: SegmentLog,
        io: IoThread,
        breaker: CircuitBreaker,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._segments = segments
        self._io = io
        self._breaker = breaker
        self._clock = clock
        self._reader = Reader(segments)
        self.notes = NoteBook(segments)
        self._last_refusal = PutResult.SKIPPED_DISK_ERROR
        self._awaits_room = False  # the last failure was ours to end: nothing could be evicted

    # For the front. REQUIRES: lock is held

    def refusal(self) -> PutResult | None:
        """Why implicit records are not taken now, or None."""
        return self._last_refusal if self._breaker.is_open(self._clock()) else None

    def room_was_made(self) -> None:
        """Try at once what failed only for want of something to evict."""
        if self._awaits_room:
            self._resume()

    def close(self) -> None:
        """After the last job."""
        self._reader.close()

    # Jobs. REQUIRES: lock is not held

    def write(self, entry: Entry) -> None:
        try:
            self._write_out(entry)
        except Exception as error:  # whatever went wrong, a record left PENDING would block the queue for good
            self._write_failed(entry, error)
        with self._ledger.lock:
            waiting = self._ledger.take_waiting()
        for call in waiting:
            call()

    def _write_out(self, entry: Entry) -> None:
        ledger = self._ledger
        with ledger.lock:
            payload = entry.payload
        if payload is None:
            return  # removed, or written by another job, while it waited
        self._need_room(entry.size)
        extent = self._segments.append(entry.record, payload, entry.key_id)
        with ledger.lock:
            self._resume()
            ledger.tally.add("written", entry.size)
            if ledger.index.is_current(entry):
                ledger.index.move(entry, Tier.DISK, extent=extent)
                ledger.settled.notify_all()
            else:
                ledger.index.release(extent)  # removed while it was written

    def persist(
        self,
        records: Sequence[RecordId],
        phases: Sequence[Sequence[Note]],
        optional: Sequence[RecordId],
    ) -> StoreError | None:
        """Bring `records` and then the notes to disk, safely; each phase is safe before the next one begins.

        The records must be pinned. One that is not held is an error, but for the optional ones.
        """
        ledger = self._ledger
        try:
            for record in (*records, *optional):
                self._io.run_urgent()
                with ledger.lock:
                    entry = ledger.index.get(record)
                if entry is not None:
                    self._make_safe(entry)
            with ledger.lock:
                for record in records:
                    entry = ledger.index.get(record)
                    if entry is None or entry.tier is not Tier.DISK:
                        raise MissingRecord(record, "not held any more")
            self._segments.sync()
            self._segments.drop_names(
                [note.id.key for phase in phases for note in phase if note.id.kind is NoteKind.TOMBSTONE]
            )
            for phase in phases:
                for note in phase:
                    self._need_room(len(note.payload))
                    self.notes.write(note)
                self._segments.sync()
            self._segments.add_names({note.id.key: note.name for phase in phases for note in phase if note.name})
            self.notes.lay_to_rest()
        except MissingRecord as error:
            return error
        except (OSError, FormatError, DiskFull) as error:
            with ledger.lock:
                ledger.tally.write_error(error)
            log.warning("the durable store could not write: %s", error)
            return error if isinstance(error, StoreError) else StoreError(f"{type(error).__name__}: {error}")
        return None

    def forget_notes(self, notes: Sequence[NoteId]) -> None:
        """Their bytes count no more. What could still refer to them must be gone from the disk."""
        for note in notes:
            self.notes.forget(note)

    def read_note(self, note: NoteId) -> Buffer | None:
        """The payload; None, counted and logged, if it does not verify."""
        extent = self.notes.place(note)
        if extent is None:
            return None
        try:
            return self._segments.read(note, extent)
        except RecordError as error:
            with self._ledger.lock:
                self._ledger.tally.corrupt += 1
                self._ledger.tally.last_error = str(error)
            log.warning("dropped a note: %s", error)
            self.notes.forget(note)
            return None

    def _make_safe(self, entry: Entry) -> None:
        extent = entry.extent  # on disk it changes on this thread alone
        if extent is None:
            self._write_out(entry)
        elif self._segments.is_suspect(extent):
            self._need_room(entry.size)
            self._copy_on(entry.record, extent)

    def _need_room(self, payload_bytes: int) -> None:
        if not self.make_room(payload_bytes + RECORD_OVERHEAD):
            raise DiskFull(f"no room for {payload_bytes} bytes: everything on disk is pinned, or the disk is full")

    def read(self, records: tuple[RecordId, ...]) -> FetchResult:
        """All or nothing; a record that does not verify is dropped."""
        ledger = self._ledger
        with ledger.lock:
            found = ledger.find(records)
        if isinstance(found, FetchResult):
            return found
        read = iter(self._reader.read([(entry.record, extent) for entry, _, _, extent in found if extent is not None]))
        payloads: list[Buffer] = []
        for entry, _, payload, extent in found:
            answer = next(read) if extent is not None else payload
            if isinstance(answer, RecordError):
                self._drop_bad(entry, answer)
                self.apply_releases()
                return FetchResult.refused(answer)
            assert answer is not None, "a record without an extent has its payload in memory"
            payloads.append(answer)
        with ledger.lock:
            return ledger.served(found, payloads)

    def trim(self, limit: int) -> None:
        """Bring the files down to `limit` bytes, as far as pins allow."""
        ledger = self._ledger
        with ledger.lock:
            if ledger.closed:
                return
        try:
            self.make_room(0, limit=limit)
        except (OSError, DiskFull) as error:  # while copying live records on: the rest stays where it is
            with ledger.lock:
                ledger.tally.write_error(error)

    def apply_releases(self) -> None:
        """Give back what the index no longer refers to."""
        with self._ledger.lock:
            released = self._ledger.index.take_released()
        for extent in released:
            self._segments.release(extent)

    def make_room(self, record_bytes: int, *, limit: int | None = None) -> bool:
        """Evict and clean until an append of this size fits; between two copies, waiting reads go first."""
        ledger = self._ledger
        while True:
            self.apply_releases()
            with ledger.lock:
                can_evict = ledger.index.has_victim(Tier.DISK)
            match self._segments.plan_room(record_bytes, limit=limit, can_evict=can_evict):
                case Step.READY:
                    return True
                case Step.FULL:
                    return False
                case Step.EVICT:
                    with ledger.lock:
                        ledger.evict(Tier.DISK)
                case Step.DROP_FOREIGN:
                    size = self._segments.drop_foreign()
                    log.info("removed %d bytes of another model's state to make room", size)
                case Step.CLEAN:
                    for record, extent in self._segments.cleaning_victim():
                        self._io.run_urgent()
                        self._copy_on(record, extent)

    def _copy_on(self, record: Name, extent: Extent) -> None:
        if isinstance(record, NoteId):
            self.notes.copy_on(record, extent)
            return
        ledger = self._ledger
        with ledger.lock:
            entry = ledger.index.get(record)
            if entry is None or entry.extent != extent:
                return  # gone since the segment was chosen
        try:
            moved = self._segments.copy_on(record, extent)
        except RecordError as error:
            self._drop_bad(entry, error)
            return
        with ledger.lock:
            ledger.tally.add("copied on", entry.size)
            if ledger.index.is_current(entry):
                entry.extent, moved = moved, extent
            ledger.index.release(moved)

    def _write_failed(self, entry: Entry, error: Exception) -> None:
        full = isinstance(error, DiskFull) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        ledger = self._ledger
        with ledger.lock:
            ledger.tally.write_error(error)
            self._last_refusal = PutResult.SKIPPED_DISK_FULL if full else PutResult.SKIPPED_DISK_ERROR
            self._awaits_room = isinstance(error, DiskFull)
            pauses = self._breaker.failure(self._clock())
            if pauses:
                self._io.pause(until=self._breaker.open_until)
            if ledger.index.is_current(entry):
                if ledger.index.is_pinned(entry.record):
                    # In use: it stays readable from memory until the disk takes it.
                    self._io.submit(lambda: self.write(entry))
                else:
                    ledger.index.lose(entry, Loss.NOT_WRITTEN)
                    ledger.settled.notify_all()
        if pauses:
            log.warning("writes to the cache's disk tier pause: %s", error)

    def _drop_bad(self, entry: Entry, error: RecordError) -> None:
        ledger = self._ledger
        with ledger.lock:
            if not ledger.index.is_current(entry):
                return
            ledger.tally.corrupt += 1
            ledger.tally.last_error = str(error)
            ledger.index.lose(entry, Loss.CORRUPT if isinstance(error, CorruptRecord) else Loss.EVICTED)
        log.warning("dropped a cached record: %s", error)

    def _resume(self) -> None:
        """REQUIRES: lock is held."""
        self._awaits_room = False
        if self._breaker.success():
            self._io.pause(until=float("-inf"))
