"""The state of caches at a moment, kept by reference. Owns going back to it when a model call could not be built.

An MLX array is a value, but upstream's caches assign into slices, which makes the same Python object stand for another
value. So every array is kept under an object of its own. That copies no data, yet while it lasts MLX cannot write into
the caches' buffers in place and copies them whole: let go of it before anything is evaluated.
"""

from __future__ import annotations

import copy

import mlx.core as mx

from service.engine import layers


class Held:
    """What `caches` were when this was made."""

    def __init__(self, caches: list) -> None:
        self._was = [(leaf, _kept(vars(leaf))) for leaf in layers.leaves(caches)]

    def put_back(self) -> None:
        """Makes the caches what they were. Once: the arrays belong to the caches again."""
        for leaf, was in self._was:
            vars(leaf).clear()
            vars(leaf).update(was)


def _kept(value):
    match value:
        case mx.array():
            return copy.copy(value)
        case dict():
            return {name: _kept(part) for name, part in value.items()}
        case list() | tuple():
            return type(value)(_kept(part) for part in value)
        case _:
            return value
