"""What reaches the disk under each policy, that handles work whatever it is, and that receipts say what that costs."""

from __future__ import annotations

import random

import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Keep
from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.receipt import MissReason
from kvcache.records import Loss, RecordId, RecordKind, Tier
from kvcache.tree import Node
from service.engine.fake import FakeEngine
from service.work import NodeAt
from tests.service.loop_rig import LAYOUT, LoopRig

THROUGH, MARKS, OFF = CheckpointPolicy
FULL, WINDOW, STATE, *_ = RecordKind


def prompt_of(length: int, seed: object = 1) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(400) for _ in range(length)]


def rig_with(policy: CheckpointPolicy, *, spacing: int = 0, layout: CacheLayout = LAYOUT, **how: object) -> LoopRig:
    disk = {"disk": 0} if policy is OFF else {}
    checkpoints = Checkpoints(policy=policy, state_spacing=spacing)
    return LoopRig(engine=FakeEngine(layout), checkpoints=checkpoints, **disk, **how)  # type: ignore[arg-type]


def stored(rig: LoopRig, node: Node) -> dict[int, set[RecordKind]]:
    """Layer kinds that are held, by the end of each node on the path."""
    return {
        here.end: {kind for kind in rig.cache.layout.kinds if rig.store.locate(RecordId(here.key, kind))}
        for here in node.path()
    }


@pytest.mark.parametrize("policy", [MARKS, OFF])
def test_a_handle_keeps_what_it_needs_and_nothing_else(policy: CheckpointPolicy) -> None:
    rig = rig_with(policy)
    heard = rig.submit(prompt_of(1300), keep=[600, 1300])
    rig.run()
    assert stored(rig, heard.nodes[600]) == {256: {FULL}, 512: {FULL, WINDOW}, 600: {FULL, WINDOW, STATE}}
    assert stored(rig, heard.nodes[1300]) == {
        256: {FULL}, 512: {FULL, WINDOW}, 768: {FULL}, 1024: {FULL, WINDOW}, 1280: {FULL, WINDOW},
        1300: {FULL, WINDOW, STATE},
    }  # fmt: skip
    rig.settle()


@pytest.mark.parametrize("policy", [MARKS, OFF])
def test_without_a_handle_nothing_is_kept_of_a_model_that_cannot_be_cut(policy: CheckpointPolicy) -> None:
    rig = rig_with(policy, share_decoded=True)
    prompt = prompt_of(1300)
    heard = rig.submit(prompt, generate=300)
    rig.run()
    assert heard.tokens == rig.engine.continuation(prompt, 300)
    assert rig.store.held() == [] and rig.store.stats().written.records == 0
    again = rig.submit(prompt, generate=3)
    rig.run()
    assert again.receipt == (0, 0, 1300)
    rig.settle()


def test_without_a_handle_a_model_that_can_be_cut_keeps_its_prefix_in_memory_and_off_the_disk() -> None:
    layout = CacheLayout((LayerSpec(LayerKind.FULL),))
    rig = rig_with(MARKS, layout=layout, memory=3_000)  # two blocks
    rig.submit(prompt_of(1300), generate=3)
    rig.run()
    assert {rig.store.locate(record) for record in rig.store.held()} == {Tier.MEMORY}
    assert rig.store.stats().written.records == 0
    rig.settle()


@pytest.mark.parametrize("policy", [MARKS, OFF])
@pytest.mark.parametrize(("prompt", "count"), [(200, 20), (200, 900), (700, 300), (255, 1)])
def test_a_saved_generation_can_be_gone_on_from(policy: CheckpointPolicy, prompt: int, count: int) -> None:
    rig = rig_with(policy)
    first = rig.submit(prompt_of(prompt), generate=count, save=True)
    rig.run()
    end = first.nodes[prompt + count]
    assert [event.lost for event in first.events if isinstance(event, NodeAt)] == [""]
    tokens = [*end.all_tokens(), 9]
    second = rig.submit(tokens, base=end, generate=3)
    rig.run()
    assert (second.receipt, second.tokens) == ((len(tokens) - 1, 0, 1), rig.engine.continuation(tokens, 3))
    rig.settle()


@pytest.mark.parametrize("policy", [MARKS, OFF])
def test_while_a_generation_runs_only_the_newest_state_is_held_and_not_on_disk(policy: CheckpointPolicy) -> None:
    rig = rig_with(policy)
    heard = rig.submit(prompt_of(200), generate=1_500, save=True)
    while heard.end is None:
        rig.turn()
        rig.store.run_pending()
        for kind, most in ((STATE, 1), (WINDOW, 2)):  # the window reaches into two blocks
            held = [record for record in rig.store.held() if record.kind is kind]
            assert heard.final or len(held) <= most
            assert heard.final or {rig.store.locate(record) for record in held} <= {Tier.MEMORY}
    rig.settle()


@pytest.mark.parametrize("policy", list(CheckpointPolicy))
def test_a_prefill_that_is_stopped_hands_out_its_last_block(policy: CheckpointPolicy) -> None:
    rig = rig_with(policy)
    heard = rig.submit(prompt_of(2_000), generate=5, save=True)
    while heard.row not in rig.steps.rows or rig.steps.rows[heard.row].position < 800:
        assert rig.turn()
    rig.loop.stop(heard.row)
    rig.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt)]
    assert event.final and event.lost == "" and event.node.end % BLOCK_TOKENS == 0 and event.node.end >= 768
    assert rig.cache.stands(event.node)
    rig.settle()


def test_what_a_name_stands_on_goes_to_disk_under_marks_and_what_was_only_passed_does_not() -> None:
    rig = rig_with(MARKS, memory=1 << 20)
    named = rig.submit(prompt_of(200), generate=400, save=True)
    rig.run()
    snapshot = rig.cache.add_snapshot("a", named.nodes[600], Keep(), parent=None)
    rig.store.run_pending()
    kinds = [record.kind for record in rig.store.held() if rig.store.locate(record) is Tier.DISK]
    assert sorted(kinds) == [WINDOW, WINDOW, STATE]
    rig.cache.delete(snapshot)
    rig.settle()


def test_off_writes_nothing_and_a_full_memory_costs_older_handles_their_state_not_their_name() -> None:
    rig = rig_with(OFF, memory=6_000)
    old = rig.submit(prompt_of(700, "old"), keep=[700])
    rig.run()
    assert rig.cache.stands(old.nodes[700])
    new = rig.submit(prompt_of(700, "new"), keep=[700])
    rig.run()
    assert rig.cache.stands(new.nodes[700]) and not rig.cache.stands(old.nodes[700])
    assert rig.cache.stored_tokens(new.nodes[700]) == (700, 0)
    tokens = [*prompt_of(700, "old"), 1]
    again = rig.submit(tokens, base=old.nodes[700], generate=2)
    rig.run()
    assert again.tokens == rig.engine.continuation(tokens, 2)
    cached, recomputed, fresh = again.receipt
    assert (cached + recomputed, fresh) == (700, 1)
    assert (again.usage.grid_tokens, again.usage.miss_reason) == (0, MissReason.EVICTED)
    assert rig.store.stats().file_bytes == rig.store.stats().written.records == 0
    rig.settle()


def test_a_place_that_memory_cannot_take_is_refused_with_the_reason() -> None:
    rig = rig_with(OFF, memory=700)  # what a block takes is larger
    heard = rig.submit(prompt_of(700), keep=[700])
    rig.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt)]
    assert event.lost == "SKIPPED_TOO_LARGE" and not rig.cache.stands(event.node)
    rig.settle()


def test_what_lost_its_last_name_is_not_written_under_marks() -> None:
    rig = rig_with(MARKS, layout=CacheLayout((LayerSpec(LayerKind.FULL),)), memory=6_000)
    first = rig.submit(prompt_of(1_024), keep=[1_024])
    rig.run()
    names = [rig.cache.add_snapshot("a", first.nodes[1_024], Keep(), parent=None) for _ in range(2)]
    for name in names:
        rig.cache.delete(name)
    second = rig.submit(prompt_of(1_024, "other"), keep=[1_024])
    rig.run()
    assert rig.store.stats().evicted[Tier.MEMORY].records > 0 and rig.store.stats().written.records == 0
    assert rig.cache.stands(second.nodes[1_024])
    rig.settle()


# -- thinning of recurrent state


def states(rig: LoopRig, node: Node) -> list[int]:
    """Blocks whose state is stored."""
    return [here.end // BLOCK_TOKENS for here in node.path() if rig.store.locate(RecordId(here.key, STATE))]


def test_state_is_thinned_as_a_chain_grows_and_a_branch_anywhere_is_right_and_says_what_it_cost() -> None:
    rig = rig_with(THROUGH, spacing=2)
    prompt = prompt_of(20 * BLOCK_TOKENS)
    heard = rig.submit(prompt, keep=[len(prompt)])
    rig.run()
    end = heard.nodes[len(prompt)]
    assert states(rig, end) == [8, 12, 16, 18, 19, 20]
    for place in (300, 1024, 2048, 2100, 3000, 3330, 4608, 5000, len(prompt)):
        cost = place - rig.cache.checkpoints_before(end, place)
        base = rig.cache.hold_base(end, place) if cost else rig.cache.cut(end, place)
        assert base is not None
        tokens = [*prompt[:place], 7]
        again = rig.submit(
            tokens,
            base=base if base.parent else None,
            known_tokens=place,
            known_reason=rig.cache.why_recomputed(end, place),
            generate=3,
            owner="a" if base.parent else f"without a base at {place}",
        )
        rig.run()
        assert again.tokens == rig.engine.continuation(tokens, 3)
        assert again.receipt == (place - cost, cost, 1)
        grid = min(cost, place % BLOCK_TOKENS)
        assert again.usage.grid_tokens == grid
        reason = MissReason.THINNED if cost > grid else MissReason.BETWEEN_CHECKPOINTS if cost else MissReason.NONE
        assert again.usage.miss_reason is reason
        rig.cache.let_go(base)
    rig.settle()


def test_a_prompt_that_leaves_a_thinned_chain_goes_on_from_the_checkpoint_before_it() -> None:
    rig = rig_with(THROUGH, spacing=2)
    prompt = prompt_of(20 * BLOCK_TOKENS)
    rig.submit(prompt, generate=1)
    rig.run()
    tokens = [*prompt[:2900], *prompt_of(100, "other")]  # behind block 11
    branch = rig.submit(tokens, generate=3)
    rig.run()
    assert branch.tokens == rig.engine.continuation(tokens, 3)
    assert branch.receipt == (8 * BLOCK_TOKENS, 2900 - 8 * BLOCK_TOKENS, 100)
    assert branch.usage.miss_reason is MissReason.THINNED
    assert branch.usage.grid_tokens == 2900 - 11 * BLOCK_TOKENS
    rig.settle()


def test_what_a_handle_stands_on_and_where_chains_part_is_never_thinned() -> None:
    rig = rig_with(THROUGH, spacing=2)
    prompt = prompt_of(20 * BLOCK_TOKENS)
    held = rig.submit(prompt, keep=[5 * BLOCK_TOKENS])
    rig.run()
    fork = [*prompt[: 5 * BLOCK_TOKENS], *prompt_of(2 * BLOCK_TOKENS, "fork")]
    rig.submit(fork, base=held.nodes[5 * BLOCK_TOKENS], generate=1)
    longer = [*prompt, *prompt_of(20 * BLOCK_TOKENS, "longer")]
    last = rig.submit(longer, keep=[len(longer)])
    rig.run()
    assert 5 in states(rig, last.nodes[len(longer)])
    rig.cache.let_go(held.nodes[5 * BLOCK_TOKENS])
    held.events.clear()
    rig.heard.remove(held)
    longest = [*longer, *prompt_of(4 * BLOCK_TOKENS, "longest")]
    last = rig.submit(longest, base=last.nodes[len(longer)], keep=[len(longest)])
    rig.run()
    assert 5 in states(rig, last.nodes[len(longest)]), "two chains part there"
    rig.settle()


def test_spacing_0_keeps_every_state() -> None:
    rig = rig_with(THROUGH, spacing=0)
    prompt = prompt_of(20 * BLOCK_TOKENS)
    heard = rig.submit(prompt, keep=[len(prompt)])
    rig.run()
    assert states(rig, heard.nodes[len(prompt)]) == list(range(1, 21))
    rig.settle()


@pytest.mark.parametrize("policy", list(CheckpointPolicy))
@pytest.mark.parametrize("memory", [3_000, 8_000])
@pytest.mark.parametrize(
    "layout", [CacheLayout((LayerSpec(LayerKind.WINDOW, 300), LayerSpec(LayerKind.STATE))), LAYOUT]
)
def test_a_saved_generation_short_of_memory_stands_on_disk_or_says_that_it_does_not(
    policy: CheckpointPolicy, memory: int, layout: CacheLayout
) -> None:
    rig = rig_with(policy, layout=layout, memory=memory)
    for i in range(3):
        rig.submit(prompt_of(400, i), keep=[100, 300, 400])
    heard = rig.submit(prompt_of(200), generate=340, save=True)
    rig.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt)]
    assert (event.node.end, event.final) == (540, True)
    assert (event.lost == "") is rig.cache.stands(event.node)
    if policy is OFF:
        assert event.lost in ("", "EVICTED", "SKIPPED_MEMORY_FULL")
    else:
        assert event.lost == ""
    rig.settle()


def test_what_lacks_an_evicted_handle_is_told_as_evicted_though_boundaries_before_it_were_thinned() -> None:
    rig = rig_with(THROUGH, spacing=2)
    prompt = prompt_of(13 * BLOCK_TOKENS)
    heard = rig.submit(prompt, keep=[len(prompt)])
    rig.run()
    end = heard.nodes[len(prompt)]
    assert states(rig, end) != list(range(1, 14))
    with rig.store._lock:
        entry = rig.store._index.get(RecordId(end.key, STATE))
        assert entry is not None
        rig.store._index.lose(entry, Loss.EVICTED)
    assert rig.cache.why_recomputed(end, end.end) is MissReason.EVICTED
    again = rig.submit([*prompt, 7], base=end, generate=1)
    rig.run()
    assert again.usage.recomputed_tokens > 0 and again.usage.miss_reason is MissReason.EVICTED
    rig.settle()


@pytest.mark.parametrize(("why", "told"), [(Loss.EVICTED, "EVICTED"), (Loss.CORRUPT, "CORRUPT")])
@pytest.mark.parametrize("early", [False, True])
def test_an_end_that_does_not_stand_says_what_became_of_its_state(why: Loss, told: str, *, early: bool) -> None:
    rig = rig_with(OFF)
    heard = rig.submit(prompt_of(2_000), generate=5, save=True)
    while heard.row not in rig.steps.rows or rig.steps.rows[heard.row].position < 800:
        assert rig.turn()
    first = rig.steps.rows[heard.row].recorder.last_block.path()[0]
    with rig.store._lock:
        entry = rig.store._index.get(RecordId(first.key, FULL))
        assert entry is not None
        rig.store._index.lose(entry, why)
    if early:
        rig.loop.stop(heard.row)
    rig.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt)]
    assert event.final and event.lost == told and not rig.cache.stands(event.node)
    rig.settle()


def test_an_end_that_was_evicted_before_it_got_its_name_is_seen_to_be_gone_and_its_receipt_says_why() -> None:
    rig = rig_with(OFF, memory=6_000)
    first = rig.submit(prompt_of(700), generate=3, save=True)
    rig.run()
    end = first.nodes[703]
    assert rig.cache.why_not(end) is MissReason.NONE
    rig.submit(prompt_of(700, "other"), keep=[700])
    rig.run()
    named = rig.cache.add_snapshot("a", end, Keep(), parent=None)
    state = rig.cache.state_of(named)
    assert state.restorable < 703 and rig.cache.why_not(end) is MissReason.EVICTED
    again = rig.submit([*end.all_tokens(), 9], base=end, generate=2)
    rig.run()
    assert again.receipt == (state.restorable, 703 - state.restorable, 1)
    assert again.usage.miss_reason is MissReason.EVICTED
    rig.cache.delete(named)
    rig.settle()


def test_state_that_the_disk_did_not_take_after_all_was_not_evicted() -> None:
    rig = rig_with(THROUGH)
    heard = rig.submit(prompt_of(700), keep=[700])
    rig.run()
    end = heard.nodes[700]
    with rig.store._lock:
        entry = rig.store._index.get(RecordId(end.key, STATE))
        assert entry is not None
        rig.store._index.lose(entry, Loss.NOT_WRITTEN)
    again = rig.submit([*end.all_tokens(), 9], base=end, generate=2)
    rig.run()
    assert again.usage.recomputed_tokens > 0 and again.usage.miss_reason is MissReason.NOT_WRITTEN
    rig.settle()
