"""One generation's text and end, token by token."""

import random
from dataclasses import dataclass

import pytest

from service.events import FinishReason
from service.request import Stopping
from service.text.stream import Piece, TextStream
from tests.text import tiny_codecs

EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return tiny_codecs.codec(tmp_path_factory.mktemp("codec"), eos=EOS)


@dataclass(frozen=True)
class Told:
    """A finished generation."""

    text: str
    finish: FinishReason | None
    tokens: int
    stop: str | None = None
    stop_token_id: int | None = None


DEFAULT = Stopping()


def run(codec, ids, stopping=DEFAULT, *, max_new_tokens=10_000, context_room=10_000, tail=()) -> Told:
    """Pushes ids until the stream ends, or ends it as StopGeneration does."""
    stream = TextStream(codec, stopping, max_new_tokens=max_new_tokens, context_room=context_room, context_tail=tail)
    text = ""
    for token in ids:
        piece = stream.push(token)
        text += piece.text
        if piece.finish is not None:
            break
    else:
        piece = stream.end(FinishReason.STOPPED)
        text += piece.text
    assert stream.finished
    return Told(text, piece.finish, stream.completion_tokens, piece.stop, piece.stop_token_id)


def test_text_goes_through_and_a_stop_from_outside_flushes_what_was_held(codec):
    ids = codec.encode("漢字 and a hal")
    assert run(codec, ids, Stopping(stop=("half",))) == Told("漢字 and a hal", FinishReason.STOPPED, len(ids))
    torn = codec.encode("字")[:-1]
    assert run(codec, torn) == Told("�", FinishReason.STOPPED, len(torn))


def test_eos_ends_and_is_counted_but_not_shown(codec):
    ids = codec.encode("done")
    assert run(codec, [*ids, *codec.encode(EOS + "more")]) == Told("done", FinishReason.EOS, len(ids) + 1)


def test_what_was_held_back_comes_before_the_end(codec):
    ids = codec.encode("so hal" + EOS)
    assert run(codec, ids, Stopping(stop=("half",))) == Told("so hal", FinishReason.EOS, len(ids))


def test_ignored_eos_goes_on_and_shows(codec):
    ids = codec.encode("one" + EOS + "two")
    assert run(codec, ids, Stopping(ignore_eos=True)) == Told("one" + EOS + "two", FinishReason.STOPPED, len(ids))


def test_a_stop_id_ends_and_is_told(codec):
    ids = codec.encode("one two!")
    stopping = Stopping(stop_token_ids=frozenset({ids[-1], 999}))
    shown = codec.text_of(ids[:-1])
    assert run(codec, ids, stopping) == Told(shown, FinishReason.STOP, len(ids), stop_token_id=ids[-1])


def test_a_stop_id_that_is_eos_too_stops_even_where_eos_is_ignored(codec):
    [eos] = codec.encode(EOS)
    for ignore_eos in (False, True):
        stopping = Stopping(stop_token_ids=frozenset({eos}), ignore_eos=ignore_eos)
        assert run(codec, [eos], stopping) == Told("", FinishReason.STOP, 1, stop_token_id=eos)


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_stop_string_over_any_token_borders(codec, seed, include_stop):
    chance = random.Random(seed)
    text = "".join(chance.choices(["river", " ", "漢", "字", "the", "\n", "ab", "é"], k=40))
    start = chance.randrange(len(text) - 6)
    stop = text[start : start + chance.randint(1, 5)]
    start = text.index(stop)
    ids = []
    rest = text
    while rest:  # tokens as a model might pick them: not those of the whole text
        size = chance.randint(1, 5)
        ids += codec.encode(rest[:size])
        rest = rest[size:]
    told = run(codec, ids, Stopping(stop=(stop, "never there"), include_stop=include_stop))
    assert told.text == text[: start + (len(stop) if include_stop else 0)]
    assert (told.finish, told.stop) == (FinishReason.STOP, stop)
    # It ended with the first token that completes the stop string.
    assert stop not in codec.text_of(ids[: told.tokens - 1])


def test_a_match_that_waits_for_a_longer_one_is_told_at_the_end(codec):
    ids = codec.encode("one\n")
    stopping = Stopping(stop=("\n", "\n\n"))
    for end in ([], codec.encode(EOS)):
        told = run(codec, [*ids, *end], stopping)
        assert (told.text, told.finish, told.stop) == ("one", FinishReason.STOP, "\n")
    assert run(codec, ids, stopping, max_new_tokens=len(ids)).stop == "\n"


def test_least_tokens_come_before_any_stop(codec):
    [eos] = codec.encode(EOS)
    ids = [eos, *codec.encode("\n"), eos, *codec.encode("\n")]
    stopping = Stopping(min_tokens=4, stop=("\n",))
    assert run(codec, ids, stopping) == Told(f"{EOS}\n{EOS}", FinishReason.STOP, 4, stop="\n")
    assert run(codec, [eos, eos, eos], Stopping(min_tokens=2)) == Told(EOS, FinishReason.EOS, 2)
    assert run(codec, [7, 7, 7], Stopping(min_tokens=3, stop_token_ids=frozenset({7}))).tokens == 3


def test_the_most_tokens_and_the_context_s_room(codec):
    ids = codec.encode("The river ran past the old mill")
    assert run(codec, ids, max_new_tokens=3) == Told(codec.text_of(ids[:3]), FinishReason.MAX_TOKENS, 3)
    assert run(codec, ids, context_room=2) == Told(codec.text_of(ids[:2]), FinishReason.CONTEXT_FULL, 2)
    assert run(codec, ids, max_new_tokens=2, context_room=2).finish is FinishReason.MAX_TOKENS


def test_stops_win_over_limits_on_the_same_token(codec):
    [eos] = codec.encode(EOS)
    assert run(codec, [eos], max_new_tokens=1, context_room=1).finish is FinishReason.EOS
    newline = codec.encode("\n")
    assert run(codec, newline, Stopping(stop=("\n",)), max_new_tokens=1).finish is FinishReason.STOP


def test_a_context_that_ends_inside_a_character_gives_it_whole(codec):
    ids = codec.encode("x漢")
    for split in range(1, len(ids)):
        assert run(codec, ids[split:], tail=ids[:split]).text == "漢"


def test_a_context_s_broken_character_is_not_the_new_text_s(codec):
    ids = codec.encode("漢")
    assert run(codec, codec.encode(EOS), tail=ids[:-1]).text == ""
    assert run(codec, codec.encode("a"), tail=ids[:-1]).text == "a"


def test_pieces_say_what_they_carry(codec):
    stream = TextStream(codec, Stopping(stop=("xyz",)), max_new_tokens=9, context_room=9)
    a, x, y, z = (codec.encode(letter)[0] for letter in "axyz")
    assert [stream.push(token) for token in (a, x, y, a, x, y, z)] == [
        Piece(text="a"),
        Piece(text=""),
        Piece(text=""),
        Piece(text="xya"),
        Piece(text=""),
        Piece(text=""),
        Piece(text="", finish=FinishReason.STOP, stop="xyz"),
    ]
