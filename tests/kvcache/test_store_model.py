"""Random operations against a naive twin. The twin knows which records were accepted and not given up since, and their
bytes; after every operation the store must agree with it, and every bound must hold.

The I/O thread's jobs are run by the test, a few at a time and in between, so that a seed is one history.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from storage_doubles import FaultyStorage, payload, record

from kvcache.errors import CorruptRecord, MissingRecord
from kvcache.format import RECORD_OVERHEAD
from kvcache.records import FetchResult, PutResult, RecordId, RecordKind, Tier
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore

NAMES = 48
MEMORY, QUEUE = 2_000, 1_200


def size_of(name: int) -> int:
    """From nothing to a few hundred bytes; two of a kind that fit hardly anywhere."""
    return (name * 37) % 400 + (3_000 if name % 24 == 23 else 0)


def named(name: int) -> RecordId:
    return record(name, RecordKind(1 + name % 4))


@dataclass
class Twin:
    """What a client may rely on, without tiers, files or order."""

    held: dict[RecordId, bytes] = field(default_factory=dict)
    pins: Counter[RecordId] = field(default_factory=Counter)
    pending_fetches: list[tuple[list[RecordId], list[FetchResult]]] = field(default_factory=list)


class World:
    def __init__(self, seed: int, *, disk_bytes: int, faults: bool, encrypt: bool) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.inner = MemoryStorage()
        self.storage = FaultyStorage(self.inner)
        self.storage.error = errno.ENOSPC
        self.faults = faults
        self.disk_bytes = disk_bytes
        self.store = TieredStore(
            StoreConfig(
                memory_bytes=MEMORY,
                disk_bytes=disk_bytes,
                queue_bytes=QUEUE,
                segment_bytes=2_000,
                min_free_bytes=0,
                encrypt=encrypt,
            ),
            self.storage,
            clock=lambda: self.now,
        )
        self.twin = Twin()
        self.results: Counter[PutResult] = Counter()

    def any_name(self) -> int:
        # Skewed, so that some records live long enough to be copied on and others come and go.
        return min(int(self.rng.expovariate(1 / 16)), NAMES - 1)

    def step(self) -> None:
        rng, store, twin = self.rng, self.store, self.twin
        name = self.any_name()
        key = named(name)
        match rng.choices(
            ["put", "run", "touch", "pin", "unpin", "delete", "fetch", "trim", "wait", "fault"],
            [30, 25, 8, 6, 7, 4, 10, 0.5, 2, 2],
        )[0]:
            case "put":
                data = payload(name, size_of(name))
                result = store.put(key, data, explicit=rng.random() < 0.3)
                self.results[result] += 1
                assert (result is PutResult.EXISTS) <= (key in twin.held)
                if result.held:
                    twin.held[key] = data
            case "run":
                store.run_pending(jobs=rng.randrange(1, 6))
            case "touch":
                store.touch(named(self.any_name()) for _ in range(5))
            case "pin":
                if sum(twin.pins.values()) < 8:
                    twin.pins[key] += 1
                    store.pin([key])
            case "unpin":
                if twin.pins:
                    key = rng.choice(sorted(twin.pins, key=str))
                    twin.pins[key] -= 1
                    twin.pins += Counter()
                    store.unpin([key])
            case "delete":
                store.delete([key])
                twin.held.pop(key, None)
            case "fetch":
                wanted = [named(self.any_name()) for _ in range(rng.randrange(4))]
                results: list[FetchResult] = []
                twin.pending_fetches.append((wanted, results))
                store.fetch(wanted, results.append)
            case "trim":
                store.trim(memory_bytes=rng.randrange(MEMORY), disk_bytes=rng.randrange(self.disk_bytes + 1))
            case "wait":
                self.now += rng.choice([0.5, 100.0])
            case "fault" if self.faults:
                self.storage.broken = rng.random() < 0.5
                self.storage.torn = rng.choice([0, 10, 100])
                self.storage.truncate_fails = rng.random() < 0.2
                self.storage.create_fails = rng.random() < 0.2

    def check(self) -> None:
        store, twin = self.store, self.twin
        lost = store.drain_lost()
        for key in lost:
            assert key not in twin.pins, "a pinned record was evicted"
            del twin.held[key]  # a record is lost once, and only if it was held
        for wanted, results in twin.pending_fetches:
            for result in results:
                self.check_answer(wanted, result)
        twin.pending_fetches = [(wanted, results) for wanted, results in twin.pending_fetches if not results]

        located = {key: tier for name in range(NAMES) if (tier := store.locate(key := named(name)))}
        assert located.keys() == twin.held.keys()
        by_tier = Counter(dict.fromkeys(Tier, 0))
        for key, tier in located.items():
            assert store.size(key) == len(twin.held[key])
            by_tier[tier] += len(twin.held[key])
        stats = store.stats()
        assert (stats.memory_bytes, stats.pending_bytes, stats.disk_bytes) == tuple(by_tier[tier] for tier in Tier)
        assert sum(usage.records for usage in stats.usage.values()) == len(located)
        assert stats.memory_bytes <= MEMORY
        assert stats.pending_bytes <= max(2 * QUEUE, QUEUE + max(map(size_of, range(NAMES))))
        assert stats.file_bytes <= self.disk_bytes
        assert sum(self.inner.sizes().values()) <= stats.file_bytes
        if not self.faults:
            assert sum(self.inner.sizes().values()) == stats.file_bytes
        assert stats.pinned == len(twin.pins)
        assert stats.failed_jobs == 0

    def check_answer(self, wanted: list[RecordId], result: FetchResult) -> None:
        """Right bytes for everything, or the name of one that is missing."""
        if result.ok:
            expected = [payload(name, size_of(name)) for key in wanted for name in range(NAMES) if named(name) == key]
            assert [bytes(data) for data in result.payloads] == expected
        else:
            assert isinstance(result.error, MissingRecord)
            assert result.failed in wanted
            assert result.payloads == []

    def check_reads(self) -> None:
        """Every held record comes back, whichever tier it is in; nothing else does."""
        for name in range(NAMES):
            result = self.store.fetch_now([named(name)])
            held = self.twin.held.get(named(name))
            assert [bytes(data) for data in result.payloads] == ([] if held is None else [held])

    def settle(self) -> None:
        """With the disk well again and nothing in use, everything that was accepted reaches its place."""
        self.storage.broken = self.storage.truncate_fails = self.storage.create_fails = False
        self.store.unpin(list(self.twin.pins.elements()))
        self.twin.pins.clear()
        for _ in range(3):
            self.now += 1000
            self.store.run_pending()


@pytest.mark.parametrize(
    ("disk_bytes", "faults", "encrypt"),
    [
        pytest.param(0, False, True, id="no disk"),
        pytest.param(6_000, False, True, id="small disk, encrypted"),
        pytest.param(6_000, True, False, id="small failing disk, clear"),
        pytest.param(20_000, False, False, id="larger disk, clear"),
        pytest.param(20_000, True, True, id="larger failing disk, encrypted"),
    ],
)
def test_the_store_agrees_with_a_naive_twin(disk_bytes: int, *, faults: bool, encrypt: bool) -> None:
    world = World(disk_bytes + faults, disk_bytes=disk_bytes, faults=faults, encrypt=encrypt)
    for number in range(10_000):
        world.step()
        world.check()
        if number % 20 == 0:
            world.check_reads()
            world.check()
    world.settle()
    world.check()
    world.check_reads()
    stats = world.store.stats()
    assert stats.pending_bytes == 0
    # The history was worth its while: every path was taken.
    assert world.results[PutResult.STORED] > 500
    assert world.results[PutResult.EXISTS] > 500
    assert sum(usage.records for usage in stats.evicted.values()) > 50
    if disk_bytes:
        assert stats.written.records > 200
        assert stats.copied_on.records > 50
    if disk_bytes and faults:
        assert stats.write_errors > 20
        assert world.results[PutResult.SKIPPED_DISK_FULL] > 20
    world.store.close()
    assert world.inner.segments == {}


def test_the_files_hold_nothing_but_what_the_index_knows() -> None:
    world = World(5, disk_bytes=20_000, faults=False, encrypt=True)
    for _ in range(3_000):
        world.step()
    world.settle()
    world.check()
    on_disk = [key for name in range(NAMES) if world.store.locate(key := named(name)) is Tier.DISK]
    live = sum(len(world.twin.held[key]) + RECORD_OVERHEAD for key in on_disk)
    stats = world.store.stats()
    assert stats.live_ratio == live / stats.file_bytes
    world.store.delete(named(name) for name in range(NAMES))
    world.store.run_pending()
    assert world.inner.segments == {}
    world.store.close()


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_in_the_files_never_gives_wrong_bytes(seed: int) -> None:
    world = World(seed, disk_bytes=20_000, faults=False, encrypt=seed % 2 == 0)
    rng, corrupt = world.rng, 0
    for _ in range(1_500):
        world.step()
        segments = [data for data in world.inner.segments.values() if data]
        if segments and rng.random() < 0.05:
            data = rng.choice(segments)
            match rng.randrange(3):
                case 0:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 1:
                    start = rng.randrange(len(data))
                    data[start : start + 30] = bytes(len(data[start : start + 30]))
                case 2:
                    other = rng.choice(segments)
                    size = min(len(data), len(other)) // 2
                    data[:size], other[:size] = other[:size], data[:size]
        for name in range(NAMES):
            result = world.store.fetch_now([named(name)])
            if result.ok:
                assert bytes(result.payloads[0]) == payload(name, size_of(name))
            else:
                assert isinstance(result.error, MissingRecord | CorruptRecord)
                corrupt += isinstance(result.error, CorruptRecord)
    assert corrupt > 20
    assert world.store.stats().corrupt >= corrupt
    assert world.store.stats().failed_jobs == 0
    world.store.close()
