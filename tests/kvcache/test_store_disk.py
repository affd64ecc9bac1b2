"""The tiered store's disk: its budget, reads from every tier, and a disk that fails."""

from __future__ import annotations

import errno

import pytest
from storage_doubles import FaultyStorage, payload, record
from store_rig import FULL, SIZE, Clock, holds, put, put_all, store_over, tiers

from kvcache.errors import CorruptRecord, MissingRecord, UnreadableRecord
from kvcache.format import RECORD_OVERHEAD
from kvcache.records import FetchResult, Loss, PutResult, Tier
from kvcache.storage import MemoryStorage
from kvcache.store import TieredStore

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
