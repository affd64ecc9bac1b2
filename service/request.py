"""What callers ask for, as plain values. Owns the nouns of a call; knows nothing of protobuf, MLX or time.

A *call* is what a client sent, validated but not yet resolved: names are not looked up and text is not tokenized.
`service.core` resolves calls into `service.sequence` work. Unset sampling knobs are `None` until the model's
defaults fill them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcache.origin import Origin


class Role(enum.Enum):
    """Speaker of a chat turn; the value is the name that chat templates use."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class TextPart:
    """UTF-8 text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Token ids taken verbatim."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """A picture: an encoded file, or the SHA-256 of one that was sent before. Exactly one of the two."""

    data: bytes | None = field(default=None, repr=False)
    sha256: bytes | None = None  # 32 bytes
    mime_type: str = ""  # one of MIME_TYPES; empty: what the file says


MIME_TYPES = ("image/png", "image/jpeg", "image/webp")

Part = TextPart | TokenPart | ImagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class RawInput:
    """Parts joined as they are: no template."""

    parts: tuple[Part, ...]
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn."""

    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """Turns to render with the model's template; with a parent only the turns to append."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_vars: dict[str, object] = field(default_factory=dict)


Input = RawInput | ChatInput


def parts_of(given: Input, at: str = "input") -> Iterator[tuple[str, Part]]:
    """Every part in reading order, with its path in the request."""
    if isinstance(given, RawInput):
        for p, part in enumerate(given.parts):
            yield f"{at}.raw.parts[{p}]", part
        return
    for m, message in enumerate(given.messages):
        for p, part in enumerate(message.parts):
            yield f"{at}.chat.messages[{m}].parts[{p}]", part


def images_of(given: Input | None, at: str = "input") -> list[tuple[str, ImagePart]]:
    """The images in reading order, with their paths."""
    if given is None:
        return []
    return [(f"{path}.image", part) for path, part in parts_of(given, at) if isinstance(part, ImagePart)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is picked. `None` means the model's default."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # (0, 1]
    top_k: int | None = None  # 0 is off
    min_p: float | None = None  # [0, 1)
    repetition_penalty: float | None = None  # > 0, 1 is off; over the whole context
    frequency_penalty: float | None = None  # over generated tokens
    presence_penalty: float | None = None  # over generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # uint32; None: drawn by the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a generation ends."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    time_limit: float | None = None  # seconds from the first new token's prefill on


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the stream carries."""

    token_ids: bool = False
    top_logprobs: int | None = None  # None: no log-probabilities at all; 0: the chosen token's only
    min_tokens_per_delta: int = 1
    progress: bool = False


class Form(enum.Enum):
    """What a constraint is written in; the value is its field's name."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A form that the new text must have: `text`, or one of `options` for CHOICE."""

    form: Form
    text: str = ""
    options: tuple[str, ...] = ()
    after_reasoning: bool = False


class Durability(enum.Enum):
    """How safe a snapshot must be before its call returns."""

    MEMORY = 1
    DISK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to keep a new snapshot."""

    snapshot_id: str = ""  # empty: server-chosen
    ttl: float | None = None  # seconds; None: the server's default
    pinned: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    durability: Durability = Durability.MEMORY
    lineage: tuple[str, ...] = ()  # of one that comes from another instance: ids that it was derived from
    origins: tuple[Origin, ...] = ()  # likewise: the calls that brought its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCall:
    """A snapshot to write out. `held`: records to leave out, by their ids."""

    name: str
    manifest_only: bool = False
    held: frozenset[bytes] = frozenset()


class Landmark(enum.Enum):
    """A place in a context known by its role."""

    PROMPT_END = 1
    REASONING_START = 2
    REASONING_END = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place whose state is kept exactly as the context passes it. Exactly one of the three places is set."""

    token_count: int | None = None
    message_count: int | None = None
    landmark: Landmark | None = None
    options: SaveOptions = SaveOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """`InferenceService.Generate`."""

    model: str = ""
    parent: str = ""
    input: Input | None = None
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    output: Output = Output()
    save: SaveOptions | None = None
    save_on_cancel: bool = False
    max_recompute_tokens: int | None = None
    marks: tuple[Mark, ...] = ()
    constraint: Constraint | None = None
    priority: int = 0
    request_id: str = ""
    deadline: float | None = None  # seconds left when the call arrived; None: no deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSnapshotCall:
    """`InferenceService.CreateSnapshot`."""

    model: str = ""
    parent: str = ""
    input: Input | None = None
    options: SaveOptions = SaveOptions()
    marks: tuple[Mark, ...] = ()
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One child of a fork."""

    append: Input | None = None
    options: SaveOptions = SaveOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCall:
    """`InferenceService.Fork`."""

    parent: str
    branches: tuple[Branch, ...]
    request_id: str = ""


class Rounding(enum.Enum):
    """How a cut between two checkpoints is met."""

    EXACT = 1
    DOWN = 2


class Release(enum.Enum):
    """What a rollback gives up."""

    NONE = 1
    SOURCE = 2
    ABANDONED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackCall:
    """`InferenceService.Rollback`. Exactly one of the three targets is set."""

    source: str
    token_count: int | None = None
    drop_tokens: int | None = None
    ancestor: str | None = None
    rounding: Rounding = Rounding.EXACT
    release: Release = Release.NONE
    options: SaveOptions = SaveOptions()
    max_recompute_tokens: int | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a dry run is about; `max_tokens` None is the server's default."""

    branches: int = 1
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokensCall:
    """`InferenceService.CountTokens`."""

    model: str = ""
    parent: str = ""
    input: Input | None = None
    include_rendered: bool = False
    plan: PlanOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChange:
    """New values for a snapshot; `None` leaves the value as it is."""

    name: str
    labels: tuple[tuple[str, str], ...] | None = None
    expire_time: float | None = None  # Unix seconds
    ttl: float | None = None  # seconds
    pinned: bool | None = None
