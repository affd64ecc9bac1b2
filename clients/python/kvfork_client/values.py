"""What a server says, as plain values. Owns the result nouns and their enums; knows nothing of protobuf or gRPC.

Counts are tokens, sizes are bytes, times are seconds as float, moments are timezone-aware `datetime`s. Every enum has a
zero member, which is also what a number becomes that a newer server may send.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

S = TypeVar("S")  # SnapshotInfo on the wire's side, a Snapshot handle on the caller's


class WireEnum(enum.Enum):
    """An enum whose numbers are the contract's; unknown numbers read as 0 instead of failing."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls(0) if isinstance(value, int) and value != 0 else None


class Residency(WireEnum):
    """Where a snapshot's model state is, which is what its next use costs."""

    UNSPECIFIED = 0
    MEMORY = 1  # nothing to load
    DISK = 2  # a load, and less than one block of compute
    TOKENS = 3  # a full prefill


class FinishReason(WireEnum):
    """Why a generation ended well."""

    UNSPECIFIED = 0
    EOS = 1
    STOP = 2  # a stop string or id of the request, told in Finished
    MAX_TOKENS = 3
    CONTEXT_FULL = 4
    TIME_LIMIT = 5
    STOPPED = 6  # by stop()


class MissReason(WireEnum):
    """Why tokens were computed again."""

    NONE = 0
    BETWEEN_CHECKPOINTS = 1
    EVICTED = 2
    NOT_WRITTEN = 3
    CORRUPT = 4
    CHEAPER_TO_COMPUTE = 5
    PROVENANCE = 6
    THINNED = 7


class Channel(WireEnum):
    """What generated text is; ANSWER also for models that do not tell channels apart."""

    ANSWER = 0
    REASONING = 1
    TOOL_CALL = 2


class GoneReason(WireEnum):
    """Why a snapshot went away."""

    UNSPECIFIED = 0
    DELETED = 1
    ROLLED_BACK = 2
    EXPIRED = 3
    EVICTED = 4
    CORRUPT = 5
    UNLISTED = 6  # it is there, without the labels that the watch asks for


class Admission(WireEnum):
    """What would become of a call."""

    UNSPECIFIED = 0
    NOW = 1
    QUEUED = 2  # taken, and would wait
    REFUSED = 3


class Phase(WireEnum):
    """Where a sequence is."""

    UNSPECIFIED = 0
    QUEUED = 1
    RESTORING = 2
    PREFILL = 3
    DECODE = 4
    SAVING = 5


class ModelState(WireEnum):
    """Whether a model can be used."""

    UNSPECIFIED = 0
    LOADING = 1
    READY = 2
    FAILED = 3


class HealthStatus(WireEnum):
    """What the health service says of one service."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """A snapshot as it was when the server answered. The name is the handle; the rest may have moved on."""

    name: str
    parent: str = ""  # empty for a root; may be gone
    model: str = ""
    model_fingerprint: str = ""
    token_count: int = 0
    checkpointed_tokens: int = 0  # of token_count: in the checkpoint store
    prefix_hash: bytes = b""  # equal hashes mean equal prefixes
    image_spans: tuple[tuple[int, int], ...] = ()  # half-open token ranges that no rollback cuts
    residency: Residency = Residency.UNSPECIFIED
    durable: bool = False
    expire_time: dt.datetime | None = None  # never earlier; later if used meanwhile
    pinned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    create_time: dt.datetime | None = None
    last_use_time: dt.datetime | None = None
    exclusive_bytes: int = 0  # freed if only this snapshot were deleted
    instance: str = ""
    active_uses: int = 0
    state_revision: int = 0  # counts up when lost state came back with other last bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The receipt of one call: prompt = cached + recomputed + new, counted where the model is called."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    image_tokens: int = 0
    completion_tokens: int = 0
    memory_tokens: int = 0  # of cached_tokens
    disk_tokens: int = 0  # of cached_tokens
    disk_bytes_read: int = 0
    diverged_at: int | None = None  # first position outside every stored chain; None: it never left them
    miss_reason: MissReason = MissReason.NONE
    grid_tokens: int = 0  # of recomputed_tokens: past the last checkpoint's place, the others for lack of state
    state_remade: bool = False  # lost state of the parent came back with other last bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds by phase, as the server measured them."""

    queue: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A generation was admitted. Until this event nothing was computed."""

    generation: str
    instance: str = ""
    prompt_tokens: int = 0
    seed: int = 0
    queue_time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prefill so far."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float  # natural log
    token_bytes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The natural log probability of a generated token, and its alternatives."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output. `first_position` is what rolls back to just before it."""

    text: str
    first_position: int = 0
    token_count: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    channel: Channel = Channel.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSummary:
    """What is in an export; sizes in bytes.

    Of `snapshot`'s tokens, the state of `state_tokens` travels or is held by the other side. The rest is computed again
    where it is used.
    """

    snapshot: SnapshotInfo
    records: int
    held_records: int
    bytes: int
    state_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCheck:
    """What of an export a server holds already, to be left out of it, and how much is missing."""

    held: tuple[bytes, ...]
    missing_records: int
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported(Generic[S]):
    """A snapshot that came from another server, what came with it, and how much of it was there already."""

    snapshot: S
    received_records: int
    received_bytes: int
    held_records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked(Generic[S]):
    """A mark was passed. Without a snapshot, `save_error_reason` says why it could not be kept."""

    mark: int
    snapshot: S | None = None
    save_error_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Generic[S]):
    """The end of a generation. `snapshot` is set if it was asked for and could be kept."""

    reason: FinishReason
    stop: str | None = None
    stop_token_id: int | None = None
    snapshot: S | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    save_error_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(Generic[S]):
    """A whole generation, by channel: `text` is the answer. `token_ids` only if they were asked for."""

    text: str
    finished: Finished[S]
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: str = ""  # as the model writes them, one after the other

    @property
    def snapshot(self) -> S | None:
        return self.finished.snapshot

    @property
    def usage(self) -> Usage:
        return self.finished.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """What CreateSnapshot made; `marked` follows the order of the marks."""

    snapshot: SnapshotInfo
    usage: Usage
    marked: tuple[SnapshotInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """What Fork made, in the order of the branches."""

    snapshots: tuple[SnapshotInfo, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What Rollback made and let go of."""

    snapshot: SnapshotInfo
    usage: Usage
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """What ExtendSnapshots prolonged. Missing names are no error: look at them."""

    snapshots: tuple[SnapshotInfo, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Changed(Generic[S]):
    """A snapshot is new, or is otherwise now."""

    snapshot: S


@dataclass(frozen=True, slots=True)
class Gone:
    """A snapshot went away."""

    name: str
    reason: GoneReason


@dataclass(frozen=True, slots=True)
class Synced:
    """All that was there has been told; what follows is news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """The size of an input. `text` and `token_ids` only if the rendered form was asked for."""

    total_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0
    remaining_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a call would meet now: cached + recomputed + new = total. A prediction is None until something was measured.

    `ttft` is from admission, were nothing else running. `reason`: why it would not begin at once.
    """

    total_tokens: int
    cached_tokens: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    miss_reason: MissReason = MissReason.NONE
    memory_bytes: int = 0
    disk_bytes: int = 0
    load: float | None = None
    prefill: float | None = None
    ttft: float | None = None
    admission: Admission = Admission.UNSPECIFIED
    reason: str = ""
    need_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a model uses where a request leaves a knob unset; None: the server does not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class CallSyntax(WireEnum):
    """How a tool call is spelled between its marks."""

    UNSPECIFIED = 0
    JSON = 1
    TAGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallForm:
    """How a model writes a tool call."""

    opening: str
    closing: str
    syntax: CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model the server knows."""

    name: str
    fingerprint: str = ""
    state: ModelState = ModelState.UNSPECIFIED
    context_tokens: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    vision: bool = False
    trimmable: bool = False
    tells_reasoning: bool = False  # apart from the answer, by Delta.channel
    tells_tool_calls: bool = False
    tool_call_form: ToolCallForm | None = None
    bytes_per_token: int = 0
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server refuses."""

    max_request_bytes: int = 0
    max_image_bytes: int = 0
    max_images: int = 0
    max_image_pixels: int = 0
    max_fork_branches: int = 0
    max_queue: int = 0
    max_batch: int = 0
    max_snapshots: int = 0
    max_pinned: int = 0
    max_ttl: float = 0.0
    max_watches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The process that answers. `instance` outlives a restart of a durable store, `boot_id` does not."""

    instance: str
    boot_id: str = ""
    version: str = ""
    features: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    uptime: float = 0.0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence of the caller's that runs or waits."""

    generation: str = ""  # empty for a snapshot being made
    phase: Phase = Phase.UNSPECIFIED
    parent: str = ""
    prompt_tokens: int = 0
    done_tokens: int = 0
    completion_tokens: int = 0
    age: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Scheduler, memory and store in numbers; counters run since the server started."""

    checkpoint_interval: int = 0
    active_sequences: int = 0
    queued_calls: int = 0
    memory_snapshots: int = 0
    disk_snapshots: int = 0
    token_snapshots: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    checkpoints_written: int = 0
    checkpoints_read: int = 0
    checkpoints_corrupt: int = 0
    evictions: int = 0
    checkpoint_policy: str = ""  # through, marks or off
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
    active_bytes: int = 0  # reserved by running sequences
    active_limit_bytes: int = 0
    evictions_by_tier: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()  # the caller's own, oldest first
    owner: str = ""  # whose snapshots and calls alone are counted; empty: the whole server's
    images_encoded: int = 0
    image_bytes: int = 0
    image_limit_bytes: int = 0
