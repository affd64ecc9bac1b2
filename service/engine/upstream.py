"""The one home of mlx-lm names that are not documented API; `tests/engine/test_upstream.py` is its contract.

Everything the engine borrows from upstream beyond calling a model goes through here: cache classes and the fields it
reads from them.
"""

from __future__ import annotations

import sys

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model

__all__ = [
    "LATENT_CACHE",
    "LATENT_FIELDS",
    "PADDING_MATTERS",
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
    "batch_end",
    "batch_in_order",
    "chunk_tokens",
    "in_order",
    "load_model",
    "make_prompt_cache",
    "of_one_row",
    "qualified_name",
    "set_chunk",
    "set_window",
]

PADDING_MATTERS = {
    "mlx_lm.models.minimax_m3_vl": "sparse blocks are cut over cache slots, which padding moves",
}
"""Model modules that compute something else for a padded row once it is long, so that no short call shows it."""

LATENT_CACHE = "mlx_lm.models.deepseek_v41.LayerCache"
LATENT_FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


def qualified_name(cache) -> str:
    """Class of a cache object: its bare name if it is one of upstream's general classes, else with its module."""
    kind = type(cache)
    return kind.__name__ if kind.__module__ == ArraysCache.__module__ else f"{kind.__module__}.{kind.__qualname__}"


def in_order(cache: RotatingKVCache, array: mx.array) -> mx.array:
    """The cache's K or V with its tokens oldest first, without unused room."""
    return cache._temporal_order(array)


def set_window(cache: RotatingKVCache, keys: mx.array, values: mx.array, position: int) -> None:
    """Lets the cache stand at `position` with the given tokens, oldest first, as its window."""
    cache.keys, cache.values, cache.offset = keys, values, position
    cache._idx = keys.shape[2]


def chunk_tokens(cache: ChunkedKVCache, array: mx.array) -> mx.array:
    """The cache's K or V without unused room; its tokens are in order."""
    return array[..., : cache.offset - cache.start_position, :]


def set_chunk(cache: ChunkedKVCache, keys: mx.array, values: mx.array, position: int) -> None:
    """Lets the cache stand at `position` with the given tokens as the end of what was seen."""
    cache.keys, cache.values, cache.offset = keys, values, position
    cache.start_position = position - keys.shape[2]


def of_one_row(batched):
    """An empty cache of the class whose batched form this is, mlx-lm's or mlx-vlm's."""
    module = sys.modules[type(batched).__module__]
    if hasattr(batched, "max_size"):
        return module.RotatingKVCache(batched.max_size)
    return module.KVCache()


def batch_end(cache: BatchKVCache) -> int:
    """Where the newest token of every row ends: rows are right-aligned."""
    return cache._idx


def batch_in_order(cache: BatchRotatingKVCache, array: mx.array) -> mx.array:
    """Rows of K or V with their tokens oldest first; the newest is last in every row."""
    return mx.roll(array, -cache._idx, axis=2) if cache.rotated else array[:, :, : cache._idx]
