"""The log of what happened to names: order, how far back it reaches, and what counts as a change."""

from __future__ import annotations

import pytest

from kvcache.cache import CacheLimits
from kvcache.changes import Change, ChangeLog, PlacePassed
from kvcache.snapshots import GoneReason
from tests.kvcache.tiny_worlds import LAYOUTS, World, prompt_of


def change(name: str) -> Change:
    return Change(name, None, {})


def test_a_log_is_read_from_any_place_that_it_still_has() -> None:
    log = ChangeLog(limit=3)
    assert log.head("a") == 0 and log.since("a", 0, 10) == []
    for name in "vwxyz":
        log.add("a", change(name))
    assert log.head("a") == 5
    assert [c.id for c in log.since("a", 2, 10)] == ["x", "y", "z"]
    assert [c.id for c in log.since("a", 2, 2)] == ["x", "y"]
    assert log.since("a", 5, 10) == []
    for place in (1, 6):
        with pytest.raises(PlacePassed):
            log.since("a", place, 10)


def test_an_owner_s_places_do_not_move_with_others() -> None:
    log = ChangeLog(limit=3)
    for _ in range(10):
        log.add("busy", change("x"))
    assert log.head("quiet") == 0


def test_a_log_that_was_dropped_does_not_pass_for_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.changes.OWNERS_LIMIT", 2)
    log = ChangeLog(limit=10)
    for name in "vwxyz":
        log.add("a", change(name))
    place = log.head("a")
    log.head("b"), log.head("c")  # the third owner's log takes the place of the first's
    for _ in range(10):
        log.add("a", change("new"))
    with pytest.raises(PlacePassed):
        log.since("a", place, 10)


def test_the_log_tells_what_changed_and_not_what_was_used() -> None:
    world = World(LAYOUTS["full"], limits=CacheLimits(default_ttl=100.0))
    told: list[str] = []
    world.cache.when_changed(told.append)
    one = world.save(world.run(prompt_of(300)).nodes[300], "one", labels=(("k", "1"),))
    world.save(world.run(prompt_of(300, 2)).nodes[300], "other", owner="b")
    world.cache.unuse(world.cache.use("a", "one"))  # no change
    world.cache.update(one, labels={"k": "2"})
    world.cache.extend(one, 50.0)
    world.cache.state_changed(one)
    world.cache.delete(one, GoneReason.ROLLED_BACK)
    world.cache.state_changed(one)  # gone: no change
    two = world.save(world.run(prompt_of(300)).nodes[300], "one")
    world.now += 1000.0
    world.cache.sweep()
    old, new = {"k": "1"}, {"k": "2"}
    assert world.cache.changes_since("a", 0, 100) == [
        Change("one", None, old),
        Change("one", old, new),
        Change("one", new, new),
        Change("one", new, new),
        Change("one", new, None, GoneReason.ROLLED_BACK),
        Change("one", None, {}),
        Change("one", {}, None, GoneReason.EXPIRED),
    ]
    assert sorted(told) == ["a"] * 7 + ["b"] * 2
    assert not world.cache._snapshots.has(two)


def test_the_log_keeps_no_node_of_what_is_gone() -> None:
    world = World(LAYOUTS["full"])
    world.cache.delete(world.save(world.run(prompt_of(300)).nodes[300], "one"))
    world.starve()
    assert world.tree == {}
    assert all(isinstance(change.id, str) for change in world.cache.changes_since("a", 0, 10))
