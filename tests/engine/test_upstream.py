"""What the engine relies on of mlx-lm's caches, tried on small arrays: a version that breaks one of these breaks us.

Tokens are told apart by their values: token t of a row has the key t and the value t + 0.5 in every place.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from service.engine.layers import extract, join, normalise
from service.engine.upstream import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    batch_end,
    batch_in_order,
    chunk_tokens,
    in_order,
    set_chunk,
    set_window,
)

HEADS, DIM, WINDOW = 2, 4, 8


def block(first: int, count: int) -> tuple[mx.array, mx.array]:
    """K and V of tokens [first, first + count): (1, heads, tokens, dim)."""
    tokens = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(tokens, (1, HEADS, count, DIM))
    return keys, keys + 0.5


def seen(array: mx.array) -> list[float]:
    """Token values of one row, and that every head and channel agrees."""
    assert mx.all(array == array[:1, :1, :, :1]).item()
    return array[0, 0, :, 0].tolist()


def filled(cache, count: int, first: int = 0, chunk: int = 5):
    for start in range(first, first + count, chunk):
        cache.update_and_fetch(*block(start, min(chunk, first + count - start)))
    return cache


def rows_of(array: mx.array) -> list[list[float]]:
    return [array[i, 0, :, 0].tolist() for i in range(array.shape[0])]


def numbers(first: int, end: int) -> list[float]:
    return [float(n) for n in range(first, end)]


def step(batch: list, tokens: list[int]) -> None:
    """One decode step: row i is fed a token of value tokens[i]."""
    keys = mx.array(tokens, dtype=mx.float32)[:, None, None, None]
    keys = mx.broadcast_to(keys, (len(tokens), HEADS, 1, DIM))
    for cache in batch:
        cache.update_and_fetch(keys, keys + 0.5)


# -- one row


@pytest.mark.parametrize("count", [1, 5, 255, 256, 257])
def test_a_full_cache_keeps_its_tokens_in_the_order_of_positions(count: int) -> None:
    cache = filled(KVCache(), count, chunk=100)
    assert cache.offset == count
    assert seen(cache.keys[..., :count, :]) == numbers(0, count)
    assert cache.keys.shape[2] >= count  # what lies behind `offset` is room


def test_a_full_cache_can_be_set_and_goes_on_from_there() -> None:
    cache = KVCache()
    cache.keys, cache.values = block(0, 300)
    cache.offset = 300
    keys, values = cache.update_and_fetch(*block(300, 1))
    assert (seen(keys), seen(values)[-1], cache.offset) == (numbers(0, 301), 300.5, 301)


@pytest.mark.parametrize("chunk", [1, 3, 20])
@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_a_window_in_order_ends_with_the_newest_token(count: int, chunk: int) -> None:
    cache = filled(RotatingKVCache(WINDOW), count, chunk=chunk)
    assert (cache.offset, cache.max_size, cache.keep) == (count, WINDOW, 0)
    tokens = seen(in_order(cache, cache.keys))
    assert len(tokens) >= min(count, WINDOW)
    assert tokens == numbers(count - len(tokens), count)
    assert [t + 0.5 for t in tokens] == seen(in_order(cache, cache.values))


@pytest.mark.parametrize("count", [3, WINDOW, 21])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_window_set_from_outside_goes_on_as_the_one_it_was_taken_from(count: int, chunk: int) -> None:
    own = filled(RotatingKVCache(WINDOW), count, chunk=4)
    normalise([own])
    other = RotatingKVCache(WINDOW)
    set_window(other, own.keys, own.values, count)
    for first in range(count, count + 20, chunk):
        ours = own.update_and_fetch(*block(first, chunk))
        theirs = other.update_and_fetch(*block(first, chunk))
        for a, b in zip(ours, theirs, strict=True):
            assert mx.array_equal(a, b)
    assert (own.offset, own._idx) == (other.offset, other._idx)
    assert own.make_mask(1) == other.make_mask(1)


def test_a_chunked_cache_drops_from_the_front_and_can_be_set() -> None:
    cache = ChunkedKVCache(8)
    for first in range(0, 20, 5):
        cache.maybe_trim_front()
        cache.update_and_fetch(*block(first, 5))
    tokens = seen(chunk_tokens(cache, cache.keys))
    assert tokens == numbers(cache.start_position, 20)
    other = ChunkedKVCache(8)
    set_chunk(other, chunk_tokens(cache, cache.keys), chunk_tokens(cache, cache.values), 20)
    for each in (cache, other):
        each.maybe_trim_front()
    assert mx.array_equal(cache.update_and_fetch(*block(20, 1))[0], other.update_and_fetch(*block(20, 1))[0])


def test_state_slots_can_be_read_and_set() -> None:
    cache = ArraysCache(2)
    assert cache.cache == [None, None]
    cache[1] = mx.ones((1, 3))
    assert cache.cache[0] is None
    assert cache.cache[1].shape == (1, 3)
    cache.cache[0] = mx.zeros((1, 2))
    assert cache[0].shape == (1, 2)


def test_a_list_of_caches_has_its_members_in_order() -> None:
    members = (KVCache(), RotatingKVCache(4))
    assert tuple(CacheList(*members).caches) == members


# -- many rows


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5, 3), (300, 2)])
def test_rows_of_a_full_batch_are_aligned_at_their_ends(lengths: tuple[int, ...]) -> None:
    batch = join(None, [[filled(KVCache(), n, chunk=100)] for n in lengths])
    (cache,) = batch
    assert type(cache) is BatchKVCache
    assert cache.offset.tolist() == list(lengths)
    step(batch, list(lengths))
    end = batch_end(cache)
    for row, length in zip(rows_of(cache.keys), lengths, strict=True):
        assert row[end - length - 1 : end] == numbers(0, length + 1)
    assert cache.left_padding.tolist() == [end - n - 1 for n in lengths]


def positions_of(cache, index: int, width: int) -> list[float]:
    ordered = batch_in_order(cache, cache.keys[index : index + 1])
    return ordered[0, 0, :, 0].tolist()[-width:]


@pytest.mark.parametrize("steps", [0, 1, WINDOW - 1, WINDOW, 2 * WINDOW + 1])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 6), (WINDOW, 1), (20, 5), (30, 40)])
def test_rows_of_a_window_batch_end_with_their_newest_token(lengths: tuple[int, ...], steps: int) -> None:
    rows = [[filled(RotatingKVCache(WINDOW), n)] for n in lengths]
    for row in rows:
        normalise(row)
    batch = join(None, rows)
    (cache,) = batch
    assert type(cache) is BatchRotatingKVCache
    for number in range(steps):
        step(batch, [n + number for n in lengths])
    assert cache.offset.tolist() == [n + steps for n in lengths]
    for index, length in enumerate(lengths):
        total = length + steps
        keep = min(total, WINDOW)
        assert positions_of(cache, index, keep) == numbers(total - keep, total)


KINDS = {"full": KVCache, "window": lambda: RotatingKVCache(WINDOW)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_row_taken_out_of_a_batch_is_what_it_would_be_alone(kind: str, gone: int) -> None:
    lengths = [3, 17, 9]
    alone = [[filled(KINDS[kind](), n)] for n in lengths]
    batch = join(None, [[filled(KINDS[kind](), n)] for n in lengths])
    batch_steps = 6
    for number in range(batch_steps):
        step(batch, [n + number for n in lengths])
        for row, n in zip(alone, lengths, strict=True):
            step(row, [n + number])
    for row in alone:
        normalise(row)
    for index, row in enumerate(alone):
        (own,) = extract(batch, index)
        assert type(own) is type(row[0])
        assert own.offset == row[0].offset
        assert mx.array_equal(own.keys[..., : own.offset, :], row[0].keys[..., : own.offset, :])
    kept = [i for i in range(3) if i != gone]
    batch[0].filter(mx.array(kept))
    for place, index in enumerate(kept):
        (own,) = extract(batch, place)
        assert mx.array_equal(own.keys[..., : own.offset, :], alone[index][0].keys[..., : own.offset, :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [1, WINDOW, 30])
def test_a_row_that_joins_later_keeps_everybodys_tokens(kind: str, late: int) -> None:
    batch = join(None, [[filled(KINDS[kind](), n)] for n in (4, 12)])
    for number in range(3):
        step(batch, [4 + number, 12 + number])
    newcomer = [filled(KINDS[kind](), late)]
    normalise(newcomer)
    batch = join(batch, [newcomer])
    for number in range(5):
        step(batch, [7 + number, 15 + number, late + number])
    for index, total in enumerate((12, 20, late + 5)):
        (own,) = extract(batch, index)
        tokens = seen(own.keys[..., : min(total, own.keys.shape[2]), :])
        first = max(0, total - WINDOW) if kind == "window" else 0
        assert (own.offset, tokens) == (total, numbers(first, total))


def test_states_of_rows_are_stacked_in_order_and_leave_alone() -> None:
    def row(value: float) -> list:
        cache = ArraysCache(2)
        cache[0], cache[1] = mx.full((1, 2), value), mx.full((1, 3, 2), value)
        return [cache]

    batch = join(None, [row(1), row(2)])
    batch = join(batch, [row(3)])
    assert batch[0].cache[0][:, 0].tolist() == [1, 2, 3]
    batch[0].filter(mx.array([0, 2]))
    (own,) = extract(batch, 1)
    assert [array.shape for array in own.cache] == [(1, 2), (1, 3, 2)]
    assert own.cache[1].tolist() == mx.full((1, 3, 2), 3.0).tolist()
