"""Stop strings: found at the same place whatever the cuts, against a search in the whole text."""

import random

import pytest

from service.text.stops import StopMatcher


def search(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first match starts and which it is: the longest of those that start there."""
    for start in range(len(text)):
        found = [stop for stop in stops if text.startswith(stop, start)]
        if found:
            return start, max(found, key=len)
    return None


def cut(text: str, chance: random.Random) -> list[str]:
    pieces = []
    while text:
        size = chance.choice([0, 1, 1, 2, 3, 6])
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def run(pieces: list[str], stops: tuple[str, ...], *, include_stop: bool = False) -> tuple[str, str | None]:
    """(all text handed out, the stop)."""
    matcher = StopMatcher(stops, include_stop)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    text, stop = matcher.finish()
    return shown + text, stop


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("seed", range(400))
def test_matches_are_those_of_a_search_in_the_whole_text(seed, include_stop):
    chance = random.Random(seed)
    letters = chance.choice(["ab", "abc", "aé漢"])
    stops = tuple("".join(chance.choices(letters, k=chance.randint(1, 5))) for _ in range(chance.randint(1, 4)))
    text = "".join(chance.choices(letters, k=chance.randint(0, 30)))
    found = search(text, stops)
    if found is None:
        expected = (text, None)
    else:
        start, stop = found
        expected = (text[: start + (len(stop) if include_stop else 0)], stop)
    assert run(cut(text, chance), stops, include_stop=include_stop) == expected


@pytest.mark.parametrize("seed", range(200))
def test_no_more_is_held_back_than_could_become_a_stop(seed):
    chance = random.Random(seed)
    stops = tuple("".join(chance.choices("ab", k=chance.randint(1, 5))) for _ in range(2))
    text = "".join(chance.choices("abc", k=20))
    matcher = StopMatcher(stops, include_stop=False)
    shown = 0
    for at, character in enumerate(text):
        passed, stop = matcher.push(character)
        if stop is not None:
            return
        shown += len(passed)
        seen = text[: at + 1]
        if search(seen, stops) is None:
            open_at = (start for start in range(len(seen) + 1) if any(s.startswith(seen[start:]) for s in stops))
            assert shown == next(open_at)


def test_the_longest_of_two_that_start_together_wins():
    assert run(["one\n", "\ntwo"], ("\n", "\n\n")) == ("one", "\n\n")
    assert run(["one\n", "two"], ("\n", "\n\n")) == ("one", "\n")
    assert run(["one\n"], ("\n", "\n\n")) == ("one", "\n")


def test_the_one_that_starts_first_wins_though_another_ends_before():
    assert run(["xab", "cd"], ("bc", "abcd")) == ("x", "abcd")
    assert run(["xab", "ce"], ("bc", "abcd")) == ("xa", "bc")


def test_inactive_text_passes_unseen_and_starts_no_match():
    matcher = StopMatcher(("end", "xy"), include_stop=False)
    assert matcher.push("the end x", active=False) == ("the end x", None)
    assert matcher.push("y and the e") == ("y and the ", None)
    assert matcher.push("nd of it") == ("", "end")


def test_a_spent_matcher_gives_nothing_more():
    matcher = StopMatcher(("a",), include_stop=True)
    assert matcher.push("bab") == ("ba", "a")
    assert matcher.push("more") == ("", None)
    assert matcher.finish() == ("", None)


def test_without_stops_everything_passes():
    assert run(["a", "b"], ()) == ("ab", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""), include_stop=False)


def test_a_stop_that_nearly_matches_everywhere_is_held_back_to_its_length():
    stop = "a" * 2000 + "b"
    matcher = StopMatcher((stop,), include_stop=False)
    shown = "".join(matcher.push("a" * 1000)[0] for _ in range(20))
    assert shown == "a" * (20 * 1000 - 2000)
    assert matcher.push("b") == ("", stop)
