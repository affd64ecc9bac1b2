"""Chat turns to token ids with the model's own template: whole conversations, and turns appended to a context.

Appending is done in token space. The context's ids are never rendered again: only what the template writes for the new
turns is encoded and put behind them. That is why a template must be append-only, and why nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from service.errors import InvalidField, TurnOpen
from service.request import ChatInput, Role
from service.text.splice import Images, Spliced, splice, to_turns
from service.text.template import Renderer, Sentinels, TemplateShape, Turn, learn, not_appendable
from service.text.tokens import TextCodec
from service.text.turns import OPEN_HINT, Closed, Open, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Turns as the model reads them.

    `message_ends[i]` is the number of `tokens` up to the end of message i, or None where that is no place of its own:
    what follows changes it, or no token ends there. For `append` all of this is about the new tokens alone.
    """

    text: str
    tokens: tuple[int, ...]
    message_ends: tuple[int | None, ...]


def render(
    codec: TextCodec,
    chat: ChatInput,
    *,
    ends: Collection[int] | None = None,
    at: str = "input.chat",
    images: Images | None = None,
) -> Rendered:
    """A whole conversation. `ends`: message counts whose ends are wanted (None: all); each costs a rendering.

    `images`: what stands for the images of its messages.

    Special tokens' own texts in a message become those tokens, as the template's do: escape them where that matters.
    TemplateMissing; InvalidField at `at` with what the template says.
    """
    renderer = Renderer(codec, chat.template_vars, at)
    turns, placeholders = to_turns(chat, images)
    whole = placeholders.place_images(renderer(turns, generation_prompt=chat.add_generation_prompt))
    placeholders.require_all(whole, at)
    if _drops_last(renderer, turns):
        text = "the template writes a system message only together with the turn after it: send both"
        raise InvalidField.at(f"{at}.messages[{len(turns) - 1}]", text)

    def prefix(count: int) -> str | None:
        text = None if _drops_last(renderer, turns[:count]) else renderer.attempt(turns[:count])
        return None if text is None else placeholders.place_images(text)

    wanted = [prefix(n) if ends is None or n in ends else None for n in range(1, len(turns) + 1)]
    return _rendered(splice(codec, whole, placeholders), wanted)


def append(
    codec: TextCodec,
    context: Sequence[int],
    chat: ChatInput,
    *,
    ends: Collection[int] | None = None,
    at: str = "input.chat",
    images: Images | None = None,
) -> Rendered:
    """The tokens that `chat`'s turns add behind `context`; `ends` counts the new messages.

    An open assistant turn is continued by a first message of the assistant: its content goes in verbatim, then the turn
    is closed. A reasoning block that the generation prompt opened is closed first, unless the content does so itself.
    TurnOpen if anything else would come into an open turn; TemplateNotAppendable; TemplateMissing; InvalidField.
    """
    renderer = Renderer(codec, chat.template_vars, at)
    turns, placeholders = to_turns(chat, images)
    if not turns:
        raise InvalidField.at(f"{at}.messages", "must not be empty")
    shape = learn(renderer, Sentinels.apart_from([turn.content for turn in turns], chat.template_vars))
    place = locate(codec, shape, context, renderer)
    growth = (
        _continued(renderer, shape, place, turns) if isinstance(place, Open) else _begun(renderer, shape, place, turns)
    )
    whole = placeholders.place_images(growth.text(len(turns), generation_prompt=chat.add_generation_prompt))
    placeholders.require_all(whole, at)

    def prefix(count: int) -> str | None:
        try:
            return placeholders.place_images(growth.text(count))
        except InvalidField:  # the template takes no conversation that ends here
            return None

    wanted = [prefix(n) if ends is None or n in ends else None for n in range(1, len(turns) + 1)]
    return _rendered(splice(codec, whole, placeholders, before=growth.before, continuing=True), wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """What the first n of the new turns add to the context: `first`, then what the template writes behind `base`."""

    renderer: Renderer
    shape: TemplateShape
    base: tuple[Turn, ...]  # probe turns that stand for the context
    base_text: str
    turns: tuple[Turn, ...]
    first: str
    in_first: int = 0  # how many of the new turns `first` holds
    before: str = ""  # what the context ends with, as far as the template wrote it; empty if unknown

    def text(self, count: int, *, generation_prompt: bool = False) -> str:
        turns = self.turns[self.in_first : count]
        if not turns and not generation_prompt:
            return self.first
        rendered = self.renderer((*self.base, *turns), generation_prompt=generation_prompt)
        if self.base[-1] == self.shape.answer:
            end = self.shape.after_answer(rendered) + len(self.shape.closer)
        else:
            end = len(self.base_text)
            if not rendered.startswith(self.base_text):
                raise not_appendable("it changes an earlier turn when another one follows")
        if self.shape.sentinels.leaked_into(rendered[end:]):
            raise not_appendable("it moves an earlier turn's text")
        return self.first + rendered[end:]


def _continued(renderer: Renderer, shape: TemplateShape, place: Open, turns: tuple[Turn, ...]) -> _Growth:
    if turns[0].role is not Role.ASSISTANT:
        raise TurnOpen("the context ends inside an assistant turn", hint=OPEN_HINT)
    if turns[0].images:
        text = "an image cannot continue the turn that the model has begun: close that first, or append raw parts"
        raise InvalidField.at(f"{renderer.at}.messages[0]", text)
    content = turns[0].content
    closes_itself = place.completion.strip() and place.completion.strip() in content
    said = content if closes_itself else place.completion + content
    return _Growth(
        renderer=renderer,
        shape=shape,
        base=(*shape.lead, shape.answer),
        base_text="",
        turns=turns,
        first=said + shape.closer,
        in_first=1,
    )


def _begun(renderer: Renderer, shape: TemplateShape, place: Closed, turns: tuple[Turn, ...]) -> _Growth:
    base, base_text = _base(renderer, shape, place, turns[0].role)
    missing = shape.closer[len(shape.closer) - place.missing :]
    return _Growth(
        renderer=renderer,
        shape=shape,
        base=base,
        base_text=base_text,
        turns=turns,
        first=missing,
        before=base_text.removesuffix(missing),
    )


def _base(renderer: Renderer, shape: TemplateShape, place: Closed, role: Role) -> tuple[tuple[Turn, ...], str]:
    """Probe turns that end like the context, and their text: a template may check or use what the next turn follows."""
    system = shape.lead[0]
    if place.bare and len(shape.lead) > 1:
        alone = renderer.attempt([system])
        if alone is not None and system.content in alone:
            return (system,), alone
    if role is Role.ASSISTANT:
        return shape.lead, shape.closed_user
    end = shape.going.index(shape.sentinels.assistant) + len(shape.sentinels.assistant) + len(shape.closer)
    return (*shape.lead, shape.answer), shape.going[:end]


def _drops_last(renderer: Renderer, turns: Sequence[Turn]) -> bool:
    """Whether the last turn is a system turn that the rendering doesn't show: some templates put it into the next."""
    last = turns[-1]
    if last.role is not Role.SYSTEM or not last.content.strip():
        return False
    other = Turn(Role.SYSTEM, last.content + Sentinels.apart_from(last.content).system, last.images)
    return renderer.attempt(turns) == renderer.attempt([*turns[:-1], other])


def _rendered(spliced: Spliced, prefixes: Sequence[str | None]) -> Rendered:
    ends: list[int | None] = []
    reached = 0
    for prefix in prefixes:
        end = None
        if prefix is not None and len(prefix) > reached and spliced.text.startswith(prefix):
            end = spliced.token_count_at(len(prefix))
            reached = len(prefix)
        ends.append(end)
    return Rendered(text=spliced.plain_text(), tokens=spliced.tokens, message_ends=tuple(ends))
