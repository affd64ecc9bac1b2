"""The language between scheduler and engine: one step's orders and what came of them. Values only.

The engine carries out a `StepPlan` in this order: leave, open, give, encode, prefill, sample, decode, close. It decides
nothing.
A row is one sequence's state inside the engine, named by a small integer that is never used twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol

from kvcache.media import MediaKey
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
    """Which tokens a row may pick. Used by the engine thread alone once the row is open.

    Answers may take their time: None says that one has not come within `wait` seconds. An exception ends the row.
    """

    def allowed(self, wait: float) -> bytes | None:
        """One bit a token, lowest first, for the next pick. Asking twice changes nothing."""
        ...

    def took(self, token: int) -> None:
        """Notes a pick. Never waits."""
        ...

    def ended(self, wait: float) -> bool | None:
        """Whether nothing can follow the last pick. Asking twice changes nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImage:
    """An image of a row's prompt, at positions [start, end): what the model sees there and computes places from."""

    start: int
    key: MediaKey
    ids: tuple[int, ...]  # see `Prepared`
    grid: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past its last position."""
        return self.start + len(self.ids)


class TowerImage(Protocol):
    """An image as a vision tower takes it: `service.media.Prepared`, whose arrays are no affair of a plan."""

    @property
    def key(self) -> MediaKey: ...
    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """One image for the vision tower; its features are kept in the engine and handed out.

    `seconds`: so long this step goes on with the tower, part by part, a part being a layer or half of one; one part is
    always made. An image that is not through then is in the result's `encoding`, and goes on with its next order.
    """

    image: TowerImage
    seconds: float = math.inf

    @property
    def key(self) -> MediaKey:
        """The image's."""
        return self.image.key


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFeatures:
    """Features that were encoded before, as they were handed out."""

    key: MediaKey
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """A new row, empty or restored. `context` is its prompt, for penalties; `images` are all of the prompt's, in order.

    For a row whose state was lost: the state alone is new; it goes on with the token it picked and its draws so far.
    """

    row: RowId
    restored: Restored | None
    sampling: Sampling | None  # None: the row never samples
    top_logprobs: int | None
    context: Sequence[int]
    constraint: TokenMask | None = None
    images: tuple[RowImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One model call for one row. `logits`: keep those of the last position, to sample from or to store.

    `tokens` are as in the context: symbols where an image is. The features of every image that they touch must be in
    the engine by then, encoded or given, in this step or an earlier one since the row was opened. `passed` are blocks
    that end inside this call, since an image that must be whole goes on beyond them.
    """

    row: RowId
    tokens: Sequence[int]
    logits: bool
    capture: Capture | None
    passed: tuple[Capture, ...] = ()


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
    give: tuple[GivenFeatures, ...] = ()
    encode: tuple[Encode, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    sample: tuple[RowId, ...] = ()  # pick a first token from the row's kept logits
    decode: Decode | None = None
    close: tuple[RowId, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.leave
            or self.open
            or self.give
            or self.encode
            or self.prefill
            or self.sample
            or self.decode
            or self.close
        )


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

    A row in `unfed` was to decode and was not fed: its constraint had not answered, so it had yet to pick from its last
    logits, or to say its pick. It may be in `picked` now, with the token that it is fed next.

    An image in `unencoded` could not be encoded, and the open rows that still needed it are in `failed`.
    """

    picked: dict[RowId, Picked] = field(default_factory=dict)
    captured: dict[RowId, Payloads] = field(default_factory=dict)
    passed: dict[RowId, tuple[Payloads, ...]] = field(default_factory=dict)  # as in the prefill call's `passed`
    encoded: dict[MediaKey, bytes | bytearray] = field(default_factory=dict)  # features, to be given again
    encoding: set[MediaKey] = field(default_factory=set)  # ordered, and not through the tower yet
    unencoded: dict[MediaKey, Exception] = field(default_factory=dict)
    failed: dict[RowId, Exception] = field(default_factory=dict)
    lost: dict[RowId, Exception] = field(default_factory=dict)
    unfed: set[RowId] = field(default_factory=set)
    prefill_tokens: int = 0  # counted at the model call
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    encode_seconds: float = 0.0
