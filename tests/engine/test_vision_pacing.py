"""A tower taken in parts gives the bits that it gives in one go, and computes each part once."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from service.engine import cpu

mx = cpu.mlx()

from service.engine.calls import Features  # noqa: E402
from service.engine.vision import attention, pacing  # noqa: E402
from service.engine.vision.pacing import Pass  # noqa: E402
from service.plan import Encode, StepPlan  # noqa: E402
from tests.engine.test_vision_exactness import FAMILIES  # noqa: E402
from tests.engine.vision_rig import VisionBench  # noqa: E402

pytest.importorskip("mlx_vlm")

pytestmark = pytest.mark.mlx

LAYERS = {"tiny-qwen3-vl": 3, "tiny-llava": 3}  # all others have two
USES_SEVERAL = {"tiny-qwen3-vl", "tiny-llava"}  # deepstack; the features of the last layer but one


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest) -> VisionBench:
    return VisionBench(request.param)


def same(one: Features, other: Features) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(np.array(one[n]), np.array(other[n])) for n in one)


def test_layer_by_layer_is_all_at_once(bench: VisionBench) -> None:
    model, depth = bench.model, LAYERS.get(bench.name, 2)
    for seed, size in enumerate([(64, 64), (150, 130), (64, 64)]):  # the first pass finds out what the tower needs
        image = bench.prepare(*size, seed)
        whole = model.encode(image)
        under_way, made, calls = Pass(), None, 0
        while made is None:
            made = model.encode_some(image, under_way, 0.0)
            calls += 1
            assert len(under_way.outputs) == calls
        assert same(made, whole)
        assert calls % depth == 0
    assert model._pace._is_chain == (bench.name not in USES_SEVERAL)


def test_attention_is_a_part_of_its_own_where_it_is_tiled(bench: VisionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FROM", 8)
    tiles: list[int] = []
    tiled = attention._tiled

    def watched(q: np.ndarray, *rest: object) -> np.ndarray:
        tiles.append(len(tiles))
        return tiled(q, *rest)

    monkeypatch.setattr(attention, "_tiled", watched)
    image = bench.prepare(150, 130, 3)
    whole = bench.model.encode(image)
    count = len(tiles)
    under_way, made, calls = Pass(), None, 0
    while made is None:
        held = len(under_way.outputs), len(under_way.inner)
        made = bench.model.encode_some(image, under_way, 0.0)
        calls += 1
        if made is None:  # one part more: an attention's, or what was left of its layer
            assert (len(under_way.outputs), len(under_way.inner)) in {(held[0], held[1] + 1), (held[0] + 1, 0)}
    assert same(made, whole)
    assert len(tiles) == 2 * count
    assert count == len(under_way.outputs)  # one attention a layer
    assert calls == 2 * count


def test_a_chain_holds_the_newest_output_alone(bench: VisionBench) -> None:
    if bench.name in USES_SEVERAL:
        pytest.skip("no chain")
    bench.model.encode(bench.prepare(64, 64, 1))
    under_way = Pass()
    assert bench.model.encode_some(bench.prepare(64, 64, 2), under_way, math.inf) is not None
    depth = LAYERS.get(bench.name, 2)
    for number, output in enumerate(under_way.outputs):
        hollow = np.isnan(np.array(output if isinstance(output, mx.array) else output[0])).all()
        assert hollow == ((number + 1) % depth != 0)


def test_the_engine_goes_on_where_the_last_step_ended_and_lets_go_of_what_nobody_needs() -> None:
    bench = VisionBench("tiny-qwen3_5-vl")
    a, b = bench.prepare(64, 64, 1), bench.prepare(64, 64, 2)
    want = bench.end(bench.run(bench.context(5, a, 6)))
    again = VisionBench("tiny-qwen3_5-vl")
    context, other = again.context(5, a, 6), again.context(5, b, 6)
    rows = [_opened(again, each) for each in (context, other)]
    first = again.step(StepPlan(encode=(Encode(image=a, seconds=0.0),)))
    assert (first.encoding, first.encoded) == ({a.key}, {})
    begun = again.step(StepPlan(encode=(Encode(image=b, seconds=0.0),)))
    assert begun.encoding == {b.key}
    again.step(StepPlan(close=(rows[1],)))
    assert set(again.engine._towers) == {a.key}
    done = again.step(StepPlan(encode=(Encode(image=a, seconds=0.0),)))
    assert (done.encoding, set(done.encoded)) == (set(), {a.key})
    assert again.engine._towers == {}
    assert again.end(again.prefill(rows[0], context, (), ())) == want
    again.step(StepPlan(close=(rows[0],)))


def _opened(bench: VisionBench, context):
    from service.plan import OpenRow, RowId

    row = RowId(50_000 + len(bench.engine._rows))
    order = OpenRow(
        row=row, restored=None, sampling=None, top_logprobs=None, context=context.tokens, images=context.images
    )
    bench.step(StepPlan(open=(order,)))
    return row


def test_no_part_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: now))
    under_way = Pass(until=7.0)
    with under_way.part():  # the first of a step, whatever it takes
        now += 5
    with pytest.raises(pacing._UsedUp), under_way.part():  # this one could take as long
        now += 1000
    assert now == 5
    under_way.until, under_way.first = 12.0, True
    for _ in range(3):  # until 6, 7 and 8, and the last began when 12 was just in time
        with under_way.part():
            now += 1
    with pytest.raises(pacing._UsedUp), under_way.part():
        now += 1000
    assert now == 8
