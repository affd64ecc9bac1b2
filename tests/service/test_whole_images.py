"""Images that must be whole, through the loop: no state stands inside one, and what is stored around it is used."""

from __future__ import annotations

import random
from array import array

import pytest

from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.media import MediaKey, symbols
from service.engine.fake import FakeEngine
from tests.service.loop_rig import LoopRig

LAYOUT = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, 300)), whole_images=True)
A, B = MediaKey(b"a" * 32), MediaKey(b"b" * 32)


def context(*parts: int | tuple[MediaKey, int], seed: int = 1) -> array[int]:
    rng = random.Random(seed)
    tokens: array[int] = array("I")
    for part in parts:
        tokens.extend([rng.randrange(400) for _ in range(part)] if isinstance(part, int) else symbols(*part))
    return tokens


@pytest.fixture
def rig() -> LoopRig:
    return LoopRig(engine=FakeEngine(LAYOUT))


def test_a_prompt_restores_at_boundaries_outside_images_and_never_inside(rig: LoopRig) -> None:
    tokens = context(200, (A, 100), 300, (B, 600), 100)  # images over 256 and over 768, 1024
    first = rig.submit(tokens, generate=3)
    rig.run()
    for count, restored in ((1299, 1280), (1250, 512), (1200, 512), (590, 512), (500, 0)):
        again = rig.submit(tokens[:count] + array("I", [1, 2, 3]), generate=3)
        rig.run()
        assert again.receipt[0] == restored
        assert again.tokens == rig.engine.continuation([*tokens[:count], 1, 2, 3], 3)
    assert first.tokens == rig.engine.continuation(tokens, 3)
    rig.settle()


def test_state_behind_an_image_over_a_boundary_is_found_again_by_content(rig: LoopRig) -> None:
    tokens = context(200, (A, 100), 300)
    rig.submit(tokens, generate=1)
    rig.run()
    again = rig.submit(tokens, generate=1)
    rig.run()
    assert again.receipt[0] == 512
    rig.settle()


def test_a_snapshot_right_behind_an_image_over_a_boundary_is_whole(rig: LoopRig) -> None:
    tokens = context(200, (A, 100))
    kept = rig.submit(tokens, keep=[300])
    rig.run()
    child = rig.submit([*tokens, *range(20)], base=kept.nodes[300], generate=2)
    rig.run()
    assert child.receipt == (300, 0, 20)
    assert child.tokens == rig.engine.continuation([*tokens, *range(20)], 2)
    other = rig.submit([*tokens[:200], *symbols(B, 100), *range(20)], generate=2)
    rig.run()
    assert other.receipt[0] == 0
    rig.settle()


def test_a_cut_inside_an_image_falls_back_to_the_place_before_it(rig: LoopRig) -> None:
    tokens = context(300, (A, 400), 200)
    kept = rig.submit(tokens, keep=[900])
    rig.run()
    node = kept.nodes[900]
    assert rig.cache.cut(node, 512) is None
    base = rig.cache.hold_base(node, 512)
    assert base.end == 256
    rig.cache.let_go(base)
    assert rig.cache.checkpoints_before(node, 767) == 256
    assert rig.cache.checkpoints_before(node, 800) == 768
    rig.settle()
