"""One generation's text, its channels and its end. Owns the order of the end checks; knows no clock and no batch.

Checks after each token, in order: stop ids and EOS, stop strings, a constraint's end, `max_tokens`, context full. The
token that stops is counted and belongs to the context; its own text is never shown. Stop strings are looked for in the
whole text, marks of channels included.

A token belongs to the channel that it is in, an opening mark to what it opens and a closing one to what it closes. Text
may come later than its token, then with no token of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.events import FinishReason, TextChannel
from service.request import Stopping
from service.text.channels import Said, Splitter
from service.text.detokenize import Detokenizer
from service.text.stops import StopMatcher
from service.text.tokens import TextCodec


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text of one channel."""

    channel: TextChannel
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one token added to the text, and whether the generation ends with it.

    `text` is of the token's own `channel`; `before` and `after` are of others, mostly empty. `reasoning_ended`: with
    this token, for the first time. `stop` or `stop_token_id` is set with FinishReason.STOP only.
    """

    text: str
    channel: TextChannel = TextChannel.ANSWER
    before: tuple[Spoken, ...] = ()
    after: tuple[Spoken, ...] = ()
    reasoning_ended: bool = False
    finish: FinishReason | None = None
    stop: str | None = None
    stop_token_id: int | None = None


class TextStream:
    """Pure state of one row. Concatenated pieces are the whole text but for the marks around reasoning; valid UTF-8.

    `max_new_tokens`: most tokens to generate, at least 1. `context_room`: tokens that fit into the context beyond the
    prompt, at least 1. `context_tail`: the last few ids before the first new token. `splitter` makes what tells the
    text apart behind the context, anew at each call; None or what makes None: all of it is the answer.
    """

    def __init__(
        self,
        codec: TextCodec,
        stopping: Stopping,
        *,
        max_new_tokens: int,
        context_room: int,
        context_tail: Sequence[int] = (),
        splitter: Callable[[], Splitter | None] | None = None,
    ) -> None:
        self._stopping = stopping
        self._model_eos_ids = codec.eos_ids
        self._eos_ids = frozenset() if stopping.ignore_eos else codec.eos_ids
        self._max_new_tokens = max_new_tokens
        self._context_room = context_room
        self._detokenizer = Detokenizer(codec, context_tail)
        self._matcher = StopMatcher(stopping.stop, stopping.include_stop)
        # Text that may be part of a stop string waits, tokens do not: each has a splitter of its own.
        self._of_text = splitter() if splitter is not None else None
        self._of_tokens = splitter() if splitter is not None else None
        self.completion_tokens = 0  # the stop token included
        self.finished = False

    def push(self, token: int, *, last: bool = False) -> Piece:
        """Takes the token that was picked; `last`: nothing may follow it. Not to be called after a finish."""
        assert not self.finished, "the generation has ended"
        self.completion_tokens += 1
        # Stops are looked at once the least number of tokens is there.
        active = self.completion_tokens >= self._stopping.min_tokens
        if active and token in self._stopping.stop_token_ids:
            return self._end(FinishReason.STOP, stop_token_id=token)
        if (active and token in self._eos_ids) or (last and token in self._model_eos_ids):
            return self._end(FinishReason.EOS)
        raw = self._detokenizer.push(token)
        channel, ended = self._place(raw)
        text, stop = self._matcher.push(raw, active=active)
        if stop is not None:
            self.finished = True
            return self._piece(text, channel, ended=ended, finish=FinishReason.STOP, stop=stop)
        if last:
            return self._end(FinishReason.STOP, before=text, channel=channel, ended=ended)
        if self.completion_tokens >= self._max_new_tokens:
            return self._end(FinishReason.MAX_TOKENS, before=text, channel=channel, ended=ended)
        if self.completion_tokens >= self._context_room:
            return self._end(FinishReason.CONTEXT_FULL, before=text, channel=channel, ended=ended)
        return self._piece(text, channel, ended=ended)

    def end(self, reason: FinishReason) -> Piece:
        """Ends from outside (time limit, StopGeneration): what was held back, with `reason`."""
        assert not self.finished, "the generation has ended"
        return self._end(reason)

    def _place(self, raw: str) -> tuple[TextChannel, bool]:
        """(the channel of the token whose text is `raw`, whether the first reasoning ends with it)."""
        splitter = self._of_tokens
        if splitter is None:
            return TextChannel.ANSWER, False
        within, ended = splitter.channel, splitter.reasoning_ended
        splitter.push(raw)
        # What leaves a channel is its closing mark, and that belongs to it.
        channel = splitter.channel if within is TextChannel.ANSWER else within
        return channel, splitter.reasoning_ended and not ended

    def _end(
        self,
        reason: FinishReason,
        *,
        before: str = "",
        channel: TextChannel | None = None,
        ended: bool = False,
        stop_token_id: int | None = None,
    ) -> Piece:
        self.finished = True
        if channel is None:
            channel = TextChannel.ANSWER if self._of_tokens is None else self._of_tokens.channel
        active = self.completion_tokens >= self._stopping.min_tokens
        rest, stop = self._matcher.push(self._detokenizer.finish(), active=active)
        text = before + rest
        if stop is None:
            rest, stop = self._matcher.finish()
            text += rest
        if stop is not None:
            # It was complete before this end and only waited for a longer one.
            return self._piece(text, channel, ended=ended, finish=FinishReason.STOP, stop=stop)
        return self._piece(text, channel, ended=ended, finish=reason, stop_token_id=stop_token_id)

    def _piece(
        self,
        text: str,
        channel: TextChannel,
        *,
        ended: bool,
        finish: FinishReason | None = None,
        stop: str | None = None,
        stop_token_id: int | None = None,
    ) -> Piece:
        before: tuple[Spoken, ...] = ()
        after: tuple[Spoken, ...] = ()
        if self._of_text is not None:
            said = self._of_text.push(text)
            if finish is not None:
                said += self._of_text.finish()
            before, text, after = _around(_shown(said), channel)
        return Piece(
            text=text,
            channel=channel,
            before=before,
            after=after,
            reasoning_ended=ended,
            finish=finish,
            stop=stop,
            stop_token_id=stop_token_id,
        )


def _shown(said: Sequence[Said]) -> list[Spoken]:
    """What is to be shown, neighbours of one channel joined."""
    shown: list[Spoken] = []
    for piece in said:
        if piece.mark:
            continue
        if shown and shown[-1].channel is piece.channel:
            shown[-1] = Spoken(piece.channel, shown[-1].text + piece.text)
        else:
            shown.append(Spoken(piece.channel, piece.text))
    return shown


def _around(spoken: list[Spoken], channel: TextChannel) -> tuple[tuple[Spoken, ...], str, tuple[Spoken, ...]]:
    """(what comes before the last text of `channel`, that text, what comes after it)."""
    for at in range(len(spoken) - 1, -1, -1):
        if spoken[at].channel is channel:
            return tuple(spoken[:at]), spoken[at].text, tuple(spoken[at + 1 :])
    return tuple(spoken), "", ()
