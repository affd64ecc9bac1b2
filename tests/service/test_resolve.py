"""From a call to tokens, places and knobs: what is filled in, and what is refused with its field's path."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvcache.media import MediaKey, spans_of, symbols
from service.errors import CallError, InvalidField
from service.events import ModelState, ModelView
from service.media import Prepared
from service.request import ChatInput, ImagePart, Landmark, Mark, Message, RawInput, Role, Sampling, TextPart, TokenPart
from service.resolve import Prompt, check_room, mark_positions, resolve_prompt, resolve_sampling
from service.text.tokens import TextCodec
from tests.text import tiny_codecs

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = ModelView(
    name="models/m", state=ModelState.READY, context_tokens=100, vocab_size=500, default_temperature=0.7,
    default_top_p=0.9, default_top_k=40,
)  # fmt: skip


MODEL_WIDE = replace(MODEL, context_tokens=1000)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder: Path = tmp_path_factory.mktemp("codec")
    return tiny_codecs.codec(folder, TEMPLATE)


def prompt(length: int, parent: int = 0, ends: tuple[int | None, ...] = ()) -> Prompt:
    return Prompt(tokens=array("I", range(length)), parent_tokens=parent, text="", message_ends=ends)


def raw(*parts: TextPart | TokenPart) -> RawInput:
    return RawInput(parts=parts)


def test_a_prompt_is_the_parents_tokens_and_what_is_added(codec: TextCodec) -> None:
    given = raw(TokenPart((7, 8)), TextPart("river"), TokenPart((9,)))
    made = resolve_prompt(codec, MODEL, [1, 2, 3], given)
    assert list(made.tokens[:5]) == [1, 2, 3, 7, 8]
    assert made.tokens[-1] == 9
    assert (made.parent_tokens, list(made.added)) == (3, list(made.tokens[3:]))
    assert codec.text_of(made.tokens[5:-1]) == "river"
    alone = resolve_prompt(codec, MODEL, [1, 2, 3], None)
    assert (list(alone.tokens), list(alone.added)) == ([1, 2, 3], [])


def test_nothing_to_continue_is_refused(codec: TextCodec) -> None:
    for given in (None, raw(), raw(TextPart("")), raw(TokenPart(()))):
        with pytest.raises(InvalidField) as error:
            resolve_prompt(codec, MODEL, [], given, at="branches[2].append")
        assert [v.field for v in error.value.fields] == ["branches[2].append"]


def test_token_ids_outside_the_vocabulary_are_refused_by_place(codec: TextCodec) -> None:
    given = raw(TextPart("x"), TokenPart((0, 499, 500)))
    with pytest.raises(InvalidField, match="is 500; ids go from 0 to 499") as error:
        resolve_prompt(codec, MODEL, [], given)
    assert [v.field for v in error.value.fields] == ["input.raw.parts[1].tokens.ids[2]"]


def test_chat_ends_are_counted_from_the_start_of_the_context(codec: TextCodec) -> None:
    turns = ChatInput(
        messages=(Message(Role.USER, (TextPart("How are you"),)), Message(Role.ASSISTANT, (TextPart("well"),)))
    )
    first = resolve_prompt(codec, MODEL, [], turns, [Mark(message_count=1), Mark(message_count=2)])
    texts = [codec.text_of(first.tokens[:end]) for end in first.message_ends if end is not None]
    assert [text.count("<|im_end|>") for text in texts] == [1, 2]
    assert first.text.startswith("<|im_start|>user\nHow are you")
    closed = first.tokens[: first.message_ends[1]]
    more = ChatInput(messages=(Message(Role.USER, (TextPart("today"),)),))
    second = resolve_prompt(codec, MODEL, closed, more, [Mark(message_count=1)])
    (end,) = second.message_ends
    assert end is not None
    assert codec.text_of(second.tokens[len(closed) : end]).count("today<|im_end|>") == 1
    assert second.parent_tokens == len(closed)


@pytest.mark.parametrize(("tokens", "needs", "fits"), [(99, 1, True), (100, 1, False), (100, 0, True), (101, 0, False)])
def test_the_context_has_an_end(tokens: int, needs: int, fits: bool) -> None:
    if fits:
        check_room(tokens, MODEL, needs=needs)
        return
    with pytest.raises(CallError) as error:
        check_room(tokens, MODEL, needs=needs, at="append")
    assert (error.value.reason, error.value.metadata) == (
        "CONTEXT_OVERFLOW",
        {"promptTokens": str(tokens), "contextTokens": "100"},
    )


def test_marks_become_positions_in_their_own_order() -> None:
    marks = [
        Mark(landmark=Landmark.PROMPT_END),
        Mark(token_count=1),
        Mark(message_count=2),
        Mark(token_count=30),
        Mark(message_count=1),
    ]
    assert mark_positions(marks, prompt(30, ends=(12, 25))) == [30, 1, 25, 30, 12]
    assert mark_positions([], prompt(3)) == []


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        (Mark(token_count=0), "marks[1].token_count"),
        (Mark(token_count=31), "marks[1].token_count"),
        (Mark(message_count=0), "marks[1].message_count"),
        (Mark(message_count=4), "marks[1].message_count"),
        (Mark(message_count=3), "marks[1].message_count"),  # a message without one end
    ],
)
def test_a_mark_where_the_prompt_has_no_place_is_refused(mark: Mark, field: str) -> None:
    with pytest.raises(InvalidField) as error:
        mark_positions([Mark(token_count=1), mark], prompt(30, ends=(12, 25, None)))
    assert [v.field for v in error.value.fields] == [field]


def test_knobs_are_the_callers_else_the_models_else_off() -> None:
    assert resolve_sampling(Sampling(), MODEL, 7) == Sampling(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, seed=7,
    )  # fmt: skip
    # Zero is a value, not an absence.
    asked = Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.2, repetition_penalty=1.3, frequency_penalty=-1.0,
        presence_penalty=0.5, logit_bias=((3, -5.0),), seed=99,
    )  # fmt: skip
    assert resolve_sampling(asked, MODEL, 7) == Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.2, repetition_penalty=1.3, frequency_penalty=-1.0,
        presence_penalty=0.5, logit_bias=((3, -5.0),), seed=7,
    )  # fmt: skip
    with pytest.raises(InvalidField) as error:
        resolve_sampling(Sampling(logit_bias=((499, 1.0), (500, 1.0))), MODEL, 7)
    assert [v.field for v in error.value.fields] == ["sampling.logit_bias"]


# -- images ----------------------------------------------------------------------------------------------------------

PARTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOSING = PARTS_TEMPLATE.replace("<|image|>", "")
DOUBLING = PARTS_TEMPLATE.replace("<|image|>", "<|image|><|image|>")
LISTS_ONLY = PARTS_TEMPLATE.replace("{{ m.content }}{% else %}", "{% else %}")


@dataclass(frozen=True)
class Seer:
    """Says how a model's prompts show images."""

    placeholder_id: int = 450
    marker_id: int = 450
    marker: str = "<|image|>"
    written: str = "<|image|>"
    whole_images: bool = False
    opening: tuple[int, ...] = (11,)
    closing: tuple[int, ...] = (12, 13)


def seen(seed: int, count: int = 6) -> Prepared:
    return Prepared(key=MediaKey(bytes([seed]) * 32), ids=(450,) * count, grid=(), inputs=None)


def run_of(picture: Prepared) -> list[int]:
    return list(symbols(picture.key, len(picture.ids)))


IMAGE_PART = ImagePart(data=b"file")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextCodec]:
    made: dict[str, TextCodec] = {}

    def codec_of(template: str) -> TextCodec:
        if template not in made:
            made[template] = tiny_codecs.codec(tmp_path_factory.mktemp("codec"), template)
        return made[template]

    return codec_of


def said(role: Role, *parts: TextPart | TokenPart | ImagePart) -> Message:
    return Message(role, parts)


def test_images_in_raw_input_stand_between_their_opening_and_closing(codec: TextCodec) -> None:
    a, b = seen(1), seen(2, 4)
    given = RawInput(parts=(TokenPart((7,)), IMAGE_PART, TextPart("river"), IMAGE_PART))
    made = resolve_prompt(codec, MODEL, [1], given, form=Seer(), pictures=(a, b))
    river = codec.encode_continuation("river")
    assert list(made.tokens) == [1, 7, 11, *run_of(a), 12, 13, *river, 11, *run_of(b), 12, 13]
    assert made.text.count("<|image|>") == 2


@pytest.mark.parametrize("template", [PARTS_TEMPLATE, LISTS_ONLY])
def test_images_in_a_chat_take_the_place_of_what_the_template_writes(
    seeing: Callable[[str], TextCodec], template: str
) -> None:
    codec = seeing(template)
    a, b, c = seen(1), seen(2, 4), seen(3)
    turns = (
        said(Role.SYSTEM, TextPart("Be brief.")),
        said(Role.USER, TextPart("this "), IMAGE_PART, IMAGE_PART, TextPart(" or")),
        said(Role.ASSISTANT, TextPart("yes")),
        said(Role.USER, TokenPart((7, 8)), IMAGE_PART),
    )
    marks = [Mark(message_count=n) for n in range(1, 5)]
    made = resolve_prompt(codec, MODEL_WIDE, [], ChatInput(messages=turns), marks, form=Seer(), pictures=(a, b, c))
    assert [(s.start, s.end) for s in spans_of(made.tokens)] == [
        (at, at + n) for at, n in zip(_places(made.tokens, a, b, c), (6, 4, 6), strict=True)
    ]
    ends = [end for end in made.message_ends if end is not None]
    assert len(ends) == 4
    assert [len(spans_of(made.tokens[:end])) for end in ends] == [0, 2, 2, 3]
    assert made.text.count("<|image|>") == 3
    plain = codec.text_of([t for t in made.tokens if t < 2**31])
    assert plain.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthis  or<|im_end|>\n")


def _places(tokens: array[int], *pictures: Prepared) -> list[int]:
    given = list(tokens)
    return [given.index(run_of(picture)[0]) for picture in pictures]


def test_turns_with_images_are_appended_behind_images(seeing: Callable[[str], TextCodec]) -> None:
    codec = seeing(PARTS_TEMPLATE)
    a, b = seen(1), seen(2)
    first = ChatInput(messages=(said(Role.USER, IMAGE_PART, TextPart("?")), said(Role.ASSISTANT, TextPart("well"))))
    second = ChatInput(messages=(said(Role.USER, TextPart("and "), IMAGE_PART),))
    begun = resolve_prompt(
        codec, MODEL_WIDE, [], replace(first, add_generation_prompt=False), form=Seer(), pictures=(a,)
    )
    grown = resolve_prompt(codec, MODEL_WIDE, begun.tokens, second, form=Seer(), pictures=(b,))
    whole = ChatInput(messages=(*first.messages, *second.messages))
    assert grown.tokens == resolve_prompt(codec, MODEL_WIDE, [], whole, form=Seer(), pictures=(a, b)).tokens
    alone = ChatInput(messages=(said(Role.ASSISTANT, IMAGE_PART),))
    opened = resolve_prompt(codec, MODEL_WIDE, [], first.__class__(messages=first.messages[:1]), form=Seer(),
                            pictures=(a,)).tokens  # fmt: skip
    with pytest.raises(InvalidField, match="cannot continue"):
        resolve_prompt(codec, MODEL_WIDE, opened, alone, form=Seer(), pictures=(b,))


@pytest.mark.parametrize("template", [LOSING, DOUBLING, TEMPLATE])
def test_a_template_that_loses_or_doubles_an_image_is_told(seeing: Callable[[str], TextCodec], template: str) -> None:
    given = ChatInput(messages=(said(Role.USER, TextPart("see "), IMAGE_PART),))
    with pytest.raises(InvalidField) as error:
        resolve_prompt(seeing(template), MODEL_WIDE, [], given, form=Seer(), pictures=(seen(1),))
    assert [v.field for v in error.value.fields] == ["input.chat"]


def test_what_stands_for_an_image_is_not_the_caller_s_to_write(codec: TextCodec) -> None:
    for part in (TextPart("a <|image|>"), TokenPart((1, 450))):
        with pytest.raises(InvalidField, match="stands for an image") as error:
            resolve_prompt(codec, MODEL, [], RawInput(parts=(TextPart("x"), part)), form=Seer())
        assert [v.field for v in error.value.fields] == ["input.raw.parts[1]"]
    resolve_prompt(codec, MODEL, [], RawInput(parts=(TextPart("a <|image|>"),)))  # of a text model it is text


def test_a_mark_inside_an_image_is_refused_with_the_image_s_ends() -> None:
    tokens = array("I", [1, 2, *run_of(seen(1)), 3])
    made = Prompt(tokens=tokens, parent_tokens=0, text="", message_ends=())
    assert mark_positions([Mark(token_count=2), Mark(token_count=8)], made) == [2, 8]
    with pytest.raises(InvalidField) as error:
        mark_positions([Mark(token_count=2), Mark(token_count=5)], made)
    assert (error.value.reason, error.value.metadata) == ("CUT_INSIDE_IMAGE", {"start": "2", "end": "8"})
    assert [v.field for v in error.value.fields] == ["marks[1].token_count"]


def test_what_the_processor_writes_around_an_image_is_text_of_the_prompt(seeing: Callable[[str], TextCodec]) -> None:
    codec = seeing(PARTS_TEMPLATE)
    given = ChatInput(messages=(said(Role.USER, TextPart("a"), IMAGE_PART, TextPart("b")),))
    made = resolve_prompt(codec, MODEL_WIDE, [], given, form=Seer(written="\n\n<|image|>\n\n"), pictures=(seen(1),))
    (span,) = spans_of(made.tokens)
    assert codec.text_of(made.tokens[: span.start]).endswith("user\na\n\n")
    assert codec.text_of(made.tokens[span.end :]).startswith("\n\nb<|im_end|>")
    assert "a\n\n<|image|>\n\nb" in made.text
