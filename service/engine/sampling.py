"""Picking tokens. Owns penalties, bias, filters, log-probabilities and each row's own randomness.

A row's draw depends on its seed and the number of tokens it has picked, on nothing else: not on its neighbours, not on
any global state. Greedy rows without extras share one argmax over the batch and pay for no softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from service.plan import Picked, TopPick
from service.request import Sampling


class BadLogits(ArithmeticError):
    """The model gave NaN, or nothing finite to pick from."""


class RowSampler:
    """One row's sampling state. `sampling` has no unset knobs left but the seed's absence is not allowed either."""

    def __init__(self, sampling: Sampling, top_logprobs: int | None, context: Sequence[int]) -> None:
        self._s = sampling
        self._top = top_logprobs
        self._drawn = 0
        self._generated: dict[int, int] = {}
        # HF semantics: repetition looks at the whole context, frequency and presence at generated tokens only.
        self._seen = set(context) if sampling.repetition_penalty not in (None, 1.0) else set()
        self._bias = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = (mx.array(ids), mx.array(values, dtype=mx.float32))

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the batch's common argmax serves it."""
        s = self._s
        return not s.temperature and self._top is None and self._bias is None and not self._penalised

    @property
    def _penalised(self) -> bool:
        s = self._s
        return bool(s.frequency_penalty or s.presence_penalty) or s.repetition_penalty not in (None, 1.0)

    def pick(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """Draws from `logits` (vocab,). Returns the token (lazy scalar) and, where asked for, log-probabilities.

        The token is negative where penalties and bias leave nothing finite to pick.
        """
        logits = self._adjusted(logits.astype(mx.float32))
        logprobs = logits - mx.logsumexp(logits) if self._top is not None else None
        if not self._s.temperature:
            return _if_any(logits, mx.argmax(logits)), logprobs
        # Less its largest first: divided by a tiny temperature, only the rest may overflow, to -inf.
        kept = _filtered((logits - mx.max(logits)) / self._s.temperature, self._s)
        key = mx.random.key((self._s.seed or 0) * 0x1_0000_0000 + self._drawn)
        return _if_any(logits, mx.random.categorical(kept, key=key)), logprobs

    def took(self, token: int, logprobs: mx.array | None) -> Picked:
        """Notes the token that was drawn."""
        self._drawn += 1
        self._generated[token] = self._generated.get(token, 0) + 1
        if self._s.repetition_penalty not in (None, 1.0):
            self._seen.add(token)
        if logprobs is None:
            return Picked(token)
        top: tuple[TopPick, ...] = ()
        if self._top:
            best = mx.argsort(-logprobs)[: self._top].tolist()
            top = tuple(TopPick(t, p) for t, p in zip(best, logprobs[mx.array(best)].tolist(), strict=True))
        return Picked(token, logprobs[token].item(), top)

    def _adjusted(self, logits: mx.array) -> mx.array:
        s = self._s
        if self._seen:
            ids = mx.array(sorted(self._seen))
            values = logits[ids]
            factor = s.repetition_penalty
            logits[ids] = mx.where(values > 0, values / factor, values * factor)
        if self._generated and (s.frequency_penalty or s.presence_penalty):
            ids = mx.array(list(self._generated))
            counts = mx.array(list(self._generated.values()), dtype=mx.float32)
            logits[ids] = logits[ids] - (s.frequency_penalty or 0.0) * counts - (s.presence_penalty or 0.0)
        if self._bias is not None:
            ids, values = self._bias
            logits[ids] = logits[ids] + values
        return logits


def pick_all(
    logits: mx.array, samplers: Sequence[RowSampler], *, also: Sequence[mx.array] = ()
) -> list[Picked | Exception]:
    """One pick for each row of `logits` (rows, vocab), with one wait for the device, which computes `also` as well.

    A row whose sampling raises, or whose logits are not finite, gets its exception; the others are not disturbed.
    Raises what the evaluation raises, before any row has taken its token: then nothing computed here can be trusted.
    """
    plain = [i for i, sampler in enumerate(samplers) if sampler.plain]
    shared = mx.argmax(logits, axis=-1) if plain else None
    # max carries NaN through, and one reduction is cheap beside the argmax.
    sound = mx.isfinite(mx.max(logits, axis=-1))
    drawn: dict[int, tuple[mx.array, mx.array | None] | Exception] = {}
    for i, sampler in enumerate(samplers):
        if not sampler.plain:
            try:
                drawn[i] = sampler.pick(logits[i])
            except Exception as error:  # a row's own knobs must never hurt its neighbours
                drawn[i] = error
    lazy = [sound] + ([shared] if shared is not None else [])
    lazy += [a for entry in drawn.values() if not isinstance(entry, Exception) for a in entry if a is not None]
    mx.eval(lazy, *also)
    common = shared.tolist() if shared is not None else []
    picks: list[Picked | Exception] = []
    for i, (sampler, ok) in enumerate(zip(samplers, sound.tolist(), strict=True)):
        entry = drawn.get(i)
        if not ok:
            picks.append(BadLogits("the model's logits are not finite"))
        elif entry is None:
            picks.append(_taken(sampler, common[i], None))
        elif isinstance(entry, Exception):
            picks.append(entry)
        elif (token := entry[0].item()) < 0:
            picks.append(BadLogits("penalties and bias leave no token to pick"))
        else:
            picks.append(_taken(sampler, token, entry[1]))
    return picks


def _taken(sampler: RowSampler, token: int, logprobs: mx.array | None) -> Picked | Exception:
    try:
        return sampler.took(token, logprobs)
    except Exception as error:  # as above; and no other row's token may be taken twice for it
        return error


def _if_any(logits: mx.array, token: mx.array) -> mx.array:
    return mx.where(mx.isfinite(mx.max(logits)), token.astype(mx.int32), -1)


def _filtered(logits: mx.array, s: Sampling) -> mx.array:
    """Sets what top-k, top-p and min-p leave out to -inf. The likeliest token always stays."""
    lowest = float("-inf")
    if s.top_k and s.top_k < logits.size:
        edge = mx.topk(logits, s.top_k).min()
        logits = mx.where(logits < edge, lowest, logits)
    if s.min_p:
        logits = mx.where(logits < mx.max(logits) + mx.log(mx.array(s.min_p)), lowest, logits)
    if s.top_p is not None and s.top_p < 1.0:
        order = mx.argsort(-logits)
        ranked = mx.softmax(logits[order])
        # A token stays while the mass before it is below top_p, so the first always does.
        stays = (mx.cumsum(ranked) - ranked) < s.top_p
        logits = mx.where(mx.take(stays, mx.argsort(order)), logits, lowest)
    return logits
