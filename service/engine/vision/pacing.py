"""A tower in parts. Owns how far a pass over an image has come, and what it holds meanwhile.

Upstream's towers are one call. It is made again in each step, from the start: a part that was computed in this pass
answers with what it gave before, and when the step's time is used up the next one ends the call. What lies before the
last computed part costs next to nothing again, since MLX evaluates what is asked for.

A part is a layer. Where its attention is a call of its own (`attention`), that is one part and the rest is another.

Most towers are a chain, in which the newest output alone matters; some families use the outputs of several layers. The
first pass finds out which, and from then on a chain holds one output and not one a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from service.engine.calls import Features

_LANGUAGE = "language_model"  # upstream's name for all that is no tower


class _UsedUp(Exception):
    """The step's time is over, and the tower asks for one more part."""


@dataclass(slots=True, eq=False)
class Pass:
    """One image on its way through the tower: what its layers gave, in the order of their calls.

    `inner` is what attention gave in the layer that comes next.
    """

    outputs: list = field(default_factory=list)
    inner: list[mx.array] = field(default_factory=list)
    asked: int = 0  # layers that the call under way has come to
    inner_asked: int = 0
    until: float = 0.0  # parts end before that, except for the first of a step
    first: bool = True
    longest: float = 0.0  # seconds that a part took so far

    @contextmanager
    def part(self) -> Iterator[None]:
        """One part more is computed inside. Raises _UsedUp if it would end too late, should it take as long as any."""
        began = time.perf_counter()
        if not self.first and began + self.longest > self.until:
            raise _UsedUp
        self.first = False
        yield
        self.longest = max(self.longest, time.perf_counter() - began)


class Pace:
    """The layers of one model's tower, each of which asks here before it computes. Engine thread only."""

    def __init__(self, model: nn.Module) -> None:
        """Takes the layers' calls over, in place; weights and names stay. A tower without layers is one step."""
        layers = _layers(model)
        self._now: Pass | None = None
        self._is_chain: bool | None = None  # not known yet
        for number, layer in enumerate(layers):
            layer.__class__ = _asking(type(layer), self, first=number == 0)

    def advance(self, under_way: Pass, seconds: float, make: Callable[[], Features]) -> Features | None:
        """Computes parts for so long by what they took so far, and at least one; `make` calls the tower.

        Its features, evaluated; None: there are parts left.

        After an error the pass is of no use.
        """
        under_way.until, under_way.first = time.perf_counter() + seconds, True
        try:
            made = self._made(under_way, make)
        except _UsedUp:
            return None
        mx.eval(list(made.values()))
        if self._is_chain is None and under_way.outputs:
            self._is_chain = self._needs_newest_only(under_way, make, made)
        return made

    def layer(self, compute: Callable[[], object], *, first: bool) -> object:
        """What a layer gives: computed now, or earlier in the pass. `first`: it is the tower's first one."""
        now = self._now
        if now is None:
            return compute()
        if now.asked == len(now.outputs):
            now.inner_asked = 0
            output = compute()
            with now.part():
                mx.eval(output)
            now.inner.clear()
            if self._is_chain and not first:  # of the first, what came before is the end of another part of the image
                now.outputs[-1] = _hollow(now.outputs[-1])
            now.outputs.append(output)
        now.asked += 1
        return now.outputs[now.asked - 1]

    def attention(self, compute: Callable[[], mx.array]) -> mx.array:
        """What a layer's attention gives: as `layer`."""
        now = self._now
        if now is None:
            return compute()
        if now.inner_asked == len(now.inner):
            with now.part():
                now.inner.append(compute())
        now.inner_asked += 1
        return now.inner[now.inner_asked - 1]

    def _made(self, under_way: Pass, make: Callable[[], Features]) -> Features:
        self._now, under_way.asked = under_way, 0
        try:
            return make()
        finally:
            self._now = None

    def _needs_newest_only(self, under_way: Pass, make: Callable[[], Features], made: Features) -> bool:
        """Whether the tower gives the same if all but the last output of its layers are not numbers."""
        hollow = Pass(outputs=[*map(_hollow, under_way.outputs[:-1]), under_way.outputs[-1]])
        again = self._made(hollow, make)
        return all(mx.array_equal(again[name], made[name]).item() for name in made)


def _hollow(output: object) -> object:
    """In an output's place: its shapes, without its bytes. What is computed from it is not a number."""
    return tree_map(
        lambda leaf: (
            mx.broadcast_to(mx.array(mx.nan, dtype=leaf.dtype), leaf.shape) if isinstance(leaf, mx.array) else leaf
        ),
        output,
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class that is no part of the language model."""
    found: list[nn.Module] = []
    for name, child in model.children().items():
        if name != _LANGUAGE and isinstance(child, nn.Module):
            for module in child.modules():
                for value in module.children().values():
                    alike = isinstance(value, list) and len({type(each) for each in value}) == 1
                    if alike and isinstance(value[0], nn.Module) and len(value) > len(found):
                        found = value
    return found


def _asking(kind: type[nn.Module], pace: Pace, *, first: bool) -> type[nn.Module]:
    """The class of a layer that asks before it computes."""

    class Asking(kind):  # type: ignore[valid-type,misc]
        def __call__(self, *args, **kwargs):
            return pace.layer(lambda: kind.__call__(self, *args, **kwargs), first=first)

    Asking.__name__ = Asking.__qualname__ = kind.__name__
    return Asking
