"""Which state is kept on the way. Owns the checkpoint policy and what a boundary is worth under it; pure, no I/O.

Three policies, by what happens to state at a block boundary that nobody asked for:

    through   every layer kind of every boundary goes to the store
    marks     only what a handle on the way needs; the disk sees nothing else
    off       as `marks`, and nothing goes to disk

A boundary of which all layer kinds are kept is a place that a caller can stand on. Its next-token logits, one vector
over the vocabulary, are kept with it, so that going on from it without input computes nothing.

A handle needs the `full` records of all blocks before it, the `window` records that its window reaches into, and the
`state` of its own place. Where a handle's place is not known yet (a generation that will be saved), the newest
boundary's state is kept in memory until the next one is there: it is what an early end is named by.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.layout import CacheLayout
from kvcache.records import RecordKind

DEFAULT_SPACING = 4


class CheckpointPolicy(enum.Enum):
    """What becomes of the state at boundaries that nobody asked for; the values are the flag's."""

    THROUGH = "through"
    MARKS = "marks"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """How much of what a run passes is kept. `state_spacing`: see `kvcache.thinning`; 0 keeps every `state` record."""

    policy: CheckpointPolicy = CheckpointPolicy.THROUGH
    state_spacing: int = DEFAULT_SPACING

    def __post_init__(self) -> None:
        if self.state_spacing < 0 or self.state_spacing == 1:
            raise ValueError("state_spacing: must be 0 (keep all) or at least 2")


DEFAULT_CHECKPOINTS = Checkpoints()


@dataclass(frozen=True, slots=True)
class Take:
    """What to keep of one boundary.

    `firm`: a handle will need it. `in_memory`: a handle needs it should the run end soon, so it goes to disk only for
    want of memory. `passing`: kept while there is room.
    """

    firm: tuple[RecordKind, ...] = ()
    passing: tuple[RecordKind, ...] = ()
    in_memory: tuple[RecordKind, ...] = ()

    @property
    def kinds(self) -> tuple[RecordKind, ...]:
        return self.firm + self.in_memory + self.passing


def take_at(policy: CheckpointPolicy, layout: CacheLayout, end: int, *, places: Iterable[int], open_end: bool) -> Take:
    """What to keep at a boundary `end` that is itself no place asked for.

    `places` are those asked for on this run, in tokens; `open_end`: the run's own end will be one, wherever it is.
    """
    ahead = [place for place in places if place > end]
    reached = any(end > place - layout.window for place in ahead)
    firm: list[RecordKind] = []
    in_memory: list[RecordKind] = []
    passing: list[RecordKind] = []
    for kind in layout.kinds:
        if kind is RecordKind.FULL:
            is_firm, is_passing = bool(ahead) or open_end, layout.trimmable
        elif kind is RecordKind.WINDOW:
            is_firm, is_passing = reached, False
        else:
            is_firm, is_passing = False, False
        if policy is CheckpointPolicy.THROUGH and open_end and kind is RecordKind.WINDOW:
            is_firm = True  # the end may come before the window has left this block
        if is_firm:
            firm.append(kind)
        elif open_end and policy is not CheckpointPolicy.THROUGH:
            in_memory.append(kind)
        elif is_passing or policy is CheckpointPolicy.THROUGH:
            passing.append(kind)
    if len(firm) + len(in_memory) + len(passing) == len(layout.kinds):
        # They stay in memory as FULL records do, and are worth to the store what those are.
        (firm if RecordKind.FULL in firm else passing).append(RecordKind.LOGITS)
    return Take(tuple(firm), tuple(passing), tuple(in_memory))
