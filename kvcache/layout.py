"""What a model's cache is made of. Owns layer kinds and which records a position needs; knows nothing of MLX."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvcache.records import RecordKind


class LayerKind(enum.Enum):
    """How a layer remembers."""

    FULL = "full"  # keys and values of every token
    WINDOW = "window"  # the last `window` tokens
    STATE = "state"  # recurrent: only the newest value
    NONE = "none"  # made by the model and never used


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One cache object of the model. `window` is in tokens and 0 unless the kind is WINDOW.

    `form` tells classes and settings of one kind apart (`keep4`, `q8g64`): they cannot read each other's records.
    """

    kind: LayerKind
    window: int = 0
    form: str = ""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache objects in the model's order, lists of them flattened.

    `alone`: why rows decode in one call each; empty where one call decodes all of them. `whole_images`: attention goes
    both ways inside an image, so that no call may end, and no state stand, inside one.
    """

    layers: tuple[LayerSpec, ...]
    alone: str = ""
    whole_images: bool = False

    @property
    def window(self) -> int:
        """The widest window in tokens; 0 without window layers."""
        return max((layer.window for layer in self.layers), default=0)

    @property
    def kinds(self) -> tuple[RecordKind, ...]:
        """The record kinds that a block of this model has."""
        have = {layer.kind for layer in self.layers}
        pairs = (
            (LayerKind.FULL, RecordKind.FULL),
            (LayerKind.WINDOW, RecordKind.WINDOW),
            (LayerKind.STATE, RecordKind.STATE),
        )
        return tuple(record for kind, record in pairs if kind in have)

    @property
    def trimmable(self) -> bool:
        """Can be cut at any position without recompute: every layer keeps every token."""
        return not self.whole_images and all(layer.kind in (LayerKind.FULL, LayerKind.NONE) for layer in self.layers)

    def describe(self) -> str:
        """A stable text for the fingerprint, such as `full,window:512,full:q8g64`."""
        return ",".join(":".join([s.kind.value, *filter(None, (str(s.window or ""), s.form))]) for s in self.layers)
