"""The nouns of the record store. Owns how a record is named and what an answer about it looks like; no behaviour.

A record is one layer kind of one block or boundary, or an image's features: opaque bytes under a 32-byte key. Equal
names mean equal content, so a record is never overwritten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvcache.errors import RecordError, StoreError

KEY_BYTES = 32

Buffer: TypeAlias = bytes | bytearray | memoryview


class RecordKind(enum.IntEnum):
    """Which part of the model's state a record holds. The numbers are on disk: never renumber."""

    FULL = 1  # keys and values of every token of one block, all full-attention layers
    WINDOW = 2  # the last tokens of the sliding-window layers at one boundary
    STATE = 3  # recurrent state at one boundary
    LOGITS = 4  # next-token logits after a prefix
    FEATURES = 5  # what the vision tower made of one image; its key is no node's

    __hash__ = int.__hash__  # the enum's own is Python code


class NoteKind(enum.IntEnum):
    """What a durable store records about records. The numbers are on disk: never renumber."""

    NODE = 128  # the tokens of one block or tail, and what it follows
    SNAPSHOT = 129  # a handle; a later one of the same key replaces it
    TOMBSTONE = 130  # the handle of this key is gone
    MEDIA = 131  # the file of an image that a handle's prefix holds

    __hash__ = int.__hash__


class Tier(enum.Enum):
    """Where a record is held."""

    MEMORY = "memory"
    PENDING = "pending"  # accepted and in memory, on its way to disk
    DISK = "disk"


class Loss(enum.Enum):
    """Why a record that was held is not any more, without its owner's doing."""

    EVICTED = "evicted"  # for want of room, or as of no use without one that went
    NOT_WRITTEN = "not_written"  # it was accepted, and the disk did not take it
    CORRUPT = "corrupt"  # what came back from the disk did not verify


class PutResult(enum.Enum):
    """What became of one `put`."""

    STORED = "stored"
    EXISTS = "exists"
    SKIPPED_QUEUE_FULL = "queue_full"  # too many bytes wait for the disk
    SKIPPED_DISK_FULL = "disk_full"  # budget or free-space floor reached, and nothing may be evicted
    SKIPPED_DISK_ERROR = "disk_error"  # writes keep failing; the store pauses before it tries again
    SKIPPED_MEMORY_FULL = "memory_full"  # too large for the disk tier, and all of the memory tier is pinned
    SKIPPED_WRITE_BUDGET = "write_budget"  # the day's bytes are spent; records asked for by name still go
    SKIPPED_TOO_LARGE = "too_large"  # fits no tier, however empty
    SKIPPED_CLOSED = "closed"

    @property
    def held(self) -> bool:
        """True if the record is in the store after the call."""
        return self in (PutResult.STORED, PutResult.EXISTS)

    @property
    def may_pass(self) -> bool:
        """True if the same record may be taken a moment later, with nothing given up for it."""
        return self in (PutResult.SKIPPED_QUEUE_FULL, PutResult.SKIPPED_DISK_FULL, PutResult.SKIPPED_DISK_ERROR)


class RecordId(NamedTuple):
    """Name of one record: the 32-byte key of its block or tail, and the layer kind.

    A tuple, as planning a restore looks thousands of them up: it is hashed and compared without running Python code.
    """

    key: bytes
    kind: RecordKind

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.key[:8].hex()}"


class NoteId(NamedTuple):
    """Name of one note: the key of its node, or the digest of a handle's owner and id."""

    key: bytes
    kind: NoteKind

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.key[:8].hex()}"


Name: TypeAlias = RecordId | NoteId


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedName:
    """A durable snapshot, as the list of what the store should hold names it."""

    namespace: bytes  # its model's
    owner: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note to be written, sealed with the key of this id."""

    id: NoteId
    payload: bytes
    key_id: int
    name: tuple[str, str] | None = None  # owner and id, of a snapshot's note


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """All payloads asked for, in that order, or the error of the first bad record and nothing else.

    `tiers[i]` and `sizes[i]` (payload bytes) say where record i came from and what was read. Payloads are to be
    treated as read-only: those from memory are shared with the store.
    """

    payloads: list[Buffer]
    tiers: list[Tier]
    sizes: list[int]
    error: StoreError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def failed(self) -> RecordId | None:
        """The first bad record, or None: nothing failed, or not one record's fault (the store was closed)."""
        record = self.error.record if isinstance(self.error, RecordError) else None
        return record if isinstance(record, RecordId) else None

    def bytes_from(self, tier: Tier) -> int:
        return sum(size for source, size in zip(self.tiers, self.sizes, strict=True) if source is tier)

    @classmethod
    def refused(cls, error: StoreError) -> FetchResult:
        return cls(payloads=[], tiers=[], sizes=[], error=error)
