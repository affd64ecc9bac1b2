"""One stream of text told apart into answer, reasoning and tool calls. Pure and incremental; knows no tokens.

The result does not depend on how the text is cut: what may still become a mark waits for what decides it. Every
character comes out once, in order. The marks around reasoning come out as such (`Said.mark`) and are not shown; those
around a tool call belong to it, since a call is told as the model writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.events import TextChannel

_LONGEST_HEADER = 512  # characters; what never gets to its message is no header


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the text. `mark`: it only tells channels apart."""

    channel: TextChannel
    text: str
    mark: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """What stands around a channel. An empty `close` lasts to the end."""

    open: str
    close: str
    channel: TextChannel


class Splitter(Protocol):
    """One stream."""

    reasoning_ended: bool  # once the first reasoning is closed

    @property
    def channel(self) -> TextChannel:
        """Where the next character goes, as far as the text so far tells."""
        ...

    @property
    def settled(self) -> bool:
        """With `lead`: no mark can follow any more, all the rest is the answer."""
        ...

    @property
    def at_start(self) -> bool:
        """With `lead`: nothing was said yet, so that reasoning may or may not follow."""
        ...

    def settle(self) -> None:
        """All the rest is the answer."""
        ...

    def push(self, text: str) -> list[Said]:
        """What `text` makes certain."""
        ...

    def finish(self) -> list[Said]:
        """What was held back."""
        ...


class SpanSplitter:
    """Channels between an opening and a closing mark."""

    def __init__(self, spans: Sequence[Span], *, lead: bool = False) -> None:
        openings = [span.open for span in spans]
        if any(a != b and b.startswith(a) for a in openings for b in openings) or "" in openings:
            raise ValueError("no opening mark may begin another one")
        self._spans = {span.open: span for span in spans}
        self._lead = lead
        self._settled = False
        self._started = False
        self._inside: Span | None = None
        self._held = ""
        self.reasoning_ended = False

    @classmethod
    def behind(cls, turn: str, spans: Sequence[Span], *, lead: bool) -> SpanSplitter:
        """One whose stream follows `turn`, the text of the open turn so far."""
        before = cls(spans)
        before.push(turn)
        made = cls(spans, lead=lead)
        made._inside = before._inside
        made._started = lead and made._inside is not None
        return made

    @property
    def channel(self) -> TextChannel:
        return TextChannel.ANSWER if self._inside is None else self._inside.channel

    @property
    def settled(self) -> bool:
        return self._settled

    @property
    def at_start(self) -> bool:
        return not self._started

    def settle(self) -> None:
        self._settled = True

    def push(self, text: str) -> list[Said]:
        left, self._held = self._held + text, ""
        said: list[Said] = []
        while left:
            start, mark = self._next(left)
            if start:
                said.append(Said(self.channel, left[:start]))
                self._started = True
            if mark is None:
                self._held = left[start:]
                break
            said.append(self._pass(mark))
            left = left[start + len(mark) :]
        return said

    def finish(self) -> list[Said]:
        held, self._held = self._held, ""
        return [Said(self.channel, held)] if held else []

    def _next(self, text: str) -> tuple[int, str | None]:
        """(where certain text ends, the mark that begins there, if it is whole)."""
        if self._settled:
            return len(text), None
        if self._inside is not None:
            return _first(text, (self._inside.close,) if self._inside.close else ())
        start, mark = _first(text, tuple(self._spans))
        if self._lead and start:
            self._settled = True  # the text does not begin with reasoning
            return len(text), None
        return start, mark

    def _pass(self, mark: str) -> Said:
        self._started = True
        if self._inside is None:
            self._inside = self._spans[mark]
            return Said(self._inside.channel, mark, self._inside.channel is TextChannel.REASONING)
        channel, self._inside = self._inside.channel, None
        reasoning = channel is TextChannel.REASONING
        self.reasoning_ended = self.reasoning_ended or reasoning
        self._settled = self._settled or self._lead
        return Said(channel, mark, reasoning)


class HarmonySplitter:
    """Messages with a header that names their channel: `<|channel|>analysis<|message|>… <|end|>`.

    A message to a recipient is a tool call, and its header belongs to it.
    """

    _BEGINS = ("<|start|>", "<|channel|>")
    _ENDS = ("<|end|>", "<|call|>", "<|return|>")
    _MESSAGE = "<|message|>"

    def __init__(self, *, lead: bool = False) -> None:
        self._lead = lead
        self._settled = False
        self._begun = ""  # what the context has of the first header; not this stream's text
        self._header: str | None = None
        self._channel = TextChannel.ANSWER
        self._held = ""
        self.reasoning_ended = False

    @classmethod
    def behind(cls, turn: str, *, lead: bool) -> HarmonySplitter:
        """One whose stream follows `turn`, the text from the last "<|start|>" on."""
        before = cls()
        before.push(turn)
        made = cls(lead=lead)
        made._channel = before._channel
        if before._header is not None:
            made._begun, made._header = before._header, ""
        made._settled = lead and made._header is None and made._channel is TextChannel.ANSWER
        return made

    @property
    def channel(self) -> TextChannel:
        return self._channel if self._header is None else _channel_of(self._begun + self._header)

    @property
    def settled(self) -> bool:
        return self._settled

    @property
    def at_start(self) -> bool:
        return False

    def settle(self) -> None:
        self._settled = True

    def push(self, text: str) -> list[Said]:
        left, self._held = self._held + text, ""
        said: list[Said] = []
        while left:
            if self._settled:
                return [*said, Said(TextChannel.ANSWER, left)]
            if self._header is not None:
                left = self._read_header(left, said)
                continue
            start, mark = _first(left, (*self._BEGINS, *self._ENDS))
            if start:
                said.append(Said(self._channel, left[:start]))
            if mark is None:
                self._held = left[start:]
                break
            left = left[start + len(mark) :]
            if mark in self._BEGINS:
                self._header = mark
            else:
                said.append(self._end(mark))
        return said

    def finish(self) -> list[Said]:
        if self._header is not None:
            said = [Said(self.channel, self._header, mark=True)] if self._header else []
            self._header = None
            return said
        held, self._held = self._held, ""
        return [Said(self._channel, held)] if held else []

    def _read_header(self, text: str, said: list[Said]) -> str:
        """Takes `text` into the header; what is left of it behind the header's end."""
        assert self._header is not None
        self._header += text
        at = self._header.find(self._MESSAGE)
        end = at + len(self._MESSAGE) if at >= 0 else len(self._header)
        if end > _LONGEST_HEADER:
            end, mark = _LONGEST_HEADER, False
            self._channel = TextChannel.ANSWER
        elif at >= 0:
            self._channel = _channel_of(self._begun + self._header[:end])
            mark = self._channel is not TextChannel.TOOL_CALL
        else:
            return ""
        said.append(Said(self._channel, self._header[:end], mark))
        rest = self._header[end:]
        self._begun, self._header = "", None
        self._settled = self._lead and self._channel is TextChannel.ANSWER
        return rest

    def _end(self, mark: str) -> Said:
        channel, self._channel = self._channel, TextChannel.ANSWER
        self.reasoning_ended = self.reasoning_ended or channel is TextChannel.REASONING
        return Said(channel, mark, mark=channel is not TextChannel.TOOL_CALL)


_RECIPIENT = re.compile(r"\bto=")
_NAME = re.compile(r"<\|channel\|>\s*(\w*)")


def _channel_of(header: str) -> TextChannel:
    if _RECIPIENT.search(header):
        return TextChannel.TOOL_CALL
    named = _NAME.search(header)
    return TextChannel.REASONING if named is not None and named[1] == "analysis" else TextChannel.ANSWER


def _first(text: str, marks: Sequence[str]) -> tuple[int, str | None]:
    """(start, the mark) of the leftmost whole mark; (start of what may become an earlier one or the end, None)."""
    start, found = len(text), None
    for mark in marks:
        at = text.find(mark)
        if 0 <= at < start:
            start, found = at, mark
    longest = max(map(len, marks), default=0)
    for at in range(max(0, len(text) - longest + 1), start):
        rest = text[at:]
        if any(mark.startswith(rest) for mark in marks):
            return at, None
    return start, found
