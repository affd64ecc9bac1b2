"""Which sequence does what next. Pure: no MLX, no gRPC, no clock of its own, no threads; the same input, the same plan.

    QUEUED ─► RESTORING ─► PREFILL ─► DECODE ─► SAVING ─► DONE
       └──────────┴───────────┴─────────┴─────────┴──► DONE   (cancelled, failed, stopped, nothing more to do)

A row whose state was lost in a failed call goes from DECODE back to RESTORING. While the last state of a row waits to
be stored, it is paused: it makes no prefill call. Calls that touch an image wait for its features, earlier ones do not.

* **Order.** A call ranks by the time at which it came, less a head start for its priority. So waiting lifts the lowest
  priority over any that comes later than the head start, and nobody waits for ever.
* **Admission.** Rows reserve the bytes that they can grow to; what does not fit waits. Prompts with more than a block
  to compute leave all rows to short ones until they are nearly done, so long prompts never fill the house.
* **Prefill.** A budget of tokens a tick, small while rows decode, so that their gap stays below one call and one step.
  Ticks take turns: the first in rank goes first, then the one with least left. A long prompt has every second turn
  whatever comes; a short one waits for one call at most, beside shorter ones.
* **Images.** One is encoded in a tick, the first in rank first. While rows decode, it goes part of the way in a tick,
  which makes no prefill call then; and ticks with and without an image take turns, so that neither text nor images wait
  for all of the other.
* **Decode.** All rows that decode step in every tick, in one call unless padding costs more (`footprint`).
"""

from __future__ import annotations

import copy
import enum
import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcache.blocks import BLOCK_TOKENS
from kvcache.media import MediaKey
from kvcache.schedule import Call
from service.events import Admission, Forecast
from service.footprint import Footprint
from service.plan import RowId

HIGHEST_PRIORITY = 10  # and -10 the lowest: what lies beyond counts as that
SECONDS_PER_PRIORITY = 10.0  # of waiting make up for one step of priority
PATIENCE = 5.0  # seconds for which smaller calls may pass one that waits for memory
CALL_TOKENS = 32  # what a further call in a tick costs beside its tokens: it reads all weights again


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


class QueueIsFull(Exception):
    """No more sequences may wait."""

    def __init__(self, queued: int, limit: int) -> None:
        super().__init__(f"{queued} calls are waiting, the limit is {limit}")
        self.queued = queued
        self.limit = limit


class NeverFits(Exception):
    """One sequence alone may grow beyond all memory that rows may take."""

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(f"the call may grow to {needed:,} bytes of state, and {limit:,} are there for all")
        self.needed = needed
        self.limit = limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds. Sizes in bytes of working state as `Footprint` counts it; None is unbounded."""

    max_rows: int = 8  # decode at once
    max_queue: int = 256  # may wait beyond those that rows are free for
    busy_prefill_tokens: int = BLOCK_TOKENS + 2 * CALL_TOKENS  # per tick while rows decode; its first call always fits
    idle_prefill_tokens: int = 2 * BLOCK_TOKENS + CALL_TOKENS  # while none do; a row makes one block's calls at most
    active_bytes: int | None = None  # all rows under way together
    idle_bytes: int = 0  # more, which kept state has to make room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a sequence asks for, as far as is known before anything was looked up."""

    prompt_tokens: int = 0
    known_tokens: int = 0  # of them, with state that is likely to be there
    new_tokens: int = 0  # at most
    samples: bool = True  # goes on to decode
    priority: int = 0
    group: str = ""  # sequences of one group share what they restore: they are admitted together
    deadline: float | None = None  # on the clock of `now`


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """What the scheduler knows of one sequence."""

    row: RowId
    demand: Demand
    arrived: float
    rank: tuple[float, int]  # lowest first
    bytes: int  # reserved from admission to the end
    left: int  # tokens to compute; an estimate until the state is restored
    length: int  # tokens once it decodes
    state: State = State.QUEUED
    calls: deque[Call] = field(default_factory=deque)
    paused: bool = False
    stop_at: int | None = None  # no call may go beyond this position yet

    @property
    def may_call(self) -> bool:
        """Whether its next call, if there is one, may run."""
        return not self.paused and (not self.calls or self.stop_at is None or self.calls[0].end <= self.stop_at)

    @property
    def is_short(self) -> bool:
        return self.left <= BLOCK_TOKENS

    @property
    def needs_slot_next(self) -> bool:
        """Its next call is its last one, and it goes on to decode."""
        return self.demand.samples and len(self.calls) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What to do in one step, by row."""

    expired: tuple[RowId, ...] = ()  # their deadline passed in the queue: they are DONE
    admit: tuple[RowId, ...] = ()
    encode: tuple[MediaKey, ...] = ()
    prefill: tuple[tuple[RowId, Call], ...] = ()
    finish_prefill: tuple[RowId, ...] = ()  # rows whose last call is in `prefill`, or that had none left
    decode: tuple[RowId, ...] = ()
    shared: tuple[tuple[RowId, ...], ...] = ()  # the rows of `decode` by call
    save: tuple[RowId, ...] = ()
    borrowed: int = 0  # of `idle_bytes`: what rows have reserved or pad
    unlent: tuple[RowId, ...] = ()  # waited in vain for a loan while nothing else ran: they are DONE


class Scheduler:
    """See the module's text. `plan` takes O(queue + rows²) time, every other method less."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.footprint = Footprint()  # of the model, once it is loaded
        self._config = config
        self._entries: dict[RowId, Entry] = {}
        self._queue: list[Entry] = []  # by rank
        self._arrivals = 0
        self._least_first = True
        self._offered: dict[MediaKey, tuple[float, int]] = {}  # images that may be encoded, by rank
        self._encoded_last = False
        self._now = 0.0  # of the last plan
        self._refused_bytes: int | None = None  # the least reservation for which the last plan got no loan
        self._sharing: tuple[tuple[RowId, ...], tuple[tuple[RowId, ...], ...], int] = ((), (), 0)

    def __repr__(self) -> str:
        return f"<Scheduler {', '.join(f'{s.value}={self.count(s)}' for s in State if s is not State.DONE)}>"

    # -- looks ----------------------------------------------------------------------------------------------------

    def count(self, *states: State) -> int:
        """How many sequences are in one of `states`."""
        return sum(entry.state in states for entry in self._entries.values())

    @property
    def is_idle(self) -> bool:
        """Nothing to plan until somebody submits, or a restore arrives."""
        moving = (State.PREFILL, State.DECODE, State.SAVING)
        return (
            not self._offered
            and all(not e.may_call or e.state not in moving for e in self._entries.values())
            and not self._admissible()
        )

    def state(self, row: RowId) -> State:
        entry = self._entries.get(row)
        return entry.state if entry else State.DONE

    @property
    def max_rows(self) -> int:
        """How many may decode at once."""
        return self._config.max_rows

    @property
    def reserved_bytes(self) -> int:
        """What rows under way may grow to, padding aside."""
        return sum(e.bytes for e in self._entries.values() if e.state is not State.QUEUED)

    def foresee(self, demand: Demand, count: int, now: float) -> Forecast:
        """What `count` sequences like this would meet if they came now; changes nothing.

        Other calls that come meanwhile are not foreseen, nor that kept state may not give up its memory in time.
        """
        twin = copy.copy(self)
        need = self.footprint.row_bytes(demand.prompt_tokens + demand.new_tokens) * count
        free = need if self._free_bytes is None else max(0, self._free_bytes)
        rows = [RowId(-1 - i) for i in range(count)]
        admission, reason = Admission.REFUSED, ""
        try:
            for row in rows:
                twin.submit(row, demand, now)
        except QueueIsFull:
            reason = "QUEUE_FULL"
        except NeverFits:
            reason = "ACTIVE_MEMORY"
        else:
            admission = Admission.NOW if twin.admits(rows, now) else Admission.QUEUED
            if admission is Admission.QUEUED:
                reason = "ROWS_BUSY" if need <= free else "ACTIVE_MEMORY"
        return Forecast(admission=admission, reason=reason, need_bytes=need, free_bytes=free)

    def __copy__(self) -> Scheduler:
        """One that can be told more without this one hearing of it; what has been told is shared."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__, _entries=dict(self._entries), _queue=list(self._queue))
        return twin

    def admits(self, rows: Sequence[RowId], now: float) -> bool:
        """Whether all of them would leave the queue in the next plan."""
        self._now = now
        return set(rows) <= set(self._admissible())

    # -- events ---------------------------------------------------------------------------------------------------

    def submit(self, row: RowId, demand: Demand, now: float) -> None:
        """Queues a sequence. Raises QueueIsFull or NeverFits."""
        needed = self.footprint.row_bytes(demand.prompt_tokens + demand.new_tokens)
        limit = self._limit_bytes
        if limit is not None and needed > limit:
            raise NeverFits(needed, limit)
        # Rows that are free will take their share of the queue at the next plan.
        queued = len(self._queue) - max(0, self._config.max_rows - (len(self._entries) - len(self._queue)))
        if queued >= self._config.max_queue:
            raise QueueIsFull(queued, self._config.max_queue)
        self._arrivals += 1
        priority = min(max(demand.priority, -HIGHEST_PRIORITY), HIGHEST_PRIORITY)
        entry = Entry(
            row=row,
            demand=demand,
            arrived=now,
            rank=(now - SECONDS_PER_PRIORITY * priority, self._arrivals),
            bytes=needed,
            left=demand.prompt_tokens - demand.known_tokens,
            length=demand.prompt_tokens,
        )
        self._entries[row] = entry
        insort(self._queue, entry, key=lambda e: e.rank)

    def restored(self, row: RowId, calls: Sequence[Call]) -> None:
        """The row stands where it could be restored to; `calls` are left to make."""
        self._go(row, State.PREFILL)
        entry = self._entries[row]
        entry.calls.extend(calls)
        entry.left = sum(call.end - call.start for call in calls)

    def lost(self, row: RowId) -> None:
        """A decoding row's state is gone: it is restored anew."""
        self._go(row, State.RESTORING)

    def unfed(self, row: RowId) -> None:
        """A row of the last plan's `decode` has waited, and is as long as before."""
        if row in self._entries:
            self._entries[row].length -= 1

    def pause(self, row: RowId) -> None:
        """No further prefill call for this row until `resume`; of no effect on a row past its prefill."""
        if self.state(row) is State.PREFILL:
            self._entries[row].paused = True

    def resume(self, row: RowId) -> None:
        """Takes `pause` back, if there was one."""
        if row in self._entries:
            self._entries[row].paused = False

    def stop_at(self, row: RowId, position: int | None) -> None:
        """No prefill call of the row may go beyond `position` until this is said anew; None: all may."""
        if row in self._entries:
            self._entries[row].stop_at = position

    def offer_image(self, key: MediaKey, rows: Iterable[RowId]) -> None:
        """An image may be encoded, which these rows wait for."""
        ranks = [self._entries[row].rank for row in rows if row in self._entries]
        self._offered[key] = min(ranks, default=(self._now, 0))

    def withdraw_image(self, key: MediaKey) -> None:
        """Nobody waits for it any more, if it was offered and not chosen yet."""
        self._offered.pop(key, None)

    def finish(self, row: RowId, *, save: bool) -> None:
        """A decoding row is at its end; `save`: its state is wanted."""
        self._go(row, State.SAVING if save else State.DONE)

    def saved(self, row: RowId) -> None:
        """A SAVING row's last call was made."""
        self._go(row, State.DONE)

    def drop(self, row: RowId) -> bool:
        """Ends a row wherever it is; False if it had ended."""
        if row not in self._entries:
            return False
        self._go(row, State.DONE)
        return True

    # -- the plan -------------------------------------------------------------------------------------------------

    def plan(self, now: float, lend: Callable[[int], int] = lambda size: 0) -> Tick:
        """The next step. Moves admitted rows to RESTORING and rows without calls left to DECODE or DONE.

        `lend` makes kept state do without so many bytes in all, and returns how many are missing: then nothing is lent
        beyond what was, and who needs it waits.
        """
        self._now = now
        self._refused_bytes = None
        expired = tuple(e.row for e in self._queue if e.demand.deadline is not None and e.demand.deadline <= now)
        for row in expired:
            self._go(row, State.DONE)
        admit = self._admissible(lend)
        for row in admit:
            self._go(row, State.RESTORING)
        unlent: tuple[RowId, ...] = ()
        if self._refused_bytes is not None and len(self._queue) == len(self._entries):
            first = self._queue[0]
            if self._now - first.arrived > PATIENCE:  # nothing runs whose end could help, and it holds up the others
                unlent = (first.row,)
                self._go(first.row, State.DONE)
        decode = [e for e in self._entries.values() if e.state is State.DECODE]
        save = tuple(e.row for e in self._entries.values() if e.state is State.SAVING)
        shared, padding = self._shared(decode, lend)
        active = self._config.active_bytes
        borrowed = 0 if active is None else max(0, self.reserved_bytes + padding - active)
        for entry in decode:
            entry.length += 1
        encode = self._encode(decoding=len(decode))
        prefill, finished = self._prefill(decoding=len(decode), saving=len(save), encoding=len(encode))
        for entry in finished:
            self._go(entry.row, State.DECODE if entry.demand.samples else State.DONE)
        return Tick(
            expired=expired,
            admit=admit,
            encode=encode,
            prefill=tuple(prefill),
            finish_prefill=tuple(entry.row for entry in finished),
            decode=tuple(entry.row for entry in decode),
            shared=shared,
            save=save,
            borrowed=borrowed,
            unlent=unlent,
        )

    @property
    def waits_for_loan(self) -> bool:
        """Somebody was not admitted for want of a loan: plan again soon, though `is_idle`."""
        return self._refused_bytes is not None and bool(self._queue)

    def _lent(self, reserved: int, lend: Callable[[int], int]) -> bool:
        """Whether rows may reserve so much in all."""
        if self._config.active_bytes is None or reserved <= self._config.active_bytes:
            return True
        if self._refused_bytes is not None and reserved >= self._refused_bytes:
            return False
        if lend(reserved - self._config.active_bytes):
            self._refused_bytes = reserved
            return False
        return True

    def _admissible(self, lend: Callable[[int], int] = lambda size: 0) -> tuple[RowId, ...]:
        """Who leaves the queue now."""
        if not self._queue:
            return ()
        under_way = [e for e in self._entries.values() if e.state is not State.QUEUED]
        rows, free, reserved = len(under_way), self._free_bytes, self.reserved_bytes
        # Rows that decode, and those that are about to; the others have a block and more to compute before that.
        near = sum(e.is_short or e.state in (State.DECODE, State.SAVING) for e in under_way)
        chosen: list[RowId] = []
        groups = _groups(self._queue)
        taken: set[RowId] = set()
        for first in self._queue:
            # Members of a group come right behind one that is chosen now, and at their own rank else: behind one that
            # waits, whoever joins its group later would pass all others.
            for entry in itertools.chain((first,), groups.get(first.demand.group, ())):
                if entry.row not in taken:
                    full = (near if entry.is_short else rows) >= self._config.max_rows
                    if not full and rows < 2 * self._config.max_rows:
                        if (free is None or entry.bytes <= free) and self._lent(reserved + entry.bytes, lend):
                            taken.add(entry.row)
                            chosen.append(entry.row)
                            rows += 1
                            near += entry.is_short
                            reserved += entry.bytes
                            free = free - entry.bytes if free is not None else None
                        elif entry is first and self._now - entry.arrived > PATIENCE:
                            return tuple(chosen)  # what comes free is this one's
                if first.row not in taken:
                    break
        return tuple(chosen)

    def _encode(self, *, decoding: int) -> tuple[MediaKey, ...]:
        """The image of this tick, if it is an image's turn."""
        waits = bool(self._offered)
        if waits and decoding and self._encoded_last:
            waits = not any(e.calls and e.may_call and e.state is State.PREFILL for e in self._entries.values())
        self._encoded_last = waits
        if not waits:
            return ()
        first = min(self._offered, key=lambda key: self._offered[key])
        del self._offered[first]
        return (first,)

    def _prefill(self, *, decoding: int, saving: int, encoding: int) -> tuple[list[tuple[RowId, Call]], list[Entry]]:
        """The calls of this tick, and who has none left behind them."""
        budget = self._config.busy_prefill_tokens
        if not decoding:
            budget = max(budget, self._config.idle_prefill_tokens)
        budget -= CALL_TOKENS * saving
        waiting = [e for e in self._entries.values() if e.state is State.PREFILL and e.may_call]
        if encoding and decoding:
            waiting = [e for e in waiting if not e.calls]  # the rows that decode wait for the image as it is
        waiting.sort(key=lambda e: e.rank)
        # Decode slots go by rank, so that nobody who is ready is passed by.
        slots = self._config.max_rows - decoding
        may_end = {e.row for e in [e for e in waiting if e.needs_slot_next][:slots]}
        self._least_first = not self._least_first
        if self._least_first:
            waiting.sort(key=lambda e: e.left)  # stable: the rank decides between equals
        calls: list[tuple[RowId, Call]] = []
        finished: list[Entry] = []
        for entry in waiting:
            while entry.calls and entry.may_call:
                tokens = entry.calls[0].end - entry.calls[0].start
                cost = tokens + CALL_TOKENS * bool(calls)
                if calls and cost > budget:
                    break
                if entry.needs_slot_next and entry.row not in may_end:
                    if len(may_end) >= slots:
                        break
                    may_end.add(entry.row)  # was not ready when the tick began
                budget -= cost
                entry.left -= tokens
                call = entry.calls.popleft()
                calls.append((entry.row, call))
                if call.stop or call.passed or call.end % BLOCK_TOKENS == 0:
                    break  # state is taken there, and a row's next call must not run before that
            if not entry.calls and (entry.row in may_end or not entry.demand.samples):
                finished.append(entry)
        return calls, finished

    def _shared(self, decode: Sequence[Entry], lend: Callable[[int], int]) -> tuple[tuple[tuple[RowId, ...], ...], int]:
        """The decode calls and their padding. They stay until the rows change, or memory for padding is short."""
        rows = tuple(e.row for e in decode)
        free = self._free_bytes
        known, calls, padding = self._sharing
        if rows != known or (free is not None and padding > free):
            found = self.footprint.share_calls([e.length for e in decode], room=free)
            calls, padding = tuple(tuple(rows[i] for i in call) for call in found.calls), found.padding
        active = self._config.active_bytes
        if padding and active is not None and not self._lent(self.reserved_bytes + padding, lend):
            found = self.footprint.share_calls([e.length for e in decode], room=max(0, active - self.reserved_bytes))
            calls, padding = tuple(tuple(rows[i] for i in call) for call in found.calls), found.padding
        self._sharing = (rows, calls, padding)
        return calls, padding

    @property
    def _limit_bytes(self) -> int | None:
        active = self._config.active_bytes
        return None if active is None else active + self._config.idle_bytes

    @property
    def _free_bytes(self) -> int | None:
        limit = self._limit_bytes
        return None if limit is None else limit - self.reserved_bytes

    def _go(self, row: RowId, state: State) -> None:
        entry = self._entries[row]
        if state not in TRANSITIONS[entry.state]:
            raise IllegalTransition(f"row {row}: {entry.state.value} -> {state.value}")
        if entry.state is State.QUEUED:
            self._queue.remove(entry)
        entry.state, entry.paused, entry.stop_at = state, False, None
        if state is State.DONE:
            del self._entries[row]


def _groups(queue: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Who waits in each group, by rank."""
    groups: dict[str, list[Entry]] = {}
    for entry in queue:
        if entry.demand.group:
            groups.setdefault(entry.demand.group, []).append(entry)
    return groups
