"""Each cache class: what is captured, prefilled or decoded, restores to the very tokens that the cache held."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvcache.blocks import BLOCK_TOKENS
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordKind
from kvcache.schedule import plan_calls
from service.engine import layers
from service.engine.layers import UnsupportedLayer, layout_of
from service.plan import Capture, Restored

pytestmark = pytest.mark.mlx

KINDS = (RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE)
Make = Callable[[], object]


class _Line:
    """A cache that is fed tokens as the engine feeds it; token n has the key n and the value n + 1/2."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.caches = [make()]
        self.layout = layout_of(self.caches)
        self.kinds = tuple(kind for kind in KINDS if kind in self.layout.kinds)
        self.end = 0
        self.blocks: list[tuple[int, dict[RecordKind, bytearray]]] = []

    def feed(self, end: int) -> None:
        keys = mx.arange(self.end, end, dtype=mx.float32)[None, None, :, None]
        if hasattr(self.caches[0], "maybe_trim_front"):
            self.caches[0].maybe_trim_front()
        self.caches[0].update_and_fetch(keys, keys + 0.5)
        self.end = end

    def prefill(self, end: int) -> None:
        for call in plan_calls(self.end, end, []):
            self.feed(call.end)
            layers.normalise(self.caches)
            if call.end % BLOCK_TOKENS == 0:
                self._keep(call.end)

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.feed(self.end + 1)
            if self.end % BLOCK_TOKENS == 0:
                self._keep(self.end)

    def restored(self) -> list:
        """A fresh cache from what is stored."""
        fresh = [self.make()]
        layers.restore(fresh, self.layout, self.stored())
        return fresh

    def stored(self) -> Restored:
        """The records of blocks that a restore reads, and of the tail."""
        if self.end % BLOCK_TOKENS:
            self._keep(self.end)
        reach = self.end - self.layout.window if RecordKind.WINDOW in self.kinds else -1
        read = [(start, part) for start, part in self.blocks if min(start + BLOCK_TOKENS, self.end) > reach]
        records = [(kind, start, part[kind]) for start, part in read for kind in self.kinds]
        kinds, starts, payloads = zip(*records, strict=True)
        return Restored(position=self.end, kinds=kinds, starts=starts, payloads=payloads)

    def _keep(self, end: int) -> None:
        start = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        what = Capture(start=start, end=end, kinds=self.kinds)
        self.blocks.append((start, layers.capture(self.caches, self.layout, what, None)))


def tokens_of(cache) -> tuple[list[float], list[float]]:
    keys, values = cache.keys_and_values()
    return keys.reshape(-1).tolist(), values.reshape(-1).tolist()


def held(end: int, window: int, keep: int) -> list[int]:
    """The tokens that a ring at `end` holds, oldest first."""
    return list(range(end)) if end <= window else [*range(keep), *range(end - window + keep, end)]


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("window", [5, 64, 255, 256, 257, 300, 513])
def test_a_ring_comes_back_before_at_and_after_it_wraps(window: int, keep: int) -> None:
    for end in sorted({1, window - 1, window, window + 1, 255, 256, 257, 511, 513, 600, 1025}):
        for decoded in (0, 1, 8):
            line = _Line(lambda: RotatingKVCache(max_size=window, keep=keep))
            line.prefill(end)
            line.decode(decoded)
            (fresh,) = line.restored()
            layers.normalise(line.caches)
            expected = held(end + decoded, window, keep)
            assert tokens_of(fresh) == tokens_of(line.caches[0]) == (expected, [n + 0.5 for n in expected])
            # And both go on alike, over the next wrap too.
            for cache in (fresh, line.caches[0]):
                for step in range(end + decoded, end + decoded + 9):
                    cache.update_and_fetch(mx.full((1, 1, 1, 1), step), mx.full((1, 1, 1, 1), step))
            assert fresh.state[2:] == line.caches[0].state[2:]
            assert tokens_of(fresh) == tokens_of(line.caches[0])


@pytest.mark.parametrize("chunk", [5, 64, 256, 300])
def test_a_chunk_comes_back_with_where_it_starts(chunk: int) -> None:
    for end in (1, chunk - 1, chunk, chunk + 1, 255, 256, 257, 600):
        for decoded in (0, 8):
            line = _Line(lambda: ChunkedKVCache(chunk))
            line.prefill(end)
            line.decode(decoded)
            (fresh,) = line.restored()
            layers.normalise(line.caches)
            expected = held(end + decoded, chunk, 0)
            assert tokens_of(fresh) == tokens_of(line.caches[0]) == (expected, [n + 0.5 for n in expected])
            assert fresh.state[2:] == line.caches[0].state[2:]


@pytest.mark.parametrize("make", [KVCache, ConcatenateKVCache])
def test_a_cache_of_every_token_comes_back(make: Make) -> None:
    for end in (1, 255, 256, 257, 600):
        line = _Line(make)
        line.prefill(end)
        line.decode(3)
        (fresh,) = line.restored()
        assert tokens_of(fresh) == tokens_of(line.caches[0])
        assert fresh.offset == end + 3


@pytest.mark.parametrize("end", [100, 256, 700])
@pytest.mark.parametrize(
    "make", [KVCache, ConcatenateKVCache, lambda: RotatingKVCache(64), lambda: ChunkedKVCache(300)]
)
def test_rows_restored_from_the_same_payloads_write_into_their_own_arrays(
    make: Make, end: int, decoded: list[object]
) -> None:
    line = _Line(make)
    line.prefill(end)
    stored = line.stored()
    payloads = layers.SharedPayloads()
    alone = [make()]
    layers.restore(alone, line.layout, stored)
    rows = [[make()] for _ in range(3)]
    decoded.clear()
    for caches in rows:
        layers.restore(caches, line.layout, stored, payloads)
    assert [id(payload) for payload in decoded] == [id(payload) for payload in stored.payloads]
    for n, (cache,) in enumerate(rows[:2]):
        for _ in range(300):  # over the end of every ring, in place
            cache.update_and_fetch(mx.full((1, 1, 1, 1), -n), mx.full((1, 1, 1, 1), -n))
        mx.eval(layers.live_arrays([cache]))
    assert tokens_of(rows[2][0]) == tokens_of(alone[0])


def test_a_restore_takes_little_more_memory_than_the_state_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "async_eval", mx.eval)  # how far ahead copies run of the joining is the machine's
    count, ends = 16, range(BLOCK_TOKENS, 9 * BLOCK_TOKENS, BLOCK_TOKENS)
    caches = [KVCache() for _ in range(count)]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, 2, ends[-1], 32), key=mx.random.key(n)) for n in (1, 2)))
    layout = layout_of(caches)
    blocks = [Capture(start=end - BLOCK_TOKENS, end=end, kinds=(RecordKind.FULL,)) for end in ends]
    payloads = [layers.capture(caches, layout, block, None)[RecordKind.FULL] for block in blocks]
    state = sum(map(len, payloads))
    restored = Restored(
        position=ends[-1],
        kinds=(RecordKind.FULL,) * len(ends),
        starts=tuple(block.start for block in blocks),
        payloads=tuple(payloads),
    )
    fresh = [KVCache() for _ in range(count)]
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    layers.restore(fresh, layout, restored)
    assert state < mx.get_peak_memory() - before < 1.5 * state
    for cache, other in zip(caches, fresh, strict=True):
        assert mx.array_equal(cache.state[0], other.state[0]) and mx.array_equal(cache.state[1], other.state[1])


def test_quantised_keys_and_values_come_back_as_they_are_packed() -> None:
    caches = [QuantizedKVCache(group_size=32, bits=4)]
    layout = layout_of(caches)
    assert layout.describe() == "full:q4g32" and layout.alone
    caches[0].update_and_fetch(mx.random.normal((1, 2, 256, 32)), mx.random.normal((1, 2, 256, 64)))
    caches[0].update_and_fetch(mx.random.normal((1, 2, 9, 32)), mx.random.normal((1, 2, 9, 64)))
    parts = [
        layers.capture(caches, layout, Capture(start=0, end=256, kinds=(RecordKind.FULL,)), None),
        layers.capture(caches, layout, Capture(start=256, end=265, kinds=(RecordKind.FULL,)), None),
    ]
    fresh = [QuantizedKVCache(group_size=32, bits=4)]
    payloads = tuple(part[RecordKind.FULL] for part in parts)
    restored = Restored(position=265, kinds=(RecordKind.FULL,) * 2, starts=(0, 256), payloads=payloads)
    layers.restore(fresh, layout, restored)
    for ours, theirs in zip(fresh[0].keys_and_values(), caches[0].keys_and_values(), strict=True):
        assert all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))
    assert fresh[0].offset == 265


def test_lists_of_caches_are_flattened_at_any_depth_and_empty_slots_stay_empty() -> None:
    def make() -> list:
        return [CacheList(ArraysCache(2), CacheList(KVCache(), RotatingKVCache(8))), KVCache()]

    caches = make()
    layout = layout_of(caches)
    assert layout.describe() == "state,full,window:8,full"
    state, full, window, last = layers.leaves(caches)
    state.cache[1] = mx.ones((1, 3))
    for cache in (full, window, last):
        cache.update_and_fetch(mx.ones((1, 1, 4, 1)), mx.ones((1, 1, 4, 0)))  # values of no width, as indexers have
    parts = layers.capture(caches, layout, Capture(start=0, end=4, kinds=KINDS), None)
    fresh = make()
    restored = Restored(position=4, kinds=KINDS, starts=(0,) * 3, payloads=tuple(parts[kind] for kind in KINDS))
    layers.restore(fresh, layout, restored)
    back, *others = layers.leaves(fresh)
    assert back.cache[0] is None and back.cache[1].tolist() == [[1.0, 1.0, 1.0]]
    assert all(leaf.offset == 4 and leaf.values.shape == (1, 1, 4, 0) for leaf in others)


def test_rows_with_lists_and_empty_slots_join_and_leave_a_batch() -> None:
    rows = []
    for length in (3, 5):
        row = [CacheList(ArraysCache(2), KVCache())]
        state, full = layers.leaves(row)
        state.cache[1] = mx.full((1, 3), length)
        full.update_and_fetch(mx.full((1, 1, length, 1), length), mx.full((1, 1, length, 1), length))
        rows.append(row)
    batch = layers.join(layers.join(None, rows[:1]), rows[1:])
    assert [type(leaf) for leaf in layers.leaves(batch)] == [ArraysCache, BatchKVCache]
    for index, length in enumerate((3, 5)):
        state, full = layers.leaves(layers.extract(batch, index))
        assert state.cache[0] is None and state.cache[1].tolist() == [[length] * 3]
        assert tokens_of(full) == ([length] * length, [length] * length)


def test_a_cache_that_no_call_fills_passes_through_a_batch() -> None:
    rows = [[KVCache(), RotatingKVCache(8)] for _ in range(2)]
    batch = layers.join(None, rows)
    for cache in batch:
        cache.filter(mx.array([1]))
    full, window = layers.extract(batch, 0)
    assert (type(full), full.state[:2], full.offset) == (KVCache, (None, None), 0)
    assert (type(window), window.state[:2], window.max_size) == (RotatingKVCache, (None, None), 8)


def test_a_record_that_falls_short_is_refused() -> None:
    for make in (KVCache, lambda: RotatingKVCache(8), lambda: ChunkedKVCache(8)):
        line = _Line(make)
        line.prefill(6)
        part = layers.capture(line.caches, line.layout, Capture(start=2, end=6, kinds=line.kinds), None)
        payloads = tuple(part[kind] for kind in line.kinds)
        with pytest.raises(ValueError, match="layer 0: 4 of 6 tokens are stored"):
            layers.restore(
                [make()],
                line.layout,
                Restored(position=6, kinds=line.kinds, starts=(2,) * len(line.kinds), payloads=payloads),
            )


class _Ring(RotatingKVCache):
    """A subclass may mean anything."""


@pytest.mark.parametrize("strange", [_Ring(8), object(), None])
def test_a_class_without_a_policy_is_refused_by_number_and_name(strange: object) -> None:
    caches = [KVCache(), CacheList(KVCache(), strange)]
    with pytest.raises(
        UnsupportedLayer, match=rf"layer 1: no snapshot policy for cache class .*{type(strange).__name__}"
    ):
        layout_of(caches)


def test_a_model_without_caches_is_refused() -> None:
    with pytest.raises(UnsupportedLayer, match="no cache"):
        layout_of([])


def test_a_cache_that_fills_after_load_is_not_passed_over() -> None:
    cache = KVCache()
    layout = CacheLayout((LayerSpec(LayerKind.NONE),))
    what = Capture(start=0, end=1, kinds=())
    assert layers.capture([cache], layout, what, None) == {}
    cache.update_and_fetch(mx.ones((1, 1, 1, 1)), mx.ones((1, 1, 1, 1)))
    with pytest.raises(ValueError, match="layer 0: KVCache holds state, and held none at load"):
        layers.capture([cache], layout, what, None)
