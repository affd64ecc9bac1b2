"""The scheduler under random load: bounds, fairness, order, one end for each row. No engine, no clock, no threads."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from kvcache.blocks import BLOCK_TOKENS
from kvcache.schedule import Call, plan_calls
from service.plan import RowId
from service.scheduler import TRANSITIONS, IllegalTransition, QueueIsFull, Scheduler, SchedulerConfig, State, Tick

CONFIG = SchedulerConfig(max_rows=3, max_queue=4)


def row(number: int) -> RowId:
    return RowId(number)


def calls_for(rng: random.Random) -> list[Call]:
    start = rng.choice([0, 0, 256, 300, rng.randrange(2000)])
    end = start + rng.choice([0, 1, 5, 40, 256, 300, 700, 3000])
    return plan_calls(start, end, {rng.randrange(start, end + 1) for _ in range(rng.randrange(3))})


class Load:
    """Random rows over a scheduler, and a twin that knows what each of them has yet to get."""

    def __init__(self, seed: int, config: SchedulerConfig) -> None:
        self.rng = random.Random(seed)
        self.config = config
        self.scheduler = Scheduler(config)
        self.numbers = itertools.count(1)
        self.state: dict[RowId, State] = {}
        self.priority: dict[RowId, int] = {}
        self.samples: dict[RowId, bool] = {}
        self.left: dict[RowId, list[Call]] = {}
        self.waited: Counter[RowId] = Counter()  # ticks since a row in PREFILL had a call
        self.submitted = 0
        self.ended: Counter[RowId] = Counter()
        self.seen: Counter[str] = Counter()

    def tick(self) -> None:
        self.disturb()
        self.check(self.scheduler.plan())

    def disturb(self) -> None:
        """What happens between two steps."""
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.2:
            self.submit()
        for name, state in list(self.state.items()):
            if rng.random() < 0.003:
                assert scheduler.drop(name)
                self.end(name)
                self.seen["dropped " + state.value] += 1
            elif state is State.RESTORING and rng.random() < 0.5:
                self.left[name] = calls_for(rng)
                scheduler.restored(name, self.left[name])
                self.state[name] = State.PREFILL
                self.waited[name] = 0
            elif state is State.DECODE and rng.random() < 0.15:
                save = rng.random() < 0.5
                scheduler.finish(name, save=save)
                if save:
                    self.state[name] = State.SAVING
                else:
                    self.end(name)

    def submit(self) -> None:
        name = row(next(self.numbers))
        priority, samples = self.rng.choice([0, 0, 0, 1, -1]), self.rng.random() < 0.8
        queued = sum(state is State.QUEUED for state in self.state.values())
        # Rows that are free take their share at the next plan: only what is left over waits.
        queued -= max(0, self.config.max_rows - (len(self.state) - queued))
        try:
            self.scheduler.submit(name, priority=priority, samples=samples)
        except QueueIsFull as full:
            assert (full.queued, full.limit) == (queued, self.config.max_queue)  # noqa: PT017 - only some are refused
            self.seen["refused"] += 1
            return
        assert queued < self.config.max_queue
        self.submitted += 1
        self.state[name], self.priority[name], self.samples[name] = State.QUEUED, priority, samples

    def end(self, name: RowId) -> None:
        del self.state[name]
        self.left.pop(name, None)
        self.waited.pop(name, None)
        self.ended[name] += 1

    def check(self, tick: Tick) -> None:
        state = self.state
        # Admission: as many as there is room for, the most urgent first, then the oldest.
        queued = sorted((n for n, s in state.items() if s is State.QUEUED), key=lambda n: (-self.priority[n], n))
        room = self.config.max_rows - (len(state) - len(queued))
        assert list(tick.admit) == queued[: max(0, room)]
        for name in tick.admit:
            state[name] = State.RESTORING
        # Every decoding row steps, every saving row saves.
        assert set(tick.decode) == {n for n, s in state.items() if s is State.DECODE}
        assert set(tick.save) == {n for n, s in state.items() if s is State.SAVING}
        assert len(set(tick.decode)) == len(tick.decode)
        # Prefill: each row's own calls in order, at most one of them captured, within the budget.
        budget = self.config.busy_prefill_tokens if tick.decode else self.config.idle_prefill_tokens
        tokens = [call.end - call.start for _, call in tick.prefill]
        assert sum(tokens) <= budget or len(tokens) == 1
        captured: Counter[RowId] = Counter()
        for name, call in tick.prefill:
            assert state[name] is State.PREFILL
            assert not captured[name], "a call behind one whose state is taken"
            assert call == self.left[name].pop(0)
            captured[name] += call.stop or call.end % BLOCK_TOKENS == 0
        assert all(not self.left[name] for name in tick.finish_prefill)
        assert {n for n, _ in tick.prefill if not self.left[n]} <= set(tick.finish_prefill)
        # Fairness: among n waiting rows nobody waits for more than n steps.
        waiting = [n for n, s in state.items() if s is State.PREFILL]
        assert not waiting or tick.prefill or tick.finish_prefill
        served = {n for n, _ in tick.prefill} | set(tick.finish_prefill)
        for name in waiting:
            self.waited[name] = 0 if name in served else self.waited[name] + 1
            assert self.waited[name] < self.config.max_rows
        for name in tick.finish_prefill:
            if self.samples[name]:
                state[name] = State.DECODE
            else:
                self.end(name)
        for name in tick.save:
            self.scheduler.saved(name)
            self.end(name)
        assert set(self.scheduler.rows()) == state.keys()
        under_way = sum(s is not State.QUEUED for s in state.values())
        assert under_way <= self.config.max_rows
        busy = any(s in (State.PREFILL, State.DECODE, State.SAVING) for s in state.values())
        admits = under_way < self.config.max_rows and under_way < len(state)
        assert self.scheduler.is_idle == (not busy and not admits)

    def drain(self) -> None:
        """No more arrivals: everybody gets to an end."""
        for _ in range(20_000):
            if not self.state:
                return
            for name, state in list(self.state.items()):
                if state is State.RESTORING:
                    self.left[name] = calls_for(self.rng)
                    self.scheduler.restored(name, self.left[name])
                    self.state[name] = State.PREFILL
                    self.waited[name] = 0
                elif state is State.DECODE:
                    self.scheduler.finish(name, save=True)
                    self.state[name] = State.SAVING
            self.check(self.scheduler.plan())


CONFIGS = {
    "one row": SchedulerConfig(max_rows=1, max_queue=2),
    "few": SchedulerConfig(max_rows=3, max_queue=4),
    "usual": SchedulerConfig(),
    "tiny budgets": SchedulerConfig(max_rows=4, max_queue=8, busy_prefill_tokens=1, idle_prefill_tokens=1),
    "great budgets": SchedulerConfig(max_rows=6, max_queue=3, busy_prefill_tokens=5_000, idle_prefill_tokens=9_000),
}


def simulate(seed: int, config: SchedulerConfig, ticks: int) -> Load:
    load = Load(seed, config)
    for _ in range(ticks):
        load.tick()
    load.drain()
    assert load.state == {}
    assert len(load.scheduler.rows()) == 0
    assert load.ended.total() == len(load.ended) == load.submitted > ticks / 50
    return load


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_under_random_load_every_bound_holds_and_every_row_ends_once(config: SchedulerConfig) -> None:
    load = simulate(1, config, 15_000)
    states = (State.QUEUED, State.RESTORING, State.PREFILL, State.DECODE)
    assert {f"dropped {state.value}" for state in states} <= load.seen.keys()
    assert config.max_queue > 100 or load.seen["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_under_a_million_steps_of_random_load_every_bound_holds(config: SchedulerConfig) -> None:
    for seed in range(2, 6):
        simulate(seed, config, 50_000)


def test_the_same_history_gives_the_same_plans() -> None:
    def history() -> list[Tick]:
        load, ticks = Load(5, CONFIG), []
        load.check = lambda tick, check=load.check: (ticks.append(tick), check(tick))[1]  # type: ignore[method-assign]
        for _ in range(2_000):
            load.tick()
        return ticks

    first, second = history(), history()
    assert first == second
    assert len(first) == 2_000


def under_way(state: State) -> Scheduler:
    """A scheduler whose row 1 is in `state`."""
    scheduler = Scheduler(CONFIG)
    scheduler.submit(row(1))
    if state is State.QUEUED:
        return scheduler
    scheduler.plan()
    if state is State.RESTORING:
        return scheduler
    scheduler.restored(row(1), [Call(0, 256, stop=False), Call(256, 257, stop=True)])
    if state is State.PREFILL:
        return scheduler
    scheduler.plan()
    scheduler.plan()
    if state is State.DECODE:
        return scheduler
    scheduler.finish(row(1), save=True)
    return scheduler


ACTS = {
    State.PREFILL: lambda s: s.restored(row(1), [Call(0, 3, stop=True)]),
    State.SAVING: lambda s: s.finish(row(1), save=True),
    State.DONE: lambda s: s.finish(row(1), save=False),
}


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE], ids=lambda s: s.value)
@pytest.mark.parametrize("target", ACTS, ids=lambda s: s.value)
def test_an_illegal_transition_raises_and_changes_nothing(state: State, target: State) -> None:
    scheduler, twin = under_way(state), under_way(state)
    assert scheduler.state(row(1)) is state
    if target in TRANSITIONS[state]:
        ACTS[target](scheduler)
        assert scheduler.state(row(1)) is target
        return
    with pytest.raises(IllegalTransition, match=f"row 1: {state.value} -> {target.value}"):
        ACTS[target](scheduler)
    assert repr(scheduler) == repr(twin)
    for _ in range(4):
        assert scheduler.plan() == twin.plan()


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE], ids=lambda s: s.value)
def test_a_row_can_be_dropped_anywhere_and_once(state: State) -> None:
    scheduler = under_way(state)
    assert scheduler.drop(row(1))
    assert (scheduler.state(row(1)), scheduler.rows(), scheduler.is_idle) == (State.DONE, (), True)
    assert not scheduler.drop(row(1))
    assert scheduler.plan() == Tick()


def test_the_table_has_one_end_and_one_way_back() -> None:
    assert TRANSITIONS.keys() == set(State)
    order = list(State)
    for state, following in TRANSITIONS.items():
        back = [later for later in following if order.index(later) <= order.index(state)]
        assert back == ([State.RESTORING] if state is State.DECODE else [])  # its state was lost
        assert (State.DONE in following) == (state is not State.DONE)


def test_the_urgent_are_admitted_first_then_the_oldest() -> None:
    scheduler = Scheduler(replace(CONFIG, max_queue=9))
    for number, priority in enumerate((0, 5, 0, 5, -1, 0)):
        scheduler.submit(row(number), priority=priority)
    assert scheduler.plan().admit == (1, 3, 0)
    assert scheduler.plan().admit == ()
    scheduler.drop(row(3))
    scheduler.drop(row(0))
    assert scheduler.plan().admit == (2, 5)


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    scheduler = Scheduler(CONFIG)
    for number in (1, 2):
        scheduler.submit(row(number))
    scheduler.plan()
    scheduler.restored(row(1), plan_calls(0, 256 * 40, []))
    scheduler.restored(row(2), plan_calls(0, 20, []))
    ticks = [scheduler.plan() for _ in range(2)]
    assert row(2) in ticks[0].finish_prefill + ticks[1].finish_prefill


def test_a_row_fully_restored_decodes_in_the_next_step_without_a_call() -> None:
    scheduler = Scheduler(CONFIG)
    scheduler.submit(row(1))
    assert scheduler.plan() == Tick(admit=(row(1),))
    assert scheduler.is_idle  # a restore is under way: there is nothing to do until it arrives
    scheduler.restored(row(1), [])
    assert scheduler.plan() == Tick(finish_prefill=(row(1),))
    assert scheduler.plan() == Tick(decode=(row(1),))


def test_counts_and_text_tell_the_states() -> None:
    scheduler = under_way(State.PREFILL)
    scheduler.submit(row(2))
    assert scheduler.count(State.PREFILL) == scheduler.count(State.QUEUED) == 1
    assert scheduler.count(*State) == 2
    assert repr(scheduler) == "<Scheduler queued=1, restoring=0, prefill=1, decode=0, saving=0>"
