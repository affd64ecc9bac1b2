"""Restored, forked and rolled-back state is bit-equal to a cold run on the same schedule, on every layer kind.

"Cold" is the same engine under another owner: owners share no chain, so nothing is restored. Whole states are
compared: the bytes of every record on the path, logits among them.
"""

from __future__ import annotations

import itertools

import pytest

from kvcache.checkpoints import CheckpointPolicy, Checkpoints
from kvcache.receipt import MissReason
from kvcache.records import RecordId, RecordKind
from kvcache.tree import Node
from service.request import Sampling
from tests.engine.rig import GREEDY, Outcome, Rig, open_rig, prompt_of

pytestmark = pytest.mark.mlx

_owners = (f"cold-{n}" for n in itertools.count())
SUFFIX = 20


def cold(rig: Rig, tokens: list[int], **how) -> Outcome:
    outcome = rig.run(tokens, owner=next(_owners), **how)
    assert outcome.usage is not None and outcome.usage.cached_tokens == 0
    return outcome


def positions(rig: Rig) -> list[int]:
    """Boundaries and windows, each with its neighbours, and a place like any other."""
    window = rig.facts.layout.window
    places = {1, 255, 256, 257, 300, 512}
    if window:
        places |= {window - 1, window, window + 1}
    return sorted(places)


def same_state(rig: Rig, warm: Node, other: Node) -> None:
    assert warm.all_tokens() == other.all_tokens()
    for ours, theirs in zip(rig.chain(warm), rig.chain(other), strict=True):
        # A place on the way has logits only if it was asked for there.
        assert ours.keys() - {RecordKind.LOGITS} == theirs.keys() - {RecordKind.LOGITS}
        for kind in ours.keys() & theirs.keys():
            assert ours[kind] == theirs[kind], kind
    assert RecordKind.LOGITS in rig.records(warm) and RecordKind.LOGITS in rig.records(other)


def test_a_snapshot_continues_bit_equal_to_a_cold_run(rig: Rig) -> None:
    prompt = prompt_of(rig, 560)
    for place in positions(rig):
        kept = rig.run(prompt[:place], keep=[place]).nodes[place]
        tokens = prompt[:place] + prompt_of(rig, SUFFIX, seed=place)
        warm = rig.run(tokens, base=kept, keep=[len(tokens)])
        assert warm.usage is not None
        assert (warm.usage.cached_tokens, warm.usage.recomputed_tokens, warm.usage.new_tokens) == (place, 0, SUFFIX)
        same_state(rig, warm.nodes[len(tokens)], cold(rig, tokens, keep=[place, len(tokens)]).nodes[len(tokens)])


def test_a_snapshot_at_its_very_end_gives_the_same_next_tokens(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 560)
    for place in positions(tiny):
        kept = tiny.run(prompt[:place], keep=[place]).nodes[place]
        warm = tiny.run(prompt[:place], base=kept, generate=6, save=True)
        assert warm.usage is not None and warm.usage.cached_tokens == place
        other = cold(tiny, prompt[:place], keep=[place], generate=6, save=True)
        assert warm.tokens == other.tokens
        assert tiny.records(warm.nodes[place + 6]) == tiny.records(other.nodes[place + 6])


def test_marks_passed_on_the_way_are_snapshots_too(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 700)
    marks = [10, 256, 299, 300, 512, 513, 640]
    once = tiny.run(prompt, keep=marks)
    for mark in marks:
        tokens = prompt[:mark] + prompt_of(tiny, SUFFIX, seed=mark)
        warm = tiny.run(tokens, base=once.nodes[mark], keep=[len(tokens)])
        assert warm.usage is not None and warm.usage.cached_tokens == mark
        upto = [m for m in marks if m <= mark]
        same_state(tiny, warm.nodes[len(tokens)], cold(tiny, tokens, keep=[*upto, len(tokens)]).nodes[len(tokens)])


def test_children_of_one_snapshot_do_not_disturb_each_other_nor_the_parent(rig: Rig) -> None:
    prompt = prompt_of(rig, 300, seed=3)
    parent = rig.run(prompt, keep=[300]).nodes[300]
    before = rig.chain(parent)
    running = rig.submit(prompt, base=parent, generate=24, save=True)  # the parent's own line goes on meanwhile
    suffixes = [prompt_of(rig, n, seed=50 + n) for n in (7, 20, 33)]
    children = [rig.submit(prompt + s, base=parent, keep=[300 + len(s)]) for s in suffixes]
    for suffix, child in zip(suffixes, children, strict=True):
        end = 300 + len(suffix)
        reference = cold(rig, prompt + suffix, keep=[300, end])
        same_state(rig, child.wait().nodes[end], reference.nodes[end])
    assert len(running.wait().tokens) == 24
    assert rig.chain(parent) == before


def test_a_rollback_to_a_kept_place_needs_no_compute_and_is_exact(rig: Rig) -> None:
    prompt = prompt_of(rig, 300, seed=5)
    answer = rig.run(prompt, keep=[300], generate=12, save=True)
    kept, end = answer.nodes[300], answer.nodes[312]
    back = rig.cache.cut(end, 300)
    assert back is kept
    tokens = prompt + prompt_of(rig, 16, seed=9)
    warm = rig.run(tokens, base=back, keep=[316])
    assert warm.usage is not None and warm.usage.recomputed_tokens == 0 and warm.usage.new_tokens == 16
    same_state(rig, warm.nodes[316], cold(rig, tokens, keep=[300, 316]).nodes[316])


def test_a_rollback_of_a_rollback_is_exact(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 900, seed=6)
    long = tiny.run(prompt, keep=[700, 900]).nodes[900]
    for place in (700, 512, 256):
        back = tiny.cache.cut(long, place)
        assert back is not None and back.end == place
        tokens = prompt[:place] + prompt_of(tiny, SUFFIX, seed=place)
        warm = tiny.run(tokens, base=back, keep=[len(tokens)])
        assert warm.usage is not None and warm.usage.recomputed_tokens == 0
        keep = [p for p in (700,) if p <= place] + [len(tokens)]
        same_state(tiny, warm.nodes[len(tokens)], cold(tiny, tokens, keep=[*keep, place]).nodes[len(tokens)])
        long = back


def test_a_cut_between_kept_places_is_computed_again_from_the_nearest(tiny: Rig) -> None:
    for place in (1, 255, 257, 400, 511, 513, 699):
        prompt = prompt_of(tiny, 700, seed=1000 + place)
        long = tiny.run(prompt, keep=[700]).nodes[700]
        base = tiny.cache.hold_base(long, place)
        if not tiny.facts.layout.trimmable:
            assert base.end == place // 256 * 256
        again = tiny.run(prompt[:place], base=base if base.parent else None, keep=[place])
        same_state(tiny, again.nodes[place], cold(tiny, prompt[:place], keep=[place]).nodes[place])


def test_a_state_read_back_from_disk_is_exact() -> None:
    for name in ("tiny-llama", "tiny-gemma3", "tiny-gemma3-w64", "tiny-qwen3_5"):
        rig = open_rig(name, memory=0)
        prompt = prompt_of(rig, 700, seed=8)
        kept = rig.run(prompt, keep=[700]).nodes[700]
        assert rig.cache.store.flush(30.0)
        tokens = prompt + prompt_of(rig, SUFFIX, seed=8)
        warm = rig.run(tokens, base=kept, keep=[720])
        assert warm.usage is not None
        assert (warm.usage.memory_tokens, warm.usage.disk_tokens) == (0, 700)
        assert warm.usage.disk_bytes_read > 0
        same_state(rig, warm.nodes[720], cold(rig, tokens, keep=[700, 720]).nodes[720])
        rig.close()


@pytest.mark.parametrize("kind", [RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE, RecordKind.LOGITS])
def test_a_missing_record_means_a_shorter_restore_never_a_wrong_one(tiny: Rig, kind: RecordKind) -> None:
    prompt = prompt_of(tiny, 700, seed=10 + kind)
    kept = tiny.run(prompt, keep=[300, 700]).nodes[700]
    tiny.cache.store.delete([RecordId(kept.key, kind)])
    tokens = prompt + prompt_of(tiny, SUFFIX, seed=11)
    warm = tiny.run(tokens, base=kept, keep=[720])
    usage = warm.usage
    assert usage is not None and usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == 720
    if kind in tiny.facts.layout.kinds:
        assert (usage.cached_tokens, usage.recomputed_tokens) == (512, 188)
        assert usage.miss_reason is not MissReason.NONE
    same_state(tiny, warm.nodes[720], cold(tiny, tokens, keep=[300, 700, 720]).nodes[720])


def test_a_lost_parent_is_computed_again_on_its_own_schedule(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 700, seed=12)
    kept = tiny.run(prompt, keep=[300, 700]).nodes[700]
    for node in kept.path():
        tiny.cache.store.delete([RecordId(node.key, kind) for kind in RecordKind])
    tokens = prompt + prompt_of(tiny, SUFFIX, seed=12)
    warm = tiny.run(tokens, base=kept, keep=[720])
    assert warm.usage is not None
    assert (warm.usage.cached_tokens, warm.usage.recomputed_tokens, warm.usage.new_tokens) == (0, 700, 20)
    same_state(tiny, warm.nodes[720], cold(tiny, tokens, keep=[300, 700, 720]).nodes[720])
    assert tiny.cache.cut(kept, 700) is kept  # and the parent itself stands again


def test_a_prompt_sent_again_is_found_by_its_content(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 600, seed=13)
    first = tiny.run(prompt, generate=4)
    again = tiny.run(prompt, generate=4)
    assert first.usage is not None and again.usage is not None
    assert (again.usage.cached_tokens, again.usage.recomputed_tokens, again.usage.new_tokens) == (512, 88, 0) or (
        again.usage.cached_tokens,
        again.usage.new_tokens,
    ) == (512, 88)
    assert again.tokens == first.tokens
    longer = tiny.run(prompt[:550] + prompt_of(tiny, 30, seed=14), generate=4)
    assert longer.usage is not None and longer.usage.cached_tokens == 512


@pytest.mark.parametrize("place", [256, 300])
def test_a_turn_sent_again_behind_its_parent_is_restored_and_exact(tiny: Rig, place: int) -> None:
    prompt = prompt_of(tiny, 620)
    parent = tiny.run(prompt[:place], keep=[place]).nodes[place]
    first = tiny.run(prompt, base=parent, keep=[620])
    again = tiny.run(prompt, base=parent, keep=[620])
    assert again.usage is not None and first.nodes == again.nodes
    assert (again.usage.cached_tokens, again.usage.recomputed_tokens, again.usage.new_tokens) == (620, 0, 0)
    further = tiny.run([*prompt, 7, 8, 9], base=parent, keep=[620, 623])
    assert further.usage is not None
    assert (further.usage.cached_tokens, further.usage.recomputed_tokens, further.usage.new_tokens) == (620, 0, 3)
    other = cold(tiny, [*prompt, 7, 8, 9], keep=[place, 620, 623]).nodes[623]
    same_state(tiny, further.nodes[623], other)


def test_decoded_blocks_serve_their_own_line_only(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 250, seed=15)
    answer = tiny.run(prompt, generate=20, save=True)
    end = answer.nodes[270]
    tokens = prompt + answer.tokens
    # Behind the handle, the decoded block is used as it is.
    warm = tiny.run([*tokens, 33], base=end, keep=[271])
    assert warm.usage is not None and warm.usage.cached_tokens == 270
    # Without it, the block that decode made is known but not used.
    implicit = tiny.run([*tokens, 33], keep=[271])
    assert implicit.usage is not None and implicit.usage.cached_tokens == 0
    assert implicit.usage.recomputed_tokens >= 256 and implicit.usage.miss_reason is MissReason.PROVENANCE


def test_decoding_across_a_boundary_leaves_a_checkpoint(tiny: Rig) -> None:
    prompt = prompt_of(tiny, 250, seed=16)
    answer = tiny.run(prompt, generate=30, save=True)
    end = answer.nodes[280]
    assert [n.end for n in end.path()] == [256, 280]
    back = tiny.cache.cut(end, 256)
    assert back is not None
    tokens = [*(prompt + answer.tokens)[:256], 21, 22, 23]
    warm = tiny.run(tokens, base=back, keep=[259])
    assert warm.usage is not None and (warm.usage.cached_tokens, warm.usage.new_tokens) == (256, 3)
    # The same line decoded once more, alone, is the same line bit for bit.
    twin = cold(tiny, prompt, generate=30, save=True)
    assert twin.tokens == answer.tokens
    assert tiny.records(twin.nodes[280]) == tiny.records(end)


def test_rows_in_one_batch_give_the_tokens_they_give_alone(tiny: Rig) -> None:
    prompts = [prompt_of(tiny, n, seed=n) for n in (5, 70, 260, 520)]
    seeded = Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=42)
    for sampling in (GREEDY, seeded):
        alone = [tiny.run(p, generate=24, sampling=sampling).tokens for p in prompts]
        together = [tiny.submit(p, generate=24, sampling=sampling) for p in prompts]
        assert [t.wait().tokens for t in together] == alone


def test_a_trimmed_block_outlives_the_snapshot_it_was_cut_from() -> None:
    rig = open_rig("tiny-llama")
    prompt = prompt_of(rig, 300, seed=30)
    answer = rig.run(prompt, generate=12, save=True)
    end = answer.nodes[312]
    back = rig.cache.cut(end, 305)
    assert back is not None
    rig.cache.let_go(end)  # as releasing its snapshot does
    tokens = [*prompt, *answer.tokens[:5], 33, 34]
    warm = rig.run(tokens, base=back, keep=[307])
    assert warm.usage is not None
    assert (warm.usage.cached_tokens, warm.usage.recomputed_tokens, warm.usage.new_tokens) == (305, 0, 2)
    rig.close()


def same_end(rig: Rig, warm: Node, other: Node) -> None:
    """As `same_state`, where boundaries on the way were thinned differently."""
    assert rig.records(warm) == rig.records(other)
    for ours, theirs in zip(rig.chain(warm), rig.chain(other), strict=True):
        for kind in ours.keys() & theirs.keys():
            assert ours[kind] == theirs[kind], kind


def test_a_branch_of_a_thinned_chain_is_computed_from_an_earlier_checkpoint_and_exact() -> None:
    rig = open_rig("tiny-qwen3_5", checkpoints=Checkpoints(state_spacing=2))
    prompt = prompt_of(rig, 2600, seed=31)
    long = rig.run(prompt, keep=[2600]).nodes[2600]
    there = [node.end for node in long.path() if RecordKind.STATE in rig.records(node)]
    assert there == [1024, 1536, 2048, 2304, 2560, 2600]
    for place in (2400, 1792, 1300, 300):  # what one computes again serves only places behind it
        cost = place - rig.cache.checkpoints_before(long, place)
        assert cost == place - max((at for at in there if at <= place), default=0)
        base = rig.cache.hold_base(long, place)
        again = rig.run(prompt[:place], base=base if base.parent else None, keep=[place])
        rig.cache.let_go(base)
        assert again.usage is not None and place - again.usage.cached_tokens == cost
        same_end(rig, again.nodes[place], cold(rig, prompt[:place], keep=[place]).nodes[place])
        tokens = [*prompt[:place], *prompt_of(rig, SUFFIX, seed=place)]  # one that finds its way by content
        branch = rig.run(tokens, keep=[len(tokens)])
        assert branch.usage is not None and branch.usage.new_tokens <= SUFFIX
        same_end(rig, branch.nodes[len(tokens)], cold(rig, tokens, keep=[len(tokens)]).nodes[len(tokens)])
    rig.close()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MARKS, CheckpointPolicy.OFF])
def test_handles_are_exact_where_nothing_else_is_kept(policy: CheckpointPolicy) -> None:
    for name in ("tiny-llama", "tiny-gemma3", "tiny-qwen3_5"):
        rig = open_rig(name, checkpoints=Checkpoints(policy=policy))
        prompt = prompt_of(rig, 1100, seed=41)
        answer = rig.run(prompt, keep=[300, 1100], generate=200, save=True)
        for place in (300, 1100):
            tokens = prompt[:place] + prompt_of(rig, SUFFIX, seed=place)
            warm = rig.run(tokens, base=answer.nodes[place], keep=[len(tokens)])
            assert warm.usage is not None and (warm.usage.cached_tokens, warm.usage.new_tokens) == (place, SUFFIX)
            keep = [mark for mark in (300, 1100) if mark <= place]
            other = cold(rig, tokens, keep=[*keep, len(tokens)]).nodes[len(tokens)]
            assert rig.records(warm.nodes[len(tokens)]) == rig.records(other)
        end = answer.nodes[1300]
        tokens = [*end.all_tokens(), *prompt_of(rig, SUFFIX, seed=42)]
        warm = rig.run(tokens, base=end, keep=[len(tokens)])
        assert warm.usage is not None and (warm.usage.cached_tokens, warm.usage.recomputed_tokens) == (1300, 0)
        assert rig.cache.store.stats().file_bytes == 0 or policy is CheckpointPolicy.MARKS
        rig.close()
