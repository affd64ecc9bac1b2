"""Random histories of a scheduler, and a twin that checks every plan. No engine, no clock, no threads.

`Load` makes the history (arrivals, restores, ends, drops, time) and knows what each row has yet to get; `check` holds
each plan to the bounds that the scheduler's module text promises.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from kvcache.blocks import BLOCK_TOKENS
from kvcache.schedule import Call, plan_calls
from service.footprint import Footprint
from service.plan import RowId
from service.scheduler import (
    CALL_TOKENS,
    HIGHEST_PRIORITY,
    PATIENCE,
    SECONDS_PER_PRIORITY,
    Demand,
    NeverFits,
    QueueIsFull,
    Scheduler,
    SchedulerConfig,
    State,
    Tick,
)

FOOTPRINT = Footprint(per_token=10, fixed=500, weights=100_000)


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How a random history goes. Probabilities are per tick, or per row and tick."""

    arrives: float = 0.08
    bursts: tuple[int, ...] = (1, 1, 1, 1, 1, 20)
    restored: float = 0.5
    ends: float = 0.15
    dropped: float = 0.003
    prompts: tuple[int, ...] = (1, 5, 20, 40, 256, 300, 700, 3000)
    answers: tuple[int, ...] = (1, 16, 200)
    second: float = 0.25  # a tick takes this long


@dataclass(eq=False)
class Row:
    """What the twin knows of one row."""

    demand: Demand
    arrived: float
    rank: tuple[float, int]
    bytes: int
    state: State = State.QUEUED
    calls: list[Call] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)  # ticks in a row in which its turn was due and did not come
    decoded: int = 0
    paused: bool = False


class Load:
    """A random history. `events` is all of it, for a replay."""

    def __init__(self, seed: int, config: SchedulerConfig, weather: Weather = Weather()) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.weather = weather
        self.scheduler = Scheduler(config)
        self.scheduler.footprint = FOOTPRINT
        self.numbers = itertools.count(1)
        self.rows: dict[RowId, Row] = {}
        self.now = 0.0
        self.ended: Counter[RowId] = Counter()
        self.submitted = 0
        self.seen: Counter[str] = Counter()
        self.events: list[tuple[object, ...]] = []
        self.ticks: list[Tick] | None = None  # set to a list: every plan is kept

    # -- the history ----------------------------------------------------------------------------------------------

    def run(self, ticks: int) -> Load:
        """`ticks` plans under load, then as many as it takes until everybody has come to an end."""
        for _ in range(ticks):
            self.disturb()
            self.plan()
        for _ in range(100_000):
            if not self.rows:
                return self
            self.settle()
            self.plan()
        raise AssertionError(f"rows that never end: {self.scheduler}")

    def tell(self, name: str, *args: object) -> None:
        """One event, to the scheduler and to the record."""
        self.events.append((name, *args))
        perform(self.scheduler, (name, *args))

    def disturb(self) -> None:
        rng, weather = self.rng, self.weather
        self.now += weather.second * rng.random() * 2
        if rng.random() < weather.arrives:
            for _ in range(rng.choice(weather.bursts)):
                self.submit()
        for name, row in list(self.rows.items()):
            if rng.random() < weather.dropped:
                self.seen["dropped " + row.state.value] += 1
                self.tell("drop", name)
                self.end(name)
            elif row.state is State.RESTORING and rng.random() < weather.restored:
                self.restore(name, row)
            elif row.state is State.PREFILL and rng.random() < (0.3 if row.paused else 0.02):
                row.paused = not row.paused
                row.passed.clear()
                self.tell("pause" if row.paused else "resume", name)
                self.seen["paused"] += row.paused
            elif row.state is State.DECODE:
                full = row.decoded >= row.demand.new_tokens
                if not full and rng.random() < 0.003:
                    self.tell("lost", name)
                    row.state = State.RESTORING
                    row.passed.clear()
                    self.seen["lost"] += 1
                elif full or rng.random() < weather.ends:
                    self.finish(name, row, save=rng.random() < 0.5)

    def settle(self) -> None:
        """No more arrivals, and nothing takes long."""
        self.now += self.weather.second
        for name, row in list(self.rows.items()):
            if row.state is State.RESTORING:
                self.restore(name, row)
            elif row.state is State.DECODE:
                self.finish(name, row, save=True)
            elif row.paused:
                row.paused = False
                self.tell("resume", name)

    def submit(self) -> None:
        rng = self.rng
        name = RowId(next(self.numbers))
        tokens = rng.choice(self.weather.prompts)
        demand = Demand(
            prompt_tokens=tokens,
            known_tokens=rng.choice([0, 0, tokens // 2, tokens]),
            new_tokens=rng.choice(self.weather.answers),
            samples=rng.random() < 0.8,
            priority=rng.choice([0, 0, 0, 1, -1, 3, -1000]),
            group=rng.choice(["", "", "a", "b"]),
            deadline=self.now + rng.choice([0.5, 5.0]) if rng.random() < 0.1 else None,
        )
        size = FOOTPRINT.row_bytes(demand.prompt_tokens + demand.new_tokens)
        waiting = sum(row.state is State.QUEUED for row in self.rows.values())
        waiting -= max(0, self.config.max_rows - (len(self.rows) - waiting))
        try:
            self.tell("submit", name, demand, self.now)
        except NeverFits as over:
            assert (over.needed, over.limit) == (size, self.limit) and size > (self.limit or 0)  # noqa: PT017
            self.seen["never fits"] += 1
            return
        except QueueIsFull as full:
            assert (full.queued, full.limit) == (waiting, self.config.max_queue)  # noqa: PT017
            self.seen["refused"] += 1
            return
        assert waiting < self.config.max_queue and size <= (self.limit or size)
        self.submitted += 1
        priority = max(-HIGHEST_PRIORITY, min(HIGHEST_PRIORITY, demand.priority))
        rank = (self.now - SECONDS_PER_PRIORITY * priority, name)
        self.rows[name] = Row(demand, self.now, rank, size)

    def restore(self, name: RowId, row: Row) -> None:
        rng, tokens = self.rng, row.demand.prompt_tokens
        start = rng.choice([row.demand.known_tokens, row.demand.known_tokens, 0, tokens])
        stops = {rng.randrange(start, tokens + 1) for _ in range(rng.randrange(3))}
        replay = {rng.randrange(start, tokens + 1) for _ in range(rng.randrange(3))}
        row.calls = plan_calls(start, tokens, stops, replay) if start < tokens else []
        row.state = State.PREFILL
        self.tell("restored", name, tuple(row.calls))

    def finish(self, name: RowId, row: Row, *, save: bool) -> None:
        self.tell("finish", name, save)
        if save:
            row.state = State.SAVING
        else:
            self.end(name)

    def end(self, name: RowId) -> None:
        del self.rows[name]
        self.ended[name] += 1

    # -- the checks -----------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        active = self.config.active_bytes
        return None if active is None else active + self.config.idle_bytes

    def plan(self) -> None:
        self.events.append(("plan", self.now))
        tick = self.scheduler.plan(self.now)
        if self.ticks is not None:
            self.ticks.append(tick)
        self.check_admission(tick)
        self.check_decode(tick)
        self.check_prefill(tick)
        for name in tick.save:
            self.tell("saved", name)
            self.end(name)
        self.check_conservation()

    def check_admission(self, tick: Tick) -> None:
        rows = self.rows
        late = {
            name
            for name, row in rows.items()
            if row.state is State.QUEUED and row.demand.deadline is not None and row.demand.deadline <= self.now
        }
        assert set(tick.expired) == late
        for name in late:
            self.end(name)
            self.seen["expired"] += 1
        under_way = [row for row in rows.values() if row.state is not State.QUEUED]
        taken, free = len(under_way), None if self.limit is None else self.limit - sum(row.bytes for row in under_way)
        admitted = set(tick.admit)
        order = self.queue(admitted)
        for place, (name, row, pulled) in enumerate(order):
            fits = free is None or row.bytes <= free
            if name in admitted:
                assert fits
                taken, free = taken + 1, None if free is None else free - row.bytes
            elif taken < self.config.max_rows:
                assert not fits  # nothing but memory stands in its way
                if not pulled and self.now - row.arrived > PATIENCE:
                    self.seen["not passed"] += 1
                    assert admitted.isdisjoint(later for later, _, _ in order[place:])
                    break
        self.check_starvation(admitted)
        for name in tick.admit:
            assert rows[name].state is State.QUEUED
            rows[name].state = State.RESTORING

    def check_starvation(self, admitted: set[RowId]) -> None:
        """Who has waited long enough and lacks memory alone is passed by a group only behind one that ranks before."""
        queued = sorted(self.queued(), key=lambda entry: entry[1].rank)
        firsts: dict[str, tuple[float, int]] = {}
        for name, row in queued:
            if name in admitted and row.demand.group:
                firsts.setdefault(row.demand.group, row.rank)
        full = len(admitted) + sum(row.state is not State.QUEUED for row in self.rows.values()) >= self.config.max_rows
        for name, row in queued:
            if name in admitted or full or self.now - row.arrived <= PATIENCE:
                continue
            for other in admitted:
                if self.rows[other].rank > row.rank:
                    assert firsts.get(self.rows[other].demand.group, row.rank) < row.rank

    def queued(self) -> list[tuple[RowId, Row]]:
        return [(name, row) for name, row in self.rows.items() if row.state is State.QUEUED]

    def queue(self, admitted: set[RowId]) -> list[tuple[RowId, Row, bool]]:
        """By rank, and right behind one that was admitted who waits in its group; these come again at their rank."""
        queued = sorted(self.queued(), key=lambda entry: entry[1].rank)
        order: list[tuple[RowId, Row, bool]] = []
        seen: set[RowId] = set()
        for name, row in queued:
            if name in seen:
                continue
            order.append((name, row, False))
            if name not in admitted or not row.demand.group:
                continue
            for other, member in queued:
                if member.demand.group == row.demand.group and other not in seen and other != name:
                    order.append((other, member, True))
                    seen |= {other} & admitted
        return order

    def check_decode(self, tick: Tick) -> None:
        rows = self.rows
        assert list(tick.decode) == [name for name, row in rows.items() if row.state is State.DECODE]
        assert set(tick.save) == {name for name, row in rows.items() if row.state is State.SAVING}
        assert len(tick.decode) <= self.config.max_rows
        assert sorted(itertools.chain(*tick.shared)) == sorted(tick.decode)
        padding = 0
        for call in tick.shared:
            lengths = [rows[name].demand.prompt_tokens + rows[name].decoded for name in call]
            padding += FOOTPRINT.per_token * (max(lengths) * len(lengths) - sum(lengths))
        reserved = sum(row.bytes for row in rows.values() if row.state is not State.QUEUED)
        assert self.limit is None or reserved + padding <= self.limit
        assert tick.borrowed == (0 if self.limit is None else max(0, reserved + padding - self.config.active_bytes))
        self.seen["calls"] += len(tick.shared) > 1
        self.seen["borrowed"] += tick.borrowed > 0
        for name in tick.decode:
            rows[name].decoded += 1
            assert rows[name].decoded <= rows[name].demand.new_tokens

    def check_prefill(self, tick: Tick) -> None:
        rows = self.rows
        waiting = sorted(
            ((name, row) for name, row in rows.items() if row.state is State.PREFILL and not row.paused),
            key=lambda e: e[1].rank,
        )
        left = {name: sum(call.end - call.start for call in row.calls) for name, row in waiting}
        slots = self.config.max_rows - len(tick.decode)
        ready = [name for name, row in waiting if row.demand.samples and len(row.calls) <= 1]
        able = [name for name, _ in waiting if name not in ready[slots:]]  # the last call needs a slot to decode in
        ends = [name for name in tick.finish_prefill if rows[name].demand.samples]
        assert len(ends) <= slots
        # The budget: what running rows wait for.
        busy = self.config.busy_prefill_tokens
        budget = busy if tick.decode else max(busy, self.config.idle_prefill_tokens)
        tokens = [call.end - call.start for _, call in tick.prefill]
        spent = sum(tokens) + CALL_TOKENS * (len(tokens) - 1 + len(tick.save))
        assert len(tokens) <= 1 or spent <= budget
        # Each row's own calls in order, and none behind one whose state is taken.
        taken: set[RowId] = set()
        for name, call in tick.prefill:
            assert rows[name].state is State.PREFILL and not rows[name].paused and name not in taken
            assert call == rows[name].calls.pop(0)
            if call.stop or call.end % BLOCK_TOKENS == 0:
                taken.add(name)
        served = {name for name, _ in tick.prefill} | set(tick.finish_prefill)
        # Fairness: of those that may go on, the first in rank and the one with least left each have every second tick.
        assert served or not able
        due = {"first": able[:1], "least": sorted(able, key=lambda name: left[name])[:1]}
        for name, row in waiting:
            for turn, names in due.items():
                row.passed[turn] = row.passed[turn] + 1 if name in names and name not in served else 0
                assert row.passed[turn] < 2
        for name in tick.finish_prefill:
            assert not rows[name].calls
            if rows[name].demand.samples:
                rows[name].state = State.DECODE
            else:
                self.end(name)
        for name, row in waiting:
            if name in rows and row.state is State.PREFILL and not row.calls:
                self.seen["waits for a slot"] += 1
                assert name in ready[slots:]

    def check_conservation(self) -> None:
        assert self.scheduler.count(*State) == len(self.rows)
        for name, row in self.rows.items():
            assert self.scheduler.state(name) is row.state
        under_way = [row for row in self.rows.values() if row.state is not State.QUEUED]
        assert len(under_way) <= 2 * self.config.max_rows
        assert self.limit is None or self.scheduler.reserved_bytes <= self.limit
        moves = any(row.state not in (State.QUEUED, State.RESTORING) and not row.paused for row in self.rows.values())
        if moves or not self.rows:
            assert self.scheduler.is_idle == (not self.rows)
        elif len(under_way) == 0:
            assert not self.scheduler.is_idle  # somebody in the queue, and all rows free


def perform(scheduler: Scheduler, event: tuple[object, ...]) -> Tick | None:
    """One event of a recorded history; refusals pass."""
    name, *args = event
    if name == "plan":
        return scheduler.plan(*args)  # type: ignore[arg-type]
    if name == "finish":
        scheduler.finish(args[0], save=args[1])  # type: ignore[arg-type]
    else:
        getattr(scheduler, str(name))(*args)
    return None


def replayed(load: Load) -> list[Tick]:
    """Every plan of the same history, made anew."""
    scheduler = Scheduler(load.config)
    scheduler.footprint = FOOTPRINT
    ticks: list[Tick] = []
    for event in load.events:
        try:
            tick = perform(scheduler, event)
        except (QueueIsFull, NeverFits):
            continue
        if tick is not None:
            ticks.append(tick)
    return ticks
