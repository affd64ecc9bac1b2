"""The record store: memory and disk tiers under byte budgets, behind one I/O thread. Takes and returns bytes.

Owns what callers see, and the lock. What stays in memory, what is queued for the disk and what is refused is decided by
`kvcache.placement`; the disk side is `kvcache.disk_tier`. It knows nothing of layers or snapshots: where records stand
on their chain, and when they are used, is told by its owner's `arrange`, `touch` and `pin`; what goes first follows
from that (`kvcache.eviction`).

Threads: one lock guards index and counters and is never held across I/O, encryption or a callback. Segment files
belong to the I/O thread alone; other threads leave freed extents in the index for it.

Process memory held: `memory_bytes` less what is lent, at most twice `queue_bytes` of pending payloads (or once, and one
record larger than that), one sealed record, and what `kvcache.buffers` keeps idle. What loans put into the queue beyond
that counts as `memory_bytes`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from kvcache.checkpoints import Checkpoints
from kvcache.disk_tier import DiskTier, Ledger
from kvcache.errors import StoreClosed, StoreError
from kvcache.eviction import Place
from kvcache.format import RECORD_OVERHEAD
from kvcache.index import RecordIndex
from kvcache.inventory import LIST_KEY_BYTES, Inventory, MemoryList
from kvcache.placement import Placement
from kvcache.records import Buffer, FetchResult, Loss, Note, NoteId, PutResult, RecordId, Tier
from kvcache.recovery import OtherModel
from kvcache.seal import AesGcmSeal, ChecksumSeal, Seal
from kvcache.segments import SegmentLog
from kvcache.stats import StoreStats, Usage
from kvcache.storage import FileStorage, Storage
from kvcache.store_config import StoreConfig
from kvcache.store_dir import Identity, segment_name
from kvcache.write_budget import WriteBudget
from kvcache.writer import CircuitBreaker, IoThread

__all__ = ["FetchResult", "PutResult", "StoreConfig", "StoreStats", "TieredStore", "Usage"]

log = logging.getLogger(__name__)

CLOSING_SECONDS = 10.0


class TieredStore:
    """Thread-safe. `put`, `locate`, `size`, `touch`, `pin` and `delete` never wait for I/O.

    FULL records stay in memory and are written when the budget asks for it, the least recently used first; the other
    kinds are written at once and leave memory then. A record that no disk tier of this size could take, or that the
    policy keeps from the disk, stays in memory whatever its kind. Whatever the pressure, a `put` is answered and
    nothing is raised.
    """

    def __init__(
        self,
        config: StoreConfig,
        storage: Storage | None = None,
        clock: Callable[[], float] = time.monotonic,
        seal: Seal | None = None,
        identity: Identity | None = None,
        inventory: Inventory | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """With an `identity` the store is durable and takes over what `storage` holds: OSError or StoreUnusable.

        `inventory` is the list of what it should hold; without one nothing is expected, and none is kept.
        `clock` is monotonic and times pauses; `wall_clock` tells the day for the write budget.
        """
        self.durable = identity is not None
        self._identity = identity
        self._inventory = inventory
        if identity is not None and inventory is None:
            self._inventory = Inventory(MemoryList(), bytes(LIST_KEY_BYTES), identity.opening)
        self.missing: Mapping[int, str] = {}  # listed segments that are not there as they were, and what is wrong
        self._clock = clock
        self._wall_clock = wall_clock
        self._budget = WriteBudget(config.daily_write_bytes)
        self._segments = SegmentLog(
            storage if storage is not None else FileStorage(config.directory),
            seal if seal is not None else AesGcmSeal() if config.encrypt else ChecksumSeal(),
            budget_bytes=config.disk_bytes,
            segment_bytes=config.segment_bytes,
            min_free_bytes=config.min_free_bytes,
            identity=identity,
            inventory=self._inventory,
            wrote=self._count_written,
        )
        self._io = IoThread("kvcache-io", clock)
        self._ledger = Ledger(RecordIndex(clock))
        self._lock = self._ledger.lock
        self._index = self._ledger.index
        self._breaker = CircuitBreaker(first_pause_s=config.retry_pause_s, longest_pause_s=config.longest_pause_s)
        self._disk = DiskTier(self._ledger, self._segments, self._io, self._breaker, clock)
        self._placement = Placement(
            config,
            self._ledger,
            self._disk,
            max_payload_bytes=self._segments.max_payload_bytes,
            affords=lambda size: self._budget.allows(size, self._wall_clock()),
            enqueue=lambda entry: self._io.submit(partial(self._disk.write, entry)),
        )
        if self.durable:
            self._recover()

    # Life

    def start(self) -> None:
        """Start the I/O thread. Until then records are accepted, but nothing is written or read from disk."""
        self._io.start()

    def close(self) -> None:
        """Stop after the job at hand and delete everything; pending records are not written. Safe to repeat.

        Fetches that still wait are answered with StoreClosed. A durable store keeps what is on disk, and first writes
        what waits, as far as that takes no longer than CLOSING_SECONDS.
        """
        if self.durable and not self._ledger.closed:
            self._finish_writing()
        with self._lock:
            if self._ledger.closed:
                return
            self._ledger.closed = True
        self._io.stop()
        self._disk.close()
        with self._lock:
            self._index.clear()
            self._ledger.settled.notify_all()
            waiting = self._ledger.take_waiting()
        for call in waiting:
            call()
        self._segments.close()

    # Records

    def put(
        self,
        record: RecordId,
        payload: Buffer,
        *,
        explicit: bool,
        key_id: int = 0,
        patient: bool = False,
        in_memory: bool = False,
    ) -> PutResult:
        """Accept or skip a record.

        The buffer is kept, not copied: it must own exactly these bytes and never change again.
        `explicit`: a client asked for it by name, so it may use the queue's second half and is written whatever the
        day's budget. `key_id`: whose sealing key. `patient`: the caller tries again if that may help, so that is not
        counted as skipped, and nothing is evicted for it that somebody asked for and the disk will take soon.
        `in_memory`: spilled when room is needed, whatever its kind, and not written before.
        """
        data = _as_bytes(payload)
        with self._lock:
            result = self._placement.admit(
                record, data, explicit=explicit, key_id=key_id, in_memory=in_memory, patient=patient
            )
            if not result.held and not (patient and result.may_pass):
                self._ledger.tally.skipped[result] += 1
        return result

    def when_written(self, call: Callable[[], None]) -> None:
        """Call back, once, after the next record left the queue; from any thread, and `call` must not block.

        At once if nothing waits.
        """
        with self._lock:
            waits = self._index.bytes_in(Tier.PENDING) > 0 and not self._ledger.closed
            if waits:
                self._ledger.waiting.append(call)
        if not waits:
            call()

    def claim(self, records: Iterable[RecordId]) -> None:
        """One more name stands on these records: until `disclaim` they count as explicit, held already or not.

        They go to disk where the policy wants that of explicit ones.
        """
        wanted = list(records)
        with self._lock:
            for record in wanted:
                entry = self._index.claim(record)
                if entry is not None:
                    self._placement.make_explicit(entry)

    def disclaim(self, records: Iterable[RecordId]) -> None:
        """Take one `claim` of each back. With the last, a record is worth no more to the policy than any other."""
        unwanted = list(records)
        with self._lock:
            for record in unwanted:
                self._index.disclaim(record)

    def locate(self, record: RecordId) -> Tier | None:
        with self._lock:
            entry = self._index.get(record)
            return entry.tier if entry is not None else None

    def size(self, record: RecordId) -> int | None:
        """Payload bytes."""
        with self._lock:
            entry = self._index.get(record)
            return entry.size if entry is not None else None

    def arrange(self, places: Iterable[Place]) -> None:
        """Say where records that are held stand on their chain, and so what each is worth and what stands on it."""
        wanted = list(places)
        with self._lock:
            self._index.arrange(wanted)

    def touch(self, records: Iterable[RecordId]) -> None:
        """Note a use of each, the last one becoming the newest: suffixes first, so that they go before prefixes."""
        used = list(records)  # an iterable may run its owner's code: not under the lock
        with self._lock:
            self._index.touch(used)

    def guard(self, place: Place) -> None:
        """Somebody is at work there: until `unguard`, none of its records is evicted, held already or not.

        Nor is what it stands on.
        """
        with self._lock:
            self._index.guard(place)

    def unguard(self, key: bytes) -> None:
        with self._lock:
            if self._index.unguard(key):
                self._disk.room_was_made()

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
            self._disk.room_was_made()

    def delete(self, records: Iterable[RecordId]) -> None:
        """Forget records, pinned or not; `drain_lost` does not report them. Disk space follows a moment later."""
        unwanted = list(records)
        with self._lock:
            for record in unwanted:
                entry = self._index.get(record)
                if entry is not None:
                    self._index.remove(entry)
                self._index.forgive(record)
            self._ledger.settled.notify_all()
            self._disk.room_was_made()
            self._io.submit(self._disk.apply_releases, urgent=True)

    def drain_lost(self) -> dict[RecordId, Loss]:
        """Records that ceased to be held since the last call without being deleted, and why; the oldest loss first."""
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
        elif not self._io.submit(lambda: done(self._disk.read(wanted)), urgent=True):
            done(FetchResult.refused(StoreClosed("the store is closed")))

    def fetch_now(self, records: Sequence[RecordId]) -> FetchResult:
        """`fetch` that waits for its result; the caller must hold no lock that a `done` callback takes."""
        wanted = tuple(records)
        return self._from_memory(wanted) or self._io.call(partial(self._disk.read, wanted))

    # What a durable store keeps

    def persist(
        self,
        records: Sequence[RecordId],
        phases: Sequence[Sequence[Note]],
        done: Callable[[StoreError | None], None],
        *,
        optional: Sequence[RecordId] = (),
    ) -> None:
        """Make `records` and then notes, phase after phase, safe from a power cut; `done` is told the error, or None.

        Orders follow each other as they were given. `done` runs on the I/O thread and must not block. Records that are
        kept in memory move to disk. One of `records` that is not held is an error, an `optional` one is passed over.
        """
        needed, also = tuple(records), tuple(optional)
        wanted = needed + also
        self.pin(wanted)

        def job() -> None:
            error: StoreError | None = StoreError("an unexpected error, see the log")
            try:
                error = self._disk.persist(needed, phases, also)
            finally:  # whatever happened, somebody waits for the answer
                self.unpin(wanted)
                done(error)

        with self._lock:
            refusal = self._disk.refusal()
        if refusal is not None:  # fail now rather than wait for a disk that keeps failing
            self.unpin(wanted)
            done(StoreError(f"the disk is not written to for a while: {self._ledger.tally.last_error}"))
        elif not self._io.submit(job):
            self.unpin(wanted)
            done(StoreClosed("the store is closed"))

    def forget_notes(self, notes: Callable[[], Sequence[NoteId]]) -> None:
        """Give notes up, after everything ordered before; which ones is asked then, on the I/O thread."""
        self._io.submit(lambda: self._disk.forget_notes(notes()))

    def notes(self) -> list[tuple[NoteId, bytes, int]]:
        """Every note with its payload and its key, from the oldest to the newest. Before `start` only."""
        assert not self._io.started
        found: list[tuple[NoteId, bytes, int]] = []
        for note in self._disk.notes.ids():
            payload = self._disk.read_note(note)
            if payload is not None:
                found.append((note, bytes(payload), self._note_keys.get(note, 0)))
        self._note_keys.clear()
        return found

    @property
    def listing(self) -> tuple[Inventory, bytes]:
        """A durable store's list of what it should hold, and the namespace that its own records have there."""
        assert self._inventory is not None and self._identity is not None
        return self._inventory, self._identity.namespace

    def others(self) -> list[OtherModel]:
        """What the segments of other models hold. Before `start` only; OSError."""
        assert not self._io.started
        return self._segments.others()

    def keep_others(self, segments: Iterable[int]) -> int:
        """Segments of other models that are not given up for room; their bytes. Before `start` only."""
        assert not self._io.started
        return self._segments.keep_foreign(segments)

    def release_others(self, segments: Collection[int]) -> None:
        """Segments of other models that may be given up again, after everything ordered before."""
        self._io.submit(partial(self._segments.release_foreign, segments))

    @property
    def disk_budget(self) -> int:
        """What all files together may take, in bytes."""
        return self._segments.budget

    def held(self) -> list[RecordId]:
        """Every record held, in any tier."""
        with self._lock:
            return list(self._index)

    @property
    def checkpoints(self) -> Checkpoints:
        return self._placement.checkpoints

    @property
    def queue_bytes(self) -> int:
        """Bound on pending payloads that somebody asked for."""
        return self._placement.queue_limit(explicit=True)

    # Maintenance

    def trim(self, *, memory_bytes: int | None = None, disk_bytes: int | None = None) -> None:
        """Bring each tier down to this many bytes once, as far as pins allow; None leaves a tier alone.

        Memory is spilled where the queue takes it, else evicted. Disk bytes are file sizes; this waits for the I/O
        thread, so the caller must hold no lock that a `done` callback takes.
        """
        if memory_bytes is not None:
            with self._lock:
                self._placement.shrink_memory(memory_bytes)
        if disk_bytes is not None:
            self._io.call(partial(self._disk.trim, disk_bytes))

    def lend(self, size: int) -> int:
        """Do without `size` bytes of the memory budget from now on, until told otherwise; how many are still missing.

        Spills for it past the queue's limit, as the buffers are in memory already; what waits beyond that limit is
        missing until it is written. Evicts only what may not be written. Pinned bytes are missing, and where they are
        the cause nothing is touched. While bytes are missing, nobody may use the loan.
        """
        with self._lock:
            return self._placement.lend(size)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is PENDING; False if that takes longer than `timeout` seconds."""
        if not self._io.started:
            self.run_pending()
        with self._lock:
            return self._ledger.settled.wait_for(lambda: not self._index.records_in(Tier.PENDING), timeout)

    def run_pending(self, jobs: int | None = None) -> None:
        """Do what the I/O thread would, up to `jobs` jobs, in the calling thread. Only while that is not started."""
        while jobs is None or jobs > 0:
            if not self._io.step():
                return
            jobs = None if jobs is None else jobs - 1

    def stats(self) -> StoreStats:
        with self._lock:
            index, tally, files = self._index, self._ledger.tally, self._segments.file_bytes
            return StoreStats(
                usage=index.usage(),
                memory_bytes=index.bytes_in(Tier.MEMORY),
                pending_bytes=index.bytes_in(Tier.PENDING),
                disk_bytes=index.bytes_in(Tier.DISK),
                file_bytes=files,
                live_ratio=self._segments.live_bytes / files if files else 1.0,
                segments=self._segments.segments,
                pinned=index.pinned,
                written=tally.total("written"),
                read=tally.by_tier("read"),
                copied_on=tally.total("copied on"),
                evicted=index.evicted(),
                skipped=dict(tally.skipped),
                missing=tally.missing,
                corrupt=tally.corrupt,
                write_errors=tally.write_errors,
                failed_jobs=self._io.failed_jobs,
                paused=self._breaker.is_open(self._clock()),
                written_today=self._budget.spent(self._wall_clock()),
                last_error=tally.last_error or self._io.last_failure,
            )

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<TieredStore memory={stats.memory_bytes} pending={stats.pending_bytes} disk={stats.disk_bytes}"
            f" files={stats.file_bytes} pinned={stats.pinned}>"
        )

    def _recover(self) -> None:
        found = self._segments.recover()
        self._note_keys: dict[NoteId, int] = {}
        for name, (extent, key_id) in found.records.items():
            if isinstance(name, NoteId):
                self._disk.notes.adopt(name, extent)
                self._note_keys[name] = key_id
            else:
                self._index.adopt(name, extent.length - RECORD_OVERHEAD, extent, key_id)
        self._ledger.tally.corrupt += found.damaged
        self.missing = found.missing
        for number, what in found.missing.items():
            log.warning("%s %s: what it held is lost until it is put back", segment_name(number), what)
        for number in sorted(found.damaged_segments):
            log.warning("%s is damaged in places: what lay there is lost until it is put back", segment_name(number))
        if found.damaged or found.cut_bytes or found.unreadable:
            log.warning(
                "the store was damaged or cut off: %d damaged places skipped, %d bytes of torn writes cut off, "
                "%d records of destroyed keys left out",
                found.damaged,
                found.cut_bytes,
                found.unreadable,
            )

    def _count_written(self, size: int) -> None:
        with self._lock:
            self._budget.count(size, self._wall_clock())

    def _finish_writing(self) -> None:
        if not self._io.started:
            self.run_pending()
            return
        written = threading.Event()
        if self._io.submit(written.set):
            written.wait(CLOSING_SECONDS)

    def _from_memory(self, records: tuple[RecordId, ...]) -> FetchResult | None:
        """The answer if it takes no disk, else None."""
        with self._lock:
            found = self._ledger.find(records)
            if isinstance(found, FetchResult):
                return found
            payloads = [payload for _, _, payload, _ in found if payload is not None]
            return self._ledger.served(found, payloads) if len(payloads) == len(found) else None


def _as_bytes(payload: Buffer) -> Buffer:
    """The same memory as read-only bytes, so that `len` counts bytes."""
    if isinstance(payload, bytes):
        return payload
    view = memoryview(payload)
    return view.cast("B").toreadonly() if view.nbytes else b""
