"""The tiered store: placement, spilling, and the bounds of the queue."""

from __future__ import annotations

import pytest
from storage_doubles import GatedStorage, payload, record
from store_rig import FULL, LOGITS, SIZE, STATE, WINDOW, holds, put, put_all, store_over, tiers

from kvcache.records import FetchResult, Loss, PutResult, RecordId, RecordKind, Tier

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
