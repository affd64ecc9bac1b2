"""Symbols: image positions that say which image they belong to."""

from __future__ import annotations

import random
from array import array

import pytest

from kvcache.blocks import block_key, root_key
from kvcache.media import FIRST, IMAGE, LAST, MediaKey, MediaSpan, cut_inside, ends_inside, spans_of, symbols, tag_of

A, B = MediaKey(b"a" * 32), MediaKey(b"b" * 32)


def test_symbols_are_no_token_ids_and_begin_once() -> None:
    run = symbols(A, 37)
    assert len(run) == 37
    assert all(symbol & IMAGE for symbol in run)
    assert [bool(symbol & FIRST) for symbol in run] == [True] + [False] * 36
    assert [bool(symbol & LAST) for symbol in run] == [False] * 36 + [True]


def test_an_image_has_the_same_symbols_everywhere_and_another_image_has_others() -> None:
    assert symbols(A, 64) == symbols(A, 64)
    assert symbols(A, 64)[:15] == symbols(A, 16)[:15]
    assert tag_of(symbols(A, 64)) == tag_of(symbols(A, 8))
    assert not set(symbols(A, 64)) & set(symbols(B, 64))


def test_too_few_positions_say_too_little() -> None:
    with pytest.raises(ValueError, match="4 positions"):
        symbols(A, 3)


def test_spans_are_found_wherever_images_lie() -> None:
    rng = random.Random(4)
    for _ in range(500):
        tokens: array[int] = array("I")
        expected: list[MediaSpan] = []
        for _ in range(rng.randrange(8)):
            if rng.random() < 0.5:
                tokens.extend(rng.randrange(1 << 18) for _ in range(rng.randrange(5)))
            else:
                run = symbols(MediaKey(rng.randbytes(32)), rng.randrange(4, 20))
                expected.append(MediaSpan(len(tokens), len(tokens) + len(run), tag_of(run)))
                tokens.extend(run)
        assert spans_of(tokens) == expected


def test_adjacent_images_are_two_and_a_cut_inside_one_is_told() -> None:
    tokens = array("I", [5, *symbols(A, 4), *symbols(B, 6), 7])
    first, second = spans_of(tokens)
    assert (first.start, first.end, second.start, second.end) == (1, 5, 5, 11)
    assert [cut_inside([first, second], at) for at in (1, 4, 5, 6, 11)] == [None, first, None, second, None]


def test_tokens_show_whether_they_end_inside_an_image() -> None:
    tokens = array("I", [5, *symbols(A, 4), *symbols(B, 6), 7])
    assert [end for end in range(len(tokens) + 1) if ends_inside(tokens[:end])] == [2, 3, 4, 6, 7, 8, 9, 10]


def test_a_block_that_an_image_touches_has_the_image_in_its_key() -> None:
    root = root_key("model", "owner")
    keys = {block_key(root, [1, *symbols(key, 300)[:255]], b"P") for key in (A, B)}
    assert len(keys) == 2
