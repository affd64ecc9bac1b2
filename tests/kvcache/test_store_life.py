"""The tiered store: what is deleted and trimmed, its thread, and its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_doubles import FaultyStorage, GatedStorage, payload, record
from store_rig import FULL, SIZE, holds, put, put_all, store_over, tiers

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.errors import MissingRecord, StoreClosed
from kvcache.records import FetchResult, PutResult, RecordKind, Tier
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore

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
