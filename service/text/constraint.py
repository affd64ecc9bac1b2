"""Forms that generated text must have. Owns llguidance: compiling a form, and which tokens may come next.

A form is compiled on a text thread at admission; what comes of it, one `RowConstraint`, is then used by the engine
thread alone. Tokens are told to llguidance by their bytes, so that every kind of tokenizer is the same to it. Special
tokens are never text: of them only those that end a generation can come, where the text so far is whole.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from service.errors import ConstraintFailed, InvalidField
from service.request import Constraint, Form, Stopping
from service.text.channels import Splitter
from service.text.detokenize import Detokenizer
from service.text.formats import Format
from service.text.tokens import TextCodec

MAX_KEPT = 64  # compiled forms; agents send the same ones again and again

# One line end with its indentation, or one space: a small model given free white space may write nothing else for ever.
_JSON_SPACE = r"(\n[ ]{0,40}|[ ])?"

# llguidance's own limits but one: a lexer state takes up to 2 kB, and a row must not hold half a gigabyte of them. They
# bound a compilation to some tenths of a second, and a step to some milliseconds.
_LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)

_LONGEST_MESSAGE = 400  # characters of llguidance's own error
_NOTHING_FITS = "no token fits the form any more"


class RowConstraint:
    """One generation's. A step asks `allowed`, then tells `took`; asking twice changes nothing."""

    def __init__(
        self, matcher: LLMatcher, codec: TextCodec, stopping: Stopping, gate: Splitter | None, openers: frozenset[int]
    ) -> None:
        """`gate`: tells the reasoning that may come first apart; `openers`: tokens that open it."""
        self._matcher = matcher
        self._eos_ids = codec.eos_ids
        self._stop_ids = stopping.stop_token_ids
        self._min_tokens = stopping.min_tokens
        self._eos_from = sys.maxsize if stopping.ignore_eos else stopping.min_tokens
        self._gate = gate
        self._openers = openers
        self._detokenizer = Detokenizer(codec)
        self._everything = b"\xff" * ((codec.vocab_size + 7) // 8)
        self._count = 0

    def allowed(self) -> bytes:
        """One bit a token, lowest first. Raises ConstraintFailed if none may come."""
        gate = self._gate
        if gate is None or gate.settled:
            return self._fitting()
        if gate.at_start:
            return _with(self._fitting(), self._openers)
        return _without(self._everything, self._eos_ids)  # inside the reasoning, which must end first

    def took(self, token: int) -> bool:
        """Notes the token that was picked; True if the text is complete, and nothing can follow."""
        self._count += 1
        gate = self._gate
        if gate is not None and not gate.settled:
            if not gate.at_start or token in self._openers:
                gate.push(self._detokenizer.push(token))
                return False
            gate.settle()
        if token in self._eos_ids:
            return True
        if token in self._stop_ids and self._count >= self._min_tokens:
            return False  # the end of the row, and perhaps no text of the form
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            raise _failed(self._matcher.get_error())
        return self._ended()

    def _fitting(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _failed(self._matcher.get_error())
        self._ended()
        accepts = self._matcher.is_accepting()
        if self._count + 1 < self._eos_from:
            # Where nothing but the end is left, it may come after all.
            mask = _without(mask, self._eos_ids) or mask
        if accepts and self._stop_ids and self._count + 1 >= self._min_tokens:
            mask = _with(mask, self._stop_ids)
        if not any(mask):
            raise _failed(_NOTHING_FITS)
        return mask

    def _ended(self) -> bool:
        if not self._matcher.is_stopped():
            return False
        if not self._matcher.is_accepting():
            raise _failed(_NOTHING_FITS)
        return True


class Grammars:
    """Compiles forms for one model. Any thread."""

    def __init__(self, codec: TextCodec, channels: Format) -> None:
        self._codec = codec
        self._channels = channels
        self._tokenizer: LLTokenizer | None = None  # takes a second for a large vocabulary, so not before the first use
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, constraint: Constraint, stopping: Stopping, context: Sequence[int]) -> RowConstraint:
        """The constraint of a generation behind `context`. InvalidField with what llguidance says of the form."""
        gate: Splitter | None = None
        openers: frozenset[int] = frozenset()
        if constraint.after_reasoning:
            gate = self._channels.splitter(self._codec, context, lead=True)
            opening = [self._codec.added_id(text) for text in self._channels.reasoning_marks]
            openers = frozenset(token for token in opening if token is not None)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _ll_tokenizer(self._codec)
            matcher = self._kept.get(constraint)
        if matcher is None:
            matcher = _compiled(self._tokenizer, constraint)
        with self._lock:
            self._kept[constraint] = matcher
            self._kept.move_to_end(constraint)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            own = matcher.deep_copy()
        return RowConstraint(own, self._codec, stopping, gate, openers)


def _compiled(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    try:
        matcher = LLMatcher(tokenizer, _grammar(constraint), log_level=0, limits=_LIMITS)
    except ValueError as error:
        raise _invalid(constraint, str(error)) from error
    if not matcher.is_error():
        matcher.compute_bitmask()  # the dearest one, and a form that fits nothing fails here
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise _invalid(constraint, matcher.get_error() or "no text has this form")
    return matcher


def _grammar(constraint: Constraint) -> str:
    match constraint.form:
        case Form.JSON_SCHEMA:
            schema = constraint.text
            if not schema.lstrip().startswith("{"):
                raise ValueError("must be a JSON object")
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_SPACE})
        case Form.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case Form.LARK:
            return LLMatcher.grammar_from_lark(constraint.text)
        case Form.CHOICE:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.options)))


def _ll_tokenizer(codec: TextCodec) -> LLTokenizer:
    vocabulary = cast(TokenizerWrapper, _Vocabulary(codec))  # it only has to look like one
    return LLTokenizer(vocabulary, n_vocab=codec.vocab_size, eos_token=sorted(codec.eos_ids))


class _Vocabulary:
    """A codec in the form that llguidance asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.eos_token_id = min(codec.eos_ids)
        self.bos_token_id = codec.bos_id
        self.tokens = [codec.token_bytes(token) for token in range(codec.vocab_size)]
        self.special_token_ids = sorted(token for token in codec.special_ids if token < codec.vocab_size)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data and token not in codec.special_ids}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of exactly this text: where a form leaves one way to go on, llguidance allows no other."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._codec.encode_continuation(data.decode(errors="replace"))
        return ids if self._codec.bytes_of(ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Half characters, and tokenizers that put spaces behind added tokens too; empty if no tokens spell it."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    break
            else:
                return []
            ids.append(token)
            at += length
        return ids


def _with(mask: bytes, tokens: Iterable[int]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            changed[token >> 3] |= 1 << (token & 7)
    return bytes(changed)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    """Empty if nothing is left."""
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(changed) if any(changed) else b""


def _invalid(constraint: Constraint, message: str) -> InvalidField:
    return InvalidField.at(f"constraint.{constraint.form.value}", _one_line(message))


def _failed(message: str) -> ConstraintFailed:
    return ConstraintFailed(
        f"constraint: {_one_line(message)}", hint="the form leaves nothing to write here, or is too costly to follow"
    )


def _one_line(message: str) -> str:
    if message.startswith("NoExtension"):
        return _NOTHING_FITS
    return " ".join(message.partition("<non-verbose")[0].split())[:_LONGEST_MESSAGE]
