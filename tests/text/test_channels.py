"""Text told apart into channels: every way of cutting it gives the same, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from service.events import TextChannel
from service.text.channels import HarmonySplitter, Said, Span, SpanSplitter, Splitter

ANSWER, REASONING, TOOL_CALL = TextChannel.ANSWER, TextChannel.REASONING, TextChannel.TOOL_CALL

THINK = Span("<think>", "</think>", REASONING)
CALL = Span("<tool_call>", "</tool_call>", TOOL_CALL)
REST = Span("[TOOL_CALLS]", "", TOOL_CALL)
GEMMA = Span("<|channel>thought", "<channel|>", REASONING)


def spans(*of: Span, turn: str = "", lead: bool = False) -> Callable[[], Splitter]:
    return lambda: SpanSplitter.behind(turn, of, lead=lead)


def harmony(turn: str = "<|start|>assistant", *, lead: bool = False) -> Callable[[], Splitter]:
    return lambda: HarmonySplitter.behind(turn, lead=lead)


def told(make: Callable[[], Splitter], pieces: list[str]) -> tuple[list[Said], bool]:
    """Every character with its channel, and whether reasoning has ended."""
    splitter = make()
    said = [one for piece in pieces for one in splitter.push(piece)] + splitter.finish()
    assert "".join(one.text for one in said) == "".join(pieces)
    return [Said(one.channel, character, one.mark) for one in said for character in one.text], splitter.reasoning_ended


def shown(make: Callable[[], Splitter], text: str) -> dict[TextChannel, str]:
    said, _ = told(make, [text])
    found: dict[TextChannel, str] = {}
    for one in said:
        if not one.mark:
            found[one.channel] = found.get(one.channel, "") + one.text
    return found


def cuts(text: str) -> Iterator[list[str]]:
    """One by one, in every two and three pieces, and some at random."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    if len(text) < 48:
        for a, b in combinations(range(1, len(text)), 2):
            yield [text[:a], text[a:b], text[b:]]
    rng = random.Random(text)
    for _ in range(50):
        places = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(1, 9))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CASES = [
    (spans(), "plain <think>text</think>", {ANSWER: "plain <think>text</think>"}),
    (spans(THINK), "<think>\nhm\n</think>\n\nYes.", {REASONING: "\nhm\n", ANSWER: "\n\nYes."}),
    (spans(THINK), "a<think>b</think>c<think>d</think>e", {ANSWER: "ace", REASONING: "bd"}),
    (spans(THINK), "<think>never closed </thin", {REASONING: "never closed </thin"}),
    (spans(THINK), "a < b, <th, <<think>c</</think></think>", {ANSWER: "a < b, <th, <</think>", REASONING: "c</"}),
    (spans(THINK), "</think> closes nothing", {ANSWER: "</think> closes nothing"}),
    (spans(THINK), "<think><think>twice</think>out</think>", {REASONING: "<think>twice", ANSWER: "out</think>"}),
    (spans(THINK, turn="<|im_start|>assistant\n<think>\n"), "hm</think>Yes", {REASONING: "hm", ANSWER: "Yes"}),
    (spans(THINK, turn="<think>old</think>"), "new", {ANSWER: "new"}),
    (
        spans(THINK, CALL),
        '<think>x</think><tool_call>{"a": 1}</tool_call>\n<tool_call>{}</tool_call>done',
        {REASONING: "x", TOOL_CALL: '<tool_call>{"a": 1}</tool_call><tool_call>{}</tool_call>', ANSWER: "\ndone"},
    ),
    (spans(THINK, CALL), "<t<tool<tool_call>f", {ANSWER: "<t<tool", TOOL_CALL: "<tool_call>f"}),
    (spans(REST), "Wait.[TOOL_CALLS]f{[TOOL_CALLS]}", {ANSWER: "Wait.", TOOL_CALL: "[TOOL_CALLS]f{[TOOL_CALLS]}"}),
    (spans(GEMMA), "<|channel>thought\nhm<channel|>Yes<|channel>th", {REASONING: "\nhm", ANSWER: "Yes<|channel>th"}),
    (spans(THINK, lead=True), "<think>hm</think>{<think>x</think>}", {REASONING: "hm", ANSWER: "{<think>x</think>}"}),
    (spans(THINK, lead=True), '{"a": "<think>x</think>"}', {ANSWER: '{"a": "<think>x</think>"}'}),
    (spans(THINK, lead=True), "<th{", {ANSWER: "<th{"}),
    (spans(THINK, turn="<think>", lead=True), "hm</think>[<think>]", {REASONING: "hm", ANSWER: "[<think>]"}),
    (
        harmony(),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        {REASONING: "Hm.", ANSWER: "Yes."},
    ),
    (
        harmony(),
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        {TOOL_CALL: "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"},
    ),
    (harmony(), " to=f<|channel|>commentary<|message|>{}", {TOOL_CALL: " to=f<|channel|>commentary<|message|>{}"}),
    (
        harmony("<|start|>assistant to=f"),
        "<|channel|>commentary<|message|>{}",
        {TOOL_CALL: "<|channel|>commentary<|message|>{}"},
    ),
    (harmony("<|start|>assistant<|channel|>analysis<|message|>So"), " far<|end|>", {REASONING: " far"}),
    (harmony(), "<|channel|>commentary<|message|>First this.<|end|>", {ANSWER: "First this."}),
    (harmony(), "<|channel|>ana", {}),
    (harmony("text"), "no headers < here <|", {ANSWER: "no headers < here <|"}),
    (harmony(), "<|channel|>" + "x" * 600 + "<|message|>y", {ANSWER: "<|channel|>" + "x" * 600 + "<|message|>y"}),
    (
        harmony(lead=True),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{<|end|>}",
        {REASONING: "Hm.", ANSWER: "{<|end|>}"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "channels"), CASES, ids=[case[1][:40] for case in CASES])
def test_the_channels_of_a_text_however_it_is_cut(make, text, channels):
    assert shown(make, text) == channels
    whole = told(make, [text])
    for pieces in cuts(text):
        assert told(make, pieces) == whole, pieces


def test_random_texts_made_of_marks_and_their_pieces():
    rng = random.Random(5)
    bits = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "think>", "<th", "a", "\n", "<tool"]
    bits += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final", " to=f", "<|"]
    makers = [spans(THINK, CALL), spans(THINK, CALL, lead=True), harmony(), harmony("x"), harmony(lead=True)]
    for _ in range(300):
        text = "".join(rng.choice(bits) for _ in range(rng.randrange(2, 14)))
        make = rng.choice(makers)
        whole = told(make, [text])
        for pieces in [*list(cuts(text))[-60:], list(text)]:
            assert told(make, pieces) == whole, (text, pieces)


@pytest.mark.parametrize(
    ("make", "before", "last"),
    [
        (spans(THINK), "<think>hm</think", ">"),
        (spans(THINK, turn="<think>"), "hm", "</think>"),
        (harmony(), "<|channel|>analysis<|message|>Hm.", "<|end|>"),
    ],
)
def test_reasoning_has_ended_with_the_last_character_of_its_closing_mark(make, before, last):
    splitter = make()
    splitter.push(before)
    assert (splitter.channel, splitter.reasoning_ended) == (REASONING, False)
    splitter.push(last)
    assert (splitter.channel, splitter.reasoning_ended) == (ANSWER, True)


def test_with_lead_the_answer_is_settled_once_no_mark_can_follow():
    def stages(make: Callable[[], Splitter], *pieces: str) -> list[tuple[bool, bool]]:
        splitter = make()
        found = [(splitter.at_start, splitter.settled)]
        for piece in pieces:
            splitter.push(piece)
            found.append((splitter.at_start, splitter.settled))
        return found

    start, free, on = (True, False), (False, False), (False, True)
    assert stages(spans(THINK, lead=True), "<think>", "hm", "</think>", "x") == [start, free, free, on, on]
    assert stages(spans(THINK, lead=True, turn="<think>"), "hm", "</think>") == [free, free, on]
    assert stages(harmony(lead=True), "<|channel|>analysis<|message|>", "a<|end|>", "<|start|>assistant") == [free] * 4
    assert stages(harmony(lead=True), "<|channel|>final", "<|message|>") == [free, free, on]
    assert stages(harmony("no turn", lead=True)) == [on]


def test_a_mark_that_begins_another_one_is_refused():
    with pytest.raises(ValueError, match="begin another"):
        SpanSplitter([Span("<a", ">", REASONING), Span("<ab", ">", TOOL_CALL)])
