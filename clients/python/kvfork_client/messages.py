"""What a caller says, as plain values. Owns inputs, sampling, stopping, marks and how to keep snapshots.

Shorthands, wherever an input is taken: a string is raw text, `tokens([...])` raw token ids, a `Message` or a list of
them a chat. Everything else about a value (ranges, lengths) is the server's to judge: it answers InvalidArgument with
the field's path.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

Seconds = float | dt.timedelta


class Named(Protocol):
    """Anything that carries a snapshot's name: a handle or a SnapshotInfo."""

    @property
    def name(self) -> str: ...


SnapshotRef = str | Named


class Role(enum.Enum):
    """Speaker of a chat turn."""

    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4


class Durability(enum.Enum):
    """How safe a new snapshot must be before its call returns."""

    MEMORY = 1
    DISK = 2  # fsynced to the checkpoint store


class Rounding(enum.Enum):
    """How a cut between two checkpoints is met."""

    EXACT = 1  # exactly there, recomputing from the checkpoint before it if need be
    DOWN = 2  # at the nearest stored point at or before it; computes nothing


class Release(enum.Enum):
    """What a rollback gives up."""

    NONE = 1
    SOURCE = 2
    ABANDONED = 3  # every unpinned snapshot with the very tokens that are dropped


class Landmark(enum.Enum):
    """A place in a context known by its role."""

    PROMPT_END = 1
    REASONING_START = 2
    REASONING_END = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids taken verbatim."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture: an encoded PNG, JPEG or WebP file, or the SHA-256 of one sent earlier. Exactly one of the two."""

    data: bytes = b""
    sha256: bytes = b""
    mime_type: str = ""  # empty: sniffed

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.sha256):
            raise ValueError("an image needs either its data or its sha256")

    @classmethod
    def file(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the file now; the server never opens paths or URLs. Raises OSError, and ValueError if it is empty."""
        data = Path(path).read_bytes()
        if not data:
            raise ValueError(f"the file is empty: {os.fspath(path)!r}")
        return cls(data=data)

    def digest(self) -> Self:
        """The same picture by its SHA-256 alone, for calls after one that sent it; ImageNotHeld: send it again."""
        return self if self.sha256 else type(self)(sha256=hashlib.sha256(self.data).digest(), mime_type=self.mime_type)


Part = str | Tokens | Image


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn."""

    role: Role
    parts: tuple[Part, ...]

    @classmethod
    def system(cls, *parts: Part) -> Self:
        return cls(Role.SYSTEM, parts)

    @classmethod
    def user(cls, *parts: Part) -> Self:
        return cls(Role.USER, parts)

    @classmethod
    def assistant(cls, *parts: Part) -> Self:
        return cls(Role.ASSISTANT, parts)

    @classmethod
    def tool(cls, *parts: Part) -> Self:
        return cls(Role.TOOL, parts)


@dataclass(frozen=True, slots=True)
class RawInput:
    """Parts joined as they are.

    `add_special_tokens` None: the tokenizer's BOS where text opens a context, and none after a parent.
    """

    parts: tuple[Part, ...]
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Turns for the model's own template; with a parent only those to append."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None  # None: yes
    template_vars: Mapping[str, object] = field(default_factory=dict)


Input = RawInput | ChatInput
InputLike = str | Tokens | Image | Message | RawInput | ChatInput | Sequence[Message] | Sequence[Part]


def raw(*parts: Part, add_special_tokens: bool | None = None) -> RawInput:
    """Untemplated input: text, `tokens([...])` and images in reading order."""
    return RawInput(parts, add_special_tokens)


def tokens(ids: Iterable[int]) -> Tokens:
    """Token ids to take verbatim."""
    return Tokens(tuple(int(i) for i in ids))


def chat(
    messages: Message | Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    template_vars: Mapping[str, object] | None = None,
) -> ChatInput:
    """Templated input. `template_vars` (tools, enable_thinking …) must be JSON values."""
    turns = (messages,) if isinstance(messages, Message) else tuple(messages)
    return ChatInput(turns, add_generation_prompt, template_vars or {})


def as_input(value: InputLike) -> Input:
    """The full form of a shorthand. Raises TypeError for anything that is not wholly turns or wholly parts."""
    if isinstance(value, RawInput | ChatInput):
        return value
    if isinstance(value, str | Tokens | Image):
        return RawInput((value,))
    if isinstance(value, Message):
        return ChatInput((value,))
    turns: list[Message] = []
    parts: list[Part] = []
    for item in value:
        if isinstance(item, Message):
            turns.append(item)
        elif isinstance(item, str | Tokens | Image):
            parts.append(item)
        else:
            raise TypeError(f"an input holds messages or parts, not {type(item).__name__}")
    if turns and parts:
        raise TypeError("an input holds either messages or raw parts, not both")
    return RawInput(tuple(parts)) if parts else ChatInput(tuple(turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is picked. None means the model's default."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # of this call alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a generation ends. `time_limit` ends it cleanly; a call's timeout, by contrast, loses the final event."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    time_limit: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to keep a new snapshot. A chosen `snapshot_id` can be found again after a lost reply."""

    ttl: Seconds | None = None  # idle time to live; None: the server's default
    pinned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    durability: Durability | None = None  # None: the server's default (memory)
    snapshot_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place whose state is kept as the context passes it, without a second forward pass. Use the constructors."""

    tokens: int | None = None
    messages: int | None = None
    landmark: Landmark | None = None
    options: SaveOptions = field(default_factory=SaveOptions)

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.tokens, self.messages, self.landmark)) != 1:
            raise ValueError("a mark is at exactly one place")

    @classmethod
    def at(cls, tokens: int, options: SaveOptions | None = None) -> Self:
        """After this many tokens of the context, the parent included."""
        return cls(tokens=tokens, options=options or SaveOptions())

    @classmethod
    def after_message(cls, count: int, options: SaveOptions | None = None) -> Self:
        """After this many messages of the chat input."""
        return cls(messages=count, options=options or SaveOptions())

    @classmethod
    def prompt_end(cls, options: SaveOptions | None = None) -> Self:
        """After the prompt, before the first new token."""
        return cls(landmark=Landmark.PROMPT_END, options=options or SaveOptions())

    @classmethod
    def reasoning_start(cls, options: SaveOptions | None = None) -> Self:
        """Before the model's reasoning opens."""
        return cls(landmark=Landmark.REASONING_START, options=options or SaveOptions())

    @classmethod
    def reasoning_end(cls, options: SaveOptions | None = None) -> Self:
        """After the model's reasoning closes; not reached if there is none."""
        return cls(landmark=Landmark.REASONING_END, options=options or SaveOptions())


class SchemaModel(Protocol):
    """A class that knows its JSON Schema, as pydantic's models do."""

    def model_json_schema(self) -> Mapping[str, Any]: ...


Schema = str | Mapping[str, object] | SchemaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A form the new text must have. Exactly one of the four kinds; `json_schema`, `regex` and `choice` make one."""

    json_schema: Schema | None = None
    regex: str | None = None
    lark: str | None = None
    choice: Sequence[str] | None = None
    after_reasoning: bool = False  # only what follows the model's reasoning, if it has any

    def __post_init__(self) -> None:
        if sum(kind is not None for kind in (self.json_schema, self.regex, self.lark, self.choice)) != 1:
            raise ValueError("a constraint has exactly one kind")
        if isinstance(self.choice, str):
            raise TypeError("a choice is of several texts, not of one text's letters")


def json_schema(schema: Schema, *, after_reasoning: bool = False) -> Constraint:
    """JSON of this schema: a mapping, a document as text, or a class with `model_json_schema()`."""
    return Constraint(json_schema=schema, after_reasoning=after_reasoning)


def regex(pattern: str, *, after_reasoning: bool = False) -> Constraint:
    """Text that the pattern matches as a whole."""
    return Constraint(regex=pattern, after_reasoning=after_reasoning)


def choice(*options: str, after_reasoning: bool = False) -> Constraint:
    """One of these texts, word for word."""
    return Constraint(choice=options, after_reasoning=after_reasoning)
