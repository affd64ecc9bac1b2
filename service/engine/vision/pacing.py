"""A tower some layers at a time. Owns how far a pass over an image has come, and what it holds meanwhile.

Upstream's towers are one call. It is made again in each step, from the start: a layer that was computed in this pass
answers with what it gave before, and when the step's layers are used up the next one ends the call. What lies before
the last computed layer is never evaluated again, since MLX evaluates what is asked for.

Most towers are a chain, in which only the newest output matters; some families use the outputs of several layers. The
first pass finds out which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from service.engine.calls import Features

_LANGUAGE = "language_model"


class _Paused(Exception):
    """The step's layers are used up."""


@dataclass(slots=True, eq=False)
class Pass:
    """One image on its way through the tower: the outputs of its layers, in the order of their calls."""

    outputs: list = field(default_factory=list)
    asked: int = 0  # layers that the call under way has come to
    left: int = 0  # layers that it may still compute


class Pace:
    """The layers of one model's tower, each of which asks here before it computes. Engine thread only."""

    def __init__(self, model: nn.Module) -> None:
        """Takes the layers' calls over, in place; weights and names stay."""
        self._layers = _tower_layers(model)
        self._now: Pass | None = None
        self._is_chain: bool | None = None  # not known yet
        for number, layer in enumerate(self._layers):
            layer.__class__ = _asking(type(layer), self, last=number == len(self._layers) - 1)

    def advance(self, under_way: Pass, layers: int, make: Callable[[], Features]) -> Features | None:
        """Computes up to so many more layers; `make` calls the tower. None: there are layers left."""
        under_way.left = layers
        try:
            made = self._call(under_way, make)
        except _Paused:
            return None
        mx.eval(list(made.values()))
        if self._is_chain is None and under_way.outputs:
            self._is_chain = self._depends_on_last(under_way, make, made)
        return made

    def layer(self, compute: Callable[[], object], *, last: bool) -> object:
        """What a layer gives: computed now or before."""
        now = self._now
        if now is None:
            return compute()
        if now.asked < len(now.outputs):
            now.asked += 1
            return now.outputs[now.asked - 1]
        if not now.left:
            raise _Paused
        now.left -= 1
        output = compute()
        mx.eval(output)
        if self._is_chain and now.outputs and not last_of_sweep(now):
            now.outputs[-1] = _hollow(now.outputs[-1])
        now.outputs.append(output)
        now.asked += 1
        return output
