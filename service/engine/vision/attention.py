"""Attention of vision towers on a CPU, in the form that is quick there. Owns nothing but that form.

MLX's CPU backend makes all scores of a layer at once, in memory that is new each time, and their exponentials one
number at a time; numpy's vectors do not, and a tile of scores stays in the cache. What that gains: docs/benchmarks.md.

The sizes of a call decide its form and its tiles, so an image has the same features whenever it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

TILE = 128  # rows of scores at once: 2 MB at 4,096 patches
FROM = 512  # keys; below, a call is short either way

Fused = Callable[..., mx.array]
"""`mx.fast.scaled_dot_product_attention`."""


Part = Callable[[Callable[[], mx.array]], mx.array]
"""Asked for what it is given to compute: now, or an earlier result."""


def attend(
    part: Part, fused: Fused, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask=None, **more
) -> mx.array:
    """What `fused` gives for q (B, heads, rows, width), k and v (B, kv heads, keys, width); evaluates its inputs."""
    keys = k.shape[2]
    if keys < FROM or more or isinstance(mask, str) or {a.dtype for a in (q, k, v)} != {mx.float32}:
        return fused(q, k, v, scale=scale, mask=mask, **more)
    return part(lambda: _computed(q, k, v, scale, mask))


def _computed(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    mx.eval(q, k, v)
    return mx.array(_tiled(np.array(q), np.array(k), np.array(v), scale, None if mask is None else _added(mask)))


def _added(mask: mx.array) -> np.ndarray:
    """What a mask adds to the scores, float32 of the mask's shape."""
    if mask.dtype == mx.bool_:
        return np.where(np.array(mask), np.float32(0), np.float32(-np.inf))
    return np.array(mask.astype(mx.float32))


def _tiled(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, added: np.ndarray | None) -> np.ndarray:
    batch, heads, rows, _ = q.shape
    share = heads // k.shape[1]  # heads that have their keys and values in common
    out = np.empty((batch, heads, rows, v.shape[-1]), dtype=np.float32)
    tile = np.empty((TILE, k.shape[2]), dtype=np.float32)
    if added is not None:
        added = np.broadcast_to(added, (batch, heads, rows, k.shape[2]))
    q = q * np.float32(scale)
    for one, head in np.ndindex(batch, heads):
        keys, values = k[one, head // share].T, v[one, head // share]
        for first in range(0, rows, TILE):
            last = min(first + TILE, rows)
            scores = tile[: last - first]
            np.matmul(q[one, head, first:last], keys, out=scores)
            if added is not None:
                scores += added[one, head, first:last]
            # A row that sees nothing has no sum; upstream has such rows as padding and looks at none of them.
            scores -= np.maximum(scores.max(axis=-1, keepdims=True), np.finfo(np.float32).min)
            np.exp(scores, out=scores)
            total = np.maximum(scores.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
            np.divide(scores @ values, total, out=out[one, head, first:last])
    return out
