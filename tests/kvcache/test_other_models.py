"""Durable snapshots of another fingerprint: told with the reason, pinned ones kept, and carried over if asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from durable_worlds import CrashStorage, DurableWorld, ring_at
from tiny_worlds import LAYOUTS, prompt_of

from kvcache.keys import KeyRing
from kvcache.snapshots import LostSnapshot

LAYOUT = LAYOUTS["all"]
PARTS = {
    "weights": "w1",
    "tokenizer": "t1",
    "template": "c1",
    "cache format": "full",
    "mlx": "0.30.0",
    "processor": "x",
}
NEWER = PARTS | {"mlx": "0.31.0", "processor": "y"}
DISK = 60_000
NAMES = {f"pinned-{n}": prompt_of(600, seed=n) for n in range(5)}


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return ring_at(tmp_path / "keys")


def first_life(ring: KeyRing, parts: dict[str, str] = PARTS) -> CrashStorage:
    """Five pinned durable snapshots of the model "one", one that is not pinned, one deleted, and passing state."""
    storage = CrashStorage()
    world = DurableWorld(LAYOUT, storage, ring, model="one", disk=DISK, parts=parts)
    gone = world.keep(world.run(prompt_of(600, seed="gone")).nodes[600], "gone")
    for name, tokens in NAMES.items():
        world.keep(world.run(tokens).nodes[600], name, pinned=True, labels=(("of", name),))
        passing = prompt_of(600, seed=("passing", name))
        world.save(world.run(passing).nodes[600], f"passing-{name}")
    world.cache.delete(gone)
    world.keep(world.run(prompt_of(600, seed="loose")).nodes[600], "loose")
    world.settle()
    world.cache.close()
    return storage


def again(storage: CrashStorage, ring: KeyRing, opening: int, model: str, **more: object) -> DurableWorld:
    image = storage.images(0)["power cut"]
    return DurableWorld(LAYOUT, CrashStorage(image), ring, opening=opening, model=model, disk=DISK, **more)  # type: ignore[arg-type]


def fill(world: DurableWorld) -> None:
    """Far more than fits, and some of it durable."""
    for seed in range(60):
        node = world.run(prompt_of(600, seed=("fill", seed)), keep=[300]).nodes[600]
        world.save(node, f"fill-{seed}")
        world.store.run_pending()
        world.cache.delete(world.cache.snapshot("a", f"fill-{seed}"))
    world.settle()
    assert sum(usage.records for usage in world.store.stats().evicted.values()) > 100
    assert world.store.stats().file_bytes <= DISK


def all_there(world: DurableWorld) -> None:
    assert {name: world.restored(name) for name in NAMES} == dict.fromkeys(NAMES, 600)  # what is read is compared
    assert {name: world.handles[name] for name in NAMES} == {n: (t, {"of": n}, True) for n, t in NAMES.items()}
    assert "gone" not in world.handles


@pytest.mark.parametrize("listed", [True, False])
def test_pinned_snapshots_outlive_another_fingerprint_that_fills_the_store(ring: KeyRing, listed: bool) -> None:
    storage = first_life(ring)
    if not listed:  # as a store from before the list
        storage.list_file.data = storage.list_file.synced = None
        storage.listed = 0
    other = again(storage, ring, 2, "two", parts=NEWER)
    assert other.handles == {}
    fill(other)
    assert other.others[0].pinned == 5
    other.cache.close()
    third = again(other.storage, ring, 3, "two", parts=NEWER)  # type: ignore[arg-type]
    fill(third)
    third.cache.close()
    back = again(third.storage, ring, 4, "one", parts=PARTS)  # type: ignore[arg-type]
    all_there(back)
    if "loose" not in back.handles:
        with pytest.raises(LostSnapshot):  # taken for room: that is told by name
            back.cache.snapshot("a", "loose")
    assert {id for _, id in back.cache.lost.values()} <= {"loose"}


def test_a_start_tells_whose_snapshots_are_there_and_why_they_do_not_fit(
    ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    storage = first_life(ring)
    with caplog.at_level(logging.WARNING):
        other = again(storage, ring, 2, "two", parts=NEWER)
    assert (
        "6 durable snapshots, 5 of them pinned, belong to fingerprint one and cannot be used under two: "
        "mlx was 0.30.0, is 0.31.0, processor was x, is y." in caplog.text
    )
    assert "--carry-over 1" in caplog.text and "bytes that the store may take" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again(other.storage, ring, 3, "one", parts=PARTS)  # type: ignore[arg-type]
    assert "durable snapshots" not in caplog.text  # nothing durable was made under "two"


def test_parts_that_were_not_noted_are_said_to_be_unknown_and_nothing_is_carried_over(
    ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    storage = first_life(ring, parts={})
    with caplog.at_level(logging.WARNING):
        other = again(storage, ring, 2, "two", parts=NEWER, carry=True)
    assert "what differs is not known" in caplog.text and "fingerprint one are not carried over" in caplog.text
    assert other.handles == {}


@pytest.mark.parametrize("part", ["tokenizer", "template", "weights"])
def test_another_model_is_not_carried_over_and_the_part_is_named(
    part: str, ring: KeyRing, caplog: pytest.LogCaptureFixture
) -> None:
    storage = first_life(ring)
    with caplog.at_level(logging.WARNING):
        other = again(storage, ring, 2, "two", parts=NEWER | {part: "another"}, carry=True)
    assert f"are not carried over: {part} differ: it is another model" in caplog.text
    assert other.handles == {}
    fill(other)
    other.cache.close()
    all_there(again(other.storage, ring, 3, "one", parts=PARTS))  # type: ignore[arg-type]


def test_names_are_carried_over_and_computed_again(ring: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    storage = first_life(ring)
    before = {s.id: s for s in again(storage, ring, 2, "one", parts=PARTS).cache.all_snapshots()}
    with caplog.at_level(logging.WARNING):
        world = again(storage, ring, 2, "two", parts=NEWER, carry=True)
    assert "6 snapshots of fingerprint one are carried over" in caplog.text
    assert "is not carried over" not in caplog.text
    for opening in (2, 3):
        assert world.handles.keys() == {*NAMES, "loose"}
        for snapshot in world.cache.all_snapshots():
            old = before[snapshot.id]
            for what in (
                "owner",
                "labels",
                "created",
                "last_use",
                "ttl",
                "expires",
                "pinned",
                "lineage",
                "origins",
                "durable",
            ):
                assert getattr(snapshot, what) == getattr(old, what), what
        assert world.restored("pinned-3") == 0  # tokens alone
        if opening == 2:
            world.cache.close()
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                world = again(world.storage, ring, 3, "two", parts=NEWER, carry=True)  # type: ignore[arg-type]
            assert not world.cache.lost
    snapshot = world.cache.snapshot("a", "pinned-3")
    ran = world.run(NAMES["pinned-3"], base=None)
    world.cache.rehome(snapshot, ran.nodes[600])
    world.settle()
    assert world.restored("pinned-3") == 600
    fill(world)  # what the old fingerprint kept makes room now
    assert not world.others[0].keep
    world.cache.close()
    assert again(world.storage, ring, 4, "two", parts=NEWER).restored("pinned-3") == 600  # type: ignore[arg-type]


def test_a_name_that_is_taken_is_not_carried_over(ring: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    storage = first_life(ring)
    world = again(storage, ring, 2, "two", parts=NEWER)
    mine = world.keep(world.run(prompt_of(300, seed="mine")).nodes[300], "pinned-0")
    assert mine.token_count == 300
    world.cache.close()
    with caplog.at_level(logging.WARNING):
        carried = again(world.storage, ring, 3, "two", parts=NEWER, carry=True)  # type: ignore[arg-type]
    assert "snapshot pinned-0 of a is not carried over" in caplog.text
    assert len(carried.handles["pinned-0"][0]) == 300 and "pinned-1" in carried.handles
    carried.cache.close()
    fill(back := again(carried.storage, ring, 4, "two", parts=NEWER))  # type: ignore[arg-type]
    back.cache.close()
    assert again(back.storage, ring, 5, "one", parts=PARTS).restored("pinned-0") == 600  # type: ignore[arg-type]


def test_pins_of_others_that_leave_little_room_are_told(ring: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    storage = first_life(ring)
    image = storage.images(0)["power cut"]
    size = sum(len(data) for number, data in image.items() if number >= 0)
    with caplog.at_level(logging.WARNING):
        world = DurableWorld(LAYOUT, CrashStorage(image), ring, opening=2, model="two", disk=size, parts=NEWER)
    kept = sum(len(image[number]) for number in world.others[0].keep)
    assert f"keep {kept} of the {size} bytes" in caplog.text
