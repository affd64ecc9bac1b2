"""The language between scheduler and engine: one step's orders and what came of them. Values only.

The engine carries out a `StepPlan` in this order: leave, open, encode, prefill, sample, decode, close. It decides
nothing.
A row is one sequence's state inside the engine, named by a small integer that is never used twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from kvcache.records import RecordKind
from service.request import Sampling

RowId = NewType("RowId", int)

Payloads = dict[RecordKind, bytes | bytearray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """State read from the store: records in path order, each with its block's start position."""

    position: int
    kinds: tuple[RecordKind, ...]
    starts: tuple[int, ...]
    payloads: tuple[bytes | bytearray | memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """State to hand out: the block (or tail) [start, end) ends where the row stands."""

    start: int
    end: int
    kinds: tuple[RecordKind, ...]


class TokenMask(Protocol):
    """Which tokens a row may pick. Used by the engine thread alone once the row is open."""

    def allowed(self) -> bytes:
        """One bit a token, lowest first, for the next pick. Asking twice changes nothing. An exception ends the row."""
        ...

    def took(self, token: int) -> bool:
        """Notes a pick; True if nothing can follow it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """A new row, empty or restored. `context` is its prompt, for penalties.

    For a row whose state was lost: the state alone is new; it goes on with the token it picked and its draws so far.
    """

    row: RowId
    restored: Restored | None
    sampling: Sampling | None  # None: the row never samples
    top_logprobs: int | None
    context: Sequence[int]
    constraint: TokenMask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One model call for one row. `logits`: keep those of the last position, to sample from or to store."""

    row: RowId
    tokens: Sequence[int]
    logits: bool
    capture: Capture | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Each row is fed the token it picked last: all in one model call, or in one for each part of `shared`."""

    rows: tuple[RowId, ...]
    shared: tuple[tuple[RowId, ...], ...] = ()  # `rows` by call, so that rows of like length share one; (): one call
    captures: dict[RowId, Capture] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step."""

    leave: tuple[RowId, ...] = ()  # out of the decode batch, so that prefill calls can follow
    open: tuple[OpenRow, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    sample: tuple[RowId, ...] = ()  # pick a first token from the row's kept logits
    decode: Decode | None = None
    close: tuple[RowId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leave or self.open or self.prefill or self.sample or self.decode or self.close)


@dataclass(frozen=True, slots=True)
class TopPick:
    """A likely alternative."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Picked:
    """A token that a row picked; log-probabilities only where asked for. `last`: its constraint lets nothing follow."""

    token: int
    logprob: float | None = None
    top: tuple[TopPick, ...] = ()
    last: bool = False


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What came of a plan. A row in `failed` has no other entry and is closed.

    A row in `lost` has no other entry either, but stays open: a decode call that it was part of failed and took its
    state along. It has picked nothing, and must be opened anew, up to the token it picked last, before it goes on.
    """

    picked: dict[RowId, Picked] = field(default_factory=dict)
    captured: dict[RowId, Payloads] = field(default_factory=dict)
    failed: dict[RowId, Exception] = field(default_factory=dict)
    lost: dict[RowId, Exception] = field(default_factory=dict)
    prefill_tokens: int = 0  # counted at the model call
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
