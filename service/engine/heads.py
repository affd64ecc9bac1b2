"""Logits of the last position alone. Owns the way around upstream's heads, which compute them for every position.

Over a vocabulary of 262k the head costs more than a 16-token call. Upstream models are a body (`model`) that returns
hidden states, and a head applied to what the body returns; some are a `language_model` of that form. So a shallow copy
of the model, whose body hands on the last position only, shares every weight and computes one row of logits. A few
tokens at load show whether that is so for a family; if not, all positions are computed and the rest is thrown away.
"""

from __future__ import annotations

import copy

import mlx.core as mx

from service.engine import layers
from service.engine.upstream import make_prompt_cache


class _HeadOfLast:
    """A head that computes the last position only, for a model that is body and head in one."""

    def __init__(self, head) -> None:
        self._head = head

    def __call__(self, hidden):
        return self._head(hidden[:, -1:, :])

    def __getattr__(self, name):
        return getattr(self._head, name)


class _LastPosition:
    """A body that hands on the last position; everything else is the body's own (its embedding is often the head)."""

    def __init__(self, body) -> None:
        self._body = body

    def __call__(self, *args, **kwargs):
        return self._body(*args, **kwargs)[:, -1:, :]

    def __getattr__(self, name):
        return getattr(self._body, name)


def last_position(model):
    """A callable like `model` that returns logits (B, 1, vocab) of the last position; `model` itself where none is."""
    short = shortened(model)
    if short is None:
        return model
    tokens = mx.array([[1, 2, 3, 4, 5]], dtype=mx.uint32)
    whole_caches, short_caches = make_prompt_cache(model), make_prompt_cache(model)
    whole = model(tokens, cache=whole_caches)[:, -1:, :]
    try:
        last = short(tokens, cache=short_caches)
        mx.eval(whole, last, layers.live_arrays(short_caches))
    except Exception:  # whatever a family's code raises on a shortened body means that it is built otherwise
        return model
    if last.shape != whole.shape or not mx.allclose(whole, last, rtol=1e-2, atol=1e-2, equal_nan=True).item():
        return model
    return short


def shortened(model):
    """The copy, or None where the model has neither a body nor a head of a known name."""
    if not isinstance(model, dict):  # upstream's modules are
        return None
    for name in ("model", "language_model"):
        if name not in model:  # a module holds its children as a dict; some have `model` as a property besides
            continue
        replaced = _LastPosition(model[name]) if name == "model" else shortened(model[name])
        if replaced is None:
            return None
        short = copy.copy(model)
        setattr(short, name, replaced)
        return short
    if "lm_head" in model:
        short = copy.copy(model)
        short.lm_head = _HeadOfLast(model["lm_head"])
        return short
    return None
