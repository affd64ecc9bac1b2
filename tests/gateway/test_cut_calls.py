"""A call that is cut: wherever that is, and however a model writes calls, none of it becomes what the model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kvfork_client as kv
import pytest
from kvfork_gateway.answer import Choice
from kvfork_gateway.tools import OPENINGS, hold_from

from service.events import TextChannel
from service.text.channels import HarmonySplitter, Span, SpanSplitter, Splitter
from service.text.formats import _HARMONY, _TOOL_CALLS

LEAD = "Is 3 < 4? Let me see.\n"
JSON = '{"name": "weather", "arguments": {"city": "<Oslo>", "days": 2}}'
TAGS = "<function=weather>\n<parameter=city>\n<Oslo>\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
PYTHONIC = '[weather(city="<Oslo>", days=2)]'
BODIES = {"json": f"\n{JSON}\n", "array": f"[{JSON}]", "tags": f"\n{TAGS}\n", "pythonic": PYTHONIC}
MESSAGE = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "<Oslo>", "days": 2}<|call|>'
CALL = ("weather", {"city": "<Oslo>", "days": 2})

_CHANNELS = {
    TextChannel.ANSWER: kv.Channel.ANSWER,
    TextChannel.REASONING: kv.Channel.REASONING,
    TextChannel.TOOL_CALL: kv.Channel.TOOL_CALL,
}


def spanned(opening: str, closing: str, body: str) -> Any:
    spans = [Span(opening, closing, TextChannel.TOOL_CALL)]
    return (lambda: SpanSplitter.behind("", spans, lead=False)), LEAD, f"{opening}{body}{closing}"


FORMS = {f"{opening} json": spanned(opening, closing, BODIES["json"]) for opening, closing in _TOOL_CALLS}
FORMS |= {f"<tool_call> {name}": spanned("<tool_call>", "</tool_call>", body) for name, body in BODIES.items()}
FORMS["harmony"] = (
    lambda: HarmonySplitter.behind("<|start|>assistant", lead=False),
    f"<|channel|>commentary<|message|>{LEAD}<|end|><|start|>assistant",
    MESSAGE,
)
"""What tells the text apart, the text before a call, one call: of every form of a call that is known."""


def said(splitter: Splitter, text: str) -> Iterator[kv.Delta]:
    """What a server sends of a text that ends there, a character at a time."""
    for pieces in (*(splitter.push(character) for character in text), splitter.finish()):
        for piece in pieces:
            if not piece.mark:
                yield kv.Delta(text=piece.text, token_count=1, channel=_CHANNELS[piece.channel])


def ended(choice: Choice, deltas: Iterator[kv.Delta], **end: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """(content of a stream, its calls, the whole choice), which agree."""
    parts = [part for delta in deltas for part in choice.delta(delta)]
    parts += choice.finish(kv.Finished(**end))
    content = "".join(part["delta"].get("content", "") for part in parts)
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    whole = choice.whole()
    assert (whole["message"]["content"] or "") == content
    assert [c["function"] for c in whole["message"].get("tool_calls", ())] == [c["function"] for c in calls]
    return content, [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls], whole


ENDS = [(form, kv.FinishReason.MAX_TOKENS) for form in FORMS]
ENDS += [("<tool_call> json", reason) for reason in (kv.FinishReason.STOPPED, kv.FinishReason.STOP)]


@pytest.mark.parametrize(("form", "reason"), ENDS)
def test_nothing_of_a_cut_call_is_said(form: str, reason: kv.FinishReason) -> None:
    make, lead, call = FORMS[form]
    end = {"reason": reason, "stop": "\0" if reason is kv.FinishReason.STOP else None}
    text = f"{lead}{call}\n{call[:-1]}"
    for cut in range(len(lead) + 1, len(text) + 1):
        choice = Choice(0, calls=True, logprobs=False)
        content, calls, whole = ended(choice, said(make(), text[:cut]), **end)
        if reason is not kv.FinishReason.STOP:  # else a beginning of a mark is text: what stopped it is no part of one
            assert content.rstrip() == LEAD.rstrip(), text[:cut]
            assert whole["finish_reason"] == ("length" if reason is kv.FinishReason.MAX_TOKENS else "stop") or calls
        assert "weather" not in content and "Oslo" not in content
        assert calls == [CALL] * len(calls)
        if not calls:
            assert "tool_calls" not in whole["message"]


def test_a_whole_call_before_the_cut_one_is_told() -> None:
    text = f"{LEAD}<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}"
    splitter = SpanSplitter.behind("", [Span("<tool_call>", "</tool_call>", TextChannel.TOOL_CALL)], lead=False)
    choice = Choice(0, calls=True, logprobs=False)
    content, calls, whole = ended(choice, said(splitter, text[:-3]), reason=kv.FinishReason.MAX_TOKENS)
    assert (content, calls, whole["finish_reason"]) == (LEAD.rstrip(), [CALL], "length")
    assert choice.left_out  # the model's own words end in half a call, and are not to be repeated to it


def test_a_stop_string_that_ends_a_call_leaves_it_whole() -> None:
    choice = Choice(0, calls=True, logprobs=False)
    splitter = SpanSplitter.behind("", [Span("<tool_call>", "</tool_call>", TextChannel.TOOL_CALL)], lead=False)
    text = f"<tool_call>\n{JSON}\n"
    _, calls, whole = ended(choice, said(splitter, text), reason=kv.FinishReason.STOP, stop="</tool_call>")
    assert (calls, whole["finish_reason"]) == ([CALL], "tool_calls")


@pytest.mark.parametrize("text", ["a <", "a\n<tool", "a [", "a \n"])
def test_what_might_have_been_a_mark_is_said_where_the_model_ended(text: str) -> None:
    choice = Choice(0, calls=True, logprobs=False)
    splitter = SpanSplitter.behind("", [Span("<tool_call>", "</tool_call>", TextChannel.TOOL_CALL)], lead=False)
    content, _, whole = ended(choice, said(splitter, text), reason=kv.FinishReason.EOS)
    assert (content, whole["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_calls_that_a_grammar_has_in_the_answer_are_told_apart(step: int) -> None:
    call = f"<tool_call>\n{JSON}\n</tool_call>"
    text = f"{LEAD}{call}\n{call}"
    deltas = [kv.Delta(text=text[at : at + step], token_count=1) for at in range(0, len(text), step)]
    choice = Choice(0, calls=True, logprobs=False, opening="<tool_call>")
    content, calls, whole = ended(choice, iter(deltas), reason=kv.FinishReason.STOP)
    assert (content, calls, whole["finish_reason"]) == (LEAD.rstrip(), [CALL, CALL], "tool_calls")
    assert "".join(choice.said) == text and not choice.left_out
    for cut in range(len(LEAD), len(text)):
        choice = Choice(0, calls=True, logprobs=False, opening="<tool_call>")
        deltas = [kv.Delta(text=text[at : min(cut, at + step)], token_count=1) for at in range(0, cut, step)]
        content, calls, whole = ended(choice, iter(deltas), reason=kv.FinishReason.MAX_TOKENS)
        assert (content.rstrip(), whole["finish_reason"]) == (LEAD.rstrip(), "length"), text[:cut]
        assert calls == [CALL] * len(calls)


def test_log_probabilities_are_those_of_what_is_said() -> None:
    text = f"Well. <tool_call>\n{JSON}\n</tool_call>"
    choice = Choice(0, calls=True, logprobs=True, opening="<tool_call>")
    for at in range(0, len(text), 3):
        token = kv.TokenLogprob(token_id=1, logprob=-1.0, token_bytes=text[at : at + 3].encode())
        choice.delta(kv.Delta(text=text[at : at + 3], token_count=1, logprobs=(token,)))
    choice.finish(kv.Finished(reason=kv.FinishReason.STOP))
    whole = choice.whole()
    assert whole["message"]["content"] == "Well."
    assert [entry["token"] for entry in whole["logprobs"]["content"]] == ["Wel", "l. "]


def test_every_mark_that_the_server_knows_is_held_back() -> None:
    marks = [opening for opening, _ in _TOOL_CALLS] + list(_HARMONY[:2])
    assert set(marks) <= set(OPENINGS)
    assert [hold_from(f"so {mark[:-1]}", OPENINGS) for mark in marks] == [2] * len(marks)
    assert hold_from("plain", OPENINGS) == 5
