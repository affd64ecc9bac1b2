"""Durable tiny worlds, and a storage that a crash may hit anywhere. Shared by the tests of durable stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvcache.cache import CacheLimits, Durable, Keep, PrefixCache
from kvcache.carrying import look_at_others
from kvcache.errors import StoreError
from kvcache.inventory import Inventory
from kvcache.keys import KeyRing, OwnerSeal
from kvcache.layout import CacheLayout
from kvcache.records import Buffer
from kvcache.snapshots import Snapshot
from kvcache.storage import MemoryStorage, Storage
from kvcache.store import StoreConfig, TieredStore
from kvcache.store_dir import Identity
from kvcache.tree import Node
from tests.kvcache.tiny_worlds import LIMITS, World

STORE_ID = bytes(range(16))
MASTER = bytes(range(32))
INSTANCE = STORE_ID.hex()


class Crash(BaseException):
    """The process ends here. No handler of ordinary errors may see it."""


# Beside the segments in an image: the list of what the store should hold, and which opening store.json says wrote it.
LIST, LISTED = -1, -2


class CrashList:
    """The list's file beside a `CrashStorage`, whose changes it counts among."""

    def __init__(self, change: Callable[[], bool], data: bytes | None) -> None:
        self._change = change
        self.data = self.synced = data
        self.torn = 0

    def read(self) -> bytes | None:
        return self.data

    def replace(self, data: bytes) -> None:
        if self._change():
            raise Crash
        self.data = self.synced = data

    def append(self, offset: int, data: bytes) -> None:
        assert self.data is not None
        crashes = self._change()
        self.data = self.data[:offset] + (data[: self.torn] if crashes else data)
        if crashes or self._change():
            raise Crash
        self.synced = self.data

    def images(self, rng: random.Random) -> dict[str, bytes | None]:
        between = self.data
        if self.data is not None and self.synced is not None and len(self.data) > len(self.synced):
            kept = rng.randint(len(self.synced), len(self.data))
            between = self.data[:kept] + bytes(rng.choice([0, len(self.data) - kept]))
        return {"killed": self.data, "power cut": self.synced, "torn": between}


class CrashStorage(MemoryStorage):
    """Remembers what was synced beside what was written, and ends the process at a chosen change.

    `crash_at`: the number of the change, counted from 1, that does not happen; of a write, `torn` bytes still do.
    """

    def __init__(self, image: Mapping[int, bytes] | None = None, *, crash_at: int = 0, torn: int = 0) -> None:
        super().__init__()
        image = dict(image or {})
        self.list_file = CrashList(self._change, image.pop(LIST, None))
        self.listed = int.from_bytes(image.pop(LISTED, b""), "little")  # the opening that store.json names
        self.segments = {number: bytearray(data) for number, data in image.items()}
        self.synced = {number: bytes(data) for number, data in self.segments.items()}
        self.crash_at = crash_at
        self.list_file.torn = self.torn = torn
        self.changes = 0

    def inventory(self, key: bytes, opening: int) -> Inventory:
        """The list that lies here, read or begun as `service.open_store` does it."""

        def began() -> None:
            if self._change():
                raise Crash
            self.listed = opening

        if self.list_file.read() is None and not self.listed:
            return Inventory(self.list_file, key, opening, began=began)
        return Inventory.read(self.list_file, key, opening, floor=self.listed, began=began)

    def _change(self) -> bool:
        self.changes += 1
        return self.changes == self.crash_at

    def create(self, segment: int) -> None:
        if self._change():
            raise Crash
        super().create(segment)

    def write(self, segment: int, offset: int, parts: Sequence[Buffer]) -> None:
        if self._change():
            super().write(segment, offset, [b"".join(parts)[: self.torn]])
            raise Crash
        super().write(segment, offset, parts)

    def truncate(self, segment: int, size: int) -> None:
        if self._change():
            raise Crash
        super().truncate(segment, size)

    def sync(self, segment: int) -> None:
        if self._change():
            raise Crash
        super().sync(segment)
        self.synced[segment] = bytes(self.segments[segment])

    def remove(self, segment: int) -> None:
        if self._change():
            raise Crash
        super().remove(segment)
        self.synced.pop(segment, None)

    def close(self) -> None:
        """What is stored stays."""

    def images(self, seed: int) -> dict[str, dict[int, bytes]]:
        """What may be found afterwards: all that was written, what was synced, or anything between."""
        rng = random.Random(seed)
        between: dict[int, bytes] = {}
        for number, data in self.segments.items():
            synced = self.synced.get(number)
            if synced is None and rng.random() < 0.3:
                continue  # its name was not on disk
            floor = len(synced or b"")
            kept = rng.randint(floor, max(floor, len(data)))
            # The file has grown, but not all of its pages have arrived.
            between[number] = bytes(data[:kept]) + bytes(
                rng.choice([0, 0, len(data) - kept]) if kept < len(data) else 0
            )
        images = {
            "killed": {number: bytes(data) for number, data in self.segments.items()},
            "power cut": dict(self.synced),
            "torn": between,
        }
        for name, data in self.list_file.images(rng).items():
            if data is not None:
                images[name] |= {LIST: data, LISTED: self.listed.to_bytes(4, "little")}
        return images


def ring_at(folder: Path, master: bytes = MASTER) -> KeyRing:
    return KeyRing(folder, STORE_ID, master)


class DurableWorld(World):
    """A world over a durable store; opening another over the same storage is a restart."""

    def __init__(
        self,
        layout: CacheLayout,
        storage: Storage,
        ring: KeyRing,
        *,
        opening: int = 1,
        model: str = "model",
        disk: int = 64_000,
        memory: int = 100_000,
        queue: int = 100_000,
        limits: CacheLimits = LIMITS,
        now: float = 1000.0,
        share_prefixes: bool = False,
        store_id: bytes = STORE_ID,
        inventory: Inventory | None = None,
        parts: Mapping[str, str] | None = None,
        carry: bool = False,
    ) -> None:
        """`inventory`: the store's list, where `storage` is no `CrashStorage`, which has its own."""
        self.now = now
        self.storage = storage  # type: ignore[assignment]
        namespace = model.encode().ljust(32, b".")
        if isinstance(storage, CrashStorage):
            inventory = storage.inventory(ring.list_key, opening)
            ring.check(inventory)
        self.store = TieredStore(
            StoreConfig(memory_bytes=memory, disk_bytes=disk, queue_bytes=queue, segment_bytes=4_000, min_free_bytes=0),
            storage,
            clock=lambda: self.now,
            seal=OwnerSeal(ring, opening),
            identity=Identity(store_id=store_id, namespace=namespace, opening=opening),
            inventory=inventory,
        )
        self.cache = PrefixCache(
            self.store,
            layout,
            model,
            limits=limits,
            clock=lambda: self.now,
            share_prefixes=share_prefixes,
            durable=Durable(ring=ring, instance=INSTANCE, opening=opening, parts=parts or {}),
        )
        self.others = look_at_others(self.cache, ring.owners(), parts or {}, now=now, carry=carry)
        self.store.run_pending()

    def keep(self, node: Node, name: str, *, parent: Snapshot | None = None, **keep: object) -> Snapshot:
        """A durable name for a held node, which it takes over; it is acknowledged when this returns."""
        snapshot = self.cache.add_snapshot(
            "a",
            node,
            Keep(snapshot_id=name, durable=True, **keep),
            parent=parent,  # type: ignore[arg-type]
        )
        self.cache.let_go(node)
        errors = self.order(snapshot)
        assert errors == [None], errors
        return snapshot

    def order(self, snapshot: Snapshot) -> list[StoreError | None]:
        """Asks for a snapshot to be made durable; the answers."""
        answers: list[StoreError | None] = []
        self.cache.make_durable(snapshot, answers.append)
        self.store.run_pending()
        return answers

    def settle(self) -> None:
        self.cache.sweep()
        self.store.run_pending()

    @property
    def handles(self) -> dict[str, tuple[list[int], dict[str, str], bool]]:
        """Every name with its tokens, labels and pin."""
        return {s.id: (list(s.node.all_tokens()), s.labels, s.pinned) for s in self.cache.all_snapshots()}

    def restored(self, name: str) -> int:
        """How far the state of a name can be restored; what is read is compared with what it should be."""
        snapshot = self.cache.use("a", name)
        tokens = list(snapshot.node.all_tokens())
        lookup = self.cache.lookup("a", tokens, base=snapshot.node, keep=())
        if lookup.plan is not None:
            read = self.store.fetch_now(lookup.plan.records)
            if read.ok:
                self.check_read(lookup, tokens, read)
        self.cache.release(lookup)
        self.cache.unuse(snapshot)
        return lookup.position if lookup.plan is not None and read.ok else 0
