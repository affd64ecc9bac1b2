"""What a row takes while it runs, and which rows may share a decode call. Pure arithmetic; owns no limits.

Rows of one call are padded to its longest: each of them pays, in memory and in time, for the tokens of all layers that
keep every token. A call of its own reads every weight once more. So rows are sorted by length and cut where padding
would cost more than the calls it saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS

CALL_SHARE = 0.5
"""What a decode call costs beyond its rows, as a share of the weights' bytes: padding is masked work besides bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one model. `fixed` does not grow with a row: full windows and recurrent state."""

    per_token: int = 0  # of layers that keep every token
    fixed: int = 0
    weights: int = 0  # read by every call

    def row_bytes(self, tokens: int) -> int:
        """Working state of one row of `tokens`: caches grow by a block at a time, from wherever they stand."""
        return self.fixed + self.per_token * (tokens + BLOCK_TOKENS)

    def share_calls(self, lengths: Sequence[int], *, room: int | None = None) -> Shared:
        """The rows of `lengths` (tokens) as decode calls. Padding never takes more than `room` bytes."""
        if not lengths:
            return Shared((), 0)
        if not self.per_token:
            return Shared((tuple(range(len(lengths))),), 0)
        price = self.weights * CALL_SHARE / self.per_token  # of one more call, in tokens of padding
        while True:
            calls = _cheapest(lengths, price)
            padding = self.per_token * sum(_padding([lengths[i] for i in call]) for call in calls)
            if room is None or padding <= room or not price:
                return Shared(calls, padding)
            price = price / 2 if price > 1 else 0


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows by call, each named by its index, and the bytes of padding in all of them."""

    calls: tuple[tuple[int, ...], ...]
    padding: int


def _cheapest(lengths: Sequence[int], price: float) -> tuple[tuple[int, ...], ...]:
    """The cut of the rows, sorted by length, with the least padding plus `price` a call."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    before = [0, *itertools.accumulate(lengths[i] for i in order)]  # tokens of the first n rows
    cost, cuts = [0.0], [0]  # of the first n rows, and where their last call begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        options = [
            (cost[start] + price + longest * (end - start) - (before[end] - before[start]), start)
            for start in range(end)
        ]
        best, start = min(options)
        cost.append(best)
        cuts.append(start)
    calls: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        calls.append(tuple(sorted(order[cuts[end] : end])))
        end = cuts[end]
    return tuple(reversed(calls))


def _padding(lengths: Sequence[int]) -> int:
    return max(lengths) * len(lengths) - sum(lengths)
