"""The tiered store: placement, spilling, eviction, reads from every tier, and a disk that fails."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_doubles import FaultyStorage, GatedStorage, payload, record

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.errors import CorruptRecord, MissingRecord, StoreClosed, UnreadableRecord
from kvcache.format import RECORD_OVERHEAD
from kvcache.records import FetchResult, Loss, PutResult, RecordId, RecordKind, Tier
from kvcache.storage import MemoryStorage, Storage
from kvcache.store import StoreConfig, TieredStore

FULL, WINDOW, STATE, LOGITS, *_ = RecordKind
SIZE = 100


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def store_over(
    storage: Storage | None = None, *, clock: Clock | None = None, **overrides: int | float | bool
) -> TieredStore:
    """Not started: the tests run the I/O thread's jobs themselves. Memory takes 10 records, the queue 5."""
    config: dict[str, int | float | bool] = {
        "memory_bytes": 10 * SIZE,
        "disk_bytes": 100_000,
        "queue_bytes": 5 * SIZE,
        "min_free_bytes": 0,
    }
    return TieredStore(
        StoreConfig(**{**config, **overrides}),  # type: ignore[arg-type]
        storage if storage is not None else MemoryStorage(),
        clock if clock is not None else Clock(),
    )


def put(store: TieredStore, name: object, kind: RecordKind = WINDOW, *, explicit: bool = False) -> PutResult:
    return store.put(record(name, kind), payload(name, SIZE), explicit=explicit)


def put_all(store: TieredStore, names: range, kind: RecordKind = WINDOW) -> None:
    """One at a time through the queue."""
    for name in names:
        assert put(store, name, kind) is PutResult.STORED
        store.run_pending()


def tiers(store: TieredStore, names: range, kind: RecordKind = WINDOW) -> list[Tier | None]:
    return [store.locate(record(name, kind)) for name in names]


def holds(store: TieredStore, name: object, kind: RecordKind = WINDOW) -> bool:
    """Whether the record comes back as it was put."""
    result = store.fetch_now([record(name, kind)])
    if result.ok:
        assert [bytes(data) for data in result.payloads] == [payload(name, SIZE)]
    return result.ok


# Placement


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_local_records_are_pending_until_written_and_then_leave_memory(kind: RecordKind) -> None:
    store = store_over()
    assert put(store, 1, kind) is PutResult.STORED
    assert store.locate(record(1, kind)) is Tier.PENDING
    assert store.stats().pending_bytes == SIZE
    assert holds(store, 1, kind)
    store.run_pending()
    assert store.locate(record(1, kind)) is Tier.DISK
    assert store.size(record(1, kind)) == SIZE
    assert store.stats().pending_bytes == store.stats().memory_bytes == 0
    assert holds(store, 1, kind)
    store.close()


def test_full_records_stay_in_memory_and_the_least_recently_used_spill_beyond_the_budget() -> None:
    store = store_over()
    put_all(store, range(10), FULL)
    assert tiers(store, range(10), FULL) == [Tier.MEMORY] * 10
    store.touch([record(2, FULL), record(0, FULL)])
    assert put(store, 10, FULL) is PutResult.STORED
    assert put(store, 11, FULL) is PutResult.STORED
    spilled = {1, 3}
    assert [name for name in range(12) if store.locate(record(name, FULL)) is Tier.PENDING] == sorted(spilled)
    store.run_pending()
    assert [name for name in range(12) if store.locate(record(name, FULL)) is Tier.DISK] == sorted(spilled)
    assert store.stats().memory_bytes == 10 * SIZE
    assert all(holds(store, name, FULL) for name in range(12))
    store.close()


def test_full_records_that_cannot_spill_are_evicted_rather_than_exceed_memory() -> None:
    store = store_over()
    for name in range(17):  # 10 in memory, 5 in the queue, 2 too many
        assert put(store, name, FULL) is PutResult.STORED
    assert store.stats().memory_bytes == 10 * SIZE
    assert store.stats().pending_bytes == 5 * SIZE
    assert tiers(store, range(17), FULL) == [Tier.PENDING] * 5 + [None] * 2 + [Tier.MEMORY] * 10
    assert store.drain_lost() == {record(5, FULL): Loss.EVICTED, record(6, FULL): Loss.EVICTED}
    assert store.drain_lost() == {}
    store.close()


def test_a_record_larger_than_memory_goes_to_disk_and_one_too_large_for_disk_stays_in_memory() -> None:
    store = store_over(memory_bytes=50)
    assert put(store, 1, FULL) is PutResult.STORED
    assert store.locate(record(1, FULL)) is Tier.PENDING
    store.close()
    store = store_over(disk_bytes=0)
    assert put(store, 1, STATE) is PutResult.STORED
    store.run_pending()
    assert store.locate(record(1, STATE)) is Tier.MEMORY
    for name in range(2, 12):
        put(store, name, STATE)
    assert store.locate(record(1, STATE)) is None
    assert store.put(record("huge"), bytes(11 * SIZE), explicit=True) is PutResult.SKIPPED_TOO_LARGE
    store.close()


def test_a_record_larger_than_the_queue_has_its_turn_and_others_keep_their_room_in_memory() -> None:
    store = store_over(queue_bytes=SIZE)
    large = payload("large", 5 * SIZE)
    put_all(store, range(10), FULL)
    assert put(store, 1) is PutResult.STORED
    assert store.put(record("passing"), large, explicit=False) is PutResult.SKIPPED_QUEUE_FULL
    assert store.put(record("large"), large, explicit=True) is PutResult.STORED, "what nobody asked for leaves it room"
    assert store.put(record("next"), large, explicit=True, patient=True) is PutResult.SKIPPED_QUEUE_FULL
    assert store.stats().pending_bytes == 6 * SIZE
    assert store.put(record("logits", LOGITS), payload("logits", 1), explicit=True) is PutResult.STORED
    assert sum(tier is Tier.MEMORY for tier in tiers(store, range(10), FULL)) == 9, "as much as one byte more takes"
    store.run_pending()
    assert store.locate(record("large")) is Tier.DISK
    assert store.put(record("next"), large, explicit=False) is PutResult.STORED, "an empty queue takes any"
    store.run_pending()
    assert bytes(store.fetch_now([record("large")]).payloads[0]) == large
    store.close()


def test_a_resident_record_larger_than_the_queue_spills_rather_than_is_lost() -> None:
    store = store_over(queue_bytes=SIZE)
    for name in range(3):
        assert store.put(record(name, FULL), payload(name, 5 * SIZE), explicit=True) is PutResult.STORED
    assert tiers(store, range(3), FULL) == [Tier.PENDING, Tier.MEMORY, Tier.MEMORY]
    store.close()


def test_a_record_is_stored_once_and_putting_it_again_counts_as_a_use() -> None:
    store = store_over()
    put_all(store, range(10), FULL)
    assert put(store, 0, FULL) is PutResult.EXISTS
    put_all(store, range(10, 11), FULL)
    assert store.locate(record(0, FULL)) is Tier.MEMORY
    assert store.locate(record(1, FULL)) is Tier.DISK
    assert put(store, 1, FULL) is PutResult.EXISTS
    store.close()


def test_kinds_of_one_key_are_records_of_their_own() -> None:
    store = store_over()
    key = bytes(32)
    for kind in RecordKind:
        store.put(RecordId(key, kind), kind.name.encode(), explicit=False)
    store.run_pending()
    result = store.fetch_now([RecordId(key, kind) for kind in RecordKind])
    assert [bytes(data) for data in result.payloads] == [kind.name.encode() for kind in RecordKind]
    assert result.tiers == [Tier.MEMORY, Tier.DISK, Tier.DISK, Tier.MEMORY, Tier.MEMORY]
    store.close()


@pytest.mark.parametrize("kind", [FULL, WINDOW])
def test_empty_and_multi_byte_payloads_come_back_as_bytes(kind: RecordKind) -> None:
    store = store_over()
    store.put(record("empty", kind), b"", explicit=False)
    store.put(record("wide", kind), memoryview(bytes(range(80))).cast("d"), explicit=False)
    for _ in range(2):
        result = store.fetch_now([record("empty", kind), record("wide", kind)])
        assert [bytes(data) for data in result.payloads] == [b"", bytes(range(80))]
        assert result.sizes == [0, 80]
        store.run_pending()
    store.close()


# Bounds of the queue


def test_an_implicit_record_is_skipped_when_the_queue_is_full_and_an_explicit_one_may_use_twice_as_much() -> None:
    store = store_over()
    assert [put(store, name) for name in range(6)] == [PutResult.STORED] * 5 + [PutResult.SKIPPED_QUEUE_FULL]
    assert [put(store, name, explicit=True) for name in range(6, 12)] == [
        *[PutResult.STORED] * 5,
        PutResult.SKIPPED_QUEUE_FULL,
    ]
    assert store.stats().pending_bytes == 10 * SIZE
    assert store.stats().skipped == {PutResult.SKIPPED_QUEUE_FULL: 2}
    store.run_pending()
    assert put(store, 5) is PutResult.STORED
    store.close()


def test_a_record_put_again_by_name_may_use_the_second_half_of_the_queue() -> None:
    store = store_over()
    put_all(store, range(10), FULL)
    assert put(store, 0, FULL, explicit=True) is PutResult.EXISTS
    store.touch(record(name, FULL) for name in range(1, 10))
    for name in range(100, 105):
        put(store, name)
    put(store, 10, FULL)
    put(store, 11, FULL)
    assert tiers(store, range(2), FULL) == [Tier.PENDING, None]
    store.close()


def test_a_follow_up_reads_pending_records_while_the_disk_stands_still() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    put(store, 0)
    put(store, 1)
    assert storage.waiting.wait(10)
    results: list[FetchResult] = []
    store.fetch([record(0), record(1)], results.append)
    assert [bytes(data) for data in results[0].payloads] == [payload(0, SIZE), payload(1, SIZE)]
    assert results[0].tiers == [Tier.PENDING] * 2
    storage.open_gate()
    assert store.flush(10)
    assert tiers(store, range(2)) == [Tier.DISK] * 2
    store.close()


def test_memory_stays_bounded_while_the_disk_stands_still() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    for name in range(300):
        put(store, name, RecordKind(1 + name % 4), explicit=name % 3 == 0)
        stats = store.stats()
        assert stats.memory_bytes <= 10 * SIZE
        assert stats.pending_bytes <= 2 * 5 * SIZE
    assert store.stats().skipped[PutResult.SKIPPED_QUEUE_FULL] > 100
    storage.open_gate()
    assert store.flush(10)
    assert store.stats().write_errors == 0
    store.close()


def test_flush_says_when_records_are_still_pending() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    put(store, 0)
    assert not store.flush(0.01)
    storage.open_gate()
    assert store.flush(10)
    store.close()


# The disk budget


def test_the_disk_tier_evicts_the_least_recently_used_and_never_exceeds_its_budget() -> None:
    storage = MemoryStorage()
    store = store_over(storage, disk_bytes=10_000)
    lost = []
    for name in range(200):
        put_all(store, range(name, name + 1))
        store.touch([record(0)])
        assert sum(storage.sizes().values()) == store.stats().file_bytes <= 10_000
        lost += store.drain_lost()
    assert lost == [record(name) for name in range(1, 1 + len(lost))]
    assert len(lost) > 100
    assert holds(store, 0)
    assert all(holds(store, name) for name in range(1 + len(lost), 200))
    assert store.stats().evicted[Tier.DISK].records == len(lost)
    store.close()


def test_space_is_won_back_by_cleaning_when_the_survivors_are_scattered() -> None:
    store = store_over(disk_bytes=20_000)
    put_all(store, range(80))
    keep = [record(name) for name in range(0, 80, 4)]
    store.pin(keep)
    put_all(store, range(100, 180))
    stats = store.stats()
    assert stats.copied_on.records > 0
    assert stats.file_bytes <= 20_000
    assert all(holds(store, name) for name in range(0, 80, 4))
    assert stats.written.records == 160
    store.close()


def test_records_that_go_in_the_order_they_came_are_never_copied_on() -> None:
    store = store_over(disk_bytes=20_000)
    put_all(store, range(400))
    assert store.stats().evicted[Tier.DISK].records > 250
    assert store.stats().copied_on.records == 0
    store.close()


def cleaning_store(storage: FaultyStorage) -> TieredStore:
    """One in four records is pinned, and enough of the rest came and went that the next puts clean."""
    store = store_over(storage, disk_bytes=20_000)
    put_all(store, range(80))
    store.pin(record(name) for name in range(0, 80, 4))
    while not store.stats().copied_on.records:
        put_all(store, range(1000 + storage.writes, 1001 + storage.writes))
    return store


def test_a_read_that_arrives_while_segments_are_cleaned_is_answered_between_two_copies() -> None:
    storage = FaultyStorage()
    store = cleaning_store(storage)
    answered_at: list[int] = []

    def ask(number: int) -> None:
        store.fetch([record(0)], lambda result: answered_at.append(storage.writes if result.ok else -1))
        storage.before_write = lambda number: None

    copies = store.stats().copied_on.records
    while store.stats().copied_on.records == copies:
        storage.before_write, begun = ask, storage.writes
        put_all(store, range(5000 + begun, 5001 + begun))
    assert begun < answered_at[-1] < storage.writes  # after the first copy, before the record that needed the room
    store.close()


def test_a_record_deleted_while_it_is_copied_on_leaves_no_bytes() -> None:
    storage = FaultyStorage()
    store = store_over(storage)
    put_all(store, range(1))
    entry = store._index.get(record(0))
    assert entry is not None
    assert entry.extent is not None
    storage.before_write = lambda number: store.delete([record(0)])
    store._disk._copy_on(record(0), entry.extent)
    assert store.stats().copied_on.records == 1
    store.run_pending()
    assert storage.sizes() == {}
    assert (store.stats().file_bytes, store.stats().failed_jobs) == (0, 0)
    store.close()


def test_touched_suffix_first_a_chain_loses_its_end_first() -> None:
    store = store_over(disk_bytes=10_000)
    chain = [record(name) for name in range(20)]
    put_all(store, range(20))
    store.touch(reversed(chain))
    put_all(store, range(100, 110 + 20))
    lost = [name for name in range(20) if store.locate(chain[name]) is None]
    assert lost == list(range(20 - len(lost), 20))
    assert 0 < len(lost) < 20
    store.close()


def test_a_touch_counts_while_the_record_is_pending() -> None:
    store = store_over(disk_bytes=10_000, queue_bytes=100 * SIZE)
    for name in range(20):
        put(store, name)
    store.touch([record(name) for name in reversed(range(20))])
    store.run_pending()
    put_all(store, range(100, 140))
    assert [store.locate(record(name)) is None for name in (0, 19)] == [False, True]
    store.close()


def test_pinned_records_are_never_evicted_and_make_new_ones_wait() -> None:
    clock = Clock()
    store = store_over(disk_bytes=5_000, clock=clock)
    put_all(store, range(60))
    held = [name for name in range(60) if store.locate(record(name))]
    store.pin(record(name) for name in held)
    store.pin([record(held[0])])
    for name in range(100, 130):
        put(store, name)
        store.run_pending()
        clock.now += 100
    assert all(holds(store, name) for name in held)
    assert store.stats().pinned == len(held)
    put(store, 200)
    store.run_pending()
    assert put(store, 201) is PutResult.SKIPPED_DISK_FULL
    store.unpin(record(name) for name in held)
    assert put(store, 202) is PutResult.STORED  # room can be made again: no need to wait for the pause to end
    store.run_pending()
    assert store.locate(record(202)) is Tier.DISK
    assert holds(store, held[0])  # still pinned once
    store.close()


def test_pinned_full_records_make_new_ones_go_to_disk() -> None:
    store = store_over()
    put_all(store, range(10), FULL)
    store.pin(record(name, FULL) for name in range(10))
    assert put(store, 10, FULL) is PutResult.STORED
    assert store.locate(record(10, FULL)) is Tier.PENDING
    assert tiers(store, range(10), FULL) == [Tier.MEMORY] * 10
    store.close()
    store = store_over(disk_bytes=0)
    put_all(store, range(10), FULL)
    store.pin(record(name, FULL) for name in range(10))
    assert put(store, 10, FULL) is PutResult.SKIPPED_MEMORY_FULL
    store.close()


def test_a_pin_may_come_before_its_record_and_outlive_it() -> None:
    store = store_over()
    store.pin([record(0, FULL)])
    put_all(store, range(20), FULL)
    assert store.locate(record(0, FULL)) is Tier.MEMORY
    store.delete([record(0, FULL)])
    put_all(store, range(1), FULL)
    put_all(store, range(20, 40), FULL)
    assert store.locate(record(0, FULL)) is Tier.MEMORY
    store.unpin([record(0, FULL)])
    with pytest.raises(ValueError, match="not pinned"):
        store.unpin([record(0, FULL)])
    put_all(store, range(40, 60), FULL)
    assert store.locate(record(0, FULL)) is Tier.DISK
    store.close()


def test_writing_never_takes_free_space_below_the_floor() -> None:
    storage = MemoryStorage(size_bytes=20_000)
    store = store_over(storage, disk_bytes=1_000_000, min_free_bytes=5_000, segment_bytes=1_000)
    for name in range(300):
        put(store, name)
        store.run_pending()
        assert storage.free_bytes() >= 5_000
    assert store.stats().disk_bytes > 0
    assert holds(store, 299)
    storage.size_bytes = 5_000 + sum(storage.sizes().values()) // 2  # somebody else fills the disk
    put(store, 1000)
    store.run_pending()
    assert storage.free_bytes() >= 5_000
    store.close()


# Reads


def test_a_fetch_is_all_or_nothing_and_says_what_came_from_where() -> None:
    store = store_over()
    put_all(store, range(3), FULL)
    put_all(store, range(3))
    put(store, 3)
    names = [record(0, FULL), record(0), record(3), record(2)]
    result = store.fetch_now(names)
    assert result.tiers == [Tier.MEMORY, Tier.DISK, Tier.PENDING, Tier.DISK]
    assert result.sizes == [SIZE] * 4
    assert (result.bytes_from(Tier.DISK), result.bytes_from(Tier.MEMORY)) == (2 * SIZE, SIZE)
    assert [bytes(data) for data in result.payloads] == [payload(name, SIZE) for name in (0, 0, 3, 2)]
    refused = store.fetch_now([*names, record("never"), record("neither")])
    assert isinstance(refused.error, MissingRecord)
    assert (refused.ok, refused.failed, refused.payloads) == (False, record("never"), [])
    assert store.stats().missing == 1
    store.close()


def test_an_empty_fetch_is_answered() -> None:
    store = store_over()
    assert store.fetch_now([]) == FetchResult(payloads=[], tiers=[], sizes=[])
    store.close()


def test_a_read_goes_ahead_of_queued_writes() -> None:
    store = store_over()
    put_all(store, range(1))
    order: list[object] = []
    for name in range(1, 4):
        put(store, name)
    store.fetch([record(0), record(1)], lambda result: order.append((result.tiers, store.stats().pending_bytes)))
    store.run_pending()
    assert order == [([Tier.DISK, Tier.PENDING], 3 * SIZE)]
    store.close()


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    store = store_over()
    store.start()
    put(store, 0)
    assert store.flush(10)
    store.fetch([record(0)], lambda result: 1 // 0)  # type: ignore[arg-type, return-value]
    assert holds(store, 0)
    put(store, 1)
    assert store.flush(10)
    assert store.stats().failed_jobs == 1
    assert "ZeroDivisionError" in store.stats().last_error
    store.close()


DAMAGE = {
    "magic": 0,
    "version": 4,
    "kind": 5,
    "flags": 6,
    "key id": 8,
    "length": 12,
    "key": 20,
    "nonce": 50,
    "header checksum": 61,
    "first byte of the payload": 64,
    "middle of the payload": 64 + SIZE // 2,
    "last byte of the payload": 64 + SIZE - 1,
    "trailer": 64 + SIZE + 2,
}


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("offset", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_record_is_dropped_counted_and_logged_once(
    offset: int, caplog: pytest.LogCaptureFixture, *, encrypt: bool
) -> None:
    storage = MemoryStorage()
    store = store_over(storage, encrypt=encrypt)
    put_all(store, range(3))
    storage.segments[0][64 + SIZE + RECORD_OVERHEAD + offset] ^= 0x40
    result = store.fetch_now([record(0), record(1), record(2)])
    assert isinstance(result.error, CorruptRecord)
    assert (result.failed, result.payloads) == (record(1), [])
    assert store.locate(record(1)) is None
    assert store.drain_lost() == {record(1): Loss.CORRUPT}
    assert isinstance(store.fetch_now([record(1)]).error, MissingRecord)
    assert store.stats().corrupt == 1
    assert len(caplog.records) == 1
    assert holds(store, 0)
    assert holds(store, 2)
    put_all(store, range(1, 2))
    assert holds(store, 1)
    store.close()


@pytest.mark.parametrize("kept", [0, 63, 64, 64 + SIZE, 64 + SIZE + 15])
def test_a_file_cut_short_loses_the_records_behind_the_cut_and_no_other(kept: int) -> None:
    storage = MemoryStorage()
    store = store_over(storage)
    put_all(store, range(3))
    del storage.segments[0][64 + SIZE + RECORD_OVERHEAD + kept :]
    assert [holds(store, name) for name in range(3)] == [True, False, False]
    assert store.stats().corrupt == 2
    store.close()


def test_two_records_swapped_on_disk_are_both_refused() -> None:
    storage = MemoryStorage()
    store = store_over(storage)
    put_all(store, range(3))
    data, length = storage.segments[0], SIZE + RECORD_OVERHEAD
    first, second = slice(64, 64 + length), slice(64 + length, 64 + 2 * length)
    data[first], data[second] = data[second], data[first]
    assert [holds(store, name) for name in range(3)] == [False, False, True]
    store.close()


def test_a_damaged_record_met_while_cleaning_is_dropped_and_the_others_go_on() -> None:
    storage = MemoryStorage()
    store = store_over(storage, disk_bytes=20_000)
    put_all(store, range(80))
    keep = range(0, 80, 4)
    store.pin(record(name) for name in keep)
    for data in storage.segments.values():
        data[64 + 20] ^= 1  # the key of each segment's first record
    put_all(store, range(100, 180))
    lost = [name for name in keep if store.locate(record(name)) is None]
    assert len(lost) == store.stats().corrupt > 0
    assert all(holds(store, name) for name in keep if name not in lost and store.locate(record(name)))
    store.close()


def test_a_read_error_refuses_the_fetch_and_drops_the_record() -> None:
    storage = FaultyStorage()
    store = store_over(storage)
    put_all(store, range(2))
    storage.read_fails = True
    assert isinstance(store.fetch_now([record(0), record(1)]).error, UnreadableRecord)
    storage.read_fails = False
    assert [holds(store, name) for name in range(2)] == [False, True]
    store.close()


# A disk that fails


def test_a_failed_write_drops_its_record_and_the_next_one_is_written() -> None:
    storage = FaultyStorage()
    storage.fail_writes = {3}  # 1: the segment's header, 2: record 0
    storage.error, storage.torn = errno.ENOSPC, 30
    store = store_over(storage)
    for name in range(3):
        put(store, name)
    store.run_pending()
    assert tiers(store, range(3)) == [Tier.DISK, None, Tier.DISK]
    assert store.drain_lost() == {record(1): Loss.NOT_WRITTEN}
    assert (holds(store, 0), holds(store, 2)) == (True, True)
    assert store.stats().write_errors == 1
    assert "write fails" in store.stats().last_error
    store.close()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(errno.ENOSPC, PutResult.SKIPPED_DISK_FULL), (errno.EIO, PutResult.SKIPPED_DISK_ERROR)],
)
def test_failures_in_a_row_pause_writing_and_one_success_ends_the_pause(
    error: int, reason: PutResult, caplog: pytest.LogCaptureFixture
) -> None:
    storage, clock = FaultyStorage(), Clock()
    storage.broken, storage.error = True, error
    store = store_over(storage, clock=clock, retry_pause_s=1.0)
    for name in range(5):
        put(store, name)
    store.run_pending()
    assert storage.writes == 3
    assert store.stats().paused
    assert tiers(store, range(5)) == [None] * 3 + [Tier.PENDING] * 2
    assert holds(store, 3)  # kept while the pause lasts, and readable
    assert put(store, 5) is reason
    assert put(store, 5, explicit=True) is PutResult.STORED
    clock.now = 1.0
    store.run_pending()
    assert storage.writes == 4  # one attempt, then a pause twice as long
    clock.now = 2.5
    store.run_pending()
    assert storage.writes == 4
    storage.broken = False
    clock.now = 3.0
    store.run_pending()
    assert tiers(store, range(6)) == [None] * 4 + [Tier.DISK] * 2
    assert not store.stats().paused
    assert put(store, 6) is PutResult.STORED
    assert len([entry for entry in caplog.records if "pause" in entry.message]) == 2
    store.close()


def test_a_pinned_record_that_cannot_be_written_stays_readable_from_memory() -> None:
    storage, clock = FaultyStorage(), Clock()
    storage.broken = True
    store = store_over(storage, clock=clock)
    put(store, 0)
    store.pin([record(0)])
    for _ in range(10):
        store.run_pending()
        clock.now += 100
    assert store.locate(record(0)) is Tier.PENDING
    assert holds(store, 0)
    assert list(store.drain_lost()) == []
    storage.broken = False
    store.run_pending()
    assert store.locate(record(0)) is Tier.DISK
    store.close()


def test_a_storage_that_raises_the_unexpected_does_not_block_the_queue() -> None:
    class Broken(FaultyStorage):
        def write(self, segment: int, offset: int, parts: object) -> None:
            raise LookupError("a bug")

    store = store_over(Broken())
    store.start()
    put(store, 0)
    assert store.flush(10)
    assert store.locate(record(0)) is None
    assert store.stats().last_error == "LookupError: a bug"
    store.close()


def test_a_full_record_lost_while_spilling_is_reported() -> None:
    storage = FaultyStorage()
    storage.broken = True
    store = store_over(storage)
    put_all(store, range(10), FULL)
    put_all(store, range(10, 11), FULL)
    assert store.locate(record(0, FULL)) is None
    assert list(store.drain_lost()) == [record(0, FULL)]
    assert store.stats().memory_bytes == 10 * SIZE
    store.close()


# Deleting and trimming


def test_deleted_records_are_gone_from_every_tier_and_not_reported() -> None:
    storage = MemoryStorage()
    store = store_over(storage)
    put_all(store, range(5), FULL)
    put_all(store, range(5))
    put(store, 5)
    store.delete([record(name, FULL) for name in range(5)])
    store.delete([record(name) for name in range(6)])
    assert tiers(store, range(5), FULL) == [None] * 5
    assert tiers(store, range(6)) == [None] * 6
    store.run_pending()
    assert storage.sizes() == {}
    stats = store.stats()
    assert (stats.memory_bytes, stats.pending_bytes, stats.disk_bytes, stats.file_bytes) == (0, 0, 0, 0)
    assert stats.written.records == 5
    assert list(store.drain_lost()) == []
    store.delete([record(0)])
    store.close()


def test_a_record_deleted_while_it_is_written_leaves_no_bytes() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    put(store, 0)
    assert storage.waiting.wait(10)
    store.delete([record(0)])
    assert store.flush(10)
    storage.open_gate()
    put(store, 1)
    assert store.flush(10)
    store.delete([record(1)])
    store.trim(disk_bytes=0)
    assert storage.sizes() == {}
    assert store.stats().failed_jobs == 0
    store.close()


def test_deleting_what_is_pending_ends_a_flush() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    put(store, 0)
    flushed: list[bool] = []
    flusher = threading.Thread(target=lambda: flushed.append(store.flush(60)))
    flusher.start()
    while not store._ledger.settled._waiters:  # type: ignore[attr-defined]
        pass
    store.delete([record(0)])
    flusher.join(10)
    assert flushed == [True]
    storage.open_gate()
    store.close()


def test_a_deleted_record_may_be_put_again_at_once() -> None:
    store = store_over()
    put(store, 0)
    store.delete([record(0)])
    assert put(store, 0) is PutResult.STORED
    store.run_pending()
    assert holds(store, 0)
    assert store.stats().disk_bytes == SIZE
    store.close()


def test_an_eviction_that_was_made_good_is_not_reported() -> None:
    store = store_over(disk_bytes=0)
    put_all(store, range(11), FULL)
    assert store.locate(record(0, FULL)) is None
    put_all(store, range(1), FULL)
    assert list(store.drain_lost()) == [record(1, FULL)]
    store.close()


def test_trimming_memory_spills_and_trimming_disk_gives_space_back() -> None:
    storage = MemoryStorage()
    store = store_over(storage)
    put_all(store, range(8), FULL)
    store.trim(memory_bytes=4 * SIZE)
    store.run_pending()
    assert tiers(store, range(8), FULL) == [Tier.DISK] * 4 + [Tier.MEMORY] * 4
    put_all(store, range(100))
    store.trim(disk_bytes=5_000)
    assert 2_000 < sum(storage.sizes().values()) <= 5_000
    assert holds(store, 99)
    store.pin([record(99)])
    store.trim(memory_bytes=0, disk_bytes=0)
    store.run_pending()
    store.trim(disk_bytes=0)
    assert holds(store, 99)
    assert store.stats().disk_bytes == SIZE
    store.close()


def test_memory_that_is_lent_is_spilled_at_once_and_not_used_until_it_is_given_back() -> None:
    store = store_over()
    put_all(store, range(8), FULL)
    store.lend(7 * SIZE)
    store.run_pending()
    assert tiers(store, range(8), FULL) == [Tier.DISK] * 5 + [Tier.MEMORY] * 3
    put_all(store, range(8, 10), FULL)
    assert store.stats().memory_bytes <= 3 * SIZE
    store.lend(20 * SIZE)  # more than there is
    put_all(store, range(10, 11), FULL)
    assert store.stats().memory_bytes == 0
    assert all(holds(store, name, FULL) for name in range(11))
    store.lend(0)
    put_all(store, range(11, 25), FULL)
    assert store.stats().memory_bytes == 10 * SIZE
    store.close()


def test_a_loan_spills_past_the_queue_s_limit_and_is_whole_once_that_is_written() -> None:
    store = store_over(queue_bytes=SIZE)
    put_all(store, range(10), FULL)
    assert store.lend(10 * SIZE) == 8 * SIZE, "two may wait for the disk beside the budget"
    assert store.stats().evicted[Tier.MEMORY].records == store.stats().evicted[Tier.DISK].records == 0
    assert store.lend(0) == 0
    assert store.put(record(99, FULL), payload(99, 3 * SIZE), explicit=True) is not PutResult.STORED
    store.run_pending()
    assert store.lend(10 * SIZE) == 0
    assert tiers(store, range(10), FULL) == [Tier.DISK] * 10
    store.close()


def test_pinned_memory_is_not_lent_and_asking_for_it_touches_nothing() -> None:
    store = store_over()
    put_all(store, range(10), FULL)
    store.pin(record(name, FULL) for name in range(4))
    assert store.lend(7 * SIZE) > 0
    assert tiers(store, range(10), FULL) == [Tier.MEMORY] * 10
    assert store.lend(6 * SIZE) == 0
    store.run_pending()
    assert tiers(store, range(10), FULL) == [Tier.MEMORY] * 4 + [Tier.DISK] * 6
    store.close()


def test_what_a_loan_leaves_no_room_for_is_not_called_too_large() -> None:
    store = store_over(checkpoints=Checkpoints(policy=CheckpointPolicy.OFF))  # type: ignore[arg-type]
    store.lend(9 * SIZE + 1)
    assert put(store, 1) is PutResult.SKIPPED_MEMORY_FULL
    assert store.put(record(2), payload(2, 10 * SIZE + 1), explicit=True) is PutResult.SKIPPED_TOO_LARGE
    store.lend(0)
    assert put(store, 1) is PutResult.STORED
    store.close()


def test_trimming_on_a_failing_disk_is_counted_and_harmless() -> None:
    storage = FaultyStorage()
    store = store_over(storage)
    put_all(store, range(40))
    store.pin(record(name) for name in range(0, 40, 2))
    storage.broken = True
    store.trim(disk_bytes=0)
    storage.broken = False
    assert all(holds(store, name) for name in range(0, 40, 2))
    assert store.stats().write_errors == 1
    store.close()


# Life


@pytest.fixture
def started(tmp_path: Path) -> Iterator[TieredStore]:
    store = TieredStore(
        StoreConfig(
            directory=tmp_path / "cache",
            memory_bytes=200_000,
            disk_bytes=2_000_000,
            queue_bytes=200_000,
            segment_bytes=100_000,
            min_free_bytes=0,
        )
    )
    store.start()
    yield store
    store.close()


def test_closing_deletes_everything_and_answers_everybody(started: TieredStore, tmp_path: Path) -> None:
    put(started, 0)
    assert started.flush(10)
    put(started, 0, FULL)
    started.pin([record(0)])
    started.close()
    started.close()
    assert list(tmp_path.iterdir()) == []
    results: list[FetchResult] = []
    started.fetch([record(0)], results.append)
    assert isinstance(results[0].error, StoreClosed)
    assert results[0].failed is None
    assert isinstance(started.fetch_now([record(0)]).error, StoreClosed)
    assert put(started, 1) is PutResult.SKIPPED_CLOSED
    assert (started.locate(record(0)), started.locate(record(0, FULL))) == (None, None)
    started.unpin([record(0)])
    started.touch([record(0)])
    started.delete([record(0)])
    started.trim(memory_bytes=0, disk_bytes=0)
    assert started.flush(0.0)
    assert list(started.drain_lost()) == []
    assert started.stats().file_bytes == 0


def test_a_fetch_that_waits_when_the_store_closes_is_refused() -> None:
    storage = GatedStorage()
    store = store_over(storage)
    store.start()
    put(store, 0)
    storage.gate.release(2)
    assert store.flush(10)
    storage.waiting.clear()
    put(store, 1)
    assert storage.waiting.wait(10)
    results: list[FetchResult] = []
    store.fetch([record(0)], results.append)
    closing = threading.Thread(target=store.close)
    closing.start()
    while put(store, 2) is not PutResult.SKIPPED_CLOSED:
        store.delete([record(2)])
    storage.open_gate()
    closing.join(10)
    assert [type(result.error) for result in results] == [StoreClosed]


def test_a_store_closed_before_it_was_started_leaves_nothing(tmp_path: Path) -> None:
    store = TieredStore(
        StoreConfig(directory=tmp_path / "cache", memory_bytes=0, disk_bytes=10_000, queue_bytes=1000, min_free_bytes=0)
    )
    results: list[FetchResult] = []
    put(store, 0)
    store.run_pending()
    store.fetch([record(0)], results.append)
    store.close()
    assert [type(result.error) for result in results] == [StoreClosed]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["memory_bytes", "disk_bytes", "queue_bytes", "min_free_bytes", "segment_bytes"])
def test_a_configuration_that_makes_no_sense_is_refused(field: str) -> None:
    good = {"memory_bytes": 1, "disk_bytes": 1, "queue_bytes": 1, "segment_bytes": 1}
    with pytest.raises(ValueError, match=field):
        StoreConfig(**{**good, field: -1})


def test_threads_that_put_read_pin_and_delete_at_once_never_see_wrong_bytes(
    started: TieredStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    wrong: list[str] = []

    def work(worker: int) -> None:
        import random

        rng = random.Random(worker)
        for _ in range(800):
            name = rng.randrange(400)
            size = 500 + name * 40
            key = record(name, RecordKind(1 + name % 4))
            match rng.randrange(8):
                case 0 | 1 | 2:
                    started.put(key, payload(name, size), explicit=rng.random() < 0.3)
                case 3 | 4 | 5:
                    started.pin([key])
                    result = started.fetch_now([key])
                    if result.ok and bytes(result.payloads[0]) != payload(name, size):
                        wrong.append(f"{key} differs")
                    if not result.ok and not isinstance(result.error, MissingRecord):
                        wrong.append(str(result.error))
                    started.unpin([key])
                case 6:
                    started.touch([key, record(name + 1)])
                case 7 if rng.random() < 0.3:
                    started.delete([key])
                case 7 if rng.random() < 0.05:
                    started.trim(memory_bytes=100_000, disk_bytes=1_000_000)
                case _:
                    started.drain_lost()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert started.flush(30)
    stats = started.stats()
    assert (stats.failed_jobs, stats.write_errors, stats.corrupt, stats.pending_bytes) == (0, 0, 0, 0)
    assert stats.memory_bytes <= 200_000
    assert stats.file_bytes <= 2_000_000
    assert stats.written.records > 100
    assert caplog.records == []
