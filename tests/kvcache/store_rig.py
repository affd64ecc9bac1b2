"""A small tiered store whose I/O the tests run themselves."""

from __future__ import annotations

from storage_doubles import payload, record

from kvcache.records import PutResult, RecordKind, Tier
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
