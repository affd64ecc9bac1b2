"""The day's write budget: what is counted, when it begins anew, and what is left out once it is spent."""

from __future__ import annotations

import pytest
from storage_doubles import payload, record

from kvcache.format import RECORD_OVERHEAD, SEGMENT_HEADER
from kvcache.records import PutResult, RecordKind, Tier
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore
from kvcache.write_budget import DAY_SECONDS, WriteBudget

SIZE = 100
WRITTEN = SIZE + RECORD_OVERHEAD


class Wall:
    def __init__(self) -> None:
        self.now = 20_000 * DAY_SECONDS + 5.0

    def __call__(self) -> float:
        return self.now


def store_with(limit: int | None, wall: Wall, *, memory: int = 0, disk: int = 100_000) -> TieredStore:
    config = StoreConfig(
        memory_bytes=memory, disk_bytes=disk, queue_bytes=1_000, min_free_bytes=0, daily_write_bytes=limit
    )
    return TieredStore(config, MemoryStorage(), clock=lambda: 0.0, wall_clock=wall)


def put(store: TieredStore, name: object, kind: RecordKind = RecordKind.STATE, *, explicit: bool = False) -> PutResult:
    return store.put(record(name, kind), payload(name, SIZE), explicit=explicit)


def test_a_day_is_counted_and_the_next_begins_at_0() -> None:
    budget = WriteBudget(100)
    budget.count(60, 10.0)
    assert budget.allows(40, 20.0) and not budget.allows(41, 20.0)
    budget.count(70, DAY_SECONDS - 1)
    assert budget.spent(DAY_SECONDS - 1) == 130
    assert budget.spent(DAY_SECONDS) == 0 and budget.allows(100, DAY_SECONDS)
    budget.count(5, DAY_SECONDS + 1)
    assert budget.spent(3.0) == 0  # the clock was set back


def test_without_a_limit_all_is_allowed_and_counted() -> None:
    budget = WriteBudget(None)
    budget.count(10**15, 0.0)
    assert budget.allows(10**15, 0.0) and budget.spent(0.0) == 10**15


def test_implicit_records_are_skipped_and_counted_once_the_day_is_spent_and_taken_again_the_next() -> None:
    wall = Wall()
    store = store_with(SEGMENT_HEADER.size + 3 * WRITTEN, wall)
    results = []
    for name in range(6):
        results.append(put(store, name))
        store.run_pending()
    # The segment's header comes out of the budget as well.
    assert results == [PutResult.STORED] * 3 + [PutResult.SKIPPED_WRITE_BUDGET] * 3
    assert store.stats().written_today == SEGMENT_HEADER.size + 3 * WRITTEN == store.stats().file_bytes
    assert store.stats().skipped == {PutResult.SKIPPED_WRITE_BUDGET: 3}
    wall.now += DAY_SECONDS
    assert store.stats().written_today == 0
    assert put(store, 9) is PutResult.STORED
    store.close()


def test_what_waits_in_the_queue_counts_before_it_is_written() -> None:
    store = store_with(3 * WRITTEN, Wall())
    assert [put(store, name).held for name in range(5)] == [True] * 3 + [False] * 2
    store.close()


def test_what_was_asked_for_by_name_is_written_beyond_the_limit_and_counted() -> None:
    store = store_with(0, Wall())
    assert put(store, 1) is PutResult.SKIPPED_WRITE_BUDGET
    assert put(store, 2, explicit=True) is PutResult.STORED
    store.run_pending()
    assert store.locate(record(2, RecordKind.STATE)) is Tier.DISK
    assert store.stats().written_today == SEGMENT_HEADER.size + WRITTEN
    store.close()


def test_memory_that_may_not_spill_is_evicted_unless_a_handle_stands_on_it() -> None:
    store = store_with(0, Wall(), memory=2 * SIZE)
    for name in range(4):
        assert put(store, name, RecordKind.FULL) is PutResult.STORED
        if name == 1:
            store.claim([record(1, RecordKind.FULL)])
    tiers = [store.locate(record(name, RecordKind.FULL)) for name in range(4)]
    assert tiers == [None, Tier.PENDING, Tier.MEMORY, Tier.MEMORY]
    assert store.stats().skipped == {PutResult.SKIPPED_WRITE_BUDGET: 1}
    assert list(store.drain_lost()) == [record(0, RecordKind.FULL)]
    store.close()


def test_what_no_name_stands_on_any_more_is_as_any_other() -> None:
    store = store_with(0, Wall(), memory=2 * SIZE)
    first = record(0, RecordKind.FULL)
    store.claim([first])
    store.claim([first])
    put(store, 0, RecordKind.FULL)
    store.disclaim([first])
    put(store, 1, RecordKind.FULL)
    put(store, 2, RecordKind.FULL)
    assert store.locate(first) is Tier.PENDING, "a second name stands on it; that it was claimed before it came counts"
    put(store, 3, RecordKind.FULL, explicit=True)
    store.claim([record(3, RecordKind.FULL)])
    store.disclaim([first, record(3, RecordKind.FULL)])
    for name in range(4, 6):
        put(store, name, RecordKind.FULL)
    assert store.locate(record(3, RecordKind.FULL)) is None, "its name is gone: not written beyond the limit"
    store.close()


def test_copies_that_cleaning_makes_are_counted() -> None:
    store = store_with(None, Wall(), disk=20_000)
    for name in range(80):
        put(store, name)
        store.run_pending()
    store.pin(record(name, RecordKind.STATE) for name in range(0, 80, 4))
    for name in range(100, 180):
        put(store, name)
        store.run_pending()
    stats = store.stats()
    assert stats.copied_on.records > 0
    records = stats.written.records + stats.copied_on.records
    assert stats.written_today > records * WRITTEN
    store.close()


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="daily_write_bytes"):
        StoreConfig(memory_bytes=0, disk_bytes=0, queue_bytes=0, daily_write_bytes=-1)
