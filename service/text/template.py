"""What a chat template puts around turns, learnt by rendering probes. Owns the verdict whether it can be appended to.

A template is a program; nothing about it is assumed but what its output shows. The probes are short conversations with
sentinel texts that no caller's text contains, so that the template's own text can be read off around them:

    lead    system P, user U           `closed_user`, and with the generation prompt `opened`
    said    lead, assistant S          what opens and closes the last assistant turn
    going   lead, assistant S, user V  the same once the conversation goes on

A template is append-only if a longer conversation starts with the shorter one. One difference is allowed: an empty
reasoning block in front of S. It is written for a last turn only (Qwen3), and a context of tokens has its own there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.errors import InvalidField, TemplateMissing, TemplateNotAppendable
from service.request import Role
from service.text.tokens import TextCodec
from service.text.waiting import go_on

RAW_HINT = "append with raw parts, or send the whole conversation without a parent"

_LONGEST_MESSAGE = 500  # characters of a template's own error
_EMPTY_REASONING = re.compile(r"\s*<([^<>/]+)>\s*</\1>\s*")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message as templates see it: one text, in which placeholders stand for token runs and for `images`."""

    role: Role
    content: str
    images: tuple[str, ...] = ()

    def message(self, *, as_parts: bool) -> dict[str, object]:
        """As a template takes it: with images a list of parts, as the makers of vision models have it."""
        if not self.images and not as_parts:
            return {"role": self.role.value, "content": self.content}
        parts: list[dict[str, str]] = []
        rest = self.content
        for image in self.images:
            text, _, rest = rest.partition(image)
            parts += [{"type": "text", "text": text}] if text else []
            parts.append({"type": "image"})
        if rest or not parts:
            parts.append({"type": "text", "text": rest})
        return {"role": self.role.value, "content": parts}


@dataclass(frozen=True, slots=True)
class Renderer:
    """One model's template with one call's variables. `at` is the input's path in the request, for errors."""

    codec: TextCodec
    variables: Mapping[str, object]
    at: str

    def __call__(self, turns: Sequence[Turn], *, generation_prompt: bool = False) -> str:
        """The rendered text; TemplateMissing, or InvalidField with what the template says."""
        if not self.codec.has_template:
            raise TemplateMissing("the model has no chat template", hint="send raw parts instead of chat messages")
        go_on()
        messages = [turn.message(as_parts=self.codec.wants_parts) for turn in turns]
        try:
            return self.codec.render_template(messages, self.variables, generation_prompt=generation_prompt)
        except Exception as error:  # the template is a foreign program and its input is the caller's
            text = str(error)[:_LONGEST_MESSAGE] or type(error).__name__
            raise InvalidField.at(self.at, f"the chat template refuses this: {text}") from error

    def attempt(self, turns: Sequence[Turn]) -> str | None:
        """The rendered text, or None where the template refuses."""
        try:
            return self(turns)
        except InvalidField:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinels:
    """Texts that stand for contents in probes."""

    system: str
    user: str
    assistant: str
    next_user: str

    @classmethod
    def apart_from(cls, *texts: object) -> Sentinels:
        """Sentinels that occur in none of `texts`."""
        stem = "kvforkprobe"
        haystack = json.dumps(texts, default=str, ensure_ascii=False)
        while stem in haystack:
            stem += "x"
        return cls(system=f"{stem}one", user=f"{stem}two", assistant=f"{stem}three", next_user=f"{stem}four")

    def leaked_into(self, text: str) -> bool:
        """Whether a template put a probe's content where new text was expected."""
        return any(name in text for name in (self.system, self.user, self.assistant, self.next_user))


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """What the probes showed. All of it is text; `going` is the one that pieces are cut from."""

    sentinels: Sentinels
    lead: tuple[Turn, ...]
    closed_user: str  # lead
    opened: str  # lead with the generation prompt
    said: str
    going: str
    closer: str  # what ends an assistant turn once another follows
    last_closer: str  # what ends a last one

    @property
    def user_end(self) -> int:
        """Where U ends, in every probe."""
        return self.closed_user.index(self.sentinels.user) + len(self.sentinels.user)

    @property
    def answer(self) -> Turn:
        """The assistant's sentinel turn."""
        return Turn(Role.ASSISTANT, self.sentinels.assistant)

    def after_answer(self, rendered: str) -> int:
        """Where S ends in a rendering of `lead`, S and more; TemplateNotAppendable unless it only appends to `lead`."""
        sentinel = self.sentinels.assistant
        if not rendered.startswith(self.closed_user) or rendered.count(sentinel) != 1:
            raise not_appendable("it changes earlier turns when another one follows")
        at = rendered.index(sentinel)
        start = len(self.closed_user)
        headers = [self.said[start : self.said.index(sentinel)], self.going[start : self.going.index(sentinel)]]
        if rendered[start:at] not in headers:
            raise not_appendable("it changes what opens an earlier assistant turn")
        end = at + len(sentinel)
        if not rendered.startswith(self.closer, end):
            raise not_appendable("it changes what closes an earlier assistant turn")
        return end


def not_appendable(why: str) -> TemplateNotAppendable:
    """The refusal; `why` completes "the template isn't append-only: …"."""
    return TemplateNotAppendable(f"the model's chat template isn't append-only: {why}", hint=RAW_HINT)


def shared_length(one: str | bytes, other: str | bytes) -> int:
    """The length of the longest common beginning."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def learn(render: Renderer, sentinels: Sentinels) -> TemplateShape:
    """Renders the probes. TemplateNotAppendable if a longer conversation would change a shorter one's text."""
    user = Turn(Role.USER, sentinels.user)
    # With a system turn where the template has one: some move it, and that must be seen.
    lead: tuple[Turn, ...] = (Turn(Role.SYSTEM, sentinels.system), user)
    if render.attempt(lead) is None:
        lead = (user,)
    answer = Turn(Role.ASSISTANT, sentinels.assistant)
    closed_user = render(lead)
    opened = render(lead, generation_prompt=True)
    said = render((*lead, answer))
    going = render((*lead, answer, Turn(Role.USER, sentinels.next_user)))
    if closed_user.count(sentinels.user) != 1 or not opened.startswith(closed_user):
        raise not_appendable("the generation prompt isn't just added at the end")
    for longer in (said, going):
        if not longer.startswith(closed_user) or longer.count(sentinels.assistant) != 1:
            raise not_appendable("it changes a user turn when another one follows")
    if going.count(sentinels.next_user) != 1:
        raise not_appendable("it leaves out or repeats a turn")
    _, _, last_closer = said.partition(sentinels.assistant)
    between = going.partition(sentinels.assistant)[2].partition(sentinels.next_user)[0]
    start = len(closed_user)
    _same_opening(said[start : said.index(sentinels.assistant)], going[start : going.index(sentinels.assistant)])
    prompted = render((*lead, answer), generation_prompt=True).partition(sentinels.assistant)[2]
    return TemplateShape(
        sentinels=sentinels,
        lead=lead,
        closed_user=closed_user,
        opened=opened,
        said=said,
        going=going,
        closer=_closer(render.codec, last_closer, between, prompted.removesuffix(opened[start:])),
        last_closer=last_closer,
    )


def _same_opening(last: str, earlier: str) -> None:
    """Refuses a template whose assistant turns open differently later on, an empty reasoning block apart."""
    common = shared_length(last, earlier)
    block, rest = last[common:], earlier[common:]
    if (block or rest) and (rest.strip() or not _EMPTY_REASONING.fullmatch(block)):
        raise not_appendable("it changes what opens an assistant turn when another turn follows")


def _closer(codec: TextCodec, last: str, between: str, before_prompt: str) -> str:
    """What closes an assistant turn that another turn follows. `between` begins with it."""
    for closer in (last, before_prompt):
        if between.startswith(closer):
            break
    else:
        raise not_appendable("it changes what closes an assistant turn when another one follows")
    # A template that writes the end token only once another turn follows.
    for token in sorted(codec.eos_ids):
        end = codec.token_bytes(token).decode(errors="replace")
        if end and end not in closer and between.startswith(end, len(closer)):
            return closer + end
    return closer
