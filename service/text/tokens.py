"""Token ids to bytes and text to ids for one model folder. Owns the vocabulary's meaning; knows no chat and no stream.

The bytes of a token are decided from the tokenizer's decoder, not by decoding ids one by one: `decode` drops leading
spaces and half characters, and a stream needs both.
"""

from __future__ import annotations

import enum
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvcache.media import IMAGE
from service.errors import InvalidField
from service.request import RawInput, TextPart, TokenPart
from service.text.waiting import go_on

Span = tuple[int, int]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Texts that stand in front of a continuation while it is encoded; the first whose own ids survive is used.
_GUARDS = ("\n", "a", ".", "0")


def spans_of(backend: Any, text: str, guards: Sequence[str] = ()) -> tuple[list[int], list[Span]]:
    """(ids, the [start, end) characters of `text` that each came from). `backend`: of the package tokenizers.

    `guards`: put before the text, one by one, until one does not melt with it; for text that follows other tokens.
    """
    for guard in guards:
        head = backend.encode(guard, add_special_tokens=False).ids
        (whole,) = backend.encode_batch([guard + text], add_special_tokens=False)
        if whole.ids[: len(head)] == head:
            skip = len(guard)
            return whole.ids[len(head) :], [(a - skip, b - skip) for a, b in whole.offsets[len(head) :]]
    # A batch of one: unlike `encode`, it lets go of the GIL, and a text can be megabytes long.
    (encoding,) = backend.encode_batch([text], add_special_tokens=False)
    return encoding.ids, encoding.offsets


class TokenizerUnusable(Exception):
    """The folder has no tokenizer that this service can use; the text says why."""


class Alphabet(enum.Enum):
    """How the tokenizer spells bytes."""

    BYTE_LEVEL = 1  # each byte is one printable character
    SENTENCEPIECE = 2  # "▁" is a space, "<0x0A>" is a byte
    OTHER = 3  # asked of the tokenizer's own decode


class TextCodec:
    """One model's tokenizer. Immutable after `load`; every method may be called from any thread.

    `vocab_size` is the number of ids that the model has rows for (config.json; the tokenizer's own count without one).
    """

    def __init__(
        self, tokenizer: Any, *, eos_ids: frozenset[int], vocab_size: int | None = None
    ) -> None:  # tokenizer: a transformers fast tokenizer
        backend = tokenizer.backend_tokenizer
        # Encoding must not depend on settings left in the file, and nobody may change them later: with both off for
        # good, `encode` only reads and needs no lock.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _alphabet(backend)
        signature = inspect.signature(tokenizer.apply_chat_template)
        self._reserved_vars = {"messages", *signature.parameters} - {"tools", "documents"}
        self.added_ids = frozenset(self._added)
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self.vocab_size = vocab_size or max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._added_ids_of = {str(added.content): token for token, added in self._added.items()}
        self.eos_ids = eos_ids
        self.bos_id: int | None = tokenizer.bos_token_id
        self.has_template = tokenizer.chat_template is not None
        self.template_source = _template_text(tokenizer.chat_template)
        plain = self.encode("a")
        whole: list[int] = backend.encode("a", add_special_tokens=True).ids
        at = _find(whole, plain)
        if at is None:
            raise TokenizerUnusable("the tokenizer's special tokens change the text between them")
        self._before, self._after = whole[:at], whole[at + len(plain) :]
        # SentencePiece habit: a space is put before whatever text is encoded.
        self.guards = _GUARDS if self.bytes_of(plain) != b"a" else ()

    @classmethod
    def load(cls, folder: Path, extra_eos: Iterable[int] = ()) -> TextCodec:
        """Reads `tokenizer.json` and its companions from `folder`; TokenizerUnusable if that can't be done."""
        # Without this, importing transformers advises on standard error that PyTorch is missing; it isn't needed.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a foreign folder can fail in any way; the caller needs one
            raise TokenizerUnusable(f"the tokenizer in {folder.name} can't be read: {error}") from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TokenizerUnusable(f"the tokenizer in {folder.name} has no fast form (tokenizer.json)")
        config = _read_json(folder / "config.json")
        eos = set(extra_eos)
        for source in (_read_json(folder / "generation_config.json"), config, _inner(config)):
            eos |= _ids(source.get("eos_token_id"))
        eos |= _ids(tokenizer.eos_token_id)
        vocab_size = config.get("vocab_size") or _inner(config).get("vocab_size")
        return cls(tokenizer, eos_ids=frozenset(eos), vocab_size=vocab_size if isinstance(vocab_size, int) else None)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of `text`. Special tokens' own texts ("<|im_start|>") become those tokens wherever they stand.

        `special` adds what the tokenizer puts around a whole text (BOS, for some EOS).
        """
        ids = self.encode_spans(text)[0]
        return [*self._before, *ids, *self._after] if special else ids

    def encode_continuation(self, text: str) -> list[int]:
        """Like `encode`, for text that follows other tokens: no space is put before it."""
        return self.encode_spans(text, continuing=True)[0]

    def encode_spans(self, text: str, *, continuing: bool = False) -> tuple[list[int], list[Span]]:
        """(ids, the [start, end) characters of `text` that each came from)."""
        go_on()
        return spans_of(self._backend, text, self.guards if continuing and text else ())

    def encode_raw(self, raw: RawInput, *, with_parent: bool) -> list[int]:
        """Parts joined as they are: neighbouring texts are one text, token runs are taken verbatim.

        Images must have become token runs. Ids are not checked against `vocab_size`. InvalidField for
        `add_special_tokens` with a parent.
        """
        if raw.add_special_tokens and with_parent:
            raise InvalidField.at("input.raw.add_special_tokens", "must be false with a parent")
        ids: list[int] = []
        text = ""
        begun = with_parent
        for part in (*raw.parts, None):
            if isinstance(part, TextPart):
                text += part.text
                continue
            if text:
                ids += self.encode_spans(text, continuing=begun)[0]
                text, begun = "", True
            if part is not None:
                assert isinstance(part, TokenPart)
                ids += part.ids
                begun = begun or bool(part.ids)
        return [*self._before, *ids, *self._after] if raw.add_special_tokens else ids

    @cached_property
    def longest_token_bytes(self) -> int:
        """The most bytes of text that one token can stand for."""
        return max((len(self.token_bytes(token)) for token in self._backend.get_vocab().values()), default=1)

    @property
    def tokenizer_file(self) -> str:
        """The text of a tokenizer.json that tokenizes as this codec does."""
        return str(self._backend.to_str())

    def added_id(self, text: str) -> int | None:
        """The id of an added token by its text; None if there is none."""
        return self._added_ids_of.get(text)

    def holds_special(self, text: str) -> bool:
        """Whether `text` becomes special tokens, in part at least."""
        return any(token in self.special_ids for token in self.encode_continuation(text))

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to the text: often less than a character; empty for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            if token >= IMAGE:  # no text, and too many to remember
                return b""
            known = self._bytes[token] = self._look_up(token)
        return known

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a run of tokens."""
        return b"".join([self.token_bytes(token) for token in tokens])

    def text_of(self, tokens: Iterable[int]) -> str:
        """The text of a run of tokens; broken characters as U+FFFD."""
        return self.bytes_of(tokens).decode(errors="replace")

    def render_template(
        self, turns: Sequence[Mapping[str, object]], variables: Mapping[str, object], *, generation_prompt: bool
    ) -> str:
        """The model's own chat template over `turns`. Raises whatever the template raises, ValueError for a variable
        that would steer the renderer instead of the template."""
        for name in sorted(self._reserved_vars & variables.keys()):
            raise ValueError(f'"{name}" is not a template variable')
        rendered = self._tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=generation_prompt, **variables
        )
        if not isinstance(rendered, str):
            raise TypeError("the template gave no text")
        return rendered

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template takes a message's content as a list of parts only, and loses a plain text."""
        probe = "kvforkprobe"
        return not self._shows(probe, probe) and self._shows([{"type": "text", "text": probe}], probe)

    def _shows(self, content: object, probe: str) -> bool:
        try:
            return probe in self.render_template([{"role": "user", "content": content}], {}, generation_prompt=False)
        except Exception:  # a foreign program may refuse this in any way; the real turns will say why
            return False

    def _look_up(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            # SentencePiece models keep runs of spaces ("▁▁▁") among the ordinary added tokens.
            as_spaces = self._alphabet is Alphabet.SENTENCEPIECE and not added.special
            return str(added.content).replace("▁", " " if as_spaces else "▁").encode()
        piece: str | None = self._backend.id_to_token(token) if 0 <= token < 2**32 else None
        if piece is None:
            return b""
        match self._alphabet:
            case Alphabet.BYTE_LEVEL:
                values = [_BYTE_OF.get(character) for character in piece]
                # Like the tokenizer's own decoder: a piece with a foreign character stands for itself.
                return piece.encode() if None in values else bytes(value for value in values if value is not None)
            case Alphabet.SENTENCEPIECE:
                byte = _BYTE_PIECE.fullmatch(piece)
                return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
            case Alphabet.OTHER:
                return self._decoded(token)

    def _decoded(self, token: int) -> bytes:
        # Decoders join differently at the start of a text; an ordinary token in front shows the middle.
        anchor = self._backend.encode("a", add_special_tokens=False).ids
        head = self._backend.decode(anchor, skip_special_tokens=False)
        whole = self._backend.decode([*anchor, token], skip_special_tokens=False)
        if not whole.startswith(head):
            head, whole = "", self._backend.decode([token], skip_special_tokens=False)
        return str(whole[len(head) :]).encode()


def _alphabet(backend: Any) -> Alphabet:
    stages = _stages(backend.decoder)
    kinds = {stage.get("type") for stage in stages}
    if "ByteLevel" in kinds:
        return Alphabet.BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"} or any(
        stage.get("type") == "Replace" and stage.get("content") == " " for stage in stages
    ):
        return Alphabet.SENTENCEPIECE
    return Alphabet.OTHER


def _stages(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    stages: list[dict[str, Any]] = state.get("decoders", [state])
    return stages


def _byte_characters() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTE_OF = _byte_characters()


def _find(whole: Sequence[int], part: Sequence[int]) -> int | None:
    for at in range(len(whole) - len(part) + 1):
        if list(whole[at : at + len(part)]) == list(part):
            return at
    return None


def _template_text(template: object) -> str:
    """A chat template's source; of several named ones, all of them."""
    named = template.values() if isinstance(template, dict) else (template,)
    return "\n".join(text for text in named if isinstance(text, str))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{path.name} can't be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _inner(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _ids(value: object) -> set[int]:
    """An id, a list of ids or nothing, as configs have them."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}
