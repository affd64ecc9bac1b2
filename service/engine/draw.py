"""Drawing a token from one row of scores. Owns the filters and the draw, on the host; knows no request and no model.

A vocabulary of 262k is not sorted: a filter that keeps the likeliest orders the few tokens that can be among them.
On the host numpy's vectors do a row in well under a millisecond, and a draw is the same on every backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_BLOCK = 512  # weights that are summed first: a float32 running sum over a vocabulary would lose its tail
_RUN = 64  # scores in a block of which only the largest is looked at first
_REACH = (
    2.0,
    4.0,
    6.0,
    8.0,
    12.0,
    math.inf,
)  # nats below the likeliest in which to look for the end of top_p's mass


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """In the order in which they apply. Off: `top_k` 0, `min_p` 0, `top_p` 1."""

    temperature: float  # > 0
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0


def draw(logits: Floats, filters: Filters, number: float) -> int:
    """The token of `logits` (vocab,) that `number` in [0, 1) falls on. One at least must be finite."""
    # Less the largest first: divided by a tiny temperature, only the rest may overflow, to -inf.
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / np.float32(filters.temperature)
    if 0 < filters.top_k < scores.size:
        ids = largest(scores, filters.top_k)
        token = draw_among(scores[ids], filters, number)
        return int(ids[token])
    return draw_among(scores, filters, number)


def draw_among(scores: Floats, filters: Filters, number: float) -> int:
    """As `draw`, of scores whose largest is 0, without `top_k`."""
    weights = np.exp(scores)
    if filters.min_p:
        weights[scores < math.log(filters.min_p)] = 0.0
    if filters.top_p >= 1.0:
        return place(weights, number)
    ids = nucleus(scores, weights, filters.top_p)
    return int(ids[place(weights[ids], number)])


def nucleus(scores: Floats, weights: Floats, share: float) -> NDArray[np.intp]:
    """The likeliest tokens, in order, while the mass before each is below `share` of all: the first always is."""
    wanted = share * float(weights.sum(dtype=np.float64))
    for reach in _REACH:
        ids = np.flatnonzero(scores >= -reach)
        if float(weights[ids].sum(dtype=np.float64)) >= wanted:
            break
    ids = ids[np.argsort(-scores[ids])]
    own = weights[ids].astype(np.float64)
    before = np.cumsum(own) - own
    return ids[: max(1, int(np.searchsorted(before, wanted, side="left")))]


def place(weights: Floats, number: float) -> int:
    """The index that `number` in [0, 1) falls on when the weights lie end to end; never one of weight 0."""
    short = -weights.size % _BLOCK
    blocks = np.pad(weights, (0, short)).reshape(-1, _BLOCK)
    ends = np.cumsum(blocks.sum(axis=1, dtype=np.float64))
    wanted = number * ends[-1]
    block = int(np.searchsorted(ends, wanted, side="right"))
    inside = np.cumsum(blocks[block], dtype=np.float64)
    at = int(np.searchsorted(inside, wanted - (ends[block - 1] if block else 0.0), side="right"))
    # A sum's last bit may put the number past the block's end: its last token with a weight is meant.
    return block * _BLOCK + min(at, int(np.flatnonzero(blocks[block])[-1]))


def likeliest(logits: Floats, count: int) -> list[int]:
    """The `count` likeliest tokens of `logits` (vocab,), in order."""
    count = min(count, logits.size)
    if count == 0:
        return []
    ids = largest(logits, count)
    return [int(i) for i in ids[np.argsort(-logits[ids], kind="stable")][:count]]


def largest(scores: Floats, count: int) -> NDArray[np.intp]:
    """Where the `count` largest are, 1 to all of them, ascending; all that equal the last of them are among them."""
    # Blocks' maxima are scores too, so the last of the `count` is at least the count-th largest of these.
    maxima = scores[: scores.size - scores.size % _RUN].reshape(-1, _RUN).max(axis=1)
    ids = None
    if count < maxima.size:
        ids = np.flatnonzero(scores >= np.partition(maxima, -count)[-count])
    among = scores if ids is None else scores[ids]
    kept = np.flatnonzero(among >= np.partition(among, -count)[-count])
    return kept if ids is None else ids[kept]


def log_total(logits: Floats) -> float:
    """log Σ exp over `logits` (vocab,)."""
    largest = float(logits.max())
    with np.errstate(over="ignore"):  # as in `draw`: what is that far below is -inf
        below = logits - np.float32(largest)
    return largest + math.log(float(np.exp(below).sum(dtype=np.float64)))
