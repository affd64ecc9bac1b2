"""Rows that decode: in one model call where the layout allows it, else one call each. Owns their caches meanwhile.

Both forms take rows in normal form and give them back in normal form; a row's place is its index in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from kvcache.layout import CacheLayout
from service.engine import layers
from service.engine.hold import Held
from service.plan import Capture, Payloads, RowId

Undo = Callable[[], None]


class DecodeBatch(Protocol):
    """All rows that decode."""

    @property
    def rows(self) -> list[RowId]:
        """In the order in which tokens go in and logits come out."""
        ...

    def arrange(self, calls: tuple[tuple[RowId, ...], ...]) -> None:
        """Which rows share a model call from now on, those included that will `join`."""
        ...

    def join(self, rows: list[RowId], caches: list[list]) -> None:
        """Adds rows at the end; their caches belong to the batch from now on."""
        ...

    def extract(self, row: RowId) -> list:
        """The row's caches, in normal form; the row stays until `drop`."""
        ...

    def drop(self, rows: list[RowId]) -> None:
        """Forgets rows and their state."""
        ...

    def step(self, model, tokens: list[int]) -> mx.array:
        """Feeds each row one token; next-token logits (rows, vocab)."""
        ...

    def hold(self) -> Undo:
        """Call what it returns to go back to this moment should the next `join` or `step` raise."""
        ...

    def live(self) -> list[mx.array]:
        """Every array that holds state."""
        ...

    def capture(self, row: RowId, what: Capture, logits: mx.array | None = None) -> Payloads:
        """The records of a row that stands at `what.end`; `logits` (1, vocab) are those of its last position."""
        ...


class OneCall:
    """The rows of one call, in one batched cache, right-aligned. A part of `Groups`, which is the `DecodeBatch`."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._batch: list | None = None
        self.rows: list[RowId] = []

    def join(self, rows: list[RowId], caches: list[list]) -> None:
        self._batch = layers.join(self._batch, caches)
        self.rows += rows

    def extract(self, row: RowId) -> list:
        return layers.extract(self._batch, self.rows.index(row))

    def drop(self, rows: list[RowId]) -> None:
        keep = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self._batch = None
            return
        for cache in self._batch:
            cache.filter(mx.array(keep))

    def step(self, model, tokens: list[int]) -> mx.array:
        return model(mx.array(tokens, dtype=mx.uint32)[:, None], cache=self._batch)[:, -1, :]

    def hold(self) -> Undo:
        held, batch, rows = Held(self._batch or []), self._batch, list(self.rows)

        def undo() -> None:
            held.put_back()
            self._batch, self.rows = batch, rows

        return undo

    def live(self) -> list[mx.array]:
        return [] if self._batch is None else layers.live_arrays(self._batch)

    def capture(self, row: RowId, what: Capture, logits: mx.array | None = None) -> Payloads:
        return layers.capture_batched(self._batch, self.rows.index(row), self._layout, what, logits)


class OneCallEach:
    """Rows keep caches of their own; a step is as many calls as there are rows."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._caches: dict[RowId, list] = {}

    @property
    def rows(self) -> list[RowId]:
        return list(self._caches)

    def arrange(self, calls: tuple[tuple[RowId, ...], ...]) -> None:
        """Rows share nothing here."""

    def join(self, rows: list[RowId], caches: list[list]) -> None:
        self._caches.update(zip(rows, caches, strict=True))

    def extract(self, row: RowId) -> list:
        caches = self._caches[row]
        layers.normalise(caches)
        mx.eval(layers.live_arrays(caches))
        return caches

    def drop(self, rows: list[RowId]) -> None:
        for row in rows:
            self._caches.pop(row, None)

    def step(self, model, tokens: list[int]) -> mx.array:
        fed = zip(tokens, self._caches.values(), strict=True)
        return mx.concatenate([model(mx.array([[t]], dtype=mx.uint32), cache=c)[:, -1, :] for t, c in fed])

    def hold(self) -> Undo:
        held, rows = Held([cache for caches in self._caches.values() for cache in caches]), dict(self._caches)

        def undo() -> None:
            held.put_back()
            self._caches = rows

        return undo

    def live(self) -> list[mx.array]:
        return [array for caches in self._caches.values() for array in layers.live_arrays(caches)]

    def capture(self, row: RowId, what: Capture, logits: mx.array | None = None) -> Payloads:
        return layers.capture(self._caches[row], self._layout, what, logits)
