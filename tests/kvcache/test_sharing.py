"""Owners and prefixes: nobody gains by what another has sent, unless the server is told to let them; names never."""

from __future__ import annotations

from pathlib import Path

import pytest
from durable_worlds import CrashStorage, DurableWorld, ring_at
from tiny_worlds import LAYOUTS, World, prompt_of

from kvcache.cache import Keep
from kvcache.names import SHARED
from kvcache.snapshots import UnknownSnapshot
from service.auth.callers import owner_name

PROMPT = prompt_of(600)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_owner_starts_from_nothing_whatever_another_has_sent(kind: str) -> None:
    world = World(LAYOUTS[kind])
    assert world.run(PROMPT, owner="a").receipt == (0, 0, 600)
    assert world.run(PROMPT, owner="b").receipt == (0, 0, 600)
    assert world.run(PROMPT, owner="a").receipt == (600, 0, 0)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_owners_who_share_find_each_others_prefixes_and_no_names(kind: str) -> None:
    world = World(LAYOUTS[kind], share_prefixes=True)
    ran = world.run(PROMPT, owner="a")
    world.cache.add_snapshot("a", ran.nodes[600], Keep(snapshot_id="name"), parent=None)
    assert world.run(PROMPT, owner="b").receipt == (600, 0, 0)
    with pytest.raises(UnknownSnapshot):
        world.cache.snapshot("b", "name")
    assert world.cache.snapshots("b") == []


def test_nobody_can_be_called_as_the_shared_prefixes_are() -> None:
    with pytest.raises(ValueError, match="an owner's name"):
        owner_name(SHARED)


@pytest.mark.parametrize("before", [False, True], ids=["own, then shared", "shared, then own"])
def test_a_durable_snapshot_outlives_a_change_of_mind_about_sharing(before: bool, tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "keys")
    world = DurableWorld(LAYOUTS["all"], CrashStorage(), ring, share_prefixes=before)
    kept = world.keep(world.run(PROMPT).nodes[600], "name", labels=(("k", "v"),))
    assert ring.owners() == [SHARED if before else "a"]
    hashed = kept.node.content
    world.cache.close()
    again = DurableWorld(LAYOUTS["all"], world.storage, ring, opening=2, share_prefixes=not before)
    assert again.handles == {"name": (PROMPT, {"k": "v"}, False)}
    assert again.restored("name") == 600
    # State that is lost is computed again under the root that the snapshot came from, and the handle moves there.
    again.store.trim(memory_bytes=0, disk_bytes=0)
    again.store.run_pending()
    snapshot = again.cache.snapshot("a", "name")
    ran = again.run(PROMPT, base=snapshot.node)
    assert ran.receipt == (0, 600, 0)
    again.cache.rehome(snapshot, ran.nodes[600])
    assert again.cache.snapshot("a", "name").node.content == hashed
    assert again.restored("name") == 600
