"""The table of places to go on from: never a wrong token, never more than its bounds, and nothing kept for nobody."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvfork_gateway.conversations import GRID, Bounds, Conversations, Kept, Place, digest

MODEL = "models/m"
PICTURE = b"p" * 32


def kept(
    prompt: Sequence[int],
    answer: Sequence[int],
    name: str,
    *,
    follows: int | None = None,
    images: tuple[bytes, ...] = (),
) -> Kept[str]:
    return Kept(
        model=MODEL,
        images=images,
        prompt_tokens=len(prompt),
        prompt_digest=digest(prompt),
        answer=array("I", answer),
        prompt=f"{name}-prompt",
        end=f"{name}-end",
        follows=follows,
    )


def find(
    table: Conversations[str, str], ids: Sequence[int], *, caller: str = "a", trimmable: bool = False, now: float = 0.0
) -> Place[str] | None:
    return table.find(caller, MODEL, ids, (), trimmable=trimmable, now=now)


PROMPT = list(range(100, 140))
ANSWER = list(range(500, 520))


@pytest.fixture
def table() -> Conversations[str, str]:
    made: Conversations[str, str] = Conversations(Bounds())
    assert made.add("a", kept(PROMPT, ANSWER, "one"), 0.0) == []
    return made


def test_a_history_that_repeats_the_answer_goes_on_from_its_end(table: Conversations[str, str]) -> None:
    assert find(table, [*PROMPT, *ANSWER, 7, 8]) == Place(entry=1, snapshot="one-end", tokens=60)


def test_one_that_does_not_goes_on_from_the_prompt(table: Conversations[str, str]) -> None:
    assert find(table, [*PROMPT, 1, 2, 3]) == Place(entry=1, snapshot="one-prompt", tokens=40)


def test_a_call_is_always_given_something_to_read(table: Conversations[str, str]) -> None:
    assert find(table, [*PROMPT, *ANSWER]) == Place(entry=1, snapshot="one-prompt", tokens=40)
    assert find(table, PROMPT) is None
    assert find(table, PROMPT[:-1]) is None


def test_where_state_can_be_cut_the_last_equal_token_counts(table: Conversations[str, str]) -> None:
    expected = Place(entry=1, snapshot="one-end", tokens=45, cut=True, prompt="one-prompt", prompt_tokens=40)
    assert find(table, [*PROMPT, *ANSWER[:5], 1, 2], trimmable=True) == expected


def test_elsewhere_the_grid_inside_the_answer_counts() -> None:
    table: Conversations[str, str] = Conversations(Bounds())
    answer = list(range(1000, 1600))
    table.add("a", kept(PROMPT, answer, "long"), 0.0)
    place = find(table, [*PROMPT, *answer[:500], 1, 2])
    assert place is not None and (place.snapshot, place.tokens, place.cut) == ("long-end", 2 * GRID, True)


def test_nothing_of_another_caller_model_or_picture_is_found(table: Conversations[str, str]) -> None:
    further = [*PROMPT, *ANSWER, 7]
    assert find(table, further, caller="b") is None
    assert table.find("a", "models/other", further, (), trimmable=False, now=0.0) is None
    assert table.find("a", MODEL, further, (PICTURE,), trimmable=False, now=0.0) is None
    table.add("a", kept(PROMPT, ANSWER, "seen", images=(PICTURE,)), 0.0)
    place = table.find("a", MODEL, further, (PICTURE,), trimmable=False, now=0.0)
    assert place is not None and place.snapshot == "seen-end"


def test_an_answer_given_again_replaces_the_first(table: Conversations[str, str]) -> None:
    freed = table.add("a", kept(PROMPT, ANSWER, "two"), 0.0)
    assert sorted(freed) == [("a", "one-end"), ("a", "one-prompt")]
    assert len(table) == 1


def test_choices_of_one_prompt_share_its_snapshot_until_the_last_goes() -> None:
    table: Conversations[str, str] = Conversations(Bounds())
    for end in ("x", "y"):
        table.add("a", replace(kept(PROMPT, [ord(end)], end), prompt="shared"), 0.0)
    assert table.drop(1) == [("a", "x-end")]
    assert sorted(table.drop(2)) == [("a", "shared"), ("a", "y-end")]


def test_one_answers_end_that_is_anothers_prompt_stays_as_long_as_either() -> None:
    table: Conversations[str, str] = Conversations(Bounds())
    table.add("a", kept(PROMPT, ANSWER, "one"), 0.0)
    table.add("a", replace(kept([*PROMPT, *ANSWER], [7], "two", follows=1), prompt="one-end"), 0.0)
    assert table.drop(1) == [("a", "one-prompt")]
    assert find(table, [*PROMPT, *ANSWER, 8]) == Place(entry=2, snapshot="one-end", tokens=60)
    assert sorted(table.drop(2)) == [("a", "one-end"), ("a", "two-end")]


def test_a_line_keeps_its_last_two_answers_and_a_branch_its_stem() -> None:
    table: Conversations[str, str] = Conversations(Bounds())
    line: list[int] = list(PROMPT)
    entry: int | None = None
    freed = []
    for turn in range(4):
        answer = [1000 * turn + i for i in range(1, 6)]
        freed += table.add("a", kept(line, answer, f"turn{turn}", follows=entry), 0.0)
        line += [*answer, 9]
        place = find(table, [*line, 9])
        assert place is not None and place.snapshot == f"turn{turn}-end"
        entry = place.entry
    assert {name for _, name in freed} == {f"turn{t}-{end}" for t in (0, 1) for end in ("prompt", "end")}
    # Another line from the second last answer: that one stays as long as both go on from it.
    stem = entry - 1  # type: ignore[operator]
    assert table.add("a", kept([*line, 77], [5], "branch", follows=stem), 0.0) == []
    assert table.add("a", kept([*line, 78], [6], "further", follows=entry), 0.0) == []


def test_time_and_room_are_bounded() -> None:
    table: Conversations[str, str] = Conversations(Bounds(entries=3, entries_per_caller=2, ttl=10.0))
    freed = [pair for i in range(3) for pair in table.add("a", kept([*PROMPT, i], [i], f"a{i}"), float(i))]
    assert sorted(freed) == [("a", "a0-end"), ("a", "a0-prompt")]
    table.add("b", kept(PROMPT, [1], "b0"), 3.0)
    freed = table.add("b", kept([*PROMPT, 1], [2], "b1"), 4.0)
    assert sorted(freed) == [("a", "a1-end"), ("a", "a1-prompt")] and len(table) == 3
    assert find(table, [*PROMPT, 2, 2, 7], now=11.9) is not None  # a use, which is ten seconds more
    assert find(table, [*PROMPT, 1, 7], caller="b", now=14.5) is None
    assert find(table, [*PROMPT, 2, 2, 7], now=20.0) is not None
    assert len(table) == 1
    small: Conversations[str, str] = Conversations(Bounds(total_bytes=3000))
    for i in range(5):
        small.add("a", kept([*PROMPT, i], range(200), f"s{i}"), 0.0)
    assert len(small) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("trimmable", [False, True])
def test_whatever_is_said_a_place_has_the_prompts_own_tokens(seed: int, trimmable: bool) -> None:
    """Random histories over few tokens, where answers are repeated, altered, cut short and branched from."""
    rng = random.Random(seed)
    table: Conversations[str, str] = Conversations(Bounds(entries=12, entries_per_caller=6, ttl=40.0))
    truth: dict[tuple[str, str], list[int]] = {}  # what each snapshot holds
    freed: list[tuple[str, str]] = []
    histories: list[list[int]] = [[1, 2, 3]]
    for step in range(200):
        caller = rng.choice("ab")
        prompt = [
            *rng.choice(histories)[: rng.randrange(2, 900)],
            *(rng.randrange(3) for _ in range(rng.randrange(1, 6))),
        ]
        place = table.find(caller, MODEL, prompt, (), trimmable=trimmable, now=float(step))
        if place is not None:
            held = truth[caller, place.snapshot]
            assert place.tokens < len(prompt) and held[: place.tokens] == prompt[: place.tokens]
            assert place.cut or len(held) == place.tokens
            assert (caller, place.snapshot) not in freed
            assert not place.cut or trimmable or place.tokens % GRID == 0
        answer = [rng.randrange(3) for _ in range(rng.choice((1, 2, 3, 300)))]
        name = f"s{step}"
        truth[caller, f"{name}-prompt"], truth[caller, f"{name}-end"] = prompt, prompt + answer
        follows = place.entry if place is not None else None
        freed += table.add(caller, kept(prompt, answer, name, follows=follows), float(step))
        assert len(table) <= 12
        histories = [*histories[-6:], prompt + answer]
    freed += table.clear()
    assert len(table) == 0 and len(set(freed)) == len(freed) and set(freed) <= truth.keys()
