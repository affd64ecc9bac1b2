"""Rows of one engine come and go in any order, and each picks the tokens that it picks alone.

Two tiny models: one with windows of 64 tokens, one with recurrent state. Lengths lie around the window, so that rows
wrap while others join and leave.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from kvcache.schedule import plan_calls
from service.engine import cpu
from service.models import resolve
from service.plan import Decode, OpenRow, Prefill, RowId, StepPlan, StepResult
from service.request import Sampling

pytestmark = pytest.mark.mlx

GREEDY = Sampling(temperature=0.0, seed=0)
SEEDED = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=11)
LENGTHS = (1, 60, 63, 64, 65, 70, 130)
STEPS = 10


class Bench:
    """One engine, driven by hand."""

    def __init__(self, name: str) -> None:
        cpu.mlx()
        from service.engine.loading import load
        from service.engine.mlx_engine import MlxEngine

        model, facts = load(resolve(name))
        self.engine = MlxEngine(model, facts.layout)
        rng = random.Random(name)
        top = min(facts.vocab_size, 400)
        self.prompts = [[rng.randrange(20, top) for _ in range(length)] for length in LENGTHS]
        self.numbers = itertools.count(1)
        self.alone = {
            (index, sampling.seed): self.run_alone(index, sampling)
            for index in range(len(LENGTHS))
            for sampling in (GREEDY, SEEDED)
        }

    def start(self, index: int, sampling: Sampling) -> tuple[RowId, int]:
        """A row that has picked its first token."""
        row, prompt = RowId(next(self.numbers)), self.prompts[index]
        order = OpenRow(row=row, restored=None, sampling=sampling, top_logprobs=None, context=prompt)
        calls = [
            Prefill(row=row, tokens=prompt[call.start : call.end], logits=call.stop, capture=None)
            for call in plan_calls(0, len(prompt), [])
        ]
        result = self.step(StepPlan(open=(order,), prefill=tuple(calls), sample=(row,)))
        return row, result.picked[row].token

    def step(self, plan: StepPlan) -> StepResult:
        result = self.engine.step(plan)
        assert result.failed == {}
        return result

    def run_alone(self, index: int, sampling: Sampling) -> list[int]:
        row, token = self.start(index, sampling)
        tokens = [token]
        while len(tokens) < STEPS:
            tokens.append(self.step(StepPlan(decode=Decode(rows=(row,)))).picked[row].token)
        self.step(StepPlan(close=(row,)))
        return tokens


@pytest.fixture(scope="module", params=["tiny-gemma3-w64", "tiny-qwen3_5"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    assert made.engine.active_bytes() == 0


def some_calls(rng: random.Random, rows: list[RowId]) -> tuple[tuple[RowId, ...], ...]:
    """The rows in one call, or dealt out to two; no wish at all is one call too."""
    if rng.random() < 0.5:
        return rng.choice([(), (tuple(rows),)])
    second = {row for row in rows if row % 2 == rng.randrange(2)}
    calls = (tuple(row for row in rows if row not in second), tuple(row for row in rows if row in second))
    return tuple(call for call in calls if call)


def play(bench: Bench, rng: random.Random) -> None:
    """Four rows join, pause, come back and end at random."""
    waiting = [(index, rng.choice([GREEDY, SEEDED])) for index in rng.sample(range(len(LENGTHS)), 4)]
    running: dict[RowId, tuple[tuple[int, int | None], list[int]]] = {}
    ended = 0
    while waiting or running:
        if waiting and (not running or rng.random() < 0.4):
            index, sampling = waiting.pop()
            row, token = bench.start(index, sampling)
            running[row] = ((index, sampling.seed), [token])
        # Some rows sit a step out, and the order of those that do not is any.
        taking = [row for row in running if rng.random() < 0.85]
        rng.shuffle(taking)
        if taking:
            result = bench.step(StepPlan(decode=Decode(rows=tuple(taking), shared=some_calls(rng, taking))))
            assert result.picked.keys() == set(taking)
            for row, pick in result.picked.items():
                running[row][1].append(pick.token)
        done = [row for row, (_, tokens) in running.items() if len(tokens) >= STEPS or rng.random() < 0.02]
        if done:
            bench.step(StepPlan(close=tuple(done)))
        for row in done:
            who, tokens = running.pop(row)
            assert tokens == bench.alone[who][: len(tokens)], who
            ended += 1
    assert ended == 4


@pytest.mark.parametrize("part", range(5))
def test_fifty_random_comings_and_goings_change_nobodys_tokens(bench: Bench, part: int) -> None:
    for seed in range(5):
        play(bench, random.Random(100 * part + seed))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_rows_leave_in_every_order(bench: Bench, order: tuple[int, ...]) -> None:
    started = [bench.start(index, GREEDY) for index in (6, 1, 4)]
    rows = [row for row, _ in started]
    tokens = {row: [token] for row, token in started}
    for leaving in order:
        result = bench.step(StepPlan(decode=Decode(rows=tuple(rows))))
        for row, pick in result.picked.items():
            tokens[row].append(pick.token)
        gone = started[leaving][0]
        bench.step(StepPlan(close=(gone,)))
        rows.remove(gone)
    for (row, _), index in zip(started, (6, 1, 4), strict=True):
        assert tokens[row] == bench.alone[index, 0][: len(tokens[row])]
    assert bench.engine.active_bytes() == 0


def test_a_row_that_left_the_batch_goes_on_by_prefill_and_comes_back(bench: Bench) -> None:
    (first, a), (second, b) = bench.start(5, GREEDY), bench.start(3, GREEDY)
    tokens = {first: [a], second: [b]}
    for _ in range(3):
        for row, pick in bench.step(StepPlan(decode=Decode(rows=(first, second)))).picked.items():
            tokens[row].append(pick.token)
    # The last token is fed by a call of its own; then the row samples and joins again.
    call = Prefill(row=first, tokens=tokens[first][-1:], logits=True, capture=None)
    result = bench.step(StepPlan(leave=(first,), prefill=(call,), sample=(first,), decode=Decode(rows=(second,))))
    for row, pick in result.picked.items():
        tokens[row].append(pick.token)
    for row, pick in bench.step(StepPlan(decode=Decode(rows=(second, first)))).picked.items():
        tokens[row].append(pick.token)
    assert tokens[first] == bench.alone[5, 0][:6]
    assert tokens[second] == bench.alone[3, 0][:6]
    bench.step(StepPlan(close=(first, second)))
