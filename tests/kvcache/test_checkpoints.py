"""What a boundary is worth under each policy: enough for every handle on the way, and nothing to spare."""

from __future__ import annotations

import itertools
import random

import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.checkpoints import CheckpointPolicy, Checkpoints, Take, take_at
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordKind

FULL, STATE = LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.STATE)
WINDOW = LayerSpec(LayerKind.WINDOW, 300)
LAYOUTS = [CacheLayout(layers) for n in (1, 2, 3) for layers in itertools.combinations((FULL, WINDOW, STATE), n)]
THROUGH, MARKS, OFF = CheckpointPolicy


@pytest.mark.parametrize("layout", LAYOUTS, ids=CacheLayout.describe)
def test_through_takes_every_kind_at_every_boundary(layout: CacheLayout) -> None:
    for places, open_end in (((), False), ((700,), False), ((), True)):
        take = take_at(THROUGH, layout, 512, places=places, open_end=open_end)
        assert set(take.kinds) == {*layout.kinds, RecordKind.LOGITS}
        assert (RecordKind.LOGITS in take.firm) is (RecordKind.FULL in take.firm)


@pytest.mark.parametrize("policy", [MARKS, OFF])
@pytest.mark.parametrize("layout", LAYOUTS, ids=CacheLayout.describe)
def test_without_a_handle_only_what_can_be_cut_anywhere_is_worth_its_memory(
    layout: CacheLayout, policy: CheckpointPolicy
) -> None:
    taken = take_at(policy, layout, 512, places=(), open_end=False)
    assert taken == (Take(passing=(RecordKind.FULL, RecordKind.LOGITS)) if layout.trimmable else Take())
    assert take_at(policy, layout, 512, places=(512, 300), open_end=False) == taken  # behind it, or itself


@pytest.mark.parametrize("policy", list(CheckpointPolicy))
@pytest.mark.parametrize("layout", LAYOUTS, ids=CacheLayout.describe)
def test_what_a_handle_will_need_is_firm_and_nothing_else(layout: CacheLayout, policy: CheckpointPolicy) -> None:
    rng = random.Random(3)
    for _ in range(200):
        place = rng.randrange(1, 3000)
        for end in range(BLOCK_TOKENS, place, BLOCK_TOKENS):
            needed = {RecordKind.FULL} if RecordKind.FULL in layout.kinds else set()
            if layout.window and end > place - layout.window:
                needed.add(RecordKind.WINDOW)
            take = take_at(policy, layout, end, places=(place,), open_end=False)
            assert set(take.firm) - {RecordKind.LOGITS} == needed
            # Logits are of use where one can stand, and nowhere else.
            assert (RecordKind.LOGITS in take.kinds) is (set(take.kinds) >= set(layout.kinds))


@pytest.mark.parametrize("policy", [MARKS, OFF])
def test_a_run_whose_end_is_not_known_keeps_all_that_its_end_may_need(policy: CheckpointPolicy) -> None:
    layout = CacheLayout((FULL, WINDOW, STATE))
    taken = take_at(policy, layout, 512, places=(), open_end=True)
    in_memory = (RecordKind.WINDOW, RecordKind.STATE)
    assert taken == Take(firm=(RecordKind.FULL, RecordKind.LOGITS), in_memory=in_memory)
    through = take_at(THROUGH, layout, 512, places=(), open_end=True)
    assert set(through.firm) == {RecordKind.FULL, RecordKind.WINDOW, RecordKind.LOGITS}
    assert through.passing == (RecordKind.STATE,)


@pytest.mark.parametrize("spacing", [-1, 1])
def test_a_spacing_that_makes_no_sense_is_refused(spacing: int) -> None:
    with pytest.raises(ValueError, match="state_spacing"):
        Checkpoints(state_spacing=spacing)
