"""The one home of mlx-lm names that are not documented API; `tests/engine/test_upstream.py` is its contract.

Everything the engine borrows from upstream beyond calling a model goes through here: cache classes and the fields it
reads from them.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model

__all__ = [
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "KVCache",
    "RotatingKVCache",
    "batch_end",
    "batch_in_order",
    "in_order",
    "load_model",
    "make_prompt_cache",
    "set_window",
]


def in_order(cache: RotatingKVCache, array: mx.array) -> mx.array:
    """The cache's K or V with its tokens oldest first, without unused room."""
    return cache._temporal_order(array)


def set_window(cache: RotatingKVCache, keys: mx.array, values: mx.array, position: int) -> None:
    """Lets the cache stand at `position` with the given tokens, oldest first, as its window."""
    cache.keys, cache.values, cache.offset = keys, values, position
    cache._idx = keys.shape[2]


def batch_end(cache: BatchKVCache) -> int:
    """Where the newest token of every row ends: rows are right-aligned."""
    return cache._idx


def batch_in_order(cache: BatchRotatingKVCache, array: mx.array) -> mx.array:
    """Rows of K or V with their tokens oldest first; the newest is last in every row."""
    return mx.roll(array, -cache._idx, axis=2) if cache.rotated else array[:, :, : cache._idx]
