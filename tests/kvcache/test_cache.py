"""The prefix cache: what a lookup offers and says, cuts, names over state that comes and goes, nothing left over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_worlds import FULL, LAYOUTS, WINDOW, World, payload_of, prompt_of

from kvcache.blocks import root_key
from kvcache.cache import CacheLimits, Keep, new_snapshot_id
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.snapshots import (
    GoneReason,
    GoneSnapshot,
    PinnedBytesLimit,
    SnapshotBusy,
    SnapshotLimit,
    TakenSnapshotId,
    UnknownSnapshot,
)

ALL = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.fixture
def world() -> World:
    return World(LAYOUTS["all"])


# -- lookup


@ALL
def test_a_prompt_sent_again_is_restored_at_its_last_block(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(700)
    first = world.run(prompt)
    assert (first.receipt, first.lookup.known, first.lookup.miss_reason) == ((0, 0, 700), 0, MissReason.NONE)
    again = world.run(prompt[:600] + prompt_of(80, "other"))
    assert again.receipt == (512, 88, 80)
    assert (again.lookup.known, again.lookup.miss_reason) == (600, MissReason.BETWEEN_CHECKPOINTS)
    assert again.calls[0][0] == 512


@ALL
def test_a_kept_place_is_restored_with_its_logits_and_handed_out_again(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(600)
    first = world.run(prompt, keep=[300])
    again = world.run(prompt, keep=[300])
    assert again.receipt == (600, 0, 0)
    assert again.nodes == first.nodes
    assert (again.lookup.plan is not None) and again.lookup.plan.logits
    # A place that nobody asked for before has to be passed.
    third = world.run(prompt, keep=[299])
    assert third.lookup.position <= 256
    assert sorted(third.nodes) == [299, 600]


@ALL
def test_an_explicit_parent_is_restored_whole(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(300)
    parent = world.run(prompt).nodes[300]
    child = world.run(prompt + prompt_of(50, "more"), base=parent)
    assert (child.receipt, child.lookup.miss_reason, child.lookup.known) == ((300, 0, 50), MissReason.NONE, 300)
    assert child.calls == [(300, 350)]


def test_owners_share_no_state(world: World) -> None:
    prompt = prompt_of(600)
    world.run(prompt, owner="a")
    assert world.run(prompt, owner="b").receipt == (0, 0, 600)


def test_a_missing_record_shortens_the_restore_and_the_reason_says_why() -> None:
    for layout in LAYOUTS.values():
        for kind in layout.kinds:
            world = World(layout)
            prompt = prompt_of(700)
            node = world.run(prompt, keep=[600]).nodes[700]
            block = node.path()[1]
            world.lose(block, kind)
            again = world.run([*prompt[:600], 1])
            position = 256 if kind is RecordKind.FULL or again.lookup.position else 0
            assert (again.lookup.position, again.lookup.known) == (position, 600)
            assert again.lookup.miss_reason is MissReason.EVICTED
            # What was computed again is whole again.
            assert world.run([*prompt[:600], 2]).lookup.position == 512


def test_what_decode_made_is_known_but_not_matched_unless_it_is_shared() -> None:
    prompt = prompt_of(700)
    for share, wanted in ((False, (0, 700, 1)), (True, (512, 188, 1))):
        world = World(LAYOUTS["all"], share_decoded=share)
        world.run(prompt, decode=600)
        again = world.run([*prompt, 1])
        assert again.receipt == wanted
        assert again.lookup.miss_reason is (MissReason.BETWEEN_CHECKPOINTS if share else MissReason.PROVENANCE)


def test_a_store_that_takes_nothing_gives_nothing_and_says_so() -> None:
    world = World(LAYOUTS["all"], memory=0, disk=0, queue=0)
    prompt = prompt_of(600)
    first = world.run(prompt)
    assert set(first.lost) == {"SKIPPED_TOO_LARGE"}
    again = world.run([*prompt, 1], base=first.nodes[600])
    assert (again.receipt, again.lookup.miss_reason) == ((0, 600, 1), MissReason.NOT_WRITTEN)


def test_a_corrupt_record_is_named_as_the_reason(world: World) -> None:
    prompt = prompt_of(600)
    node = world.run(prompt).nodes[600]
    assert world.store.flush(0.0)
    for segment in world.storage.segments.values():
        segment[:] = bytes(len(segment))
    lookup = world.cache.lookup("a", [*prompt, 1], base=node, keep=())
    assert lookup.plan is not None and lookup.position == 600
    read = world.store.fetch_now(lookup.plan.records)
    assert read.failed is not None
    world.cache.note_corrupt(read.failed)
    world.cache.release(lookup)
    after = world.cache.lookup("a", [*prompt, 1], base=node, keep=())
    assert (after.position, after.known, after.miss_reason) == (256, 600, MissReason.CORRUPT)
    world.cache.release(after)


def test_a_restore_that_was_given_up_still_makes_the_cuts_of_its_parent(world: World) -> None:
    prompt = prompt_of(700)
    first = world.run(prompt, keep=[300])
    lookup = world.cache.lookup("a", [*prompt, 1], base=first.nodes[700], keep=())
    given_up = lookup.without_state()
    assert (given_up.position, given_up.known, given_up.miss_reason) == (0, 700, MissReason.CORRUPT)
    assert {300, 700} <= set(given_up.replay)
    world.cache.release(lookup)


def test_a_planned_restore_survives_any_pressure_until_it_is_released() -> None:
    world = World(LAYOUTS["all"], memory=800, disk=4_000, queue=2_000)
    prompt = prompt_of(600)
    node = world.run(prompt).nodes[600]
    lookup = world.cache.lookup("a", [*prompt, 1], base=node, keep=())
    assert lookup.plan is not None and lookup.position == 600
    for seed in range(20):
        for other in world.run(prompt_of(600, seed), owner="b").nodes.values():
            world.cache.let_go(other)
        world.store.run_pending()
    world.starve()
    world.check_read(lookup, prompt, world.store.fetch_now(lookup.plan.records))
    world.cache.release(lookup)
    world.forget_everything()
    assert all(world.store.locate(record) is None for record in lookup.plan.records)


def test_state_that_is_stored_is_not_asked_for_again(world: World) -> None:
    prompt = prompt_of(256)
    root = world.cache.root("a")
    kinds = (RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE)
    assert world.cache.wants(root, prompt, b"P", logits=True) == (*kinds, RecordKind.LOGITS)
    commit = world.cache.commit(root, prompt, b"P", {RecordKind.STATE: b"s"}, explicit=False)
    assert commit.lost is None
    assert world.cache.wants(root, prompt, b"P", logits=False) == (RecordKind.FULL, RecordKind.WINDOW)
    assert world.cache.wants(root, prompt, b"P\x01", logits=False) == kinds


# -- cuts


def test_a_cut_on_the_path_or_at_a_kept_place_is_the_node_that_stands_there(world: World) -> None:
    prompt = prompt_of(700)
    ran = world.run(prompt, keep=[300, 600])
    end = ran.nodes[700]
    assert world.cache.cut(end, 300) is ran.nodes[300]
    assert world.cache.cut(end, 600) is ran.nodes[600]
    assert world.cache.cut(end, 700) is end
    assert world.cache.cut(end, 512) is end.parent
    assert world.cache.cut(end, 0) is world.cache.root("a")
    assert [world.cache.cut(end, place) for place in (1, 255, 301, 513, 699)] == [None] * 5
    world.lose(ran.nodes[300], RecordKind.STATE)
    assert world.cache.cut(end, 300) is None


def test_a_cut_takes_no_tail_of_another_generation() -> None:
    world = World(LAYOUTS["all"])
    prompt = prompt_of(300)
    twins = [world.run(prompt[:280], decode=20).nodes for _ in range(2)]
    longer = world.run(prompt, decode=40).nodes[300]
    assert twins[0][280] is not twins[1][280]
    assert world.cache.cut(longer, 280) is None
    assert world.cache.cut(longer, 260) is not None  # its own prompt's end


def test_where_every_layer_keeps_every_token_a_block_is_cut_to_size() -> None:
    world = World(LAYOUTS["full"])
    prompt = prompt_of(700)
    end = world.run(prompt).nodes[700]
    for place in (1, 255, 257, 400, 699):
        cut = world.cache.cut(end, place)
        assert cut is not None and cut.is_tail
        assert list(cut.all_tokens()) == prompt[:place]
        assert world.cache.cut(end, place) is cut
        ran = world.run([*prompt[:place], 7, 7], base=cut)
        assert ran.receipt == (place, 0, 2)
        # What follows a cut shares a key with nothing else: no cold run computes these bits.
        assert ran.nodes[place + 2] is not world.run([*prompt[:place], 7, 7]).nodes[place + 2]
        deeper = world.cache.cut(cut, max(1, place - 1))
        assert deeper is not None and deeper.source in {n.key for n in end.path()}


def test_a_cut_is_offered_only_where_all_before_it_is_stored() -> None:
    world = World(LAYOUTS["full"])
    end = world.run(prompt_of(700)).nodes[700]
    world.lose(end.path()[0], RecordKind.FULL)
    assert [world.cache.cut(end, place) for place in (300, 512, 600, 700)] == [None] * 4


@pytest.mark.parametrize("pinned", [False, True])
def test_a_cut_keeps_its_state_when_the_line_it_was_cut_from_is_deleted(pinned: bool) -> None:
    world = World(LAYOUTS["full"])
    prompt = prompt_of(300)
    source = world.save(world.run(prompt).nodes[300], "source")
    cut = world.cache.cut(source.node, 280)
    assert cut is not None
    back = world.save(cut, "back", parent=source, pinned=pinned)
    again = world.cache.cut(back.node, 270)
    assert again is not None
    further = world.save(again, "further", parent=back)
    world.cache.delete(source, GoneReason.ROLLED_BACK)
    assert world.run([*prompt[:280], 7], base=back.node).receipt == (280, 0, 1)
    world.cache.update(back, pinned=False)
    world.cache.delete(back)
    assert world.run([*prompt[:270], 7], base=further.node).receipt == (270, 0, 1)
    assert world.cache.state_of(further).restorable == 270


def test_the_state_behind_a_cut_goes_with_the_last_that_stands_on_it() -> None:
    world = World(LAYOUTS["full"])
    source = world.save(world.run(prompt_of(300)).nodes[300], "source")
    lent = RecordId(source.node.key, RecordKind.FULL)
    cuts = [world.cache.cut(source.node, place) for place in (280, 290)]
    names = [world.save(cut, f"s{cut.end}") for cut in cuts if cut is not None]
    world.cache.delete(source)
    for name in names:
        assert world.store.locate(lent) is not None
        world.cache.delete(name)
    assert world.store.locate(lent) is None
    assert world.tree == {(0, 256): 1}


def test_a_run_behind_a_cut_of_a_cut_keeps_the_block_that_both_were_cut_from() -> None:
    world = World(LAYOUTS["full"])
    end = world.run(prompt_of(300)).nodes[300]
    cut = world.cache.cut(end, 280)
    assert cut is not None
    again = world.cache.cut(cut, 270)
    assert again is not None and again.source == end.key
    world.cache.follow(again)
    world.starve()
    assert world.cache.stands(again)
    world.cache.unfollow(again)
    world.starve()
    assert not world.cache.stands(again)


@ALL
@pytest.mark.parametrize("decoded", [0, 20])
def test_a_run_behind_a_parent_goes_on_where_one_like_it_has_been(layout: CacheLayout, decoded: int) -> None:
    world = World(layout)
    prompt, more = prompt_of(300), prompt_of(600, seed=2)
    parent = world.run(prompt, decode=decoded).nodes[300]
    first = world.run([*prompt, *more], base=parent, keep=[500])
    assert first.receipt == (300, 0, 600)
    again = world.run([*prompt, *more], base=parent, keep=[500])
    assert (again.receipt, again.calls, again.nodes) == ((900, 0, 0), [], first.nodes)
    # Up to where they part, and to no place that other cuts lead to.
    assert world.run([*prompt, *more[:500], 7], base=parent, keep=[500]).receipt == (768, 0, 33)
    assert world.run([*prompt, *more[:220], 7], base=parent, keep=[500]).receipt == (512, 0, 9)
    assert world.run([*prompt, *more], base=parent).receipt == (300, 0, 600)
    assert world.run([*prompt, *more], base=parent, keep=[400, 500]).receipt == (300, 0, 600)
    assert world.run([*prompt, *more]).lookup.position == 256


@ALL
def test_a_handle_stands_for_its_own_state_where_decoded_blocks_are_shared(layout: CacheLayout) -> None:
    world = World(layout, share_decoded=True)
    prompt = prompt_of(600)
    handle = world.run(prompt[:300], decode=40).nodes[300]
    world.run(prompt, decode=340)  # the same tokens, decoded by another call and kept for longer
    ran = world.run([*prompt, 7], base=handle)
    assert ran.receipt == (300, 0, 301)
    assert ran.nodes[601].path()[0] is handle.path()[0]


@ALL
def test_what_cannot_be_read_beyond_a_parent_is_computed_with_the_parents_own_cuts(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(700)
    parent = world.run(prompt[:300], keep=[100]).nodes[300]
    world.run(prompt, base=parent)
    lost = world.cache.lookup("a", prompt, base=parent, keep={700})
    world.cache.release(lost)
    assert lost.position == 700 and {100, 300} <= {*lost.without_state().replay}


@ALL
def test_the_base_of_a_place_is_the_deepest_stored_one_before_it(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(700)
    ran = world.run(prompt, keep=[300, 310])
    end = ran.nodes[700]

    def bases() -> list[int]:
        places = []
        for position in (1, 256, 299, 300, 305, 511, 512, 699, 700):
            node = world.cache.hold_base(end, position)
            places.append(node.end)
            world.cache.let_go(node)
            assert world.cache.checkpoints_before(end, position) == node.end
        return places

    assert bases() == [0, 256, 256, 300, 300, 310, 512, 512, 700]
    world.lose(ran.nodes[300], layout.kinds[-1])
    assert bases() == [0, 256, 256, 256, 256, 310, 512, 512, 700]


# -- names


def test_a_name_is_held_until_it_ends_and_its_tail_goes_with_it(world: World) -> None:
    snapshot = world.save(world.run(prompt_of(300)).nodes[300], "x", labels=(("k", "v"),))
    assert (snapshot.token_count, snapshot.labels, snapshot.parent) == (300, {"k": "v"}, "")
    assert world.cache.snapshot("a", "x") is snapshot
    assert world.tree == {(0, 256): 1, (256, 300): 1}
    world.cache.delete(snapshot)
    assert world.tree == {(0, 256): 1}  # whole blocks stay as long as the store keeps them
    with pytest.raises(GoneSnapshot):
        world.cache.snapshot("a", "x")
    with pytest.raises(UnknownSnapshot):
        world.cache.snapshot("b", "x")
    world.forget_everything()
    assert world.tree == {}


def test_evicted_state_never_ends_a_name(world: World) -> None:
    prompt = prompt_of(600)
    snapshot = world.save(world.run(prompt).nodes[600], "x")
    world.starve()
    assert list(world.cache.snapshot("a", "x").node.all_tokens()) == prompt
    state = world.cache.state_of(snapshot)
    assert (state.restorable, state.disk_tokens, state.checkpointed, state.exclusive_bytes) == (0, 0, 0, 0)
    ran = world.run([*prompt, 1], base=snapshot.node)
    assert (ran.receipt, ran.lookup.miss_reason) == ((0, 600, 1), MissReason.EVICTED)


def test_pinned_state_stays_under_any_pressure_until_it_is_unpinned(world: World) -> None:
    prompt = prompt_of(600)
    snapshot = world.save(world.run(prompt).nodes[600], "x", pinned=True)
    world.now += 1e9
    world.starve()
    assert world.cache.state_of(snapshot).restorable == 600
    world.cache.update(snapshot, pinned=False, ttl=50.0)
    world.starve()
    assert world.cache.state_of(snapshot).restorable == 0


def test_a_refused_name_or_pin_changes_nothing() -> None:
    world = World(LAYOUTS["all"], limits=CacheLimits(max_snapshots=2, max_pinned=1))
    node = world.run(prompt_of(300)).nodes[300]
    first = world.cache.add_snapshot("a", node, Keep(snapshot_id="x", pinned=True), parent=None)
    holds, pinned = node.holds, world.store.stats().pinned
    with pytest.raises(TakenSnapshotId):
        world.cache.add_snapshot("a", node, Keep(snapshot_id="x"), parent=None)
    with pytest.raises(SnapshotLimit):
        world.cache.add_snapshot("a", node, Keep(snapshot_id="y", pinned=True), parent=None)
    assert (node.holds, world.store.stats().pinned, world.cache.snapshots("a")) == (holds, pinned, [first])
    second = world.cache.add_snapshot("a", node, Keep(snapshot_id="y"), parent=first)
    with pytest.raises(SnapshotLimit):
        world.cache.update(second, pinned=True, labels={"new": ""}, ttl=1.0)
    assert (second.pinned, second.labels, second.ttl) == (False, {}, 3600.0)
    with pytest.raises(SnapshotLimit):
        world.cache.check_room("a", count=1, pinned=0)


def test_pins_of_an_owner_keep_so_many_bytes_and_no_more_each_record_once() -> None:
    world = World(LAYOUTS["all"])
    nodes = world.run(prompt_of(600), keep=[300, 600]).nodes
    short = world.cache.add_snapshot("a", nodes[300], Keep(snapshot_id="short", pinned=True), parent=None)
    alone = world.cache.pinned_bytes("a")
    assert 0 < alone == sum(world.store.size(r) or 0 for r in world.cache._stock.records_of(short.node))
    long = world.cache.add_snapshot("a", nodes[600], Keep(snapshot_id="long", pinned=True), parent=None)
    both = world.cache.pinned_bytes("a")
    own = sum(world.store.size(r) or 0 for r in world.cache._stock.records_of(long.node))
    assert both < alone + own, "what they share counts once"
    again = world.cache.add_snapshot(
        "a", world.cache.hold(long.node), Keep(snapshot_id="again", pinned=True), parent=None
    )
    assert world.cache.pinned_bytes("a") == both
    world.cache.delete(again)
    world.cache.update(long, pinned=False)
    assert world.cache.pinned_bytes("a") == alone and world.cache.pinned_bytes("b") == 0
    # One byte less than both take, and the second pin is refused, by whatever way it comes.
    world.cache.limits = CacheLimits(max_pinned_bytes=both - 1)
    pinned, held = world.store.stats().pinned, long.node.holds
    for pin in (
        lambda: world.cache.update(long, pinned=True, labels={"new": ""}),
        lambda: world.cache.add_snapshot("a", long.node, Keep(snapshot_id="third", pinned=True), parent=None),
    ):
        with pytest.raises(PinnedBytesLimit) as caught:
            pin()
        refused = caught.value
        assert (refused.limit, refused.have, refused.have + refused.more) == (both - 1, alone, both)
    assert (world.store.stats().pinned, long.node.holds, long.labels, long.pinned) == (pinned, held, {}, False)
    world.cache.add_snapshot("b", world.cache.hold(long.node), Keep(snapshot_id="x", pinned=True), parent=None)
    world.cache.check_room("a", count=1, pinned=1)
    world.cache.limits = CacheLimits(max_pinned_bytes=alone)
    with pytest.raises(PinnedBytesLimit):
        world.cache.check_room("a", count=1, pinned=1)
    world.cache.check_room("a", count=1, pinned=0)
    world.cache.delete(short)
    assert world.cache.pinned_bytes("a") == 0
    world.cache.limits = CacheLimits(max_pinned_bytes=both - 1)
    world.cache.update(long, pinned=True)


def test_state_that_a_pinned_handle_gets_back_counts_again() -> None:
    world = World(LAYOUTS["all"])
    prompt = prompt_of(600)
    snapshot = world.save(world.run(prompt).nodes[600], "x")
    world.starve()
    world.cache.update(snapshot, pinned=True)
    assert world.cache.pinned_bytes("a") == 0, "nothing of it is stored"
    node = world.run(prompt).nodes[600]
    world.cache.rehome(snapshot, node)
    records = world.cache._stock.records_of(snapshot.node)
    assert world.cache.pinned_bytes("a") == sum(world.store.size(r) or 0 for r in records) > 0
    world.cache.delete(snapshot)
    assert world.cache.pinned_bytes("a") == 0


def test_times_are_bounded_and_a_promise_is_kept() -> None:
    world = World(LAYOUTS["all"], limits=CacheLimits(default_ttl=100, max_ttl=1000))
    node = world.run(prompt_of(10)).nodes[10]
    default, long = world.save(world.cache.hold(node), "x"), world.save(node, "y", ttl=9999.0)
    assert (default.expires, long.expires) == (world.now + 100, world.now + 1000)
    world.now += 50
    world.cache.extend(default, None)
    assert default.expires == world.now + 100
    world.cache.extend(long, 10.0)  # never less than was promised
    assert long.expires == world.now + 950
    world.cache.update(default, expires=world.now + 1e9)
    assert default.expires == world.now + 1000
    world.cache.update(default, ttl=5.0)  # a change may shorten
    assert default.expires == world.now + 5
    world.now += 6
    assert world.cache.snapshots("a") == [long]


def test_a_name_in_use_neither_expires_nor_is_deleted_unawares(world: World) -> None:
    snapshot = world.save(world.run(prompt_of(300)).nodes[300], "x", ttl=10.0)
    assert world.cache.use("a", "x") is snapshot
    world.cache.use("a", "x")
    world.now += 100
    world.cache.sweep()
    with pytest.raises(SnapshotBusy) as error:
        world.cache.delete(snapshot)
    assert error.value.uses == 2
    world.cache.unuse(snapshot)
    world.cache.unuse(snapshot)
    assert snapshot.expires == world.now + 10  # idle from now on
    world.now += 11
    assert world.cache.all_snapshots() == []


def test_lineage_tells_the_ancestors_and_what_a_rollback_gives_up(world: World) -> None:
    prompt = prompt_of(700)
    ran = world.run(prompt, keep=[300, 600])
    a = world.save(ran.nodes[300], "a")
    b = world.save(ran.nodes[600], "b", parent=a)
    c = world.save(ran.nodes[700], "c", parent=b)
    assert (c.lineage, c.parent) == (("a", "b"), "b")
    assert world.cache.descendants(a) == [b, c]
    assert world.cache.abandoned_by(c, 300) == [b, c]


def test_a_rehomed_name_stands_on_the_new_state_and_keeps_its_pin(world: World) -> None:
    prompt = prompt_of(300)
    made = world.run(prompt, decode=40).nodes
    snapshot = world.save(made[300], "x", pinned=True)
    old = snapshot.node
    for kind in world.cache.layout.kinds:
        world.lose(old, kind)
    again = world.run(prompt).nodes[300]
    assert again is not old
    world.cache.rehome(snapshot, again)
    world.cache.let_go(again)
    assert (snapshot.node, world.cache.state_of(snapshot).restorable) == (again, 300)
    world.starve()
    assert world.cache.state_of(snapshot).restorable == 300
    assert old not in set(world.cache._tree)
    world.cache.rehome(snapshot, again)  # once more is harmless
    world.cache.delete(snapshot)
    world.cache.rehome(snapshot, again)  # as is one that came too late
    world.cache.let_go(made[260])
    world.forget_everything()
    assert (world.tree, world.store.stats().pinned) == ({}, 0)


def test_where_state_is_can_be_seen() -> None:
    world = World(CacheLayout((FULL, WINDOW)))
    ran = world.run(prompt_of(700), keep=[600])
    x = world.save(ran.nodes[700], "x")
    state = world.cache.state_of(x)
    assert (state.restorable, state.checkpointed, state.disk_tokens) == (700, 512, 0)
    world.store.flush(0.0)  # windows leave memory once written
    assert world.cache.state_of(x).disk_tokens == 256 + 188
    assert world.cache.stored_tokens(x.node) == (x.node.end, 256 + 188)
    assert world.cache.state_of(x).exclusive_bytes == 60 + 50 + 40  # the other tail stands on the blocks as well
    world.cache.let_go(ran.nodes[600])
    assert world.cache.state_of(x).exclusive_bytes == 60 + 50 + 40 + 2 * 110
    world.lose(x.node, RecordKind.WINDOW)
    state = world.cache.state_of(x)
    assert (state.restorable, state.checkpointed) == (512, 512)


@ALL
def test_nothing_is_left_once_nothing_is_held(layout: CacheLayout) -> None:
    world = World(layout)
    prompt = prompt_of(900)
    held = [*world.run(prompt, keep=[300, 512, 700]).nodes.values()]
    held += world.run([*prompt, 3], base=held[-1], decode=1).nodes.values()
    end = held[-1]
    for place in (100, 300, 512, 699):
        node = world.cache.cut(end, place)
        held += [node] if node is not None else [world.cache.hold_base(end, place)]
    for node in held:
        world.cache.let_go(node)
    assert all(not node.is_tail and node.holds == 0 for node in world.cache._tree)
    world.forget_everything()
    assert (world.tree, world.cache._tree._content.keys()) == ({}, {world.cache.root("a").content})
    assert world.store.stats().pinned == 0


# -- cost


@pytest.mark.parametrize("stored", ["all of it", "the blocks without their windows"])
@pytest.mark.parametrize("kind", ["full", "window", "state", "all"])
def test_questions_to_the_store_grow_with_the_prompt_and_no_faster(kind: str, stored: str) -> None:
    """Counted in calls of `locate`, at 128k tokens and at an eighth of that."""

    def asked(blocks: int) -> dict[str, int]:
        layout = CacheLayout(
            tuple(
                spec if spec.kind is not LayerKind.WINDOW else LayerSpec(spec.kind, 1024)
                for spec in LAYOUTS[kind].layers
            )
        )
        world = World(layout, memory=10_000_000, disk=10_000_000, queue=10_000_000)
        prompt = [7] * (256 * blocks)
        world.store.run_pending()
        node = world.cache.hold(world.cache.root("a"))
        kinds = layout.kinds if stored == "all of it" else (RecordKind.FULL,)
        for start in range(0, len(prompt), 256):
            payloads = {k: payload_of(k, [start]) for k in kinds}
            node = world.cache.commit(node, prompt[start : start + 256], b"P", payloads, explicit=False).node
        snapshot = world.save(node, "x")
        count = 0
        locate = world.store.locate

        def counted(record: RecordId) -> Tier | None:
            nonlocal count
            count += 1
            return locate(record)

        world.store.locate = counted  # type: ignore[method-assign]
        counts: dict[str, int] = {}

        def measure(name: str, act: Callable[[], object]) -> None:
            nonlocal count
            count = 0
            act()
            counts[name] = count

        for name, base in (("lookup by content", None), ("lookup behind a parent", node)):
            measure(
                name, lambda base=base: world.cache.release(world.cache.lookup("a", [*prompt, 1], base=base, keep=()))
            )
        measure("cut", lambda: world.cache.cut(node, len(prompt) - 256))
        measure("base", lambda: world.cache.hold_base(node, len(prompt) - 10))
        measure("view", lambda: world.cache.state_of(snapshot))
        return counts

    few, many = asked(64), asked(512)
    for name, count in many.items():
        assert count <= 8 * (few[name] + 64), name
        assert count <= 30 * 512, name


def test_server_made_names_are_of_the_callers_alphabet_and_never_the_same() -> None:
    names = {new_snapshot_id() for _ in range(2_000)}
    assert len(names) == 2_000
    assert {len(name) for name in names} == {27}
    assert set("".join(names)) <= set("s0123456789abcdefghijklmnopqrstuv")


def test_a_root_is_one_for_each_model_and_owner(world: World) -> None:
    assert world.cache.root("a") is world.cache.root("a")
    assert world.cache.root("a").key == root_key("model", "a")
    with pytest.raises(AssertionError):
        world.cache.add_snapshot("a", world.cache.root("a"), Keep(), parent=None)


def test_an_evicted_cut_of_a_block_says_evicted_and_not_that_it_lies_between_checkpoints() -> None:
    world = World(LAYOUTS["full"])
    whole = world.run(prompt_of(700)).nodes[700]
    cut = world.cache.cut(whole, 100)
    assert cut is not None
    handle = world.save(cut, "at 100")
    world.starve()
    lookup = world.cache.lookup("a", prompt_of(100), base=handle.node, keep=())
    assert (lookup.position, lookup.known, lookup.miss_reason) == (0, 100, MissReason.EVICTED)
    world.cache.release(lookup)
