"""Names as callers see them: views, and the cache's errors in the contract's words."""

from __future__ import annotations

import random

import pytest

from kvcache.cache import CacheLimits, PrefixCache
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordId, RecordKind
from kvcache.snapshots import GoneReason
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.errors import CallError, SnapshotIdTaken, SnapshotInUse, SnapshotNotFound, SnapshotQuota, Unsupported
from service.events import Residency, SnapshotView
from service.handles import RESOURCE, Handles, bare_id, full_name
from service.request import Durability, SaveOptions

LAYOUT = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, 300)))


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        config = StoreConfig(memory_bytes=10_000, disk_bytes=100_000, queue_bytes=10_000, min_free_bytes=0)
        self.store = TieredStore(config, MemoryStorage(), clock=lambda: self.now)
        limits = CacheLimits(max_snapshots=3, max_pinned=1, default_ttl=100.0)
        self.cache = PrefixCache(self.store, LAYOUT, "print", limits=limits, clock=lambda: self.now)
        self.handles = Handles(self.cache, "models/m", "here")

    def node(self, length: int = 300, seed: int = 1, schedule: bytes = b"P") -> Node:
        """Held once, with all of its state."""
        rng = random.Random(seed)
        tokens = [rng.randrange(100) for _ in range(length)]
        node = self.cache.hold(self.cache.root("a"))
        for start in range(0, length, 256):
            state = {RecordKind.FULL: b"f" * 50, RecordKind.WINDOW: b"w" * 20, RecordKind.LOGITS: b"l" * 10}
            parent, node = (
                node,
                self.cache.commit(node, tokens[start : start + 256], schedule, state, explicit=True).node,
            )
            self.cache.let_go(parent)
        return node

    def add(self, name: str, node: Node | None = None, **how: object) -> SnapshotView:
        options = SaveOptions(snapshot_id=name, **how)  # type: ignore[arg-type]
        return self.handles.view(self.handles.add("a", node or self.node(), options, None))


@pytest.fixture
def world() -> World:
    return World()


def test_names_have_one_form() -> None:
    assert (full_name("x"), bare_id("snapshots/x"), bare_id("x")) == ("snapshots/x", "x", "x")


def test_a_view_tells_all_that_is_known(world: World) -> None:
    parent = world.handles.add("a", world.node(256), SaveOptions(snapshot_id="p"), None)
    node = world.node(700)
    snapshot = world.handles.add("a", node, SaveOptions(snapshot_id="x", labels=(("b", "2"), ("a", "1"))), parent)
    assert world.handles.view(snapshot) == SnapshotView(
        name="snapshots/x", parent="snapshots/p", model="models/m", model_fingerprint="print", token_count=700,
        checkpointed_tokens=512, prefix_hash=bytes(node.content), residency=Residency.MEMORY, durable=False,
        expire_time=1100.0, pinned=False, labels=(("a", "1"), ("b", "2")), create_time=1000.0, last_use_time=1000.0,
        exclusive_bytes=160, instance="here", active_uses=0,
    )  # fmt: skip


def test_residency_follows_the_state(world: World) -> None:
    snapshot = world.handles.add("a", world.node(700), SaveOptions(snapshot_id="x"), None)

    def residency() -> Residency:
        return world.handles.view(snapshot).residency

    assert residency() is Residency.MEMORY
    world.store.delete([RecordId(snapshot.node.key, RecordKind.LOGITS)])
    assert residency() is Residency.DISK  # a call without input computes its last block again
    world.store.flush(0.0)
    assert residency() is Residency.DISK  # windows have left memory
    world.store.trim(memory_bytes=0)
    world.store.flush(0.0)
    world.store.trim(disk_bytes=0)
    assert residency() is Residency.TOKENS


def test_a_pinned_name_has_no_end(world: World) -> None:
    assert world.add("x", pinned=True).expire_time is None


def test_adding_takes_over_the_hold_whether_or_not_it_works(world: World) -> None:
    node = world.node()
    world.add("x", node)
    assert node.holds == 1
    for wrong, error in (
        (SaveOptions(snapshot_id="x"), SnapshotIdTaken),
        (SaveOptions(durability=Durability.DISK), Unsupported),
    ):
        other = world.node(seed=2)
        with pytest.raises(error):
            world.handles.add("a", other, wrong, None)
        assert other.holds == 0


def test_a_chosen_name_of_the_very_same_prefix_is_given_again(world: World) -> None:
    first = world.handles.add("a", world.node(), SaveOptions(snapshot_id="x"), None)
    again = world.handles.add("a", world.node(schedule=b"P\x05"), SaveOptions(snapshot_id="x"), None)
    assert again is first
    assert first.node.holds == 1


def facts(error: CallError) -> tuple[type, str, object, dict[str, str]]:
    return type(error), error.reason, error.resource, error.metadata


def test_what_is_wrong_with_a_name_is_said_in_the_contracts_words(world: World) -> None:
    world.add("x")
    resource = (RESOURCE, "snapshots/x")
    with pytest.raises(CallError) as unknown:
        world.handles.find("snapshots/x", "b")
    assert facts(unknown.value) == (SnapshotNotFound, "SNAPSHOT_NOT_FOUND", resource, {"snapshot": "snapshots/x"})
    with world.handles.using("snapshots/x", "a") as snapshot:
        assert world.handles.view(snapshot).active_uses == 1
        for act in (
            lambda: world.handles.refuse_if_busy(snapshot),
            lambda: world.handles.delete(snapshot, GoneReason.DELETED, in_use_ok=False),
        ):
            with pytest.raises(CallError) as busy:
                act()
            assert facts(busy.value) == (SnapshotInUse, "SNAPSHOT_IN_USE", resource, {"activeUses": "1"})
    world.handles.refuse_if_busy(snapshot)
    world.handles.delete(snapshot, GoneReason.ROLLED_BACK, in_use_ok=False)
    with pytest.raises(CallError) as gone, world.handles.using("snapshots/x", "a"):
        pass
    told = {"goneTime": "1970-01-01T00:16:40.000Z", "snapshot": "snapshots/x"}
    assert facts(gone.value) == (SnapshotNotFound, "SNAPSHOT_ROLLED_BACK", resource, told)


def test_limits_are_told_apart_before_and_while_a_name_is_made(world: World) -> None:
    world.add("p", pinned=True)
    pin, plain = SaveOptions(pinned=True), SaveOptions()
    for wanted, reason, limit in (([pin], "PIN_QUOTA", "1"), ([plain] * 3, "SNAPSHOT_QUOTA", "3")):
        with pytest.raises(SnapshotQuota) as error:
            world.handles.check_new("a", wanted)
        assert (error.value.reason, error.value.metadata) == (reason, {"limit": limit})
    world.handles.check_new("a", [plain] * 2)
    with pytest.raises(Unsupported):
        world.handles.check_new("a", [plain, SaveOptions(durability=Durability.DISK)])
    other = world.handles.add("a", world.node(seed=2), SaveOptions(), None)
    with pytest.raises(SnapshotQuota):
        world.handles.update(other, labels={"x": "y"}, expires=None, ttl=None, pinned=True)
    assert (other.pinned, other.labels) == (False, {})


def test_use_ends_with_its_block_even_when_that_fails(world: World) -> None:
    world.add("x")
    with pytest.raises(KeyError), world.handles.using("snapshots/x", "a") as snapshot:
        raise KeyError
    assert snapshot.uses == 0
