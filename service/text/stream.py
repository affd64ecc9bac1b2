"""One generation's text and end. Owns the order of the end checks; knows no clock, no batch and no events.

Checks after each token, in order: stop ids and EOS, stop strings, `max_tokens`, context full. The token that stops is
counted and belongs to the context; its own text is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.events import FinishReason
from service.request import Stopping
from service.text.detokenize import Detokenizer
from service.text.stops import StopMatcher
from service.text.tokens import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one token added to the text, and whether the generation ends with it.

    `stop` or `stop_token_id` is set with FinishReason.STOP only.
    """

    text: str
    finish: FinishReason | None = None
    stop: str | None = None
    stop_token_id: int | None = None


class TextStream:
    """Pure state of one row. Concatenated `Piece.text` is the whole text, always valid UTF-8.

    `max_new_tokens`: most tokens to generate, at least 1. `context_room`: tokens that fit into the context beyond the
    prompt, at least 1. `context_tail`: the last few ids before the first new token.
    """

    def __init__(
        self,
        codec: TextCodec,
        stopping: Stopping,
        *,
        max_new_tokens: int,
        context_room: int,
        context_tail: Sequence[int] = (),
    ) -> None:
        self._stopping = stopping
        self._eos_ids = frozenset() if stopping.ignore_eos else codec.eos_ids
        self._max_new_tokens = max_new_tokens
        self._context_room = context_room
        self._detokenizer = Detokenizer(codec, context_tail)
        self._matcher = StopMatcher(stopping.stop, stopping.include_stop)
        self.completion_tokens = 0  # the stop token included
        self.finished = False

    def push(self, token: int) -> Piece:
        """Takes the token that was picked. Not to be called after a finish."""
        assert not self.finished, "the generation has ended"
        self.completion_tokens += 1
        # Stops are looked at once the least number of tokens is there.
        active = self.completion_tokens >= self._stopping.min_tokens
        if active and token in self._stopping.stop_token_ids:
            return self._end(FinishReason.STOP, stop_token_id=token)
        if active and token in self._eos_ids:
            return self._end(FinishReason.EOS)
        text, stop = self._matcher.push(self._detokenizer.push(token), active=active)
        if stop is not None:
            self.finished = True
            return Piece(text=text, finish=FinishReason.STOP, stop=stop)
        if self.completion_tokens >= self._max_new_tokens:
            return self._end(FinishReason.MAX_TOKENS, before=text)
        if self.completion_tokens >= self._context_room:
            return self._end(FinishReason.CONTEXT_FULL, before=text)
        return Piece(text=text)

    def end(self, reason: FinishReason) -> Piece:
        """Ends from outside (time limit, StopGeneration): what was held back, with `reason`."""
        assert not self.finished, "the generation has ended"
        return self._end(reason)

    def _end(self, reason: FinishReason, *, before: str = "", stop_token_id: int | None = None) -> Piece:
        self.finished = True
        active = self.completion_tokens >= self._stopping.min_tokens
        rest, stop = self._matcher.push(self._detokenizer.finish(), active=active)
        text = before + rest
        if stop is None:
            rest, stop = self._matcher.finish()
            text += rest
        if stop is not None:
            # It was complete before this end and only waited for a longer one.
            return Piece(text=text, finish=FinishReason.STOP, stop=stop)
        return Piece(text=text, finish=reason, stop_token_id=stop_token_id)
