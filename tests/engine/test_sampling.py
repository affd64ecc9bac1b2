"""Picking tokens against numpy written from the definitions; a row's draw is its own affair."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest

from service.engine.draw import largest, log_total
from service.engine.sampling import BadLogits, RowSampler, pick_all
from service.plan import Picked
from service.request import Sampling

VOCAB = 12
RNG = np.random.default_rng(7)
LOGITS = RNG.normal(0, 2, (6, VOCAB)).astype(np.float32)
OFF = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=1,
)  # fmt: skip


def sampling(**knobs: object) -> Sampling:
    return dataclasses.replace(OFF, **knobs)


def sampler(top: int | None = None, context: tuple[int, ...] = (), **knobs: object) -> RowSampler:
    return RowSampler(sampling(**knobs), top, context)


def pick_rows(logits: np.ndarray, samplers: list[RowSampler]) -> list[Picked | Exception]:
    return pick_all(mx.array(logits), samplers)


def tokens(picks: list[Picked | Exception]) -> list[int]:
    assert all(isinstance(pick, Picked) for pick in picks), picks
    return [pick.token for pick in picks]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return weights / weights.sum()


def kept(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities by the definitions, one filter after the other: k likeliest, a share of the likeliest, a mass."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    stays = np.ones(len(scaled), dtype=bool)
    if top_k:
        stays &= scaled >= np.sort(scaled)[-min(top_k, len(scaled))]
    if min_p:
        stays &= softmax(scaled) >= min_p * softmax(scaled).max()
    order = np.argsort(-np.where(stays, scaled, -np.inf))
    mass = 0.0
    whole = softmax(np.where(stays, scaled, -np.inf))
    for token in order:
        if mass >= top_p:
            stays[token] = False
        mass += whole[token]
    return softmax(np.where(stays, scaled, -np.inf))


def draws(logits: np.ndarray, count: int, **knobs: object) -> np.ndarray:
    """How often each token came in `count` draws of one row's own sequence."""
    rows = 500
    samplers = [sampler(seed=seed, **knobs) for seed in range(rows)]
    batch = np.tile(logits, (rows, 1))
    counts = np.zeros(len(logits), dtype=int)
    for _ in range(count // rows):
        counts += np.bincount(tokens(pick_rows(batch, samplers)), minlength=len(logits))
    return counts


# -- greedy


def test_greedy_is_the_argmax_with_and_without_extras() -> None:
    best = LOGITS.argmax(axis=1).tolist()
    assert tokens(pick_rows(LOGITS, [sampler() for _ in LOGITS])) == best
    assert tokens(pick_rows(LOGITS, [sampler(top=2) for _ in LOGITS])) == best
    assert tokens(pick_rows(LOGITS, [sampler(logit_bias=((3, 0.0),)) for _ in LOGITS])) == best


def test_a_temperature_near_zero_is_greedy() -> None:
    for temperature in (1e-6, 1e-3):
        assert tokens(pick_rows(LOGITS, [sampler(temperature=temperature) for _ in LOGITS])) == (
            LOGITS.argmax(axis=1).tolist()
        )


# -- a row's own randomness


def sequence(picker: RowSampler, steps: int, beside: list[RowSampler], at: int) -> list[int]:
    picked = []
    for step in range(steps):
        rows = [*beside[:at], picker, *beside[at:]]
        logits = np.stack([LOGITS[0] if row is picker else LOGITS[1 + (i + step) % 5] for i, row in enumerate(rows)])
        picked.append(tokens(pick_rows(logits, rows))[rows.index(picker)])
    return picked


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_a_draw_depends_on_the_rows_own_seed_and_count_alone(seed: int) -> None:
    alone = sequence(sampler(temperature=1.0, seed=seed), 40, [], 0)
    for at, others in ((0, 3), (2, 3), (1, 1)):
        beside = [sampler(temperature=0.7 * i, seed=seed, top=i or None) for i in range(others)]
        mx.random.seed(at)  # the process's own state plays no part
        assert sequence(sampler(temperature=1.0, seed=seed), 40, beside, at) == alone
    assert len(set(alone)) > 3
    assert sequence(sampler(temperature=1.0, seed=seed ^ 5), 40, [], 0) != alone


# -- the distribution

# The 0.9999 quantile of chi-square for 1 to 11 degrees of freedom.
CHI_SQUARE = [15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88, 31.83, 33.72, 35.56, 37.37]


ALL_AT_ONCE = {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05}
KNOBS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize(
    ("knobs", "count"),
    [
        *((knobs, 2_000) for knobs in KNOBS),
        (ALL_AT_ONCE, 5_000),
        *(pytest.param(knobs, 20_000, marks=pytest.mark.slow) for knobs in [*KNOBS, ALL_AT_ONCE]),
    ],
    ids=str,
)
def test_many_draws_are_distributed_as_defined(knobs: dict[str, float], count: int) -> None:
    wanted = kept(LOGITS[2], **knobs) * count
    counts = draws(LOGITS[2], count, **knobs)
    assert counts[wanted == 0].sum() == 0
    likely = wanted > 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(wanted[likely], wanted[~likely].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert len(expected) > 2
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE[len(expected) - 2]


@pytest.mark.parametrize(
    ("knobs", "stays"),
    [
        ({"top_k": VOCAB}, VOCAB),
        ({"top_k": VOCAB + 100}, VOCAB),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 1.0}, VOCAB),
        ({"min_p": 0.999999}, 1),
    ],
    ids=str,
)
def test_the_borders_of_the_filters(knobs: dict[str, float], stays: int) -> None:
    counts = draws(LOGITS[3] / 8, 1_000, temperature=1.0, **knobs)
    assert (counts > 0).sum() == stays
    assert counts[LOGITS[3].argmax()] > 0


# -- penalties, bias, log-probabilities


def adjusted(logits: np.ndarray, context: list[int], generated: list[int], s: Sampling) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    if s.repetition_penalty is not None:
        for token in {*context, *generated}:
            factor = s.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(generated):
        out[token] -= (s.frequency_penalty or 0.0) * generated.count(token) + (s.presence_penalty or 0.0)
    for token, value in s.logit_bias:
        out[token] += value
    return out


@pytest.mark.parametrize(
    "knobs",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.1},
        {"frequency_penalty": -0.5, "presence_penalty": -0.3},
        {"logit_bias": ((2, 3.0), (5, -4.0))},
        {
            "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "temperature": 0.8,
            "logit_bias": ((0, 1.0), (7, -100.0)), "top_k": 5,
        },
    ],
    ids=str,
)  # fmt: skip
def test_log_probabilities_come_after_penalties_and_bias_and_before_temperature(knobs: dict[str, object]) -> None:
    context = [1, 4, 4, 9]
    row = sampler(top=3, context=tuple(context), **knobs)
    generated: list[int] = []
    for step in range(24):
        logits = LOGITS[step % 2]
        wanted = adjusted(logits, context, generated, sampling(**knobs))
        logprobs = wanted - (np.log(np.exp(wanted - wanted.max()).sum()) + wanted.max())
        (pick,) = pick_rows(logits[None], [row])
        assert isinstance(pick, Picked) and pick.logprob is not None
        assert pick.logprob == pytest.approx(logprobs[pick.token], abs=1e-4)
        order = np.argsort(-logprobs)[:3].tolist()
        assert [top.token for top in pick.top] == order
        assert [top.logprob for top in pick.top] == pytest.approx(logprobs[order].tolist(), abs=1e-4)
        if "temperature" not in knobs:
            assert pick.token == wanted.argmax()
        generated.append(pick.token)
    assert len(set(generated)) > 1


def test_only_what_was_asked_for_is_reported() -> None:
    silent, chosen, many = pick_rows(LOGITS[:3], [sampler(), sampler(top=0), sampler(top=VOCAB + 5)])
    assert isinstance(silent, Picked) and (silent.logprob, silent.top) == (None, ())
    assert isinstance(chosen, Picked) and chosen.logprob is not None and chosen.top == ()
    assert isinstance(many, Picked) and sorted(top.token for top in many.top) == list(range(VOCAB))
    assert sum(math.exp(top.logprob) for top in many.top) == pytest.approx(1, abs=1e-5)


def test_a_bias_can_leave_one_token_only() -> None:
    bias = tuple((token, -math.inf) for token in range(VOCAB) if token != 8)
    for knobs in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.2}):
        (pick,) = pick_rows(LOGITS[:1], [sampler(top=1, logit_bias=bias, **knobs)])
        assert isinstance(pick, Picked)
        assert (pick.token, pick.logprob) == (8, pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_leaves_nothing_fails_its_row_alone(temperature: float) -> None:
    bias = tuple((token, -math.inf) for token in range(VOCAB))
    picks = pick_rows(LOGITS[:2], [sampler(logit_bias=bias, temperature=temperature), sampler()])
    assert isinstance(picks[0], BadLogits)
    assert tokens(picks[1:]) == [LOGITS[1].argmax()]


@pytest.mark.parametrize(
    "knobs", [{}, {"temperature": 1.0}, {"logit_bias": ((1, 1.0),)}, {"frequency_penalty": 1.0}], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_finite_logits_fails_alone(value: float, knobs: dict[str, float]) -> None:
    logits = LOGITS[:3].copy()
    logits[1, 4] = value
    rows = [sampler(**knobs) for _ in range(3)]
    picks = pick_rows(logits, rows)
    alone = [pick_rows(LOGITS[i : i + 1], [sampler(**knobs)])[0] for i in (0, 2)]
    assert [picks[0], picks[2]] == alone
    assert isinstance(picks[1], BadLogits)
    assert isinstance(pick_rows(np.full((1, VOCAB), -np.inf, np.float32), [sampler(**knobs)])[0], BadLogits)
    # Tokens that the model rules out are no fault.
    logits[1] = LOGITS[1]
    logits[1, :3] = -np.inf
    assert all(isinstance(pick, Picked) for pick in pick_rows(logits, [sampler(**knobs) for _ in range(3)]))


def test_a_row_whose_knobs_raise_fails_alone() -> None:
    picks = pick_rows(LOGITS[:3], [sampler(), Broken(OFF, None, ()), sampler()])
    assert isinstance(picks[1], ZeroDivisionError)
    assert tokens([picks[0], picks[2]]) == [LOGITS[0].argmax(), LOGITS[2].argmax()]


class Broken(RowSampler):
    def pick(self, logits: np.ndarray, mask: np.ndarray | None = None) -> Picked:
        raise ZeroDivisionError


def test_half_precision_logits_are_picked_from_in_single() -> None:
    half = mx.array(LOGITS).astype(mx.bfloat16)
    single = np.array(half.astype(mx.float32))
    (pick,) = pick_all(half[:1], [sampler(top=0)])
    assert isinstance(pick, Picked) and pick.logprob is not None
    assert pick.logprob == pytest.approx(float(np.log(softmax(single[0]).max())), abs=1e-5)


# -- large vocabularies: only the likeliest are ordered


def large(rows: int, vocab: int, spread: float, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 2.0, 9.0], ids="flat {}".format)
@pytest.mark.parametrize(
    "knobs",
    [{"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 70}, {"top_k": 5, "top_p": 0.5}, {"top_p": 0.8, "min_p": 0.01}],
    ids=str,
)
def test_what_a_filter_keeps_of_a_large_vocabulary_is_as_defined(knobs: dict[str, float], spread: float) -> None:
    # A flat distribution's nucleus is wider than the first look, so the look is widened.
    logits = large(1, 40_000, spread)[0]
    likely = kept(logits, temperature=1.0, **knobs) > 0
    rows = [sampler(temperature=1.0, seed=seed, **knobs) for seed in range(60)]
    drawn = tokens(pick_rows(np.tile(logits, (60, 1)), rows))
    edge = np.sort(logits[likely])[0]
    assert all(logits[token] >= edge - 1e-3 for token in drawn)  # float32 sums may put the edge one token further
    if likely.sum() > 200:
        assert len(set(drawn)) > 20


def test_a_row_draws_the_same_beside_rows_with_other_knobs() -> None:
    logits = large(5, 30_000, 1.5)
    knobs = [
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3},
        {"temperature": 1.0, "top_k": 900, "top_p": 0.9, "min_p": 0.001},
        {"temperature": 0.0, "frequency_penalty": 0.4},
    ]
    together = [sampler(seed=9, top=3, **k) for k in knobs]
    apart = [sampler(seed=9, top=3, **k) for k in knobs]
    for _ in range(12):
        assert pick_rows(logits, together) == [pick_rows(logits[i : i + 1], [s])[0] for i, s in enumerate(apart)]


def test_the_models_logits_are_left_as_they_were() -> None:
    logits = mx.array(LOGITS)
    pick_all(logits, [sampler(logit_bias=((2, 50.0),), repetition_penalty=2.0, context=(1, 2)) for _ in LOGITS])
    assert np.array_equal(np.array(logits), LOGITS)


def test_the_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    logits = np.zeros(200_000, np.float32)
    logits[0] = np.log(200_000)  # half of the mass, the rest evenly over the tail
    rows = [sampler(temperature=1.0, seed=seed) for seed in range(400)]
    drawn = np.array(tokens(pick_rows(np.tile(logits, (400, 1)), rows)))
    assert 140 < (drawn == 0).sum() < 260
    tail = drawn[drawn > 0]
    assert 0.35 < (tail > 100_000).mean() < 0.65
    assert len(set(tail.tolist())) > 100


def test_a_mask_leaves_the_tokens_that_it_allows_and_an_exception_in_its_place_ends_the_row() -> None:
    allowed = np.zeros(VOCAB, dtype=bool)
    allowed[[4, 7]] = True
    rows = [sampler(), sampler(top=1), sampler(temperature=1.0, top_p=0.9), sampler(), sampler()]
    masks = {1: allowed, 2: allowed, 3: ~allowed | True, 4: ValueError("no more")}
    picks = pick_all(mx.array(LOGITS[:5]), rows, masks)
    best = [4, 7][int(LOGITS[1][7] > LOGITS[1][4])]
    assert isinstance(picks[4], ValueError)
    assert tokens(picks[:2]) == [LOGITS[0].argmax(), best]
    assert tokens(picks[2:4])[0] in (4, 7) and tokens(picks[3:4]) == [LOGITS[3].argmax()]
    nothing = pick_all(mx.array(LOGITS[:2]), [sampler(), sampler()], {0: np.zeros(VOCAB, dtype=bool)})
    assert isinstance(nothing[0], BadLogits) and tokens(nothing[1:]) == [LOGITS[1].argmax()]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("levels", [2, 1000], ids=["many ties", "few ties"])
def test_the_largest_of_a_row_are_found_with_everything_that_ties(size: int, levels: int) -> None:
    scores = np.random.default_rng(size).integers(0, levels, size).astype(np.float32)
    for count in {1, 2, size // 3, size - 1, size} & set(range(1, size + 1)):
        wanted = np.flatnonzero(scores >= np.sort(scores)[-count])
        assert largest(scores, count).tolist() == wanted.tolist()


def test_the_total_of_scores_at_both_ends_of_float32_is_the_largest() -> None:
    logits = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    assert log_total(logits) == float(logits[0])
