"""What the engine thread is asked to do, and what it says back. Values only; no names, no gRPC, no MLX.

A *work* is a call after resolution: token ids, where to start, which places to keep. Handles are not made here: the
engine thread hands out nodes, and `service.core` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.receipt import MissReason, Usage
from kvcache.tree import Node
from service.events import FinishReason, TextChannel, Timing
from service.media import Prepared
from service.plan import Picked, TokenMask
from service.request import Sampling, Stopping
from service.text.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The generating half of a work. `sampling` is fully resolved."""

    sampling: Sampling
    stopping: Stopping
    top_logprobs: int | None
    text: TextStream
    save: bool  # hand out the node at the end
    save_on_cancel: bool
    constraint: TokenMask | None = None
    mark_reasoning: bool = False  # hand out the node at the reasoning's end


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkImage:
    """An image in a work's tokens, from `start` on. `layout` has no inputs.

    `load` makes them and tells them, or why it cannot, to whom it is given: at once or later, on any thread. It never
    waits.
    """

    start: int
    layout: Prepared
    load: Callable[[Callable[[Prepared | Exception], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prefill `tokens`, hand out nodes at `keep`, then perhaps generate."""

    owner: str
    tokens: Sequence[int]
    base: Node | None  # explicit parent: a prefix of `tokens`; held by the submitter until the work has ended
    keep: frozenset[int]  # positions in (0, len(tokens)]
    generation: Generation | None
    images: tuple[WorkImage, ...] = ()  # all that `tokens` hold, in order
    known_tokens: int = 0  # of `tokens`: computed once before, as the submitter knows; more than `base` may tell
    known_reason: MissReason = MissReason.NONE  # why no state stands at `known_tokens`, beyond the grid
    mended: Usage | None = None  # what computing the base's state again has cost just before, if it was lost
    max_recompute_tokens: int | None = None
    progress: bool = False
    priority: int = 0
    most_new_tokens: int = 0  # that the row may grow by
    deadline: float | None = None  # on the engine loop's clock
    group: str = ""  # works of one group go on from one fork: they are admitted together


@dataclass(frozen=True, slots=True)
class Admitted:
    """Left the queue; the commit point."""

    queue_seconds: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompt tokens done so far, restored ones included."""

    done: int


@dataclass(frozen=True, slots=True)
class NodeAt:
    """State was kept at `node.end`. The receiver owns one hold on `node`. `lost`: why not all of it was stored."""

    node: Node
    lost: str
    final: bool  # the end of a generation, not a declared place
    rehome: bool = False  # the parent's state, computed again
    reasoning_end: bool = False  # a declared place, beyond the prompt


@dataclass(slots=True)
class Tokens:
    """Tokens of one channel picked since the last event. Mutable: pending ones merge while the reader is slow."""

    text: str
    first_position: int
    picked: list[Picked] = field(default_factory=list)
    channel: TextChannel = TextChannel.ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The one terminal event of a work that went well."""

    usage: Usage
    timing: Timing
    reason: FinishReason | None  # None for a work without generation
    stop: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The one terminal event of a work that did not."""

    error: Exception


WorkEvent = Admitted | Prefilled | NodeAt | Tokens | Ended | Failed
