"""A restore plan names the deepest place whose every layer is whole, and exactly the records that place needs.

The reference is written from what layers remember, token by token, and shares nothing with the planner.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvcache.blocks import BLOCK_TOKENS, root_key
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordId, RecordKind, Tier
from kvcache.restore import RestorePlan, disk_tokens, needed, plan_restore
from kvcache.schedule import decode_schedule, trimmed_schedule
from kvcache.tree import BlockTree, Node

FULL, STATE = LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.STATE)


def window(tokens: int) -> LayerSpec:
    return LayerSpec(LayerKind.WINDOW, tokens)


def layout(*layers: LayerSpec) -> CacheLayout:
    return CacheLayout(layers)


def path_of(length: int, *, tail: bool = True, schedule: bytes = b"P") -> list[Node]:
    tree = BlockTree()
    node = tree.root(root_key("model", "owner"))
    while node.end < length:
        size = min(BLOCK_TOKENS, length - node.end)
        if size < BLOCK_TOKENS and not tail:
            break
        node = tree.add(node, [node.end + i for i in range(size)], schedule)
    return node.path()


def all_records(path: Sequence[Node]) -> set[RecordId]:
    return {
        RecordId(node.source if kind is RecordKind.FULL else node.key, kind) for node in path for kind in RecordKind
    }


def memory_of(path: Sequence[Node], layer: LayerSpec) -> list[RecordId | None]:
    """For each token: the record that has what the layer remembers of it, if any."""
    owners: list[RecordId | None] = []
    for node in path:
        for token in range(node.start, node.end):
            if layer.kind is LayerKind.FULL:
                owners.append(RecordId(node.source, RecordKind.FULL))
            elif token >= node.end - min(len(node.tokens), layer.window):
                owners.append(RecordId(node.key, RecordKind.WINDOW))
            else:
                owners.append(None)  # the block's record has let go of this token
    return owners


def reference(
    path: Sequence[Node], shape: CacheLayout, have: set[RecordId], target: int, *, more_follows: bool
) -> tuple[int, set[RecordId], bool] | None:
    ends = {node.end: node for node in path}
    kept = [(layer, memory_of(path, layer)) for layer in shape.layers if layer.kind is not LayerKind.STATE]
    for place in range(target, 0, -1):
        if place not in ends and any(layer.kind is not LayerKind.FULL for layer in shape.layers):
            continue  # only a layer that keeps every token can be cut inside a record
        if not more_follows and target in ends and ends[target].start < place < target:
            continue  # what prefill made comes back by the calls that made it
        used: set[RecordId | None] = set()
        for layer, owners in kept:
            first = max(0, place - layer.window) if layer.kind is LayerKind.WINDOW else 0
            used |= set(owners[first:place])
        if any(layer.kind is LayerKind.STATE for layer in shape.layers):
            used.add(RecordId(ends[place].key, RecordKind.STATE))
        logits = place == target and not more_follows
        if logits:
            used.add(RecordId(ends[place].key, RecordKind.LOGITS) if place in ends else None)
        if used <= have:
            return place, {record for record in used if record}, logits
    return None


def random_layout(rng: random.Random) -> CacheLayout:
    choices = [FULL, STATE, window(rng.randrange(3, 701)), window(rng.choice([255, 256, 257, 511, 512, 513]))]
    return CacheLayout(tuple(rng.choice(choices) for _ in range(rng.randrange(1, 4))))


@pytest.mark.parametrize("seed", range(4))
def test_plans_agree_with_a_reference_written_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    offered = 0
    for _ in range(300):
        shape = random_layout(rng)
        path = path_of(rng.choice([rng.randrange(1, 1300), 256 * rng.randrange(1, 5), 256 * rng.randrange(1, 5) + 1]))
        have = all_records(path)
        for record in sorted(have, key=lambda r: (r.key, r.kind)):
            if rng.random() < rng.choice([0, 0.05, 0.3]):
                have.discard(record)
        end = path[-1].end
        target = rng.choice([end, end, rng.randrange(1, end + 1)])
        more_follows = rng.random() < 0.5
        plan = plan_restore(path, shape, have.__contains__, target=target, more_follows=more_follows)
        wanted = reference(path, shape, have, target, more_follows=more_follows)
        found = (plan.position, set(plan.records), plan.logits) if plan else None
        assert found == wanted, (shape.describe(), end, target, more_follows)
        if plan is None:
            continue
        offered += 1
        assert len(set(plan.records)) == len(plan.records) == len(plan.starts)
        starts = {node.key: node.start for node in path} | {node.source: node.start for node in path}
        assert list(plan.starts) == [starts[record.key] for record in plan.records]
        assert plan.nodes == tuple(n for n in path if n.start < plan.position)
        for kind in RecordKind:  # a reader joins the records of a kind in the order given
            of_kind = [start for start, record in zip(plan.starts, plan.records, strict=True) if record.kind is kind]
            assert of_kind == sorted(of_kind)
    assert offered > 150


def test_a_layer_that_keeps_every_token_can_be_cut_anywhere() -> None:
    path = path_of(600)
    have = all_records(path)
    places = [
        plan.position
        for target in range(1, 601)
        if (plan := plan_restore(path, layout(FULL, FULL), have.__contains__, target=target, more_follows=True))
    ]
    assert places == list(range(1, 601))


def test_a_lost_block_leaves_what_lies_before_it_however_far_the_path_goes_on() -> None:
    path = path_of(1024)
    have = all_records(path) - {RecordId(path[2].key, RecordKind.FULL)}
    for target, place in ((1024, 512), (700, 512), (513, 512), (512, 512), (400, 400), (1, 1)):
        plan = plan_restore(path, layout(FULL), have.__contains__, target=target, more_follows=True)
        assert plan is not None and plan.position == place


@pytest.mark.parametrize("schedule", [b"P", b"P\x10", decode_schedule(bytes(16)), trimmed_schedule(bytes(32))])
def test_without_logits_a_cut_or_decoded_state_lacks_one_token_and_a_prefilled_one_its_calls(schedule: bytes) -> None:
    path = path_of(600, schedule=schedule)
    have = all_records(path) - {RecordId(path[-1].key, RecordKind.LOGITS)}
    places = {
        shape.describe(): plan_restore(path, shape, have.__contains__, target=600, more_follows=False)
        for shape in (layout(FULL), layout(window(100)), layout(FULL, STATE))
    }
    assert {text: plan and plan.position for text, plan in places.items()} == {
        "full": 512 if schedule[:1] == b"P" else 599, "window:100": 512, "full,state": 512,
    }  # fmt: skip


def test_nothing_stored_or_nothing_known_is_no_plan() -> None:
    shape = layout(FULL, window(512), STATE)
    assert plan_restore(path_of(600), shape, lambda record: False, target=600, more_follows=True) is None
    assert plan_restore([], shape, lambda record: True, target=0, more_follows=True) is None
    assert needed([], shape, logits=True) == []


def test_tokens_count_as_read_from_disk_if_any_layer_of_them_is() -> None:
    path = path_of(600)
    shape = layout(FULL, window(300))
    plan = plan_restore(path, shape, lambda record: True, target=600, more_follows=False)
    assert plan is not None
    kinds = [(start, record.kind.name) for start, record in zip(plan.starts, plan.records, strict=True)]
    assert kinds == [(0, "FULL"), (256, "FULL"), (512, "FULL"), (256, "WINDOW"), (512, "WINDOW"), (512, "LOGITS")]

    def on_disk(*places: int) -> int:
        return disk_tokens(plan, [Tier.DISK if i in places else Tier.MEMORY for i in range(6)])

    assert [on_disk(i) for i in range(6)] == [256, 256, 88, 256, 88, 0]
    assert (on_disk(), on_disk(1, 3), on_disk(0, 4), on_disk(*range(6))) == (0, 256, 344, 600)
    cut = plan_restore(path, layout(FULL), lambda record: True, target=300, more_follows=True)
    assert cut is not None
    assert disk_tokens(cut, [Tier.PENDING, Tier.DISK]) == 44


SHAPES = {
    "full": layout(FULL),
    "window": layout(window(512)),
    "wide window": layout(window(4096)),
    "state": layout(STATE),
    "all": layout(FULL, window(700), STATE),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("lost", ["nothing", "every window", "every state", "windows but the last of each reach"])
def test_planning_asks_for_each_record_a_bounded_number_of_times(shape: CacheLayout, lost: str) -> None:
    """Linear at 128k tokens, counted in questions to the store and not by a clock."""

    def asked(blocks: int) -> int:
        path = path_of(256 * blocks)
        gone = {
            "nothing": set(),
            "every window": {RecordId(n.key, RecordKind.WINDOW) for n in path},
            "every state": {RecordId(n.key, RecordKind.STATE) for n in path},
            "windows but the last of each reach": {RecordId(n.key, RecordKind.WINDOW) for n in path[1::2]},
        }[lost]
        count = 0

        def has(record: RecordId) -> bool:
            nonlocal count
            count += 1
            return record not in gone

        plan_restore(path, shape, has, target=256 * blocks, more_follows=True)
        return count

    reach = shape.window // BLOCK_TOKENS + 2
    assert asked(512) <= 512 * (2 + reach)
    assert asked(512) <= 9 * asked(64)


def plan_fields(plan: RestorePlan | None) -> object:
    return None if plan is None else (plan.position, plan.nodes, plan.records, plan.starts, plan.logits)


def test_what_follows_the_target_on_the_path_does_not_matter() -> None:
    rng = random.Random(9)
    for _ in range(300):
        shape = random_layout(rng)
        path = path_of(256 * rng.randrange(2, 5))
        have = {r for r in sorted(all_records(path), key=lambda r: (r.key, r.kind)) if rng.random() < 0.9}
        target = 256 * rng.randrange(1, len(path))
        short = path[: target // 256]
        for more_follows in (False, True):
            long_plan = plan_restore(path, shape, have.__contains__, target=target, more_follows=more_follows)
            short_plan = plan_restore(short, shape, have.__contains__, target=target, more_follows=more_follows)
            assert plan_fields(long_plan) == plan_fields(short_plan)
