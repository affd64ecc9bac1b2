"""Attention that goes both ways inside an image. Owns the masks of the prefill calls that have such an image.

The call must have the whole image (`kvcache.schedule`). Upstream's models ask their caches for masks, so a cache that
answers with the image opened up is all that is needed; keys and values go to the row's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

Run = tuple[int, int]
"""Offsets [first, last) in a call between which every token sees every other."""


def runs_of(ids: Sequence[int], image_id: int) -> list[Run]:
    """Where `ids` have the image token, run by run."""
    marks = np.diff(np.concatenate([[0], (np.asarray(ids) == image_id).astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(marks == 1).tolist(), np.flatnonzero(marks == -1).tolist(), strict=True))


class Opened:
    """A row's cache for one call; everything but the mask is the cache's own."""

    def __init__(self, cache, runs: Sequence[Run]) -> None:
        self._cache = cache
        self._runs = runs

    def make_mask(self, count: int, return_array: bool = True, **more) -> mx.array:  # noqa: FBT001, FBT002 - upstream's
        """The cache's own mask (count, keys), True where a token is seen, with the runs opened up."""
        mask = self._cache.make_mask(count, return_array=True, **more)
        before = mask.shape[-1] - count  # keys that were there before the call
        opened = np.zeros((count, mask.shape[-1]), dtype=np.bool_)
        for first, last in self._runs:
            opened[first:last, before + first : before + last] = True
        return mask | mx.array(opened)

    def __getattr__(self, name):
        return getattr(self._cache, name)
