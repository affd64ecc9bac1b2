"""What the calls at load find out: caches that stay empty, the cost of a token, models that padding leads astray."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from service.engine.layers import UnsupportedLayer
from service.engine.probe import probe

pytestmark = pytest.mark.mlx

_TABLE = mx.random.normal((50, 8), key=mx.random.key(1))


class _SumOfAllTokens:
    """Next-token logits from the sum of the embeddings so far: the smallest model with a cache of its own."""

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        seen = _TABLE[tokens % 50][:, None]
        keys, values = cache[0].update_and_fetch(seen, seen)
        total = (keys + values).sum(axis=2)
        return mx.broadcast_to(total, (tokens.shape[0], tokens.shape[1], 8)) @ _TABLE.T


class _CountsSlots(_SumOfAllTokens):
    """Takes the length of the cache for the position, which it is not where a row is padded."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens, cache)
        return mx.roll(logits, cache[0].keys_and_values()[0].shape[2], axis=-1)


class _NeedsAPlainOffset(_SumOfAllTokens):
    """Uses the offset as a Python number, which a batched cache does not have."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return super().__call__(tokens, cache) + float(cache[0].offset)


class _IgnoresItsCaches(_SumOfAllTokens):
    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return super().__call__(tokens, self.make_cache())


def test_a_model_that_batches_well_decodes_in_one_call() -> None:
    probed = probe(_SumOfAllTokens())
    assert probed.layout.alone == ""
    assert probed.layout.describe() == "full,none"  # the second cache is never filled
    assert probed.footprint.per_token == 2 * 8 * 4  # keys and values, float32


def test_a_model_that_padding_leads_astray_decodes_row_by_row() -> None:
    assert "rows of unequal length differ by" in probe(_CountsSlots()).layout.alone


def test_a_model_that_cannot_take_a_batched_cache_decodes_row_by_row() -> None:
    assert probe(_NeedsAPlainOffset()).layout.alone.startswith("a batched call fails: ")


def test_a_model_that_keeps_its_state_elsewhere_is_refused() -> None:
    with pytest.raises(UnsupportedLayer, match="layer 0: KVCache stays empty"):
        probe(_IgnoresItsCaches())
