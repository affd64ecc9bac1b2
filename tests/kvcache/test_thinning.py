"""Thinning: what stays of a chain however it grew, how much that is, and what a branch costs then."""

from __future__ import annotations

import math
import random

import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.thinning import (
    Boundary,
    is_on_ruler,
    surplus_states,
    surplus_windows,
)

SPACINGS = (2, 3, 4, 8)


def thinned(chain: list[Boundary], spacing: int | None) -> list[int]:
    """Blocks that stay."""
    going = set(surplus_states(chain, spacing))
    return [here.block for here in chain if here.block not in going]


def grown(length: int, spacing: int, held: frozenset[int] = frozenset()) -> list[list[int]]:
    """What stays after each block of a chain that is thinned as it grows."""
    there: list[int] = []
    steps = []
    for newest in range(1, length + 1):
        there = thinned([Boundary(block, held=block in held) for block in (*there, newest)], spacing)
        steps.append(there)
    return steps


@pytest.mark.parametrize("spacing", SPACINGS)
def test_thinning_as_a_chain_grows_leaves_what_thinning_it_at_the_end_leaves(spacing: int) -> None:
    rng = random.Random(spacing)
    held = frozenset(rng.sample(range(1, 200), 12))
    for length, there in enumerate(grown(200, spacing, held), start=1):
        assert there == thinned([Boundary(block, held=block in held) for block in range(1, length + 1)], spacing)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_newest_what_is_held_and_where_chains_part_stay(spacing: int) -> None:
    rng = random.Random(spacing)
    for _ in range(200):
        length = rng.randrange(1, 300)
        chain = [Boundary(b, held=rng.random() < 0.05, parts=rng.random() < 0.05) for b in range(1, length + 1)]
        there = set(thinned(chain, spacing))
        assert length in there
        assert {here.block for here in chain if here.held or here.parts} <= there
        assert thinned([here for here in chain if here.block in there], spacing) == sorted(there)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_the_number_that_stays_grows_with_the_logarithm(spacing: int) -> None:
    for length in (10, 100, 1_000, 10_000):
        there = thinned([Boundary(block) for block in range(1, length + 1)], spacing)
        assert len(there) <= spacing * (1 + math.log2(length)) / 2 + spacing


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_branch_costs_in_proportion_to_how_far_back_it_is(spacing: int) -> None:
    for newest in range(1, 300):
        there = [block for block in range(1, newest + 1) if is_on_ruler(block, newest, spacing)]
        for block in range(1, newest + 1):
            cost = block - max((at for at in there if at <= block), default=0)
            back = newest - block
            assert cost == 0 if back == 0 else cost < 2 * back / (spacing - 1)


def test_spacing_0_keeps_all_and_none_keeps_what_has_a_reason() -> None:
    chain = [Boundary(block, held=block == 3) for block in range(1, 40)]
    assert surplus_states(chain, 0) == []
    assert thinned(chain, None) == [3, 39]
    assert surplus_states([], 4) == surplus_windows([], 300) == []


def test_window_records_go_once_no_place_reaches_back_to_them() -> None:
    window = 300  # reaches into two blocks
    plain = [Boundary(block) for block in range(1, 9)]
    assert surplus_windows(plain, window) == [1, 2, 3, 4, 5, 6]
    for mark in ("held", "parts", "tails"):
        chain = [Boundary(block, **{mark: block == 4}) for block in range(1, 9)]
        assert surplus_windows(chain, window) == [1, 2, 5, 6], mark


def test_windows_that_stay_are_those_that_some_place_needs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        length, window = rng.randrange(1, 40), rng.choice((1, 64, 256, 257, 512, 1024))
        chain = [Boundary(block, held=rng.random() < 0.1) for block in range(1, length + 1)]
        places = [here.block for here in chain if here.held] + [length]
        needed = {
            block
            for block in range(1, length + 1)
            if any(block <= at and block * BLOCK_TOKENS > at * BLOCK_TOKENS - window for at in places)
        }
        assert set(surplus_windows(chain, window)) == set(range(1, length + 1)) - needed
