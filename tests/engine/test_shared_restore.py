"""Rows that go on from one state restore it together: each record is decoded once, and no row changes another's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kvcache.layout import CacheLayout
from kvcache.records import RecordKind
from kvcache.schedule import plan_calls
from service.engine import cpu
from service.models import resolve
from service.plan import Capture, Decode, OpenRow, Payloads, Prefill, Restored, RowId, StepPlan
from service.request import Sampling

pytestmark = pytest.mark.mlx

ROWS, STEPS, LENGTH = 4, 6, 600
GREEDY = Sampling(temperature=0.0, seed=0)


def restored_of(layout: CacheLayout, blocks: Sequence[tuple[int, int, Payloads]]) -> Restored:
    """What a restore of the last block's end reads."""
    end = blocks[-1][1]
    parts = [(start, kind, payload) for start, _, payloads in blocks for kind, payload in payloads.items()]
    wanted = [
        (start, kind, payload)
        for kind in RecordKind
        for start, own, payload in parts
        if (own is kind and (kind is RecordKind.FULL or start == blocks[-1][0]))
        or (own is kind is RecordKind.WINDOW and start + 256 > end - layout.window)
    ]
    starts, kinds, payloads = zip(*wanted, strict=True)
    return Restored(position=end, kinds=kinds, starts=starts, payloads=payloads)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3-w64", "tiny-gpt-oss", "tiny-qwen3_5", "tiny-lfm2"])
def test_rows_restored_together_go_on_as_they_do_alone(name: str, decoded: list[object]) -> None:
    cpu.mlx()
    from service.engine.loading import load
    from service.engine.mlx_engine import MlxEngine

    model, facts = load(resolve(name))
    engine = MlxEngine(model, facts.layout, facts.footprint)
    numbers = itertools.count(1)
    rng = random.Random(name)
    prompt = [rng.randrange(20, min(facts.vocab_size, 400)) for _ in range(LENGTH)]

    def opened(restored: Restored | None) -> OpenRow:
        row = RowId(next(numbers))
        return OpenRow(row=row, restored=restored, sampling=GREEDY, top_logprobs=None, context=prompt)

    order = opened(None)
    blocks: list[tuple[int, int, Payloads]] = []
    engine.step(StepPlan(open=(order,)))
    for call in plan_calls(0, LENGTH, []):
        kinds = (*facts.layout.kinds, RecordKind.LOGITS) if call.stop else facts.layout.kinds
        take = Capture(start=call.start, end=call.end, kinds=kinds)
        fed = Prefill(row=order.row, tokens=prompt[call.start : call.end], logits=call.stop, capture=take)
        blocks.append((call.start, call.end, engine.step(StepPlan(prefill=(fed,))).captured[order.row]))
    restored = restored_of(facts.layout, blocks)

    def go_on(count: int) -> list[list[int]]:
        """Row i is fed i tokens of its own first; then all decode."""
        orders = [opened(restored) for _ in range(count)]
        tokens = {order.row: [] for order in orders}
        # Rows that nobody feeds sample from the stored logits.
        fed = [
            Prefill(row=order.row, tokens=[21 + i] * i, logits=True, capture=None)
            for i, order in enumerate(orders)
            if i
        ]
        rows = tuple(tokens)
        plans = [StepPlan(open=tuple(orders), prefill=tuple(fed), sample=rows)]
        plans += [StepPlan(decode=Decode(rows=rows))] * STEPS
        for plan in plans:
            result = engine.step(plan)
            assert result.failed == {}
            for row, pick in result.picked.items():
                tokens[row].append(pick.token)
        engine.step(StepPlan(close=rows))
        return list(tokens.values())

    decoded.clear()
    together = go_on(ROWS)
    assert sorted(map(id, decoded)) == sorted(map(id, restored.payloads))
    assert go_on(1) == together[:1]
    assert go_on(ROWS) == together
    assert len({tuple(row) for row in together}) > 1
