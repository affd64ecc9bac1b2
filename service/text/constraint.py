"""Forms that generated text must have, token by token: which may come next, and whether anything may.

A form is compiled at admission, and its row's masks are made, in processes of their own (`forms`): what answers late is
waited for by that row alone. Tokens are told by their bytes, so that every kind of tokenizer is the same to it. Special
tokens are never text: of them only those that end a generation can come, where the text so far is whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from service.errors import ConstraintFailed
from service.request import Constraint, Stopping
from service.text.channels import Splitter
from service.text.detokenize import Detokenizer
from service.text.form_frames import Reply
from service.text.formats import Format
from service.text.forms import NOTHING_FITS, FormLimits, FormRow, Forms, Gone, one_line
from service.text.tokens import TextCodec


class RowConstraint:
    """One generation's: see `service.plan.TokenMask`. Waits are seconds; an exception is a ConstraintFailed."""

    def __init__(
        self,
        row: FormRow,
        limits: FormLimits,
        codec: TextCodec,
        stopping: Stopping,
        gate: Splitter | None,
        openers: frozenset[int],
    ) -> None:
        """`gate`: tells the reasoning that may come first apart; `openers`: tokens that open it."""
        self._row = row
        self._limits = limits
        self._eos_ids = codec.eos_ids
        self._stop_ids = stopping.stop_token_ids
        self._min_tokens = stopping.min_tokens
        self._eos_from = sys.maxsize if stopping.ignore_eos else stopping.min_tokens
        self._gate = gate
        self._openers = openers
        self._detokenizer = Detokenizer(codec)
        self._everything = b"\xff" * ((codec.vocab_size + 7) // 8)
        self._count = 0
        self._mask: bytes | None = None  # the form's own: whether the text may end here, then the bits
        self._ended: bool | None = False

    def allowed(self, wait: float = 0.0) -> bytes | None:
        """One bit a token, lowest first; None if it is not known within `wait`. Asking twice changes nothing."""
        gate = self._gate
        if gate is not None and not gate.settled and not gate.at_start:
            return _without(self._everything, self._eos_ids)  # inside the reasoning, which must end first
        if self._mask is None:
            if self.ended(wait) is None:
                return None
            answer = self._answer(wait)
            if answer is None:
                return None
            self._mask = answer[1]
        fitting = self._fitting(self._mask[1:], accepts=bool(self._mask[0]))
        return fitting if gate is None or gate.settled else _with(fitting, self._openers)

    def took(self, token: int) -> None:
        """Notes the token that was picked."""
        self._count += 1
        self._ended = False
        gate = self._gate
        if gate is not None and not gate.settled:
            if not gate.at_start or token in self._openers:
                gate.push(self._detokenizer.push(token))
                return
            gate.settle()
        if token in self._eos_ids:
            self._ended = True
        elif token not in self._stop_ids or self._count < self._min_tokens:  # else the row ends, perhaps with no text
            self._mask = self._ended = None
            try:
                self._row.take(token)
            except Gone:
                raise self._too_dear() from None

    def ended(self, wait: float = 0.0) -> bool | None:
        """Whether nothing can follow the token taken last; None if it is not known within `wait`."""
        if self._ended is None:
            answer = self._answer(wait)
            if answer is not None and answer[0] is Reply.MASK:  # of the place before, which nobody asked for
                answer = self._answer(wait)
            if answer is not None:
                self._ended = answer[0] is Reply.IS_WHOLE
        return self._ended

    def _answer(self, wait: float) -> tuple[Reply, bytes] | None:
        try:
            answer = self._row.answer(wait)
        except Gone:
            raise self._too_dear() from None
        if answer is not None and answer[0] is Reply.DEAD_END:
            raise _failed(one_line(answer[1].decode(errors="replace")) or NOTHING_FITS)
        return answer

    def _fitting(self, mask: bytes, *, accepts: bool) -> bytes:
        if self._count + 1 < self._eos_from:
            # Where nothing but the end is left, it may come after all.
            mask = _without(mask, self._eos_ids) or mask
        if accepts and self._stop_ids and self._count + 1 >= self._min_tokens:
            mask = _with(mask, self._stop_ids)
        if not any(mask):
            raise _failed(NOTHING_FITS)
        return mask

    def _too_dear(self) -> ConstraintFailed:
        seconds = self._limits.mask_seconds
        return _failed(f"to tell which tokens fit took more than {seconds:g} s, or more memory than a form may have")


class Grammars:
    """What makes constraints for one model."""

    def __init__(self, codec: TextCodec, channels: Format, limits: FormLimits | None = None) -> None:
        self._codec = codec
        self._channels = channels
        self._forms = Forms(codec, limits or FormLimits())

    async def open(self, owner: str, constraint: Constraint) -> FormRow:
        """Compiles a form, unless the owner's is kept. InvalidField with what is wrong with it. On the event loop."""
        return await self._forms.open(owner, constraint)

    def follow(self, row: FormRow, constraint: Constraint, stopping: Stopping, context: Sequence[int]) -> RowConstraint:
        """The constraint of a generation behind `context`. On any thread."""
        gate: Splitter | None = None
        openers: frozenset[int] = frozenset()
        if constraint.after_reasoning:
            gate = self._channels.splitter(self._codec, context, lead=True)
            opening = [self._codec.added_id(text) for text in self._channels.reasoning_marks]
            openers = frozenset(token for token in opening if token is not None)
        return RowConstraint(row, self._forms.limits, self._codec, stopping, gate, openers)

    def close(self) -> None:
        """Ends every process that compiles forms or follows them."""
        self._forms.close()


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            changed[token >> 3] |= 1 << (token & 7)
    return bytes(changed)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Empty if nothing is left."""
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(changed) if any(changed) else b""


def _failed(message: str) -> ConstraintFailed:
    return ConstraintFailed(
        f"constraint: {message}", hint="the form leaves nothing to write here, or is too costly to follow"
    )
