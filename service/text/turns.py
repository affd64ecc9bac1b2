"""Where in a turn a context of token ids ends. Owns the comparison of a context with a template's markers.

Markers are compared as bytes in which every special token is led by 0xFF, a byte that no text has: "<|im_end|>" spelled
out in ordinary tokens closes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.errors import TurnOpen
from service.text.template import RAW_HINT, Renderer, TemplateShape, not_appendable, shared_length
from service.text.tokens import TextCodec

_SPECIAL = b"\xff"
_WINDOWS = (512, 8192)  # tokens looked at before the whole context is
_CLOSER_CUTS = 8  # characters after the closing token where a context may end

OPEN_HINT = "begin with an assistant message, which continues the open turn, or append with raw parts"


@dataclass(frozen=True, slots=True)
class Closed:
    """A turn has ended. `missing` of the closer's last characters are still to come.

    `bare`: the context has no user or assistant turn yet, at most a system turn.
    """

    missing: int
    bare: bool


@dataclass(frozen=True, slots=True)
class Open:
    """An assistant turn is open. `completion` is what its header still lacks before visible text can follow."""

    completion: str


def marked(codec: TextCodec, tokens: Iterable[int]) -> bytes:
    """The bytes of `tokens` with special tokens made unmistakable."""
    pieces = []
    for token in tokens:
        if token in codec.special_ids:
            pieces.append(_SPECIAL)
        pieces.append(codec.token_bytes(token))
    return b"".join(pieces)


class Markers:
    """A template's markers as they appear in a context; made once per call."""

    def __init__(self, codec: TextCodec, shape: TemplateShape) -> None:
        self._codec = codec
        start, going = shape.user_end, shape.going
        answer_at = going.index(shape.sentinels.assistant)
        answer_end = answer_at + len(shape.sentinels.assistant)
        said_at = shape.said.index(shape.sentinels.assistant)
        self.user_closer = self._piece(shape.closed_user, start, len(shape.closed_user))
        opening = self._piece(going, start, answer_at)
        last_opening = self._piece(shape.said, start, said_at)
        prompt = self._piece(shape.opened, start, len(shape.opened))[len(self.user_closer) :]
        header = opening[len(self.user_closer) :]
        self.assistant = (
            header[: shared_length(header, prompt)].rstrip(_SPECIAL).strip()
            or header.strip()
            or prompt.strip()
            or self.user_closer.strip()  # templates that open the answer by closing the question
        )
        user_start = answer_end + len(shape.closer)
        self.user = self._piece(going, user_start, going.index(shape.sentinels.next_user)).strip()
        if self.assistant in self.user:  # an empty one too
            raise not_appendable("nothing in it marks where an assistant turn begins")
        self.header = opening[opening.rfind(self.assistant) :]
        self.last_header = last_opening[last_opening.rfind(self.assistant) :]
        self.last_closer = self._piece(shape.said, said_at + len(shape.sentinels.assistant), len(shape.said))
        # From its closing special token on, a context may stop anywhere; a closer without one must be whole.
        self.end_token = self._end_token(shape.closer)
        length = len(shape.closer)
        first = length if self.end_token is None else max(self.end_token, length - _CLOSER_CUTS)
        cuts = {*range(first, length + 1), length if self.end_token is None else self.end_token}
        self.closers = [(cut, self._piece(going, answer_end, answer_end + cut)) for cut in sorted(cuts, reverse=True)]

    def _piece(self, text: str, start: int, end: int) -> bytes:
        """`text[start:end]` marked as it is tokenized behind what precedes it."""
        before = marked(self._codec, self._codec.encode(text[:start]))
        return marked(self._codec, self._codec.encode(text[:end]))[len(before) :]

    def _end_token(self, closer: str) -> int | None:
        """Where the closer's first special token ends, in characters; None if it has none."""
        ids, spans = self._codec.encode_spans(closer, continuing=True)
        for token, (_, end) in zip(ids, spans, strict=True):
            if token in self._codec.special_ids:
                return end
        return None


def locate(codec: TextCodec, shape: TemplateShape, context: Sequence[int], render: Renderer) -> Closed | Open:
    """Says how the context ends; TurnOpen if inside a turn that is not the assistant's."""
    markers = Markers(codec, shape)
    tail, assistant, user = _last_turn(codec, markers, context)
    length = len(shape.closer)
    bare = assistant < 0 and user < 0
    if markers.end_token is not None:
        for cut, piece in markers.closers:
            if tail.endswith(piece):
                return Closed(length - cut, bare)
    if markers.last_closer.strip() and tail.endswith(markers.last_closer):
        return Closed(0, bare)
    if context and context[-1] in codec.eos_ids:
        # The model ended its turn with another EOS id than the template's: that one stands for it.
        return Closed(length - (markers.end_token or 0), bare)
    if assistant > user:
        said = tail[assistant:]
        if markers.end_token is None:
            nothing_said = markers.header.startswith(said)
            if not nothing_said and tail.endswith(markers.closers[0][1]):
                return Closed(0, bare)
        elif markers.closers[-1][1] in said:
            raise TurnOpen("the context goes on after its last assistant turn has ended", hint=RAW_HINT)
        return Open(_completion(markers, said))
    if user > assistant and tail.endswith(markers.user_closer):
        return Closed(0, bare)
    if bare and _ends_system_turn(codec, shape, tail, render):
        return Closed(0, bare)
    raise TurnOpen("the context ends inside a turn that is not the assistant's", hint=RAW_HINT)


def _last_turn(codec: TextCodec, markers: Markers, context: Sequence[int]) -> tuple[bytes, int, int]:
    """(marked tail, where the last assistant turn begins in it, where the last user turn does); -1 for none."""
    for window in (*_WINDOWS, len(context)):
        tail = marked(codec, context[-window:] if window else ())
        assistant = tail.rfind(markers.assistant)
        user = tail.rfind(markers.user) if markers.user else -1
        if assistant >= 0 or user >= 0 or window >= len(context):
            break
    return tail, assistant, user


def _completion(markers: Markers, said: bytes) -> str:
    """What is missing of the header if nothing has been said yet, an open empty reasoning block included."""
    for header in (markers.header, markers.last_header):
        if header.startswith(said):
            return header[len(said) :].replace(_SPECIAL, b"").decode(errors="replace")
    return ""


def _ends_system_turn(codec: TextCodec, shape: TemplateShape, tail: bytes, render: Renderer) -> bool:
    """For templates whose system turn closes in its own way or not at all."""
    system = shape.lead[0]
    rendered = render.attempt([system]) if len(shape.lead) > 1 else None
    if rendered is None or rendered.count(system.content) != 1:
        return False
    end = rendered.index(system.content) + len(system.content)
    before, whole = codec.encode(rendered[:end]), codec.encode(rendered)
    return tail.endswith(marked(codec, whole)[len(marked(codec, before)) :])
