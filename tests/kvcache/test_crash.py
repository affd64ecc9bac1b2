"""A durable store after a crash at every change of its files: some moment of the past, and exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from durable_worlds import Crash, CrashStorage, DurableWorld, ring_at
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.keys import KeyRing
from kvcache.layout import CacheLayout
from kvcache.snapshots import GoneReason

BUDGET = 20_000
PASSING = 8
LAYOUT = LAYOUTS["all"]
PROMPT = prompt_of(600)
LONGER = prompt_of(600) + prompt_of(150, seed=2)

Handles = dict[str, tuple[list[int], dict[str, str], bool]]


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    ring = ring_at(tmp_path / "keys")
    ring.id_of("a")
    return ring


def history(world: DurableWorld) -> Iterator[None]:
    """Steps of which each changes at most one durable name; after each, all that was ordered is on disk."""
    run = world.run(PROMPT, keep=[300])
    kept = world.keep(run.nodes[600], "conversation")
    yield
    world.save(run.nodes[300], "only-in-memory")
    world.settle()
    yield
    world.keep(world.cache.hold(kept.node), "fork-pinned", parent=kept, pinned=True)
    yield
    longer = world.keep(world.run(LONGER, base=kept.node).nodes[750], "longer", parent=kept)
    yield
    cut = world.cache.cut(longer.node, 512)
    assert cut is not None
    world.keep(cut, "rolled-back", parent=longer)
    yield
    world.cache.update(kept, labels={"step": "six"})
    world.settle()
    yield
    world.cache.delete(longer, GoneReason.ROLLED_BACK)
    world.settle()
    yield
    for seed in range(3, 3 + PASSING):  # more than fits: records go, and segments are cleaned
        ran = world.run(prompt_of(520, seed=seed), keep=[100, 300, 400])
        for place, node in ran.nodes.items():
            world.save(node, f"passing-{seed}-{place}")
        world.store.run_pending()
        for snapshot in world.cache.snapshots("a"):
            if snapshot.id.startswith("passing") and not snapshot.id.endswith("400"):
                world.cache.delete(snapshot)
    world.settle()
    yield
    world.cache.delete(world.cache.snapshot("a", "rolled-back"))
    world.settle()
    yield
    world.keep(world.run(prompt_of(300, seed=20)).nodes[300], "longer", labels=(("again", "yes"),))
    yield
    world.now += 600
    world.cache.unuse(world.cache.use("a", "conversation"))
    world.settle()
    yield


def durable_of(world: DurableWorld) -> Handles:
    return {s.id: world.handles[s.id] for s in world.cache.all_snapshots() if s.durable}


def open_world(storage: CrashStorage, ring: KeyRing, opening: int = 1, layout: CacheLayout = LAYOUT) -> DurableWorld:
    world = DurableWorld(layout, storage, ring, opening=opening, disk=BUDGET, memory=500)
    assert (world.cache.lost, world.store.missing) == ({}, {})  # a crash is no loss, and is not called one
    return world


def states_of(ring: KeyRing) -> tuple[list[Handles], int]:
    """What is durable before and after each step, and how many changes of the files all of them take."""
    storage = CrashStorage()
    world = open_world(storage, ring)
    states = [durable_of(world)]
    for _ in history(world):
        states.append(durable_of(world))
    stats = world.store.stats()
    assert stats.copied_on.records and sum(u.records for u in stats.evicted.values()), "the history cleans and evicts"
    assert stats.file_bytes <= BUDGET
    return states, storage.changes


def crash(ring: KeyRing, *, at: int, torn: int) -> tuple[CrashStorage, int]:
    """The storage that a crash leaves, and how many steps had been acknowledged."""
    storage = CrashStorage(crash_at=at, torn=torn)
    steps = 0
    try:
        for _ in history(open_world(storage, ring)):
            steps += 1
    except Crash:
        return storage, steps
    raise AssertionError("it did not come to the crash")


def check(world: DurableWorld, allowed: list[Handles], where: object) -> None:
    found = world.handles
    assert found in allowed, (where, sorted(found), [sorted(state) for state in allowed])
    for name, (tokens, _, pinned) in found.items():
        restored = world.restored(name)
        assert restored == len(tokens) or not pinned, (where, name)
    assert world.store.stats().corrupt == 0, where


def test_the_history_reads_back_as_it_was(ring: KeyRing) -> None:
    states, _ = states_of(ring)
    assert [sorted(state) for state in states] == [
        [],
        ["conversation"],
        ["conversation"],
        ["conversation", "fork-pinned"],
        ["conversation", "fork-pinned", "longer"],
        ["conversation", "fork-pinned", "longer", "rolled-back"],
        ["conversation", "fork-pinned", "longer", "rolled-back"],
        ["conversation", "fork-pinned", "rolled-back"],
        ["conversation", "fork-pinned", "rolled-back"],
        ["conversation", "fork-pinned"],
        ["conversation", "fork-pinned", "longer"],
        ["conversation", "fork-pinned", "longer"],
    ]


SHARES = 5  # every change is hit, four fifths of them where slow tests run


@pytest.mark.parametrize("share", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SHARES))])
def test_a_crash_at_any_change_leaves_a_moment_of_the_past(ring: KeyRing, share: int) -> None:
    states, changes = states_of(ring)
    assert changes > 100
    for at in range(1 + share, changes + 1, SHARES):
        storage, steps = crash(ring, at=at, torn=(at * 37) % 700)
        for name, image in storage.images(seed=at).items():
            world = open_world(CrashStorage(image), ring, opening=2)
            if name == "torn":
                check_torn(world, states[steps : steps + 2], (at, name))
            else:
                check(world, states[steps : steps + 2], (at, name))


def check_torn(world: DurableWorld, allowed: list[Handles], where: object) -> None:
    """Pages that never arrived may hold a whole header over half a payload: that is noticed, not served."""
    assert world.handles in allowed, (where, sorted(world.handles))
    for name in world.handles:
        world.restored(name)


def second_life(storage: CrashStorage, ring: KeyRing) -> list[Handles]:
    """A restart over what was left, and one more durable name; the handles before and after."""
    world = open_world(storage, ring, opening=2)
    before = world.handles
    world.keep(world.run(prompt_of(270, seed=50)).nodes[270], "second-life", labels=(("n", "2"),))
    return [before, world.handles]


def test_a_crash_while_opening_and_going_on_loses_nothing(ring: KeyRing) -> None:
    """The second process crashes too, at every change of its own, over what the first one left."""
    states, changes = states_of(ring)
    for first in range(40, changes, 45):
        storage, steps = crash(ring, at=first, torn=33)
        image = storage.images(seed=first)["killed"]
        whole = CrashStorage(image)
        before, after = second_life(whole, ring)
        assert before in states[steps : steps + 2]
        for at in range(1, whole.changes + 1):
            again = CrashStorage(image, crash_at=at, torn=200)
            with pytest.raises(Crash):
                second_life(again, ring)
            for name, left in again.images(seed=at).items():
                third = open_world(CrashStorage(left), ring, opening=3)
                assert third.handles in (before, after), (first, at, name)
