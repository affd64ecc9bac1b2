"""A recorder names the places of one sequence: by the calls that made them, and nothing of it stays when it closes."""

from __future__ import annotations

import random

import pytest

from kvcache.blocks import block_key
from kvcache.cache import PrefixCache
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordKind
from kvcache.schedule import is_decoded, plan_calls, prefill_schedule
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.plan import Capture
from service.recorder import Recorder

TOKENS = [random.Random(1).randrange(100) for _ in range(1000)]


class World:
    def __init__(self, *kinds: LayerKind) -> None:
        config = StoreConfig(memory_bytes=100_000, disk_bytes=0, queue_bytes=0, min_free_bytes=0)
        layout = CacheLayout(tuple(LayerSpec(kind) for kind in kinds or (LayerKind.FULL, LayerKind.STATE)))
        self.cache = PrefixCache(TieredStore(config, MemoryStorage()), layout, "model")

    def follow(
        self, recorder: Recorder, start: int, end: int, *, keep: tuple[int, ...] = (), decoded: int = 10**9
    ) -> Node:
        """Calls and commits over [start, end); positions beyond `decoded` one by one. Returns the last node, held."""
        node = None
        prefilled = min(end, decoded)
        steps = [(c.end, False) for c in plan_calls(start, prefilled, keep)] if start < prefilled else []
        steps += [(place, True) for place in range(max(start, decoded) + 1, end + 1)]
        for place, one in steps:
            recorder.called(place, decoded=one)
            if place % 256 == 0 or place == end:
                capture = recorder.capture(place, logits=place == end)
                if node is not None:
                    self.cache.let_go(node)
                state = {kind: bytes([kind]) * 8 for kind in capture.kinds}
                commit = recorder.commit(place, state, explicit=True)
                node = commit.node
                assert commit.lost is None
        assert node is not None
        return node

    def run(self, end: int, *, base: Node | None = None, keep: tuple[int, ...] = (), decoded: int = 10**9) -> Node:
        tokens = TOKENS[:end]
        recorder = Recorder(self.cache, "a", tokens)
        start = 0
        if base is not None:
            elsewhere = [*TOKENS[: base.end], 1_000]  # from the base itself, however often this was computed behind it
            lookup = self.cache.lookup("a", elsewhere, base=base, keep=())
            recorder.start_at(lookup)
            self.cache.release(lookup)
            start = lookup.position
        node = self.follow(recorder, start, end, keep=keep, decoded=decoded)
        recorder.close()
        return node


@pytest.fixture
def world() -> World:
    return World()


def test_the_key_of_a_place_says_which_calls_made_it(world: World) -> None:
    node = world.run(700, keep=(300,))
    calls = [c.end for c in plan_calls(0, 700, [300])]
    key = world.cache.root("a").key
    for place in node.path():
        schedule = prefill_schedule(place.start, place.end, calls)
        assert place.schedule == schedule
        key = block_key(key, TOKENS[place.start : place.end], schedule)
        assert place.key == key


def test_a_run_behind_a_tail_makes_the_blocks_of_a_cold_run_that_passed_there(world: World) -> None:
    cold = world.run(700, keep=(300,))
    tail = world.run(300)
    assert world.run(700, base=tail) is cold


def test_a_decoded_block_is_no_other_runs_block_but_goes_on_as_one(world: World) -> None:
    prompt = world.run(250)
    one, two = (world.run(600, base=prompt, decoded=250) for _ in range(2))
    assert [is_decoded(node.schedule) for node in one.path()] == [True, True, True]
    assert {node.key for node in one.path()} & {node.key for node in two.path()} == set()
    # Behind the same decoded tail, the same calls are the same state.
    ends = [world.run(800, base=one) for _ in range(2)]
    assert ends[0] is ends[1]
    assert is_decoded(ends[0].path()[2].schedule) and not is_decoded(ends[0].path()[3].schedule)


def test_a_run_behind_a_cut_shares_nothing_with_anybody() -> None:
    world = World(LayerKind.FULL)
    whole = world.run(300)
    cut = world.cache.cut(whole, 280)
    assert cut is not None
    assert world.run(290, base=cut).parent is whole.parent
    assert world.run(290, base=cut) is not world.run(290)


def test_only_what_is_not_stored_is_captured(world: World) -> None:
    kept = world.run(300)
    recorder = Recorder(world.cache, "a", TOKENS[:300])
    recorder.called(256)
    assert recorder.capture(256, logits=False) == Capture(start=0, end=256, kinds=())
    assert recorder.capture(256, logits=True).kinds == (RecordKind.LOGITS,)
    node = recorder.commit(256, {}, explicit=False).node
    assert node is kept.parent
    assert recorder.last_block is node
    with pytest.raises(AssertionError):
        recorder.capture(256, logits=False)
    recorder.close()
    world.cache.let_go(node)


def test_nothing_is_held_once_all_is_closed(world: World) -> None:
    prompt = world.run(250)
    answer = world.run(600, base=prompt, decoded=250)
    more = world.run(700, base=answer)
    for node in (prompt, answer, more):
        assert node.holds == 1
        world.cache.let_go(node)
    assert [node for node in world.cache._tree if node.holds or node.is_tail] == []
