"""Rendered text with token runs in it, as token ids. Owns the placeholders that carry ids through a template.

A template joins texts, so a message's token run travels through it as a placeholder and is put back afterwards. What
stands left and right of it is encoded by itself: the run stays as it was sent, without any drift.

For an image a template writes a marker of its own. The first marker becomes the first image's placeholder and so on.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import InvalidField
from service.request import ChatInput, ImagePart, TextPart, TokenPart
from service.text.template import Turn
from service.text.tokens import Span, TextCodec


@dataclass(frozen=True, slots=True)
class Images:
    """What stands for each image of a chat in the context, in reading order.

    A template writes `marker` for one, which then becomes `written`: the marker with text around it, or just that.
    """

    marker: str
    written: str
    runs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Texts that stand for token runs; none of them occurs in the caller's own text.

    `images` are those of images, in order; see `Images` for the rest.
    """

    runs: dict[str, tuple[int, ...]]
    images: tuple[str, ...] = ()
    marker: str = ""
    written: str = ""

    def place_images(self, rendered: str) -> str:
        """A rendering, or the beginning of one, with its image's placeholder for each marker."""
        if not self.images:
            return rendered
        pieces = rendered.split(self.marker)
        names = [self.written.replace(self.marker, image) for image in self.images[: len(pieces) - 1]]
        names += [*[self.marker] * (len(pieces) - 1 - len(names)), ""]
        return "".join(text + name for text, name in zip(pieces, names, strict=True))

    def split(self, text: str) -> list[str]:
        """`text` cut before and after each placeholder; empty pieces left out."""
        if not self.runs:
            return [text] if text else []
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, self.runs))})", text) if piece]

    def require_all(self, text: str, at: str) -> None:
        """InvalidField unless the template kept every token run and every image, once."""
        if self.marker and (self.marker in text or any(text.count(image) != 1 for image in self.images)):
            raise InvalidField.at(at, "the chat template leaves out or repeats an image: send raw parts")
        for placeholder in self.runs:
            if text.count(placeholder) != 1:
                raise InvalidField.at(at, "the chat template leaves out or repeats a message's token run: send text")


def to_turns(chat: ChatInput, images: Images | None = None) -> tuple[tuple[Turn, ...], Placeholders]:
    """The messages as a template takes them. `images` has a run for each image of theirs."""
    own = "".join(part.text for message in chat.messages for part in message.parts if isinstance(part, TextPart))
    stem = "kvforktokens"
    while stem in own:
        stem += "x"
    runs: dict[str, tuple[int, ...]] = {}
    shown: list[str] = []
    turns = []
    for message in chat.messages:
        content = ""
        before = len(shown)
        for part in message.parts:
            if isinstance(part, TextPart):
                content += part.text
                continue
            run = part.ids if isinstance(part, TokenPart) else _run_of(images, len(shown))
            if run:
                placeholder = f"{stem}{len(runs)}q"
                runs[placeholder] = run
                content += placeholder
                if isinstance(part, ImagePart):
                    shown.append(placeholder)
        turns.append(Turn(message.role, content, tuple(shown[before:])))
    return tuple(turns), Placeholders(runs, tuple(shown), *((images.marker, images.written) if images else ()))


def _run_of(images: Images | None, index: int) -> tuple[int, ...]:
    assert images is not None, "a chat with images has their runs"
    return images.runs[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spliced:
    """`text` (placeholders in it) behind `before`, encoded. `spans` are the characters of each token."""

    codec: TextCodec
    before: str
    text: str
    placeholders: Placeholders
    continuing: bool
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]

    def plain_text(self) -> str:
        """The text with token runs decoded; for an image its marker."""
        placeholders = self.placeholders

        def shown(piece: str) -> str:
            if piece in placeholders.images:
                return placeholders.marker
            run = placeholders.runs.get(piece)
            return piece if run is None else self.codec.text_of(run)

        return "".join(shown(piece) for piece in placeholders.split(self.text))

    def token_count_at(self, length: int) -> int | None:
        """How many tokens the first `length` characters are, if encoding them alone gives just these tokens."""
        count = bisect_left(self.spans, length, key=lambda span: span[0])
        if count and self.spans[count - 1][1] > length:
            return None
        # Text is cut at added tokens before anything else, so that at their borders both sides stand alone.
        beside = self.tokens[max(count - 1, 0) : count + 1]
        if count == len(self.tokens) or not self.codec.added_ids.isdisjoint(beside):
            return count
        alone = splice(
            self.codec, self.text[:length], self.placeholders, before=self.before, continuing=self.continuing
        )
        return count if alone.tokens == self.tokens[:count] else None


def splice(
    codec: TextCodec, text: str, placeholders: Placeholders, *, before: str = "", continuing: bool = False
) -> Spliced:
    """Encodes `text` as it reads behind `before`, or behind unknown text with `continuing`."""
    tokens: list[int] = []
    spans: list[Span] = []
    at = 0
    for piece in placeholders.split(text):
        end = at + len(piece)
        run = placeholders.runs.get(piece)
        if run is not None:
            tokens += run
            spans += [(at, end)] * len(run)
        else:
            ids, offsets = _encode_behind(codec, before if at == 0 else "", piece, continuing=continuing or at > 0)
            tokens += ids
            spans += [(at + a, at + b) for a, b in offsets]
        at = end
    return Spliced(
        codec=codec,
        before=before,
        text=text,
        placeholders=placeholders,
        continuing=continuing,
        tokens=tuple(tokens),
        spans=tuple(spans),
    )


def _encode_behind(
    codec: TextCodec, before: str, text: str, *, continuing: bool
) -> tuple[Sequence[int], Sequence[Span]]:
    if not before:
        return codec.encode_spans(text, continuing=continuing)
    head = codec.encode(before)
    ids, offsets = codec.encode_spans(before + text)
    if ids[: len(head)] != head:
        # A token would reach over the border. The context's own ids stand, so the new text is encoded by itself.
        return codec.encode_spans(text, continuing=True)
    skip = len(before)
    return ids[len(head) :], [(a - skip, b - skip) for a, b in offsets[len(head) :]]
