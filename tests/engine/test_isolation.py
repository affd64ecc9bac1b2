"""One row's failure is its own: whatever a decode call does, every other row gets the tokens that it gets alone.

On a model with full attention, one with windows of 64 tokens and one with recurrent state; lengths lie around the
window. The culprit is a row that can pick nothing but the poison.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from service.errors import RowFailed
from service.models import resolve
from service.request import Constraint, Form, Sampling
from tests.engine.poisoned import POISON, load_poisoned
from tests.engine.rig import GREEDY, Outcome, Rig, prompt_of

pytestmark = pytest.mark.mlx

CULPRIT = Sampling(temperature=0.0, seed=0, logit_bias=((POISON, 100.0),))
SEEDED = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=11)
LENGTHS = ((300, GREEDY), (63, SEEDED), (5, GREEDY), (130, SEEDED))
TOKENS = 40
MODELS = ("tiny-llama", "tiny-gemma3-w64", "tiny-qwen3_5")


@pytest.fixture(scope="module", params=MODELS)
def solo(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Outcome]]]:
    """What each row says alone, and how it goes on from its saved state."""
    rig = Rig(resolve(request.param))
    outcomes = []
    for number, (length, sampling) in enumerate(LENGTHS):
        outcomes.append(rig.run(prompt_of(rig, length, number + 1), generate=TOKENS, sampling=sampling, save=True))
        assert POISON not in outcomes[-1].tokens
        outcomes.append(rig.run(further(outcomes[-1]), generate=5, base=last_node(outcomes[-1])))
    yield request.param, outcomes
    rig.close()


def last_node(outcome: Outcome):
    return outcome.nodes[max(outcome.nodes)]


def further(outcome: Outcome) -> list[int]:
    return [*last_node(outcome).all_tokens(), 9]


Opened = Callable[..., Rig]


@pytest.fixture
def poisoned(solo: tuple[str, list[Outcome]]) -> Iterator[Opened]:
    opened: list[Rig] = []

    def open_one(how: str, after: int, *, alone: bool = False) -> Rig:
        folder = resolve(solo[0])
        opened.append(Rig(folder, load=partial(load_poisoned, folder, how, after, alone=alone)))
        return opened[-1]

    yield open_one
    for rig in opened:
        rig.close()


def run_with_culprit(rig: Rig, expected: list[Outcome]) -> Exception | None:
    """Four rows and a culprit; the rows must say what they say alone. Returns how the culprit ended."""
    tickets = [
        rig.submit(prompt_of(rig, length, number + 1), generate=TOKENS, sampling=sampling, save=True)
        for number, (length, sampling) in enumerate(LENGTHS)
    ]
    ill = rig.submit(prompt_of(rig, 70, 9), generate=TOKENS, sampling=CULPRIT, save=True)
    for number, ticket in enumerate(tickets):
        assert ticket.wait().tokens == expected[2 * number].tokens
        # What was saved is whole: it goes on as the undisturbed one does.
        more = rig.run(further(ticket.outcome), generate=5, base=last_node(ticket.outcome))
        assert more.tokens == expected[2 * number + 1].tokens
        assert more.usage is not None and more.usage.recomputed_tokens == 0
    assert ill.ended.wait(240)
    if ill.outcome.error is None:
        assert ill.outcome.tokens == [POISON] * TOKENS
    return ill.outcome.error


FORMS = (
    Constraint(form=Form.REGEX, text="([a-z]{4} )*"),
    Constraint(form=Form.JSON_SCHEMA, text='{"type": "array", "items": {"type": "integer"}, "minItems": 30}'),
)


@pytest.mark.parametrize("how", ["build", "compute"])
def test_a_form_is_followed_through_calls_that_are_made_again(solo, poisoned: Opened, how: str) -> None:
    rig = poisoned(how, 7)
    asked = [
        (prompt_of(rig, 40 + 30 * number, 20 + number), form, sampling)
        for number, (form, sampling) in enumerate([(FORMS[0], GREEDY), (FORMS[1], SEEDED), (FORMS[0], SEEDED)])
    ]
    alone = [rig.run(tokens, generate=TOKENS, form=form, sampling=sampling) for tokens, form, sampling in asked]
    tickets = [rig.submit(tokens, generate=TOKENS, form=form, sampling=sampling) for tokens, form, sampling in asked]
    ill = rig.submit(prompt_of(rig, 70, 9), generate=TOKENS, sampling=CULPRIT)
    assert [ticket.wait().tokens for ticket in tickets] == [outcome.tokens for outcome in alone]
    assert re.fullmatch("([a-z]{4} )*[a-z ]{0,4}", tickets[0].outcome.text)
    assert ill.ended.wait(240)
    assert rig.model.failures >= 1
    is_as_before(rig)


def is_as_before(rig: Rig) -> None:
    """Nothing of the failure is left, and the next caller is served."""
    assert rig.run(prompt_of(rig, 20, 5), generate=3).tokens
    assert rig.loop.is_alive(60)
    assert rig.engine.active_bytes() == 0
    assert rig.cache.store.stats().pinned == 0


@pytest.mark.parametrize("after", [0, 7, 30])
@pytest.mark.parametrize("how", ["build", "compute", "memory", "nan"])
def test_a_call_that_fails_ends_the_culprit_alone(solo, poisoned: Opened, how: str, after: int, caplog) -> None:
    rig = poisoned(how, after)
    error = run_with_culprit(rig, solo[1])
    assert isinstance(error, RowFailed)
    assert error.metadata["call"] == "decode" and error.metadata["position"] == str(70 + after)
    assert f"row {error.metadata['row']} failed in decode, incident {error.metadata['incident']}" in caplog.text
    assert rig.model.failures >= 1
    is_as_before(rig)


@pytest.mark.parametrize("how", ["build", "compute"])
def test_rows_in_calls_of_their_own_are_isolated_too(solo, poisoned: Opened, how: str) -> None:
    rig = poisoned(how, 5, alone=True)
    assert isinstance(run_with_culprit(rig, solo[1]), RowFailed)
    is_as_before(rig)


def test_a_call_that_fails_for_no_rows_fault_ends_nobody(solo, poisoned: Opened, caplog) -> None:
    caplog.set_level(logging.WARNING)
    rig = poisoned("together", 4)
    assert run_with_culprit(rig, solo[1]) is None
    assert rig.model.failures == 3  # then its rows stay apart
    is_as_before(rig)
