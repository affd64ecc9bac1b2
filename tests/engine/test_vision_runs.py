"""Attention that goes both ways inside an image: the masks, written out token by token."""

from __future__ import annotations

import numpy as np
import pytest

from service.engine import cpu

mx = cpu.mlx()

from mlx_lm.models.cache import KVCache, RotatingKVCache  # noqa: E402

from service.engine.vision.runs import Opened, runs_of  # noqa: E402

pytestmark = pytest.mark.mlx


def test_runs_are_where_the_image_token_is() -> None:
    assert runs_of([5, 9, 9, 1, 9], 9) == [(1, 3), (4, 5)]
    assert runs_of([1, 2], 9) == []


@pytest.mark.parametrize("window", [0, 16, 100])
@pytest.mark.parametrize("before", [0, 5, 15, 16, 17, 40])
def test_an_opened_mask_is_the_rule_written_out(window: int, before: int) -> None:
    cache = RotatingKVCache(window) if window else KVCache()
    if before:
        cache.update_and_fetch(mx.zeros((1, 1, before, 4)), mx.zeros((1, 1, before, 4)))
        if window and before > window:
            cache.keys, cache.values = cache.keys[..., -window:, :], cache.values[..., -window:, :]
            cache._idx = window
    count, runs = 30, [(2, 24), (25, 29)]
    mask = np.array(Opened(cache, runs).make_mask(count, window_size=window or None))
    keys, _ = cache.update_and_fetch(mx.zeros((1, 1, count, 4)), mx.zeros((1, 1, count, 4)))
    assert mask.shape == (count, keys.shape[2])
    first = before + count - keys.shape[2]  # position of the first key
    for i in range(count):
        for j in range(keys.shape[2]):
            query, key = before + i, first + j
            seen = key <= query and (not window or query - key < window)
            together = any(a <= query - before < b and a <= key - before < b for a, b in runs)
            assert mask[i, j] == (seen or together), (i, j)
