"""Picking tokens. Owns penalties, bias, log-probabilities and each row's own randomness; `draw` owns filters and draw.

A row's draw depends on its seed and the number of tokens it has picked, on nothing else: not on its neighbours, not on
any global state. Logits are looked at on the host, after the step's one wait, row by row, each vectorised over the
vocabulary: numpy takes 30 µs for an argmax over 262k, and a row that is greedy pays for no softmax.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcache.media import IMAGE
from service.engine import draw
from service.plan import Picked, TopPick
from service.request import Sampling

Mask = NDArray[np.bool_]


class BadLogits(ArithmeticError):
    """The model gave NaN, or nothing finite to pick from."""


class RowSampler:
    """One row's sampling state. `sampling` has no unset knobs left but the seed's absence is not allowed either."""

    def __init__(self, sampling: Sampling, top_logprobs: int | None, context: Sequence[int]) -> None:
        s = sampling
        self._top = top_logprobs
        self._seed = s.seed or 0
        self._drawn = 0
        self._filters: draw.Filters | None = None  # None: greedy
        if s.temperature:
            self._filters = draw.Filters(
                temperature=s.temperature,
                top_k=s.top_k or 0,
                min_p=s.min_p or 0.0,
                top_p=1.0 if s.top_p is None else s.top_p,
            )
        self._repetition = 1.0 if s.repetition_penalty is None else s.repetition_penalty
        self._frequency = s.frequency_penalty or 0.0
        self._presence = s.presence_penalty or 0.0
        # HF semantics: repetition looks at the whole context, frequency and presence at generated tokens only.
        self._seen = None
        if self._repetition != 1.0:
            seen = np.unique(np.array(context, dtype=np.int64))
            self._seen = seen[seen < IMAGE]  # nobody repeats a picture
        self._generated: dict[int, int] = {}
        self._bias = None
        if s.logit_bias:
            ids, values = zip(*s.logit_bias, strict=True)
            self._bias = (np.array(ids), np.array(values, dtype=np.float32))

    @property
    def _adjusts(self) -> bool:
        return bool(self._bias or self._frequency or self._presence) or self._seen is not None

    def pick(self, logits: NDArray[np.float32], mask: Mask | None = None) -> Picked:
        """Picks from `logits` (vocab,), which stay as they are. Raises BadLogits: not finite, or nothing left to pick.

        `mask` (vocab,): True for tokens that may be picked; log-probabilities do not know of it.
        """
        token = int(logits.argmax())  # of a NaN, where there is one
        if not np.isfinite(logits[token]):
            raise BadLogits("the model's logits are not finite")
        if self._adjusts:
            logits = self._adjusted(logits)
        allowed = logits if mask is None else np.where(mask, logits, np.float32(-np.inf))
        if self._adjusts or mask is not None:
            token = int(allowed.argmax())
        if not np.isfinite(allowed[token]):
            raise BadLogits("penalties, bias and constraint leave no token to pick")
        if self._filters is not None:
            # The generator is made anew for each draw: a row's state is its seed and a count.
            number = random.Random((self._seed << 32) + self._drawn).random()
            token = draw.draw(allowed, self._filters, number)
        if self._top is None:
            return Picked(token)
        total = draw.log_total(logits)
        best = draw.likeliest(logits, self._top)
        return Picked(token, float(logits[token]) - total, tuple(TopPick(t, float(logits[t]) - total) for t in best))

    def took(self, token: int) -> None:
        """Notes the token that was picked."""
        self._drawn += 1
        if self._adjusts:
            if self._seen is not None and token not in self._generated:
                self._seen = np.union1d(self._seen, [token])
            self._generated[token] = self._generated.get(token, 0) + 1

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = logits.copy()
        if self._seen is not None:
            values = logits[self._seen]
            factor = np.float32(self._repetition)
            logits[self._seen] = np.where(values > 0, values / factor, values * factor)
        if self._generated and (self._frequency or self._presence):
            ids = np.array(list(self._generated))
            counts = np.array(list(self._generated.values()), dtype=np.float32)
            logits[ids] -= np.float32(self._frequency) * counts + np.float32(self._presence)
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] += values
        return logits


def pick_all(
    logits: mx.array, samplers: Sequence[RowSampler], masks: Mapping[int, Mask | Exception] | None = None
) -> list[Picked | Exception]:
    """One pick for each row of `logits` (rows, vocab), with one wait for the device.

    `masks`: of constrained rows, by index; an exception in a mask's place is that row's end. A row whose sampling
    raises, or whose logits are not finite, gets its exception; the others are not disturbed.
    """
    masks = masks or {}
    picks: list[Picked | Exception] = []
    for i, (sampler, row) in enumerate(zip(samplers, np.asarray(logits.astype(mx.float32)), strict=True)):
        mask = masks.get(i)
        try:
            if isinstance(mask, Exception):
                raise mask
            pick = sampler.pick(row, mask)
            sampler.took(pick.token)
            picks.append(pick)
        except Exception as error:  # a row's own knobs must never hurt its neighbours
            picks.append(error)
    return picks
