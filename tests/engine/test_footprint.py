"""What a row was said to take at admission bounds what it takes: apart, decoding, padded, and past every window."""

from __future__ import annotations

import itertools

import pytest

from kvcache.schedule import plan_calls
from service.engine import cpu
from service.models import resolve
from service.plan import Decode, OpenRow, Prefill, RowId, StepPlan
from service.request import Sampling

pytestmark = pytest.mark.mlx

STEPS = 20


@pytest.mark.parametrize(
    "name", ["tiny-llama", "tiny-gemma3", "tiny-gemma3-w64", "tiny-gpt-oss", "tiny-qwen3_5", "tiny-lfm2"]
)
def test_rows_never_outgrow_what_was_reserved_for_them(name: str) -> None:
    cpu.mlx()
    from service.engine.loading import load
    from service.engine.mlx_engine import MlxEngine

    model, facts = load(resolve(name))
    footprint = facts.footprint
    engine = MlxEngine(model, facts.layout, footprint)
    numbers = itertools.count(1)

    def start(length: int) -> RowId:
        row = RowId(next(numbers))
        tokens = [20 + i % 300 for i in range(length)]
        order = OpenRow(
            row=row, restored=None, sampling=Sampling(temperature=0.0, seed=0), top_logprobs=None, context=tokens
        )
        engine.step(StepPlan(open=(order,)))
        for call in plan_calls(0, length, []):
            fed = Prefill(row=row, tokens=tokens[call.start : call.end], logits=call.stop, capture=None)
            engine.step(StepPlan(prefill=(fed,)))
        engine.step(StepPlan(sample=(row,)))
        return row

    for length in (10, 300, 700, 1300):
        row = start(length)
        assert engine.active_bytes() <= footprint.row_bytes(length + STEPS), length
        for _ in range(STEPS):
            engine.step(StepPlan(decode=Decode(rows=(row,))))
            assert 0 < engine.active_bytes() <= footprint.row_bytes(length + STEPS), length
        engine.step(StepPlan(close=(row,)))

    lengths = (10, 300, 700)
    rows = tuple(start(length) for length in lengths)
    shared = footprint.share_calls(lengths)
    order = Decode(rows=rows, shared=tuple(tuple(rows[i] for i in call) for call in shared.calls))
    reserved = sum(footprint.row_bytes(length + STEPS) for length in lengths)
    for _ in range(STEPS):
        engine.step(StepPlan(decode=order))
        assert engine.active_bytes() <= reserved + shared.padding
    engine.step(StepPlan(close=rows))
    assert engine.active_bytes() == 0
