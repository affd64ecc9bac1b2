"""Where a record goes: what stays in memory, what is queued for the disk, what is refused, what has to leave for it.

Owns the rules and what they go by: budgets, policy, the queue's bounds, what is lent. No I/O and no lock of its own;
REQUIRES, all through: the store's lock is held. The disk itself is `kvcache.disk_tier`, what goes first the index's.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.disk_tier import DiskTier, Ledger
from kvcache.format import RECORD_OVERHEAD
from kvcache.index import Entry
from kvcache.records import Buffer, PutResult, RecordId, RecordKind, Tier
from kvcache.store_config import StoreConfig

RESIDENT = (RecordKind.FULL, RecordKind.LOGITS, RecordKind.FEATURES)
"""Kinds that stay in memory: using a snapshot of a full-attention model then costs no load at all."""


class Placement:
    """Decides about records, and moves them between memory and queue in the index."""

    def __init__(
        self,
        config: StoreConfig,
        ledger: Ledger,
        disk: DiskTier,
        *,
        max_payload_bytes: int,
        affords: Callable[[int], bool],
        enqueue: Callable[[Entry], object],
    ) -> None:
        """`max_payload_bytes`: of one record on disk. `affords`: whether so many bytes may still be written today.

        `enqueue` orders the write of an entry that is PENDING.
        """
        self._config = config
        self._ledger = ledger
        self._index = ledger.index
        self._disk = disk
        self._max_payload_bytes = max_payload_bytes
        self._budget_takes = affords
        self._to_disk = enqueue
        self.lent = 0
        self._large: Entry | None = None  # the last record larger than `queue_bytes` that went to the queue

    @property
    def checkpoints(self) -> Checkpoints:
        """What is kept on the way, as configured."""
        return self._config.checkpoints

    @property
    def _memory_bytes(self) -> int:
        return max(0, self._config.memory_bytes - self.lent - self._overdue_bytes)

    @property
    def _overdue_bytes(self) -> int:
        """What loans have put into the queue beyond its limit: still in memory, and counted there."""
        limit = self.queue_limit(explicit=True)
        if self._large is not None and self._large.waits:
            limit = max(limit, self._config.queue_bytes + self._large.size)
        return max(0, self._index.bytes_in(Tier.PENDING) - limit)

    def admit(
        self, record: RecordId, data: Buffer, *, explicit: bool, key_id: int, in_memory: bool, patient: bool
    ) -> PutResult:
        if self._ledger.closed:
            return PutResult.SKIPPED_CLOSED
        entry = self._index.get(record)
        if entry is not None:
            if explicit and in_memory:
                entry.explicit = True
            elif explicit:
                self.make_explicit(entry)
            self._index.touch((record,))
            return PutResult.EXISTS
        size = len(data)
        fits_disk = size <= self._max_payload_bytes and self._may_write(explicit=explicit)
        if (record.kind in RESIDENT or in_memory or not fits_disk) and size <= self._config.memory_bytes:
            if size <= self._memory_bytes and self.shrink_memory(self._memory_bytes - size, patient=patient):
                self._index.add(record, data, Tier.MEMORY, explicit=explicit, key_id=key_id)
                return PutResult.STORED
            if not fits_disk:
                return PutResult.SKIPPED_MEMORY_FULL
        if not fits_disk:
            return PutResult.SKIPPED_TOO_LARGE
        refusal = self._disk.refusal()
        if refusal is not None and not explicit:
            return refusal
        if not self._affords(size, explicit=explicit):
            return PutResult.SKIPPED_WRITE_BUDGET
        if not self._queue_takes(size, explicit=explicit):
            return refusal if refusal is not None else PutResult.SKIPPED_QUEUE_FULL
        self._enqueue(self._index.add(record, data, Tier.PENDING, explicit=explicit, key_id=key_id))
        return PutResult.STORED

    def lend(self, size: int) -> int:
        """See `TieredStore.lend`."""
        pinned = self._index.pinned_bytes_in_memory() if size > self.lent else 0
        self.lent = size
        room = max(0, self._config.memory_bytes - size)
        if pinned <= room:
            self.shrink_memory(room, loan=True)
        return max(0, self._index.bytes_in(Tier.MEMORY) + self._overdue_bytes + size - self._config.memory_bytes)

    def shrink_memory(self, limit: int, *, loan: bool = False, patient: bool = False) -> bool:
        """Spill or evict until the memory tier holds at most `limit` bytes; False if pins forbid it.

        `loan`: the queue's limit does not count. `patient`: rather than evict what somebody asked for and only the
        queue has no room for, give up.
        """
        while self._index.bytes_in(Tier.MEMORY) > limit:
            oldest = self._index.pop_oldest_resident()
            if oldest is None:
                return False
            if self._spills(oldest, loan=loan):
                self._index.move(oldest, Tier.PENDING)
                self._enqueue(oldest)
                continue
            self._index.keep(oldest)
            waits = patient and oldest.explicit and self._disk.refusal() is None and self._spills(oldest, loan=True)
            if waits or not self._ledger.evict(Tier.MEMORY):
                return False
        return True

    def make_explicit(self, entry: Entry) -> None:
        """What was only passed is asked for: on to disk if that is where its kind belongs."""
        entry.explicit = True
        if entry.tier is Tier.MEMORY and entry.record.kind not in RESIDENT and self._spills(entry):
            self._index.move(entry, Tier.PENDING)
            self._enqueue(entry)

    def _spills(self, entry: Entry, *, loan: bool = False) -> bool:
        """Whether a record in memory may go to disk now."""
        if entry.size > self._max_payload_bytes or not self._may_write(explicit=entry.explicit):
            return False
        if not self._affords(entry.size, explicit=entry.explicit):
            self._ledger.tally.skipped[PutResult.SKIPPED_WRITE_BUDGET] += 1
            return False
        return loan or self._queue_takes(entry.size, explicit=entry.explicit)

    def _may_write(self, *, explicit: bool) -> bool:
        policy = self._config.checkpoints.policy
        return policy is CheckpointPolicy.THROUGH or (policy is CheckpointPolicy.MARKS and explicit)

    def _affords(self, size: int, *, explicit: bool) -> bool:
        """Whether the day's bytes suffice for this record and all that waits before it."""
        ahead = self._index.bytes_in(Tier.PENDING) + self._index.records_in(Tier.PENDING) * RECORD_OVERHEAD
        return explicit or self._budget_takes(ahead + size + RECORD_OVERHEAD)

    def queue_limit(self, *, explicit: bool) -> int:
        return self._config.queue_bytes * (2 if explicit else 1)

    def _queue_takes(self, size: int, *, explicit: bool) -> bool:
        """A record of any size has its turn, for else one that is too large for the queue would never reach the disk.

        One that was asked for waits for others of its like only: what was not leaves it room.
        """
        waiting = self._index.bytes_in(Tier.PENDING)
        has_turn = waiting <= self._config.queue_bytes if explicit else not waiting
        return has_turn or waiting + size <= self.queue_limit(explicit=explicit)

    def _enqueue(self, entry: Entry) -> None:
        if entry.size > self._config.queue_bytes:
            self._large = entry
        self._to_disk(entry)
