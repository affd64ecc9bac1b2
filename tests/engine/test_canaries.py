"""Four callers with a secret each, among neighbours that join, leave, fail and are cancelled: nothing of one shows in
another.

A canary's prompt is drawn from an alphabet of its own, and all but that alphabet is forbidden to its sampler (but for
one canary, which is plain): a token of somebody else's would be a sampler's or a detokenizer's leak. State that leaked
would change tokens, so everything must be what the canary says alone. Two share a long public beginning, which one
owner's call may not find in the other's store.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from service.models import resolve
from service.request import Sampling, Stopping
from service.work import Ended, Failed
from tests.engine.poisoned import POISON, load_poisoned
from tests.engine.rig import GREEDY, Outcome, Rig, Ticket

pytestmark = pytest.mark.mlx

MODELS = ("tiny-llama", "tiny-gemma3-w64", "tiny-qwen3_5")
VOCABULARY = 512
CULPRIT = Sampling(temperature=0.0, seed=0, logit_bias=((POISON, 100.0),))


def alphabet(number: int) -> list[int]:
    """A quarter of the vocabulary; nobody's holds the poison."""
    return [token for token in range(20, VOCABULARY) if token % 4 == number]


@dataclass(frozen=True)
class Canary:
    """One caller: a secret prompt, how it samples, and what it says next."""

    number: int
    secret: tuple[int, ...]
    sampling: Sampling
    tokens: int
    more: tuple[int, ...]  # a second turn on the saved state


def canaries() -> list[Canary]:
    rng = random.Random(7)
    public = [rng.choice(alphabet(0)) for _ in range(290)]
    made = []
    for number in range(4):
        own = alphabet(number)
        begin = public if number in (0, 3) else []
        secret = [*begin, *(rng.choice(own) for _ in range((20, 70, 130, 33)[number]))]
        bias = tuple((token, -100.0) for token in range(VOCABULARY) if token not in own)
        sampling = Sampling(
            temperature=0.9 if number % 2 else 0.0, top_p=0.95, seed=number, logit_bias=() if number == 3 else bias
        )
        more = tuple(rng.choice(own) for _ in range(12))
        made.append(Canary(number, tuple(secret), sampling, (40, 25, 60, 33)[number], more))
    return made


CANARIES = canaries()


class Cage:
    """One model, and what every canary says alone on it."""

    def __init__(self, name: str) -> None:
        folder = resolve(name)
        self.rig = Rig(folder, load=partial(load_poisoned, folder, "build", 1_000_000), memory=16 << 20)
        self.alone = [self.both_turns(canary, "alone") for canary in CANARIES]

    def first(self, canary: Canary, owner: str) -> Ticket:
        return self.rig.submit(
            canary.secret, generate=canary.tokens, sampling=canary.sampling, save=True, owner=f"{owner}-{canary.number}"
        )

    def second(self, canary: Canary, owner: str, before: Outcome) -> Ticket:
        node = before.nodes[max(before.nodes)]
        return self.rig.submit(
            [*node.all_tokens(), *canary.more],
            base=node,
            generate=canary.tokens,
            sampling=canary.sampling,
            owner=f"{owner}-{canary.number}",
        )

    def both_turns(self, canary: Canary, owner: str) -> tuple[list[int], str, list[int], str]:
        one = self.first(canary, owner).wait()
        two = self.second(canary, owner, one).wait()
        return one.tokens, one.text, two.tokens, two.text

    def close(self) -> None:
        self.rig.close()


@pytest.fixture(scope="module", params=MODELS)
def cage(request: pytest.FixtureRequest) -> Iterator[Cage]:
    made = Cage(request.param)
    yield made
    made.close()


def play(cage: Cage, seed: int) -> None:
    """One schedule: the canaries begin in any order, at any time, among neighbours of every kind."""
    rig, rng, owner = cage.rig, random.Random(seed), f"s{seed}"
    rig.model.how = rng.choice(["build", "compute", "memory", "nan", "together"])
    rig.model.after = rng.choice([0, 3, 12, 40])
    todo = rng.sample(CANARIES, 4)
    first: dict[int, Ticket] = {}
    second: dict[int, Ticket] = {}
    neighbours: list[Ticket] = []
    while len(second) < 4:
        match rng.choice(["canary", "neighbour", "culprit", "end", "wait", "wait"]):
            case "canary" if todo:
                canary = todo.pop()
                first[canary.number] = cage.first(canary, owner)
            case "neighbour" if len(neighbours) < 6:
                prompt = [rng.randrange(20, 400) for _ in range(rng.choice([1, 60, 64, 200, 520]))]
                neighbours.append(
                    rig.submit(
                        prompt,
                        generate=rng.choice([1, 15, 80]),
                        sampling=rng.choice([GREEDY, Sampling(temperature=1.0, seed=seed)]),
                        stopping=Stopping(ignore_eos=True, time_limit=rng.choice([None, 0.05])),
                        owner=owner,
                    )
                )
            case "culprit" if len(neighbours) < 6:
                prompt = [rng.randrange(20, 400) for _ in range(rng.choice([5, 70]))]
                neighbours.append(rig.submit(prompt, generate=50, sampling=CULPRIT, owner=owner))
            case "end" if neighbours:
                end = rng.choice([rig.loop.stop, rig.loop.cancel, partial(rig.loop.cancel, save=True)])
                end(rng.choice(neighbours).row)
            case "wait":
                time.sleep(rng.uniform(0, 0.01))
        for number, ticket in first.items():
            if number not in second and ticket.ended.is_set():
                second[number] = cage.second(CANARIES[number], owner, ticket.wait())
    for canary in CANARIES:
        one, two = first[canary.number].wait(), second[canary.number].wait()
        assert (one.tokens, one.text, two.tokens, two.text) == cage.alone[canary.number], (seed, canary.number)
        if canary.number != 3:
            assert {*one.tokens, *two.tokens} <= set(alphabet(canary.number))
        assert one.usage is not None and one.usage.cached_tokens == 0, "somebody else's state was found"
        assert two.usage is not None and two.usage.recomputed_tokens == 0
    for ticket in [*first.values(), *second.values(), *neighbours]:
        assert ticket.ended.wait(240)
        ends_once(ticket)
        for node in ticket.outcome.nodes.values():
            rig.cache.let_go(node)
    assert rig.run([20], generate=1).tokens  # a step after the last end: all rows are closed
    assert rig.engine.active_bytes() == 0
    assert rig.cache.store.stats().pinned == 0


def ends_once(ticket: Ticket) -> None:
    """Exactly one terminal event, and nothing after it."""
    events = []
    while not ticket.events.empty():
        events.append(ticket.events.get())
    assert [type(event) for event in events if isinstance(event, Ended | Failed)] == [type(events[-1])]


@pytest.mark.parametrize("part", range(3))
def test_nothing_of_a_canary_shows_in_another(cage: Cage, part: int) -> None:
    for seed in range(4 * part, 4 * part + 4):
        play(cage, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_of_a_canary_shows_in_another_over_200_schedules(cage: Cage) -> None:
    for seed in range(100, 167):  # on each of three models
        play(cage, seed)
