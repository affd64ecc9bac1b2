"""A model that fails on purpose. Owns the ways in which a decode call can go wrong for one row of it.

A row whose last token is `POISON` is the culprit. `after` decode calls with such a row in them go well, and every later
one fails, alone or with others, in the way that `how` says:

    build      raises once the whole graph is built: every cache has been written to
    compute    raises while it is computed, in the second layer: MLX's CPU backend does so for a singular matrix
    memory     the same, where and how an allocator says no
    nan        the culprit's logits are NaN; nothing raises
    together   as `compute`, but only for calls of two rows and more: no row is to blame
"""

from __future__ import annotations

from pathlib import Path

POISON = 8


class Poisoned:
    """Wraps an upstream model; everything but the call is the model's own."""

    def __init__(self, model, how: str, after: int) -> None:
        self._model = model
        self.how = how
        self.after = after
        self.failures = 0
        self._armed = False
        layers = model.model.layers  # of the body: some models give copies of the list themselves
        layers[1] = _Second(layers[1], self)

    def __call__(self, tokens, cache=None, **more):
        import mlx.core as mx

        last = tokens[:, -1].tolist()
        hit = tokens.shape[1] == 1 and POISON in last and (self.how != "together" or len(last) > 1)
        if hit:
            self.after -= 1
        if not hit or self.after >= 0:
            return self._model(tokens, cache=cache, **more)
        self.failures += 1
        self._armed = self.how in ("compute", "together")
        logits = self._model(tokens, cache=cache, **more)
        self._armed = False
        if self.how == "build":
            raise ValueError("as planned")
        if self.how == "memory":
            raise RuntimeError("[malloc] Unable to allocate 1099511627776 bytes.")
        if self.how == "nan":
            ill = mx.array([token == POISON for token in last])[:, None, None]
            return mx.where(ill, mx.array(float("nan")), logits)
        return logits

    def spoilt(self, hidden):
        """What the second layer gives while the model is armed: the same value, if it could be computed."""
        import mlx.core as mx

        if not self._armed:
            return hidden
        return hidden + 0 * mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()

    def __getattr__(self, name):
        return getattr(self._model, name)


class _Second:
    def __init__(self, layer, owner: Poisoned) -> None:
        self._layer = layer
        self._owner = owner

    def __call__(self, *args, **kwargs):
        return self._owner.spoilt(self._layer(*args, **kwargs))

    def __getattr__(self, name):
        return getattr(self._layer, name)


def load_poisoned(folder: Path, how: str, after: int, *, alone: bool = False):
    """(model, ModelFacts), as `service.engine.loading.load` gives them. `alone`: rows decode in one call each."""
    from dataclasses import replace

    from service.engine.loading import load

    model, facts = load(folder)
    if alone:
        facts = replace(facts, layout=replace(facts.layout, alone="the test wants it"))
    return Poisoned(model, how, after), facts
