"""The engine as the suite watches it: what stands in a row's caches, and records that are given to it changed.

Imports MLX: only once the process is prepared for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvcache.records import RecordKind
from service.engine import layers
from service.engine.mlx_engine import MlxEngine
from service.plan import Capture, Decode, OpenRow, Payloads, Prefill, Restored, RowId, StepResult


class WatchedEngine(MlxEngine):
    """The engine itself. A row's whole state is looked at as soon as it is restored, and wherever it is captured.

    `states` has one payload for each kind of layer, which holds all that the row's caches hold of it. `change` is asked
    for every restore, before the engine sees the records.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states: dict[tuple[int, int], Payloads] = {}  # by row and position
        self.change: Callable[[Restored], Restored] | None = None

    def _open(self, order: OpenRow, payloads: layers.SharedPayloads) -> None:
        if order.restored is not None and self.change is not None:
            order = replace(order, restored=self.change(order.restored))
        super()._open(order, payloads)
        if order.restored is not None:
            self._look(order.row)

    def _prefill(self, call: Prefill, result: StepResult) -> None:
        super()._prefill(call, result)
        if call.capture is not None:
            self._look(call.row)

    def _decode(self, order: Decode, result: StepResult) -> None:
        super()._decode(order, result)
        for name in order.captures.keys() & result.captured.keys():
            self._look(name, result.captured[name].get(RecordKind.LOGITS))

    def _look(self, name: RowId, logits: bytes | bytearray | None = None) -> None:
        """`logits`: as they were captured, where a row does not keep them."""
        row = self._rows[name]
        kinds = self._layout.kinds + ((RecordKind.LOGITS,) if logits is None and row.logits is not None else ())
        # A record that reaches from the first token to the last holds everything that is there.
        whole = Capture(start=0, end=row.position, kinds=kinds)
        if row.caches is None:
            state = self._batch.capture(name, whole, None)
        else:
            state = layers.capture(row.caches, self._layout, whole, row.logits)
        if logits is not None:
            state[RecordKind.LOGITS] = logits
        self.states[name, row.position] = state
