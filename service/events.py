"""What a call can say back. Owns the values that streams and replies are made of; knows nothing of protobuf."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcache.receipt import MissReason, Usage


class Residency(enum.Enum):
    """Where a snapshot's state lives."""

    MEMORY = 1
    DISK = 2
    TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """A snapshot as its owner sees it at one moment. Times are Unix seconds, sizes bytes."""

    name: str  # "snapshots/{id}"
    parent: str  # "" for a root
    model: str  # "models/{id}"
    model_fingerprint: str
    token_count: int
    image_spans: tuple[tuple[int, int], ...] = ()  # [start, end), in order
    checkpointed_tokens: int
    prefix_hash: bytes
    residency: Residency
    durable: bool
    expire_time: float | None  # None while pinned
    pinned: bool
    labels: tuple[tuple[str, str], ...]
    create_time: float
    last_use_time: float
    exclusive_bytes: int
    instance: str
    active_uses: int
    state_revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Admitted: the first event."""

    generation: str  # "generations/{id}"
    instance: str
    prompt_tokens: int
    seed: int
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill so far."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative token."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, after penalties and bias, before temperature) of one token."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[TopLogprob, ...] = ()


class TextChannel(enum.Enum):
    """What generated text is."""

    ANSWER = 0  # also for models that do not tell channels apart
    REASONING = 1
    TOOL_CALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output of one channel. `text` is always valid UTF-8 and may lag `token_count`."""

    text: str
    first_position: int
    token_count: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    channel: TextChannel = TextChannel.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A mark was passed; `snapshot` is None when it could not be kept."""

    mark: int
    snapshot: SnapshotView | None
    save_error_reason: str = ""


class FinishReason(enum.Enum):
    """Why a generation ended well."""

    EOS = 1
    STOP = 2
    MAX_TOKENS = 3
    CONTEXT_FULL = 4
    TIME_LIMIT = 5
    STOPPED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds by phase."""

    queue: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Ended well: the last event."""

    reason: FinishReason
    usage: Usage
    timing: Timing
    stop: str | None = None
    stop_token_id: int | None = None
    snapshot: SnapshotView | None = None
    save_error_reason: str = ""


Event = Started | Progress | Delta | Marked | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """Result of CreateSnapshot."""

    snapshot: SnapshotView
    usage: Usage
    marked: tuple[SnapshotView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Result of Fork; children in the order of the branches."""

    snapshots: tuple[SnapshotView, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """Result of Rollback."""

    snapshot: SnapshotView
    released: tuple[str, ...]
    usage: Usage


class Admission(enum.Enum):
    """What would become of a call."""

    NOW = 1
    QUEUED = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the scheduler foresees for calls that might come, all together.

    `reason`: why not at once; ROWS_BUSY or an error's reason.
    """

    admission: Admission
    reason: str
    need_bytes: int  # of working state, for all of them
    free_bytes: int  # reserved by nobody; `need_bytes` where memory is unbounded


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What a call would meet now. Seconds; None: not measured yet."""

    memory_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    new_tokens: int
    miss_reason: MissReason
    memory_bytes: int
    disk_bytes: int
    load_seconds: float | None
    prefill_seconds: float | None
    forecast: Forecast

    @property
    def ttft_seconds(self) -> float | None:
        """From admission to the first token, were nothing else running."""
        if self.load_seconds is None or self.prefill_seconds is None:
            return None
        return self.load_seconds + self.prefill_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Result of CountTokens."""

    total_tokens: int
    image_tokens: int = 0
    cached_tokens: int
    remaining_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    plan: PlanView | None = None


class WhyGone(enum.Enum):
    """Why a watch shows a snapshot no longer."""

    DELETED = 1
    ROLLED_BACK = 2
    EXPIRED = 3
    UNLISTED = 6  # it is there, without the labels


@dataclass(frozen=True, slots=True)
class Changed:
    """A snapshot is new, or is otherwise now."""

    snapshot: SnapshotView


@dataclass(frozen=True, slots=True)
class Gone:
    """A snapshot went away."""

    name: str
    reason: WhyGone


@dataclass(frozen=True, slots=True)
class Synced:
    """The listing is over, or a watch goes on."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Nothing to tell for a while."""


@dataclass(frozen=True, slots=True)
class Watched:
    """One message of a watch; `resume_token` is empty during the listing."""

    event: Changed | Gone | Synced | Bookmark
    resume_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportView:
    """What is in an export; sizes in bytes."""

    snapshot: SnapshotView
    records: int
    held_records: int  # left out
    bytes: int
    state_tokens: int


@dataclass(frozen=True, slots=True)
class ExportPiece:
    """The next bytes of an export. `about` comes with the first."""

    data: bytes = field(repr=False)
    about: ExportView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCheck:
    """What of an export is here already, by record ids of 33 bytes."""

    held: tuple[bytes, ...]
    missing_records: int
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A snapshot that came from another instance, and what came with it."""

    snapshot: SnapshotView
    received_records: int
    received_bytes: int
    held_records: int


class ModelState(enum.Enum):
    """Whether a model can be used."""

    LOADING = 1
    READY = 2
    FAILED = 3


class CallSyntax(enum.Enum):
    """How a tool call is spelled between its marks."""

    JSON = 1
    TAGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes a tool call; all of it is text, so that a grammar can have it."""

    opening: str
    closing: str
    syntax: CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model. Everything below `state` is zero or empty until it is READY."""

    name: str  # "models/{id}"
    state: ModelState
    fingerprint: str = ""
    context_tokens: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    trimmable: bool = False
    vision: bool = False
    tells_reasoning: bool = False  # apart from the answer
    tells_tool_calls: bool = False
    call_form: CallForm | None = None
    bytes_per_token: int = 0
    default_temperature: float = 0.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsView:
    """What is refused."""

    max_request_bytes: int
    max_image_bytes: int
    max_images: int
    max_image_pixels: int
    max_fork_branches: int
    max_queue: int
    max_batch: int
    max_snapshots: int
    max_pinned: int
    max_ttl: float
    max_watches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """The process."""

    instance: str
    boot_id: str
    version: str
    features: tuple[str, ...]
    limits: LimitsView
    uptime: float
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """A sequence under way, as its owner sees it. `age` in seconds."""

    row: int  # the process's own number
    phase: str  # queued, restoring, prefill, decode or saving
    prompt_tokens: int
    done_tokens: int
    completion_tokens: int
    age: float
    priority: int
    generation: str = ""  # "generations/{id}"
    parent: str = ""  # "snapshots/{id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsView:
    """Scheduler, memory and store in numbers."""

    checkpoint_interval: int
    active_sequences: int
    queued_calls: int
    memory_snapshots: int
    disk_snapshots: int
    token_snapshots: int
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    checkpoints_written: int
    checkpoints_read: int
    checkpoints_corrupt: int
    evictions: int
    checkpoint_policy: str = ""
    checkpoints_skipped: Mapping[str, int] = field(default_factory=dict)  # by reason
    pending_bytes: int = 0  # accepted, on their way to disk
    written_today_bytes: int = 0
    daily_write_limit_bytes: int | None = None
    write_errors: int = 0
    writes_paused: bool = False
    last_write_error: str = ""
    restoring_rows: int = 0
    prefilling_rows: int = 0
    decoding_rows: int = 0
    saving_rows: int = 0
    completion_tokens: int = 0
    active_bytes: int = 0
    active_limit_bytes: int = 0
    evictions_by_tier: Mapping[str, int] = field(default_factory=dict)
    images_encoded: int = 0
    image_bytes: int = 0
    image_limit_bytes: int = 0
