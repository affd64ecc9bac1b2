"""From a call to token ids and places. Owns how inputs become a prompt and marks become positions; no engine, no gRPC.

Pure but for the tokenizer. Limits that need the model (vocabulary, context length) are checked here, so that what goes
on to the engine thread can be carried out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.media import MediaSpan, cut_inside, spans_of, symbols
from service.errors import InvalidField
from service.events import ModelView
from service.media import ImageForm, Prepared
from service.request import (
    ChatInput,
    ImagePart,
    Input,
    Landmark,
    Mark,
    Part,
    RawInput,
    Sampling,
    TextPart,
    TokenPart,
    parts_of,
)
from service.text import chat
from service.text.splice import Images
from service.text.tokens import TextCodec
from service.work import WorkImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A whole context: the parent's tokens and what was added. `text` is a rendered chat; `message_ends` absolute."""

    tokens: array[int]
    parent_tokens: int
    text: str
    message_ends: tuple[int | None, ...]
    images: tuple[WorkImage, ...] = ()  # all of the context, once they are known

    @property
    def image_tokens(self) -> int:
        """Positions of images."""
        return sum(len(image.layout.ids) for image in self.images)

    @property
    def added(self) -> array[int]:
        return self.tokens[self.parent_tokens :]


def resolve_prompt(
    codec: TextCodec,
    model: ModelView,
    context: Sequence[int],
    given: Input | None,
    marks: Sequence[Mark] = (),
    at: str = "input",
    form: ImageForm | None = None,
    pictures: Sequence[Prepared] = (),
) -> Prompt:
    """The context after `given`; `at` is the field path for errors. Raises InvalidField, TurnOpen, Template…

    `pictures` are those of `given`, in reading order, prepared by what has this `form`.
    """
    tokens = array("I", context)
    text = ""
    message_ends: tuple[int | None, ...] = ()
    if isinstance(given, RawInput):
        check_token_ids(given.parts, model, f"{at}.raw")
        _refuse_markers(codec, given, form, f"{at}.raw")
        placed = _with_runs(given, form, pictures)
        tokens.extend(codec.encode_raw(placed, with_parent=bool(context)))
        text = _raw_text(codec, given, form) if pictures else ""
    elif isinstance(given, ChatInput):
        for m, message in enumerate(given.messages):
            check_token_ids(message.parts, model, f"{at}.chat.messages[{m}]")
        ends = {mark.message_count for mark in marks if mark.message_count is not None}  # each costs a rendering
        at_chat = f"{at}.chat"
        _refuse_markers(codec, given, form, at_chat)
        images = None
        if form is not None:
            images = Images(form.marker, form.written, tuple(_run(picture) for picture in pictures))
        if context:
            rendered = chat.append(codec, context, given, ends=ends, at=at_chat, images=images)
        else:
            rendered = chat.render(codec, given, ends=ends, at=at_chat, images=images)
        tokens.extend(rendered.tokens)
        text = rendered.text
        message_ends = tuple(end + len(context) if end is not None else None for end in rendered.message_ends)
    if not tokens:
        raise InvalidField.at(at, "gives no tokens, and there is no parent: there is nothing to continue")
    return Prompt(tokens=tokens, parent_tokens=len(context), text=text, message_ends=message_ends)


def _run(picture: Prepared) -> tuple[int, ...]:
    return tuple(symbols(picture.key, len(picture.ids)))


def _with_runs(given: RawInput, form: ImageForm | None, pictures: Sequence[Prepared]) -> RawInput:
    """Raw input with each image as the run of tokens that stands for it."""
    if form is None or not pictures:
        return given
    runs = iter(pictures)
    parts = [
        TokenPart((*form.opening, *_run(next(runs)), *form.closing)) if isinstance(part, ImagePart) else part
        for part in given.parts
    ]
    return replace(given, parts=tuple(parts))


def _raw_text(codec: TextCodec, given: RawInput, form: ImageForm | None) -> str:
    """Raw input as text, with the marker for each image."""
    assert form is not None
    pieces: list[str] = []
    for part in given.parts:
        if isinstance(part, TextPart):
            pieces.append(part.text)
        elif isinstance(part, TokenPart):
            pieces.append(codec.text_of(part.ids))
        else:
            pieces += [codec.text_of(form.opening), form.marker, codec.text_of(form.closing)]
    return "".join(pieces)


def _refuse_markers(codec: TextCodec, given: Input, form: ImageForm | None, at: str) -> None:
    """A caller's own text or ids must not stand for an image: nothing would be seen there."""
    if form is None:
        return
    reserved = {form.placeholder_id, form.marker_id}
    names = {codec.text_of([token]) for token in reserved} | {form.marker}
    top = at.rpartition(".")[0]
    for path, part in parts_of(given, top):
        if isinstance(part, TextPart) and any(name in part.text for name in names if name):
            raise InvalidField.at(path, "spells the token that stands for an image: leave it out or escape it")
        if isinstance(part, TokenPart) and not reserved.isdisjoint(part.ids):
            raise InvalidField.at(path, "holds the token that stands for an image: send the image itself")


def check_token_ids(parts: Sequence[Part], model: ModelView, at: str) -> None:
    """Token ids taken verbatim must be in the vocabulary."""
    for p, part in enumerate(parts):
        if not isinstance(part, TokenPart):
            continue
        for i, token in enumerate(part.ids):
            if token >= model.vocab_size:
                text = f"is {token}; ids go from 0 to {model.vocab_size - 1}"
                raise InvalidField.at(f"{at}.parts[{p}].tokens.ids[{i}]", text)


def refuse_long_text(
    codec: TextCodec, model: ModelView, context_tokens: int, given: Input | None, at: str, *, most: int, fits: bool
) -> None:
    """Refuses text before a tokenizer spends minutes on it: more than `most` bytes, and with `fits` what the context
    cannot hold, however it is tokenized."""
    if given is None:
        return
    groups = [given.parts] if isinstance(given, RawInput) else [message.parts for message in given.messages]
    size = sum(len(part.text.encode()) for parts in groups for part in parts if isinstance(part, TextPart))
    least = context_tokens + size // codec.longest_token_bytes
    if fits and least > model.context_tokens:
        facts = {"promptTokens": f">={least}", "contextTokens": str(model.context_tokens)}
        text = f"has {size:,} bytes of text, at least {least:,} tokens; the model takes {model.context_tokens:,}"
        raise InvalidField.at(at, text, reason="CONTEXT_OVERFLOW", metadata=facts)
    if size > most:
        raise InvalidField.at(at, f"has {size:,} bytes of text; the server takes {most:,} at a time")


def check_room(prompt_tokens: int, model: ModelView, *, needs: int, at: str = "input") -> None:
    """The prompt and at least `needs` more tokens must fit into the context."""
    if prompt_tokens + needs <= model.context_tokens:
        return
    facts = {"promptTokens": str(prompt_tokens), "contextTokens": str(model.context_tokens)}
    text = f"the context is {prompt_tokens} tokens long and the model takes {model.context_tokens}"
    raise InvalidField.at(at, text, reason="CONTEXT_OVERFLOW", metadata=facts)


def mark_positions(marks: Sequence[Mark], prompt: Prompt) -> list[int]:
    """The token position of each mark in the prompt.

    Raises InvalidField for a place that the prompt does not have, or that lies inside an image.
    """
    return [_position(i, mark, prompt) for i, mark in enumerate(marks)]


def refuse_cut_inside(spans: Sequence[MediaSpan], position: int, field: str) -> None:
    """InvalidField CUT_INSIDE_IMAGE if an image has positions on both sides of `position`."""
    span = cut_inside(spans, position)
    if span is not None:
        facts = {"start": str(span.start), "end": str(span.end)}
        text = f"is {position}, inside an image at [{span.start}, {span.end}); cut before or behind it"
        raise InvalidField.at(field, text, reason="CUT_INSIDE_IMAGE", metadata=facts)


def generation_places(marks: Sequence[Mark], prompt: Prompt, *, reasons: bool) -> list[int | None]:
    """The same for a call that generates: None is the reasoning's end, wherever it comes.

    `reasons`: the model tells its reasoning apart. InvalidField also where it never comes to a place.
    """
    places: list[int | None] = []
    for i, mark in enumerate(marks):
        if mark.landmark is not Landmark.REASONING_END:
            places.append(_position(i, mark, prompt))
        elif reasons:
            places.append(None)
        else:
            text = "the model's template and tokenizer have no marks around reasoning: it never comes there"
            raise InvalidField.at(f"marks[{i}].landmark", text)
    return places


def _position(index: int, mark: Mark, prompt: Prompt) -> int:
    if mark.token_count is not None:
        if not 1 <= mark.token_count <= len(prompt.tokens):
            text = f"is {mark.token_count}; the prompt has {len(prompt.tokens)} tokens"
            raise InvalidField.at(f"marks[{index}].token_count", text)
        refuse_cut_inside(spans_of(prompt.tokens), mark.token_count, f"marks[{index}].token_count")
        return mark.token_count
    if mark.message_count is not None:
        return _message_position(index, mark.message_count, prompt)
    assert mark.landmark in (Landmark.PROMPT_END, Landmark.REASONING_START)
    return len(prompt.tokens)  # a turn opens with its reasoning


def _message_position(index: int, count: int, prompt: Prompt) -> int:
    at = f"marks[{index}].message_count"
    if not 1 <= count <= len(prompt.message_ends):
        raise InvalidField.at(at, f"is {count}; the chat input has {len(prompt.message_ends)} messages")
    position = prompt.message_ends[count - 1]
    if position is None:
        raise InvalidField.at(at, "the model's template does not end a message in one place; use token_count")
    return position


def resolve_sampling(asked: Sampling, model: ModelView, seed: int) -> Sampling:
    """Every knob set: the caller's value, else the model's default, else off."""
    for token, _ in asked.logit_bias:
        if token >= model.vocab_size:
            text = f"has token id {token}; ids go from 0 to {model.vocab_size - 1}"
            raise InvalidField.at("sampling.logit_bias", text)

    def first(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=first(asked.temperature, model.default_temperature),
        top_p=first(asked.top_p, model.default_top_p),
        top_k=model.default_top_k if asked.top_k is None else asked.top_k,
        min_p=first(asked.min_p, 0.0),
        repetition_penalty=first(asked.repetition_penalty, 1.0),
        frequency_penalty=first(asked.frequency_penalty, 0.0),
        presence_penalty=first(asked.presence_penalty, 0.0),
        logit_bias=asked.logit_bias,
        seed=seed,
    )
