"""Which marks a model writes around reasoning and tool calls. Owns the table of known formats and the choice of one.

A format counts for a model if its chat template writes one of the two marks, or if its tokenizer has both as tokens of
their own. A model without any has one channel, the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from service.events import CallForm, CallSyntax, TextChannel
from service.text.channels import HarmonySplitter, Span, SpanSplitter, Splitter
from service.text.tokens import TextCodec

_REASONING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
_TOOL_CALLS = (
    ("<tool_call>", "</tool_call>"),
    ("<|tool_call_start|>", "<|tool_call_end|>"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|tool_call>", "<tool_call|>"),
    ("<start_function_call>", "<end_function_call>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<longcat_tool_call>", "</longcat_tool_call>"),
    ("[TOOL_CALLS]", ""),  # up to the end of the turn
    ("<|python_tag|>", ""),
)
_JSON_CALL = re.compile(r"name\W{2,5}.{1,60}arguments\W{2,5}", re.DOTALL)
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")


class Format:
    """How one model's text is told apart. Immutable; any thread."""

    def __init__(self, spans: Sequence[Span], *, harmony: bool = False) -> None:
        self.spans = tuple(spans)
        self.harmony = harmony

    def __bool__(self) -> bool:
        return self.harmony or bool(self.spans)

    @property
    def has_reasoning(self) -> bool:
        """Whether the model can reason in a channel of its own."""
        return self.harmony or any(span.channel is TextChannel.REASONING for span in self.spans)

    @property
    def has_tool_calls(self) -> bool:
        """Whether the model's tool calls are told apart from what it answers."""
        return self.harmony or any(span.channel is TextChannel.TOOL_CALL for span in self.spans)

    @property
    def reasoning_marks(self) -> tuple[str, ...]:
        """What opens the reasoning."""
        return tuple(span.open for span in self.spans if span.channel is TextChannel.REASONING)

    def splitter(self, codec: TextCodec, context: Sequence[int], *, lead: bool = False) -> Splitter | None:
        """Tells apart what follows `context`, which may end inside a channel; None if there is but one channel.

        `lead`: only reasoning that opens the text; whatever comes behind it is the answer, marks and all.
        """
        if self.harmony:
            return HarmonySplitter.behind(_open_turn(codec, context, frozenset(_HARMONY[:1])), lead=lead)
        spans = tuple(s for s in self.spans if s.channel is TextChannel.REASONING) if lead else self.spans
        if not spans:
            return None
        marks = frozenset(mark for span in self.spans for mark in (span.open, span.close))
        return SpanSplitter.behind(_open_turn(codec, context, marks), spans, lead=lead)


def detect(codec: TextCodec) -> Format:
    """The format of a model."""
    if all(codec.added_id(mark) is not None and mark in codec.template_source for mark in _HARMONY):
        return Format((), harmony=True)
    spans = [Span(*marks, TextChannel.REASONING) for marks in _REASONING if _writes(codec, *marks)]
    spans += [Span(*marks, TextChannel.TOOL_CALL) for marks in _TOOL_CALLS if _writes(codec, *marks)]
    return Format(spans)


def call_form(codec: TextCodec, channels: Format) -> CallForm | None:
    """How the model writes a call, where its template shows one of the ways that are known here, and as plain text."""
    for span in channels.spans:
        marks = (span.open, span.close)
        if span.channel is not TextChannel.TOOL_CALL or not span.close:
            continue
        if not any(mark in codec.template_source for mark in marks) or any(map(codec.holds_special, marks)):
            continue
        if "<function=" in codec.template_source and "<parameter=" in codec.template_source:
            return CallForm(opening=span.open, closing=span.close, syntax=CallSyntax.TAGS)
        if _JSON_CALL.search(codec.template_source):
            return CallForm(opening=span.open, closing=span.close, syntax=CallSyntax.JSON)
    return None


def _writes(codec: TextCodec, opening: str, closing: str) -> bool:
    marks = [mark for mark in (opening, closing) if mark]
    in_template = any(mark in codec.template_source for mark in marks)
    return in_template or all(codec.added_id(mark) is not None for mark in marks)


def _open_turn(codec: TextCodec, context: Sequence[int], marks: frozenset[str]) -> str:
    """The text behind the last special token that is none of `marks`, a last one of those included."""
    known = {token for mark in marks if (token := codec.added_id(mark)) is not None}
    start = len(context)
    for start in range(len(context) - 1, -1, -1):
        token = context[start]
        if token in codec.special_ids and token not in known and not _inside_mark(codec, token, marks):
            return codec.text_of(context[start + 1 :])
    return codec.text_of(context)


def _inside_mark(codec: TextCodec, token: int, marks: frozenset[str]) -> bool:
    """Whether a special token is part of a longer mark ("<|channel>" of "<|channel>thought")."""
    text = codec.text_of([token])
    return any(text in mark for mark in marks)
