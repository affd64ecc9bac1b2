"""The record store: memory and disk tiers under byte budgets, behind one I/O thread. Takes and returns bytes.

Owns placement, spilling, eviction and what happens when the disk does not play along. It knows nothing of tokens,
layers or snapshots: which records belong together, and in which order they may go, is told by its owner's `touch`
and `pin`.

Threads: `_lock` guards the index and the counters and is never held across I/O, encryption or a callback. Segment
files belong to the I/O thread alone; other threads leave freed extents in `_released` for it.

Process memory held: `memory_bytes`, at most twice `queue_bytes` of pending payloads, and one sealed record.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kvcache.errors import DiskFull, MissingRecord, RecordError, StoreClosed
from kvcache.format import RECORD_OVERHEAD
from kvcache.index import Entry, RecordIndex
from kvcache.records import Buffer, FetchResult, PutResult, RecordId, RecordKind, Tier
from kvcache.seal import AesGcmSeal, ChecksumSeal, Seal
from kvcache.segments import Extent, SegmentLog, Step
from kvcache.stats import StoreStats, Tally, Usage
from kvcache.storage import FileStorage, Storage
from kvcache.writer import CircuitBreaker, IoThread

__all__ = ["FetchResult", "PutResult", "StoreConfig", "StoreStats", "TieredStore", "Usage"]

log = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """What the store may use. Sizes in bytes, times in seconds."""

    directory: Path | None = None  # whose file system to use; None: the system's temporary directory
    memory_bytes: int  # budget of the memory tier
    disk_bytes: int  # budget of all segment files together, headers and dead records included
    queue_bytes: int  # bound on PENDING payloads for implicit records; explicit ones may use twice as much
    segment_bytes: int = 64 * MIB
    min_free_bytes: int = 1024 * MIB  # writing never takes the file system's free space below this
    encrypt: bool = True
    retry_pause_s: float = 1.0  # first pause after writes failed; doubles
    longest_pause_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "queue_bytes", "min_free_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.segment_bytes <= 0:
            raise ValueError("segment_bytes must be positive")


_Source: TypeAlias = tuple[Entry, Tier, Buffer | None, Extent | None]


class TieredStore:
    """Thread-safe. `put`, `locate`, `size`, `touch`, `pin` and `delete` never wait for I/O.

    FULL records stay in memory and are written when the budget asks for it, the least recently used first; the other
    kinds are written at once and leave memory then. A record that no disk tier of this size could take stays in
    memory whatever its kind. Whatever the pressure, a `put` is answered and nothing is raised.
    """

    def __init__(
        self,
        config: StoreConfig,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.monotonic,
        seal: Seal | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._segments = SegmentLog(
            storage if storage is not None else FileStorage(config.directory),
            seal if seal is not None else AesGcmSeal() if config.encrypt else ChecksumSeal(),
            budget_bytes=config.disk_bytes,
            segment_bytes=config.segment_bytes,
            min_free_bytes=config.min_free_bytes,
        )
        self._io = IoThread("kvcache-io", clock)
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)  # something left PENDING
        self._index = RecordIndex()
        self._breaker = CircuitBreaker(first_pause_s=config.retry_pause_s, longest_pause_s=config.longest_pause_s)
        self._refusal = PutResult.SKIPPED_DISK_ERROR  # what implicit records hear while the breaker is open
        self._awaits_room = False  # the last failure was ours to end: everything was pinned
        self._closed = False
        self._tally = Tally()

    # Life

    def start(self) -> None:
        """Start the I/O thread. Until then, records are accepted but nothing is written and no fetch is answered."""
        self._io.start()

    def close(self) -> None:
        """Stop after the job at hand and delete everything; pending records are not written. Safe to repeat.

        Fetches that still wait are answered with StoreClosed.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._io.stop()
        with self._settled:
            self._index.clear()
            self._settled.notify_all()
        self._segments.close()

    # Records

    def put(self, record: RecordId, payload: Buffer, *, explicit: bool) -> PutResult:
        """Accept or skip a record.

        The buffer is kept, not copied: it must own exactly these bytes and never change again.
        `explicit`: a client asked for it by name, so it may use the queue's second half.
        """
        data = _as_bytes(payload)
        with self._lock:
            result = self._admit(record, data, explicit=explicit)
            if not result.held:
                self._tally.skipped[result] += 1
        return result

    def locate(self, record: RecordId) -> Tier | None:
        with self._lock:
            entry = self._index.get(record)
            return entry.tier if entry is not None else None

    def size(self, record: RecordId) -> int | None:
        """Payload bytes."""
        with self._lock:
            entry = self._index.get(record)
            return entry.size if entry is not None else None

    def touch(self, records: Iterable[RecordId]) -> None:
        """Note a use of each, the last one becoming the newest: suffixes first, so that they go before prefixes."""
        used = list(records)  # an iterable may run its owner's code: not under the lock
        with self._lock:
            self._index.touch(used)

    def pin(self, records: Iterable[RecordId]) -> None:
        """Count one more use of each: until `unpin`, none is evicted. They need not be held yet."""
        wanted = list(records)
        with self._lock:
            for record in wanted:
                self._index.pin(record)

    def unpin(self, records: Iterable[RecordId]) -> None:
        """Take one `pin` of each back; ValueError if there is none."""
        unwanted = list(records)
        with self._lock:
            for record in unwanted:
                self._index.unpin(record)
            self._room_was_made()

    def delete(self, records: Iterable[RecordId]) -> None:
        """Forget records, pinned or not; `drain_evicted` does not report them. Disk space follows a moment later."""
        unwanted = list(records)
        with self._settled:
            for record in unwanted:
                entry = self._index.get(record)
                if entry is not None:
                    self._index.remove(entry)
                self._index.forgive(record)
            self._settled.notify_all()
            self._room_was_made()
            self._io.submit(self._apply_releases, urgent=True)

    def drain_evicted(self) -> list[RecordId]:
        """Records that ceased to be held since the last call without being deleted: evicted, corrupt, not writable."""
        with self._lock:
            return self._index.take_lost()

    # Reads

    def fetch(self, records: Sequence[RecordId], done: Callable[[FetchResult], None]) -> None:
        """Read all of `records` and call `done` once, from any thread; it must not block.

        What memory can answer (or refuse) is answered here before `fetch` returns, so that a slow disk does not delay
        records that have not reached it yet. Else `done` runs on the I/O thread, ahead of queued writes.
        """
        wanted = tuple(records)
        result = self._from_memory(wanted)
        if result is not None:
            done(result)
        elif not self._io.submit(lambda: done(self._read(wanted)), urgent=True):
            done(FetchResult.refused(StoreClosed("the store is closed")))

    def fetch_now(self, records: Sequence[RecordId]) -> FetchResult:
        """`fetch` that waits for its result; the caller must hold no lock that a `done` callback takes."""
        wanted = tuple(records)
        return self._from_memory(wanted) or self._io.call(partial(self._read, wanted))

    # Maintenance

    def trim(self, *, memory_bytes: int | None = None, disk_bytes: int | None = None) -> None:
        """Bring each tier down to this many bytes once, as far as pins allow; None leaves a tier alone.

        Memory is spilled where the queue takes it, else evicted. Disk bytes are file sizes; this waits for the I/O
        thread, so the caller must hold no lock that a `done` callback takes.
        """
        if memory_bytes is not None:
            with self._settled:
                self._shrink_memory(memory_bytes)
        if disk_bytes is not None:
            try:
                self._io.call(partial(self._trim_disk, disk_bytes))
            except OSError as error:  # while copying live records on; what was not copied stays where it is
                with self._lock:
                    self._note_write_error(error)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is PENDING; False if that takes longer than `timeout` seconds."""
        if not self._io.started:
            self.run_pending()
        with self._settled:
            return self._settled.wait_for(lambda: not self._index.records_in(Tier.PENDING), timeout)

    def run_pending(self, jobs: int | None = None) -> None:
        """Do what the I/O thread would, up to `jobs` jobs, in the calling thread. Only while that is not started."""
        while jobs is None or jobs > 0:
            if not self._io.step():
                return
            jobs = None if jobs is None else jobs - 1

    def stats(self) -> StoreStats:
        with self._lock:
            index, files = self._index, self._segments.file_bytes
            return StoreStats(
                usage=index.usage(),
                memory_bytes=index.bytes_in(Tier.MEMORY),
                pending_bytes=index.bytes_in(Tier.PENDING),
                disk_bytes=index.bytes_in(Tier.DISK),
                file_bytes=files,
                live_ratio=self._segments.live_bytes / files if files else 1.0,
                segments=self._segments.segments,
                pinned=index.pinned,
                written=self._tally.total("written"),
                read=self._tally.by_tier("read"),
                copied_on=self._tally.total("copied on"),
                evicted=self._tally.by_tier("evicted"),
                skipped=dict(self._tally.skipped),
                missing=self._tally.missing,
                corrupt=self._tally.corrupt,
                write_errors=self._tally.write_errors,
                failed_jobs=self._io.failed_jobs,
                paused=self._breaker.is_open(self._clock()),
                last_error=self._tally.last_error or self._io.last_failure,
            )

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<TieredStore memory={stats.memory_bytes} pending={stats.pending_bytes} disk={stats.disk_bytes}"
            f" files={stats.file_bytes} pinned={stats.pinned}>"
        )

    def _from_memory(self, records: tuple[RecordId, ...]) -> FetchResult | None:
        """The answer if it takes no disk, else None."""
        with self._lock:
            found = self._find(records)
            if isinstance(found, FetchResult):
                return found
            payloads = [payload for _, _, payload, _ in found if payload is not None]
            if len(payloads) < len(found):
                return None
            return self._served([(entry, tier) for entry, tier, _, _ in found], payloads)

    # REQUIRES, from here to the next such line: lock is held

    def _find(self, records: tuple[RecordId, ...]) -> list[_Source] | FetchResult:
        """Where each record is at this moment, or the refusal of the first that is nowhere."""
        if self._closed:
            return FetchResult.refused(StoreClosed("the store is closed"))
        found: list[_Source] = []
        for record in records:
            entry = self._index.get(record)
            if entry is None:
                self._tally.missing += 1
                return FetchResult.refused(MissingRecord(record, "not held"))
            found.append((entry, entry.tier, entry.payload, entry.extent))
        return found

    def _served(self, sources: list[tuple[Entry, Tier]], payloads: list[Buffer]) -> FetchResult:
        for entry, tier in sources:
            self._tally.add(("read", tier), entry.size)
        return FetchResult(
            payloads=payloads, tiers=[tier for _, tier in sources], sizes=[entry.size for entry, _ in sources]
        )

    def _admit(self, record: RecordId, data: Buffer, *, explicit: bool) -> PutResult:
        if self._closed:
            return PutResult.SKIPPED_CLOSED
        entry = self._index.get(record)
        if entry is not None:
            entry.explicit |= explicit
            self._index.touch((record,))
            return PutResult.EXISTS
        size = len(data)
        fits_disk = size <= self._segments.max_payload_bytes and size <= self._queue_limit(explicit=explicit)
        if (record.kind is RecordKind.FULL or not fits_disk) and size <= self._config.memory_bytes:
            if self._shrink_memory(self._config.memory_bytes - size):
                self._index.add(record, data, Tier.MEMORY, explicit=explicit)
                return PutResult.STORED
            if not fits_disk:
                return PutResult.SKIPPED_MEMORY_FULL
        if not fits_disk:
            return PutResult.SKIPPED_TOO_LARGE
        if not explicit and self._breaker.is_open(self._clock()):
            return self._refusal
        if not self._queue_takes(size, explicit=explicit):
            return PutResult.SKIPPED_QUEUE_FULL
        self._enqueue(self._index.add(record, data, Tier.PENDING, explicit=explicit))
        return PutResult.STORED

    def _shrink_memory(self, limit: int) -> bool:
        """Spill or evict until the memory tier holds at most `limit` bytes; False if pins forbid it."""
        while self._index.bytes_in(Tier.MEMORY) > limit:
            victim = self._index.pop_victim(Tier.MEMORY)
            if victim is None:
                return False
            if victim.size <= self._segments.max_payload_bytes and self._queue_takes(
                victim.size, explicit=victim.explicit
            ):
                self._index.move(victim, Tier.PENDING)
                self._enqueue(victim)
            else:
                self._evict(victim)
        return True

    def _queue_limit(self, *, explicit: bool) -> int:
        return self._config.queue_bytes * (2 if explicit else 1)

    def _queue_takes(self, size: int, *, explicit: bool) -> bool:
        return self._index.bytes_in(Tier.PENDING) + size <= self._queue_limit(explicit=explicit)

    def _enqueue(self, entry: Entry) -> None:
        self._io.submit(partial(self._write, entry))

    def _evict(self, entry: Entry) -> None:
        self._tally.add(("evicted", entry.tier), entry.size)
        self._index.lose(entry)

    def _room_was_made(self) -> None:
        """Try at once what failed only for want of something to evict."""
        if self._awaits_room:
            self._awaits_room = False
            self._resume()

    def _resume(self) -> None:
        if self._breaker.success():
            self._io.pause(until=float("-inf"))

    def _note_write_error(self, error: Exception) -> None:
        self._tally.write_errors += 1
        self._tally.last_error = f"{type(error).__name__}: {error}"

    # REQUIRES, from here on: the I/O thread, or nobody else in its place; lock is not held

    def _write(self, entry: Entry) -> None:
        with self._lock:
            if not self._index.is_current(entry) or entry.payload is None:
                return  # deleted while it waited
            payload = entry.payload
        try:
            if not self._make_room(entry.size + RECORD_OVERHEAD):
                raise DiskFull(f"no room for {entry.size} bytes: everything on disk is pinned, or the disk is full")
            extent = self._segments.append(entry.record, payload)
        except Exception as error:  # whatever went wrong, a record left PENDING would block the queue for good
            self._write_failed(entry, error)
            return
        with self._settled:
            self._awaits_room = False
            self._resume()
            self._tally.add("written", entry.size)
            if self._index.is_current(entry):
                self._index.move(entry, Tier.DISK, extent=extent)
                self._settled.notify_all()
            else:
                self._index.release(extent)  # deleted while it was written

    def _write_failed(self, entry: Entry, error: Exception) -> None:
        full = isinstance(error, DiskFull) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        with self._settled:
            self._note_write_error(error)
            self._refusal = PutResult.SKIPPED_DISK_FULL if full else PutResult.SKIPPED_DISK_ERROR
            self._awaits_room = isinstance(error, DiskFull)
            paused = self._breaker.failure(self._clock())
            if paused:
                self._io.pause(until=self._breaker.open_until)
            if self._index.is_current(entry):
                if self._index.is_pinned(entry.record):
                    self._enqueue(entry)  # in use: it stays readable from memory until the disk takes it
                else:
                    self._index.lose(entry)
                    self._settled.notify_all()
        if paused:
            log.warning("writes to the cache's disk tier pause: %s", error)

    def _trim_disk(self, limit: int) -> None:
        with self._lock:
            if self._closed:
                return
        self._make_room(0, limit=limit)

    def _make_room(self, record_bytes: int, *, limit: int | None = None) -> bool:
        """Evict and clean until an append of this size fits; between steps, waiting reads go first."""
        while True:
            self._io.run_urgent()
            self._apply_releases()
            with self._lock:
                can_evict = self._index.has_victim(Tier.DISK)
            match self._segments.plan_room(record_bytes, limit=limit, can_evict=can_evict):
                case Step.READY:
                    return True
                case Step.FULL:
                    return False
                case Step.EVICT:
                    with self._lock:
                        victim = self._index.pop_victim(Tier.DISK)
                        if victim is not None:
                            self._evict(victim)
                case Step.CLEAN:
                    for record, extent in self._segments.cleaning_victim():
                        self._io.run_urgent()
                        self._copy_on(record, extent)

    def _copy_on(self, record: RecordId, extent: Extent) -> None:
        with self._lock:
            entry = self._index.get(record)
            if entry is None or entry.extent != extent:
                return  # gone since the segment was chosen
        try:
            moved = self._segments.copy_on(record, extent)
        except RecordError as error:
            self._drop_bad(entry, error)
            return
        with self._lock:
            self._tally.add("copied on", entry.size)
            if self._index.is_current(entry):
                entry.extent, moved = moved, extent
            self._index.release(moved)

    def _apply_releases(self) -> None:
        with self._lock:
            released = self._index.take_released()
        for extent in released:
            self._segments.release(extent)

    def _read(self, records: tuple[RecordId, ...]) -> FetchResult:
        with self._lock:
            found = self._find(records)
        if isinstance(found, FetchResult):
            return found
        payloads: list[Buffer] = []
        for entry, _, payload, extent in found:
            if extent is not None:
                try:
                    payload = self._segments.read(entry.record, extent)
                except RecordError as error:
                    self._drop_bad(entry, error)
                    self._apply_releases()
                    return FetchResult.refused(error)
            assert payload is not None, "a record without an extent has its payload in memory"
            payloads.append(payload)
        with self._lock:
            return self._served([(entry, tier) for entry, tier, _, _ in found], payloads)

    def _drop_bad(self, entry: Entry, error: RecordError) -> None:
        with self._lock:
            if not self._index.is_current(entry):
                return
            self._tally.corrupt += 1
            self._tally.last_error = str(error)
            self._index.lose(entry)
        log.warning("dropped a cached record: %s", error)


def _as_bytes(payload: Buffer) -> Buffer:
    """The same memory as read-only bytes, so that `len` counts bytes."""
    if isinstance(payload, bytes):
        return payload
    view = memoryview(payload)
    return view.cast("B").toreadonly() if view.nbytes else b""
