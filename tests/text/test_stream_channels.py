"""A generation's channels, token by token: texts, whose each token is, marks, stop strings and a constraint's end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
from tokenizers import AddedToken

from service.events import CallForm, CallSyntax, FinishReason, TextChannel
from service.request import Stopping
from service.text.formats import call_form, detect
from service.text.stream import Piece, TextStream
from service.text.tokens import TextCodec
from tests.text import chat_templates, tiny_codecs

ANSWER, REASONING, TOOL_CALL = TextChannel.ANSWER, TextChannel.REASONING, TextChannel.TOOL_CALL
TOOL_TEMPLATE = chat_templates.QWEN3 + "{# <tool_call> #}"


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    return tiny_codecs.codec(tmp_path_factory.mktemp("codec"), TOOL_TEMPLATE)


@dataclass
class Told:
    """A finished generation."""

    texts: dict[TextChannel, str] = field(default_factory=dict)
    tokens: list[TextChannel] = field(default_factory=list)  # whose each token is
    order: list[tuple[TextChannel, str]] = field(default_factory=list)
    ended_with: list[int] = field(default_factory=list)  # tokens with which reasoning ended
    finish: FinishReason | None = None
    stop: str | None = None

    def take(self, piece: Piece, *, token: bool) -> None:
        spoken = [(s.channel, s.text) for s in piece.before] + [(piece.channel, piece.text)]
        for channel, text in spoken + [(s.channel, s.text) for s in piece.after]:
            if text:
                self.order.append((channel, text))
                self.texts[channel] = self.texts.get(channel, "") + text
        if token:
            self.tokens.append(piece.channel)
        if piece.reasoning_ended:
            self.ended_with.append(len(self.tokens))
        self.finish, self.stop = piece.finish, piece.stop


def run(
    codec: TextCodec, ids: list[int], stopping: Stopping | None = None, *, context: str = "", **how: object
) -> Told:
    before = codec.encode(context)
    splitter = partial(detect(codec).splitter, codec, before, lead=bool(how.pop("lead", False)))
    most = int(how.pop("most", 10_000))  # type: ignore[call-overload]
    stream = TextStream(codec, stopping or Stopping(), max_new_tokens=most, context_room=10_000, splitter=splitter)
    told = Told()
    for token in ids:
        told.take(stream.push(token, **how), token=True)  # type: ignore[arg-type]
        if told.finish is not None:
            return told
    told.take(stream.end(FinishReason.STOPPED), token=False)
    return told


def test_each_token_is_of_the_channel_that_it_is_in(codec):
    ids = codec.encode("a<think>b</think>c")
    told = run(codec, ids)
    assert [codec.text_of([token]) for token in ids] == ["a", "<think>", "b", "</think>", "c"]
    assert told.tokens == [ANSWER, REASONING, REASONING, REASONING, ANSWER]
    assert told.texts == {ANSWER: "ac", REASONING: "b"}
    assert told.ended_with == [4]


def test_reasoning_that_the_template_opened_is_reasoning(codec):
    told = run(codec, codec.encode("b</think>c"), context="<|im_start|>assistant\n<think>\n")
    assert told.texts == {REASONING: "b", ANSWER: "c"}
    # Of an earlier turn it was somebody's text.
    told = run(
        codec, codec.encode("b</think>c"), context="<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert told.texts == {ANSWER: "b</think>c"}


def test_marks_of_several_tokens_tell_as_well(codec):
    ids = codec.encode("x<tool_call>{}</tool_call>y")
    assert len(ids) > 12
    told = run(codec, ids)
    assert told.texts == {ANSWER: "xy", TOOL_CALL: "<tool_call>{}</tool_call>"}
    assert told.ended_with == []


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_channels_and_in_their_marks(codec, include):
    text = "<think>one two</think>three"
    told = run(codec, codec.encode(text), Stopping(stop=("two</think>t",), include_stop=include))
    assert (told.finish, told.stop) == (FinishReason.STOP, "two</think>t")
    assert told.texts == ({REASONING: "one two", ANSWER: "t"} if include else {REASONING: "one "})
    told = run(codec, codec.encode(text), Stopping(stop=("</think>",)))
    assert (told.finish, told.texts) == (FinishReason.STOP, {REASONING: "one two"})


def test_text_that_waits_for_a_stop_string_still_comes_in_its_own_channel(codec):
    ids = codec.encode("<think>a stop that was none</think>b")
    told = run(codec, ids, Stopping(stop=("that was not", "none</think>c")))
    assert told.texts == {REASONING: "a stop that was none", ANSWER: "b"}
    assert told.tokens == [REASONING] * (len(ids) - 1) + [ANSWER]


def test_texts_do_not_depend_on_stop_strings_that_do_not_come(codec):
    rng = random.Random(4)
    bits = ["<think>", "</think>", "<tool_call>", "</tool_call>", "a", " b", "\n", "<", "漢", "no", "st"]
    for _ in range(200):
        ids = [token for _ in range(rng.randrange(1, 12)) for token in codec.encode_continuation(rng.choice(bits))]
        plain, stopping = run(codec, ids), run(codec, ids, Stopping(stop=("no stop", "st\nst<think>x", "</think>!")))
        assert (stopping.texts, stopping.tokens, stopping.ended_with) == (plain.texts, plain.tokens, plain.ended_with)


def test_an_end_in_the_middle_of_a_mark_shows_what_there_is_of_it(codec):
    told = run(codec, codec.encode("x<tool_c"))
    assert told.texts == {ANSWER: "x<tool_c"}
    ids = codec.encode("<tool_call>x</tool")
    told = run(codec, ids, most=len(ids))
    assert (told.finish, told.texts) == (FinishReason.MAX_TOKENS, {TOOL_CALL: "<tool_call>x</tool"})


def test_a_constraint_that_lets_nothing_follow_stops(codec):
    (one,) = codec.encode("a")
    told = run(codec, [one, one], last=True)
    assert (told.finish, told.stop, told.texts, len(told.tokens)) == (FinishReason.STOP, None, {ANSWER: "a"}, 1)
    (eos,) = codec.encode("<|im_end|>")
    told = run(codec, [eos], Stopping(ignore_eos=True), last=True)
    assert (told.finish, told.texts) == (FinishReason.EOS, {})


def test_constrained_text_behind_reasoning_is_the_answer_whatever_it_says(codec):
    ids = codec.encode("<think>hm</think><think>1</think><tool_call>")
    assert run(codec, ids, lead=True).texts == {REASONING: "hm", ANSWER: "<think>1</think><tool_call>"}


def test_messages_with_headers_end_their_reasoning_with_the_message(tmp_path):
    codec = tiny_codecs.codec(tmp_path, chat_templates.HARMONY)
    ids = codec.encode("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes")
    told = run(codec, ids, context="<|start|>assistant")
    assert told.texts == {REASONING: "hm", ANSWER: "yes"}
    assert told.ended_with == [ids.index(codec.added_id("<|end|>")) + 1]


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (chat_templates.QWEN3, True, False),
        (TOOL_TEMPLATE, True, True),
        (chat_templates.HARMONY, True, True),
        (chat_templates.MISTRAL + "{# [TOOL_CALLS] #}", True, True),
    ],
)
def test_the_format_is_read_off_template_and_tokenizer(tmp_path, template, reasoning, tools):
    found = detect(tiny_codecs.codec(tmp_path, template))
    assert found.has_reasoning == reasoning
    assert (found.harmony or TOOL_CALL in {span.channel for span in found.spans}) == tools


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOOL_TEMPLATE, None),  # marks, and nothing that tells what is between them
        (TOOL_TEMPLATE + r"{# {\"name\": <function-name>, \"arguments\": <args-json-object>} #}", CallSyntax.JSON),
        (
            TOOL_TEMPLATE + "{# <function=example>\n<parameter=one>\nvalue\n</parameter>\n</function> #}",
            CallSyntax.TAGS,
        ),
        (chat_templates.HARMONY, None),
        (chat_templates.QWEN3 + '{# [TOOL_CALLS] {"name": "f", "arguments": {}} #}', None),  # nothing closes it
        (chat_templates.QWEN3 + '{# {"name": "f", "arguments": {}} #}', None),
    ],
)
def test_how_a_model_writes_a_call_is_read_off_its_template(tmp_path, template, form):
    codec = tiny_codecs.codec(tmp_path, template)
    found = call_form(codec, detect(codec))
    assert found == (form and CallForm(opening="<tool_call>", closing="</tool_call>", syntax=form))


def test_marks_that_are_special_tokens_are_no_text_of_a_grammar(tmp_path):
    tokenizer = tiny_codecs.byte_level()
    tokenizer.add_special_tokens([AddedToken("<tool_call>", special=True)])
    folder = tiny_codecs.save(tmp_path, tokenizer, template=TOOL_TEMPLATE + '{# {"name": "f", "arguments": {}} #}')
    codec = TextCodec.load(folder)
    assert detect(codec).has_tool_calls and call_form(codec, detect(codec)) is None
