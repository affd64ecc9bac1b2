"""Where a prefill is cut depends on absolute places alone. Exactness rests on the suffix property tested here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.media import MediaSpan, MediaTag, cut_inside
from kvcache.schedule import (
    NONCE_BYTES,
    Call,
    after_image,
    continued_schedule,
    cut_by_image,
    decode_schedule,
    is_decoded,
    plan_calls,
    prefill_schedule,
    replay_cuts,
    trimmed_schedule,
)

CASES = 4_000


def naive(start: int, end: int, stops: Iterable[int], replay: Iterable[int]) -> list[Call]:
    """The rule, token by token: a call ends at the grid, a stop, or a replayed cut."""
    kept = set(stops) | {end}
    cuts = kept | set(replay)
    calls = []
    opened = start
    for place in range(start + 1, end + 1):
        if place not in cuts and place % BLOCK_TOKENS:
            continue
        calls.append(Call(opened, place, stop=place in kept))
        opened = place
    return calls


def some_places(rng: random.Random, low: int, high: int) -> set[int]:
    """A few places, many of them beside the grid or beside each other."""
    places: set[int] = set()
    for _ in range(rng.randrange(6)):
        near = rng.choice([rng.randrange(low, high + 1), rng.randrange(low, high + 1) // 256 * 256])
        places.add(min(high, max(low, near + rng.choice([0, 0, 1, -1, 2, 31, 32, 33]))))
    return places


def cases(seed: int) -> Iterator[tuple[random.Random, int, set[int]]]:
    """(rng, end, stops) by the thousand."""
    rng = random.Random(seed)
    for _ in range(CASES):
        end = rng.choice(
            [rng.randrange(1, 60), rng.randrange(1, 1500), 256 * rng.randrange(1, 5) + rng.randrange(-2, 3)]
        )
        yield rng, end, some_places(rng, 0, end + 40)


def test_plans_equal_the_rule_written_token_by_token() -> None:
    for rng, end, stops in cases(1):
        start = rng.randrange(end)
        replay = some_places(rng, 0, end + 40)
        assert plan_calls(start, end, stops, replay) == naive(start, end, stops, replay), (start, end, stops, replay)


def test_from_any_cut_on_the_plan_is_the_rest_of_the_cold_plan() -> None:
    for rng, end, stops in cases(2):
        replay = some_places(rng, 0, end)
        whole = plan_calls(0, end, stops, replay)
        for done in range(len(whole) + 1):
            position = whole[done - 1].end if done else 0
            assert plan_calls(position, end, stops, replay) == whole[done:]
        assert [c.start for c in whole] == [0, *(c.end for c in whole[:-1])]


def test_a_longer_prompt_begins_with_the_calls_of_a_shorter_one_that_was_kept() -> None:
    for rng, end, stops in cases(3):
        short = rng.randrange(1, end + 1)
        before = plan_calls(0, short, {p for p in stops if p <= short})
        after = plan_calls(0, end, stops | {short})
        assert after[: len(before)] == before


def test_replayed_cuts_give_the_calls_of_the_run_that_made_them() -> None:
    for rng, end, stops in cases(4):
        first = plan_calls(0, end, stops)
        longer = end + rng.randrange(1, 300)
        again = plan_calls(0, longer, {end}, [call.end for call in first])
        assert [(c.start, c.end) for c in again[: len(first)]] == [(c.start, c.end) for c in first]
        # A block's schedule is all that is remembered of those calls, and it is enough.
        cuts = []
        for start in range(0, end, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, end)
            cuts += [*replay_cuts(start, prefill_schedule(start, stop, [c.end for c in first])), stop]
        assert plan_calls(0, longer, {end}, cuts) == again


def test_a_stop_on_the_grid_changes_no_call() -> None:
    for _, end, stops in cases(5):
        grid = set(range(BLOCK_TOKENS, end, BLOCK_TOKENS))
        without = [(c.start, c.end) for c in plan_calls(0, end, stops)]
        assert [(c.start, c.end) for c in plan_calls(0, end, stops | grid)] == without


def test_no_call_is_empty_or_crosses_the_grid_and_stops_are_where_they_were_asked_for() -> None:
    for rng, end, stops in cases(6):
        start = rng.randrange(end)
        calls = plan_calls(start, end, stops)
        for call in calls:
            assert call.start < call.end
            assert call.start // BLOCK_TOKENS == (call.end - 1) // BLOCK_TOKENS
        assert {c.end for c in calls if c.stop} == {p for p in stops if start < p <= end} | {end}


def test_nothing_to_prefill_takes_no_calls() -> None:
    assert plan_calls(300, 300, [300], [299]) == []


def test_a_block_continued_behind_a_prefilled_tail_is_the_block_of_a_cold_run_that_stopped_there() -> None:
    for rng, end, stops in cases(7):
        tail = rng.randrange(1, end + 1)
        if tail % BLOCK_TOKENS == 0 or tail == end:
            continue
        start = tail // BLOCK_TOKENS * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, end)
        cold = [c.end for c in plan_calls(0, end, stops | {tail})]
        made_by = [c.end for c in plan_calls(0, tail, stops)]
        went_on = [c.end for c in plan_calls(tail, end, stops)]
        made = prefill_schedule(start, tail, made_by)
        assert continued_schedule(made, start, tail, stop, went_on) == prefill_schedule(start, stop, cold)


def test_a_block_continued_behind_a_decoded_tail_is_told_apart_by_tail_and_calls() -> None:
    tails = [decode_schedule(bytes([n]) * NONCE_BYTES) for n in (1, 2)] + [trimmed_schedule(bytes(32))]
    ways = list(itertools.product(tails, (10, 20), ([], [30], [30, 40])))
    made = [continued_schedule(tail, 0, at, 256, ends) for tail, at, ends in ways]
    assert len(set(made)) == len(ways)
    assert all(is_decoded(schedule) for schedule in made)
    assert made == [continued_schedule(tail, 0, at, 256, ends) for tail, at, ends in ways]  # shared by equal runs


@pytest.mark.parametrize("schedule", [decode_schedule(bytes(NONCE_BYTES)), trimmed_schedule(bytes(32))])
def test_what_decode_had_a_part_in_has_no_cuts_to_replay(schedule: bytes) -> None:
    assert is_decoded(schedule)
    assert replay_cuts(512, schedule) == []


def test_a_prefilled_block_remembers_the_cuts_inside_it_only() -> None:
    schedule = prefill_schedule(256, 512, [100, 256, 257, 300, 511, 512, 600, 300])
    assert not is_decoded(schedule)
    assert replay_cuts(256, schedule) == [257, 300, 511]
    assert replay_cuts(0, schedule) == [1, 44, 255]


def whole_cases(seed: int) -> Iterator[tuple[random.Random, list[MediaSpan], int, set[int]]]:
    """(rng, images that must be whole, end, stops beside them) by the hundred."""
    rng = random.Random(seed)
    for _ in range(CASES // 10):
        at, spans = 0, []
        for _ in range(rng.randrange(1, 5)):
            at += rng.choice([0, 0, 1, 40, 250, 256])
            spans.append(MediaSpan(at, at + rng.choice([4, 70, 256, 600]), MediaTag(b"tag")))
            at = spans[-1].end
        end = at + rng.choice([0, 1, 300])
        yield rng, spans, end, {after_image(spans, p) for p in some_places(rng, 0, end)}


def test_no_call_splits_a_whole_image_and_cuts_inside_one_move_to_its_end() -> None:
    for _, spans, end, stops in whole_cases(8):
        calls = plan_calls(0, end, stops, whole=spans)
        ends = [call.end for call in calls]
        assert all(cut_inside(spans, place) is None for place in ends)
        cuts = {*range(BLOCK_TOKENS, end, BLOCK_TOKENS), *stops, end}
        assert sorted({after_image(spans, place) for place in cuts} - {0}) == ends
        passed = [boundary for call in calls for boundary in call.passed]
        assert passed == [p for p in range(BLOCK_TOKENS, end, BLOCK_TOKENS) if cut_inside(spans, p) is not None]


def test_from_any_cut_on_the_plan_with_images_is_the_rest_of_the_cold_plan() -> None:
    for _, spans, end, stops in whole_cases(9):
        whole = plan_calls(0, end, stops, whole=spans)
        for done, call in enumerate(whole):
            assert plan_calls(call.end, end, stops, whole=spans) == whole[done + 1 :] or call.end == end


def test_a_blocks_schedule_follows_from_stops_and_the_image_that_reaches_into_it() -> None:
    for _, spans, end, stops in whole_cases(10):
        ends = [call.end for call in plan_calls(0, end, stops, whole=spans)]
        for start in range(0, end, BLOCK_TOKENS):
            stop = min(start + BLOCK_TOKENS, end)
            told = [*stops, *cut_by_image(spans, start, stop)]
            assert prefill_schedule(start, stop, ends) == prefill_schedule(start, stop, told)
