"""Rows that decode in several calls a step. Owns which batch a row is in; how a batch computes is `batch`.

The scheduler says which rows share a call, so that a short row is not padded to a long neighbour. Rows move between
batches only when it says so.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from kvcache.layout import CacheLayout
from service.engine.batch import DecodeBatch, OneCall, OneCallEach, Undo
from service.engine.calls import Calls, Fed
from service.plan import Capture, Payloads, RowId


def decode_batch(layout: CacheLayout, *, own: bool = False) -> DecodeBatch:
    """An empty batch of the form that the layout allows. `own`: see `OneCall`."""
    return OneCallEach(layout) if layout.alone else Groups(layout, own=own)


class Groups:
    """A `DecodeBatch` of batches. Its rows are ordered batch by batch."""

    def __init__(self, layout: CacheLayout, *, own: bool = False) -> None:
        self._empty = partial(OneCall, layout, own=own)
        self._calls: tuple[tuple[RowId, ...], ...] = ()
        self._homes: dict[RowId, OneCall] = {}
        self._batches: list[OneCall] = []

    @property
    def rows(self) -> list[RowId]:
        return [row for batch in self._batches for row in batch.rows]

    def arrange(self, calls: tuple[tuple[RowId, ...], ...]) -> None:
        """Lets the rows of each call share a batch, those included that will join; as few as possible move."""
        if calls == self._calls:
            return
        free = list(self._batches)
        homes: dict[RowId, OneCall] = {}
        for rows in calls:
            nearest = max(free, key=lambda batch: len(set(rows) & set(batch.rows)), default=None)
            if nearest is None or set(rows).isdisjoint(nearest.rows):
                nearest = self._empty()
            else:
                free.remove(nearest)
            homes |= dict.fromkeys(rows, nearest)
        moving = [(row, batch) for batch in self._batches for row in batch.rows if homes[row] is not batch]
        for row, batch in moving:
            caches = batch.extract(row)
            batch.drop([row])
            homes[row].join([row], [caches])
        self._calls, self._homes, self._batches = calls, homes, list(dict.fromkeys(homes.values()))

    def join(self, rows: list[RowId], caches: list[list]) -> None:
        """Adds rows that `arrange` has named."""
        for batch in self._batches:
            mine = [(row, own) for row, own in zip(rows, caches, strict=True) if self._homes[row] is batch]
            if mine:
                batch.join([row for row, _ in mine], [own for _, own in mine])

    def extract(self, row: RowId) -> list:
        return self._homes[row].extract(row)

    def drop(self, rows: list[RowId]) -> None:
        for batch in self._batches:
            batch.drop(rows)

    def step(self, calls: Calls, fed: list[Fed]) -> mx.array:
        """As many calls as there are batches with rows."""
        logits, left = [], iter(fed)
        for batch in self._batches:
            if batch.rows:
                logits.append(batch.step(calls, [next(left) for _ in batch.rows]))
        return logits[0] if len(logits) == 1 else mx.concatenate(logits)

    def hold(self) -> Undo:
        undos = [batch.hold() for batch in self._batches]

        def undo() -> None:
            for each in undos:
                each()

        return undo

    def live(self) -> list[mx.array]:
        return [array for batch in self._batches for array in batch.live()]

    def capture(self, row: RowId, what: Capture, logits: mx.array | None = None) -> Payloads:
        return self._homes[row].capture(row, what, logits)
