"""Rows that decode: in one model call where the layout allows it, else one call each. Owns their caches meanwhile.

Both forms take rows in normal form and give them back in normal form; a row's place is its index in `rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from kvcache.layout import CacheLayout
from service.engine import layers
from service.engine.calls import Calls, Fed
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

    def step(self, calls: Calls, fed: list[Fed]) -> mx.array:
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
    """The rows of one call, in one batched cache, right-aligned. A part of `Groups`, which is the `DecodeBatch`.

    `own`: a row that is the only one keeps caches of its own, for models that copy a batched cache of one row.
    """

    def __init__(self, layout: CacheLayout, *, own: bool = False) -> None:
        self._layout = layout
        self._keeps_own = own
        self._own: list | None = None  # the only row's; then there is no batch
        self._batch: list | None = None
        self.rows: list[RowId] = []

    def join(self, rows: list[RowId], caches: list[list]) -> None:
        if self._keeps_own and not self.rows and len(rows) == 1:
            self._own = caches[0]
        else:
            here = [] if self._own is None else [self._own]
            self._batch, self._own = layers.join(self._batch, [*here, *caches]), None
        self.rows += rows

    def extract(self, row: RowId) -> list:
        if self._own is None:
            return layers.extract(self._batch, self.rows.index(row))
        layers.normalise(self._own)
        mx.eval(layers.live_arrays(self._own))
        return self._own

    def drop(self, rows: list[RowId]) -> None:
        keep = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(keep) == len(self.rows):
            return
        if self._keeps_own and len(keep) == 1:
            self._own, self._batch = layers.extract(self._batch, keep[0]), None
        elif not keep:
            self._own = self._batch = None
        else:
            for cache in self._batch:
                cache.filter(mx.array(keep))
        self.rows = [self.rows[i] for i in keep]

    def step(self, calls: Calls, fed: list[Fed]) -> mx.array:
        return calls.decode(fed, self._batch if self._own is None else self._own)

    def hold(self) -> Undo:
        # Copies of the lists: a model may put other objects into one while it is called.
        held = Held(self._own or self._batch or [])
        own, batch, rows = self._own, self._batch and list(self._batch), list(self.rows)

        def undo() -> None:
            held.put_back()
            self._own, self._batch, self.rows = own, batch, rows

        return undo

    def live(self) -> list[mx.array]:
        return layers.live_arrays(self._own or self._batch or [])

    def capture(self, row: RowId, what: Capture, logits: mx.array | None = None) -> Payloads:
        if self._own is not None:
            return layers.capture(self._own, self._layout, what, logits)
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

    def step(self, calls: Calls, fed: list[Fed]) -> mx.array:
        return mx.concatenate([calls.decode([one], own) for one, own in zip(fed, self._caches.values(), strict=True)])

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
