"""Products of a few rows with a weight, in the form that MKL is quick at. Owns nothing but that form.

Decode multiplies 1 to 8 rows with every weight of the model, so each product should cost one read of the weight.
MKL's product of two rows does; its product of one row goes at half that speed, and one of 3 to 16 rows packs the whole
weight first. So one row goes in twice, and a weight with many outputs (the head over the vocabulary) goes in slices
that stay in the cache between packing and use. Figures: docs/benchmarks.md.

Which rows a product has decides its form, never where they come from, so a restored run makes the same products.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

SLICE = 2048  # outputs: 5 MB of float32 weight at width 640
_SLICED_FROM = 8 * SLICE  # outputs; below, slicing costs more than packing


class _Linear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        y = product(x, self["weight"])
        return y + self["bias"] if "bias" in self else y


class _Embedding(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self["weight"])


_FORMS = {nn.Linear: _Linear, nn.Embedding: _Embedding}


def adopt(model: nn.Module) -> None:
    """Has every plain linear layer and tied head of `model` use `product`, in place; weights and names stay."""
    for module in model.modules():
        form = _FORMS.get(type(module))
        if form is not None and module["weight"].dtype == mx.float32:
            module.__class__ = form


def product(x: mx.array, weight: mx.array) -> mx.array:
    """`x` (..., width) times `weight` (outputs, width) transposed: (..., outputs)."""
    outputs, width = weight.shape
    rows = x.size // width
    if rows == 1:
        y = mx.broadcast_to(x.reshape(1, width), (2, width)) @ weight.T
        return y[:1].reshape(*x.shape[:-1], outputs)
    if rows == 2 or outputs < _SLICED_FROM:
        return x @ weight.T
    whole = outputs - outputs % SLICE
    flat = x.reshape(rows, width)
    slices = weight[:whole].reshape(-1, SLICE, width)
    y = mx.matmul(flat, slices.swapaxes(1, 2)).swapaxes(0, 1).reshape(rows, whole)
    if whole < outputs:
        y = mx.concatenate([y, flat @ weight[whole:].T], axis=1)
    return y.reshape(*x.shape[:-1], outputs)
