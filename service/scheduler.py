"""Which sequence does what next. Pure: no MLX, no gRPC, no clock of its own, no threads; the same input, the same plan.

    QUEUED ─► RESTORING ─► PREFILL ─► DECODE ─► SAVING ─► DONE
       └──────────┴───────────┴─────────┴─────────┴──► DONE   (cancelled, failed, stopped, nothing more to do)

A row whose state was lost in a failed call goes from DECODE back to RESTORING.

Each tick: one decode step for all rows that decode, and prefill calls up to a token budget. The budget is one block
while rows decode, so that their inter-token gap stays below one call and one step, and more when none do. Waiting
prefills take turns, so that a short prompt is not stuck behind a long one.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.blocks import BLOCK_TOKENS
from kvcache.schedule import Call
from service.plan import RowId


class State(enum.Enum):
    """Where a sequence is in its life."""

    QUEUED = "queued"
    RESTORING = "restoring"
    PREFILL = "prefill"
    DECODE = "decode"
    SAVING = "saving"
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RESTORING, State.DONE}),
    State.RESTORING: frozenset({State.PREFILL, State.DONE}),
    State.PREFILL: frozenset({State.DECODE, State.DONE}),
    State.DECODE: frozenset({State.RESTORING, State.SAVING, State.DONE}),
    State.SAVING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A sequence was asked to go where it cannot; nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`max_rows` sequences are under way at once, `max_queue` more may wait."""

    max_rows: int = 8
    max_queue: int = 256
    busy_prefill_tokens: int = 256  # per tick while rows decode
    idle_prefill_tokens: int = 512  # per tick while none do, over all rows: a row makes one block's calls at most


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """What the scheduler knows of one sequence."""

    row: RowId
    priority: int
    arrived: int  # order of arrival
    state: State = State.QUEUED
    calls: deque[Call] = field(default_factory=deque)
    samples: bool = True  # goes on to decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What to do in one step, by row."""

    admit: tuple[RowId, ...] = ()
    prefill: tuple[tuple[RowId, Call], ...] = ()
    finish_prefill: tuple[RowId, ...] = ()  # rows whose last call is in `prefill`, or that had none left
    decode: tuple[RowId, ...] = ()
    save: tuple[RowId, ...] = ()


class QueueIsFull(Exception):
    """No more sequences may wait."""

    def __init__(self, queued: int, limit: int) -> None:
        super().__init__(f"{queued} calls are waiting, the limit is {limit}")
        self.queued = queued
        self.limit = limit


class Scheduler:
    """See the module's text. Every method is O(rows)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._entries: dict[RowId, Entry] = {}
        self._turn: deque[RowId] = deque()  # rows in PREFILL, next one first
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"<Scheduler {', '.join(f'{s.value}={self.count(s)}' for s in State if s is not State.DONE)}>"

    def count(self, *states: State) -> int:
        """How many sequences are in one of `states`."""
        return sum(entry.state in states for entry in self._entries.values())

    @property
    def is_idle(self) -> bool:
        """Nothing to plan until somebody submits, or a restore arrives."""
        return not any(e.state in (State.PREFILL, State.DECODE, State.SAVING) for e in self._entries.values()) and not (
            self._next_admitted()
        )

    def state(self, row: RowId) -> State:
        entry = self._entries.get(row)
        return entry.state if entry else State.DONE

    def rows(self) -> Sequence[RowId]:
        """Every row that is not DONE."""
        return tuple(self._entries)

    def submit(self, row: RowId, *, priority: int = 0, samples: bool = True) -> None:
        """Queues a sequence. Raises QueueIsFull."""
        # Rows that are free will take their share of the queue at the next plan.
        queued = self.count(State.QUEUED) - max(0, self._free_rows())
        if queued >= self._config.max_queue:
            raise QueueIsFull(queued, self._config.max_queue)
        self._arrivals += 1
        self._entries[row] = Entry(row=row, priority=priority, arrived=self._arrivals, samples=samples)

    def restored(self, row: RowId, calls: Sequence[Call]) -> None:
        """The row stands where it could be restored to; `calls` are left to make."""
        self._go(row, State.PREFILL)
        self._entries[row].calls.extend(calls)
        self._turn.append(row)

    def lost(self, row: RowId) -> None:
        """A decoding row's state is gone: it is restored anew."""
        self._go(row, State.RESTORING)

    def finish(self, row: RowId, *, save: bool) -> None:
        """A decoding row is at its end; `save`: its state is wanted."""
        self._go(row, State.SAVING if save else State.DONE)

    def drop(self, row: RowId) -> bool:
        """Ends a row wherever it is; False if it had ended."""
        if row not in self._entries:
            return False
        self._go(row, State.DONE)
        return True

    def plan(self) -> Tick:
        """The next step. Moves admitted rows to RESTORING and rows without calls left to DECODE or DONE."""
        admit = self._next_admitted()
        for row in admit:
            self._go(row, State.RESTORING)
        decode = tuple(r for r, e in self._entries.items() if e.state is State.DECODE)
        save = tuple(r for r, e in self._entries.items() if e.state is State.SAVING)
        prefill, finished = self._prefill(busy=bool(decode))
        for row in finished:
            self._turn.remove(row)
            self._go(row, State.DECODE if self._entries[row].samples else State.DONE)
        return Tick(admit=admit, prefill=prefill, finish_prefill=finished, decode=decode, save=save)

    def saved(self, row: RowId) -> None:
        """A SAVING row's last call was made."""
        self._go(row, State.DONE)

    def _prefill(self, *, busy: bool) -> tuple[tuple[tuple[RowId, Call], ...], tuple[RowId, ...]]:
        budget = self._config.busy_prefill_tokens if busy else self._config.idle_prefill_tokens
        calls: list[tuple[RowId, Call]] = []
        finished: list[RowId] = []
        for row in list(self._turn):
            entry = self._entries[row]
            took = False
            while entry.calls and (not calls or entry.calls[0].end - entry.calls[0].start <= budget):
                call = entry.calls.popleft()
                budget -= call.end - call.start
                calls.append((row, call))
                took = True
                if call.stop or call.end % BLOCK_TOKENS == 0:
                    break  # state is taken there, and a row's next call must not run before that
            if not entry.calls:
                finished.append(row)
            elif took:
                self._turn.remove(row)
                self._turn.append(row)
            if budget <= 0:
                break
        return tuple(calls), tuple(finished)

    def _free_rows(self) -> int:
        return self._config.max_rows - sum(e.state is not State.QUEUED for e in self._entries.values())

    def _next_admitted(self) -> tuple[RowId, ...]:
        free = self._free_rows()
        if free <= 0:
            return ()
        queued = [e for e in self._entries.values() if e.state is State.QUEUED]
        queued.sort(key=lambda e: (-e.priority, e.arrived))
        return tuple(e.row for e in queued[:free])

    def _go(self, row: RowId, state: State) -> None:
        entry = self._entries[row]
        if state not in TRANSITIONS[entry.state]:
            raise IllegalTransition(f"row {row}: {entry.state.value} -> {state.value}")
        entry.state = state
        if state is State.DONE:
            del self._entries[row]
            if row in self._turn:
                self._turn.remove(row)
