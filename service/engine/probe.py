"""What only running a model tells: which caches it fills, what a token costs, whether rows may share a decode call.

A few short calls at load. A batched form exists for a class and not for a model: some families compute positions that
a padded row does not have. So a model decodes in one call only after rows of unequal length gave, together, what they
gave alone.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import mlx.core as mx

from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from service.engine import layers
from service.engine.calls import Calls, Fed, calls_of
from service.engine.policies import policy_of
from service.engine.upstream import qualified_name
from service.footprint import Footprint

_LENGTHS = (40, 17, 9, 1)  # the longest first: it is the only one that is not padded

TOLERANCE = 0.1
"""Largest difference of a logit in deviations of the row's logits. Rounding is far below, a wrong place far above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the calls showed."""

    layout: CacheLayout
    footprint: Footprint  # of a row; the weights are no part of it


def probe(model) -> Probed:
    """Runs the model on a few dozen tokens. Raises UnsupportedLayer with the layer's number, class and reason."""
    calls = calls_of(model)
    layout = layers.layout_of(calls.caches())
    prompts = [[1 + (7 * i + n) % 50 for i in range(n)] for n in _LENGTHS]
    rows = [_prefilled(calls, prompt) for prompt in prompts]
    longest, shortest = list(layers.leaves(rows[0])), list(layers.leaves(rows[-1]))
    specs = []
    for number, (leaf, spec) in enumerate(zip(longest, layout.layers, strict=True)):
        if policy_of(leaf).live(leaf):
            specs.append(spec)
        else:
            specs.append(replace(spec, kind=LayerKind.NONE, window=0))
        if bool(policy_of(leaf).live(leaf)) != bool(policy_of(shortest[number]).live(shortest[number])):
            raise layers.UnsupportedLayer(
                f"layer {number}: {qualified_name(leaf)} is filled by a long call and not by a short one"
            )
    if all(spec.kind is LayerKind.NONE for spec in specs):
        raise layers.UnsupportedLayer(
            f"layer 0: {qualified_name(longest[0])} stays empty, as do all others: the model keeps its state elsewhere"
        )
    per_token = sum(
        array.nbytes
        for leaf, spec in zip(longest, specs, strict=True)
        if spec.kind is LayerKind.FULL
        for array in policy_of(leaf).capture(leaf, 0, 1).values()
    )
    fixed = sum(_fixed_bytes(leaf, spec) for leaf, spec in zip(longest, specs, strict=True))
    alone = layout.alone or calls.alone or _why_alone(calls, rows, [Fed(prompt[-1], len(prompt)) for prompt in prompts])
    return Probed(layout=CacheLayout(tuple(specs), alone=alone), footprint=Footprint(per_token=per_token, fixed=fixed))


def _fixed_bytes(leaf, spec: LayerSpec) -> int:
    """What a leaf takes however long the row is: a whole window, or recurrent state as the probe left it."""
    held = sum(array.nbytes for array in policy_of(leaf).live(leaf))
    if spec.kind is LayerKind.STATE:
        return held
    return -(-held // min(_LENGTHS[0], spec.window)) * spec.window if spec.kind is LayerKind.WINDOW else 0


def _prefilled(calls: Calls, tokens: list[int]) -> list:
    caches = calls.caches()
    calls.prefill(tokens, 0, (), {}, caches)
    layers.normalise(caches)
    mx.eval(layers.live_arrays(caches))
    return caches


def _why_alone(calls: Calls, rows: list[list], fed: list[Fed]) -> str:
    """Why these rows cannot decode together; empty if they can. Uses the rows up."""
    try:
        batch = layers.join(None, rows)
        together = calls.decode(fed, batch)
        mx.eval(together, layers.live_arrays(batch))
    except Exception as error:  # whatever the model's code raises on a batched cache means that it takes none
        text = " ".join(str(error).split())
        return f"a batched call fails: {type(error).__name__}: {text[:120]}"
    own = mx.concatenate([calls.decode([one], caches) for one, caches in zip(fed, rows, strict=True)])
    own, together = _finite(own), _finite(together)
    off = mx.abs(together - own).max(axis=-1) / mx.maximum(mx.std(own, axis=-1), 1e-9)
    # Of the padded rows the middle one: a mixture of experts may turn on a last bit in a single row.
    figure = statistics.median(off.tolist()[1:])
    return "" if figure <= TOLERANCE else f"rows of unequal length differ by {figure:.2g} deviations in one call"


def _finite(logits: mx.array) -> mx.array:
    """Logits with those that the model rules out at 0."""
    logits = logits.astype(mx.float32)
    return mx.where(mx.isinf(logits), 0.0, logits)
