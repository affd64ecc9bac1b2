"""The scheduler: bounds and fairness under random load, and single decisions. No engine, no clock, no threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.schedule import Call, plan_calls
from service.footprint import Footprint
from service.plan import RowId
from service.scheduler import (
    HIGHEST_PRIORITY,
    PATIENCE,
    SECONDS_PER_PRIORITY,
    TRANSITIONS,
    Demand,
    IllegalTransition,
    NeverFits,
    Scheduler,
    SchedulerConfig,
    State,
    Tick,
)
from tests.service.simulation import FOOTPRINT, Load, Weather, replayed

CONFIG = SchedulerConfig(max_rows=3, max_queue=4)


def row(number: int) -> RowId:
    return RowId(number)


CONFIGS = {
    "one row": SchedulerConfig(max_rows=1, max_queue=2),
    "few": SchedulerConfig(max_rows=3, max_queue=4),
    "usual": SchedulerConfig(),
    "tiny budgets": SchedulerConfig(max_rows=4, max_queue=8, busy_prefill_tokens=1, idle_prefill_tokens=1),
    "great budgets": SchedulerConfig(max_rows=6, max_queue=3, busy_prefill_tokens=5_000, idle_prefill_tokens=9_000),
    "little memory": SchedulerConfig(max_rows=6, max_queue=12, active_bytes=20_000, idle_bytes=9_000),
}


def simulate(seed: int, config: SchedulerConfig, ticks: int) -> Load:
    load = Load(seed, config).run(ticks)
    assert load.scheduler.count(*State) == 0
    assert load.ended.total() == len(load.ended) == load.submitted
    return load


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_under_random_load_every_bound_holds_and_every_row_ends_once(config: SchedulerConfig) -> None:
    load = simulate(1, config, 20_000)
    states = (State.QUEUED, State.RESTORING, State.PREFILL, State.DECODE)
    assert {f"dropped {state.value}" for state in states} | {"expired", "paused", "lost"} <= load.seen.keys()
    assert load.submitted > 300
    assert config.max_queue > 100 or load.seen["refused"]
    if config.active_bytes is not None:
        assert load.seen["borrowed"] and load.seen["never fits"] and load.seen["not passed"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_under_millions_of_steps_of_random_load_every_bound_holds(config: SchedulerConfig) -> None:
    for seed in range(2, 6):
        load = Load(seed, config)
        for _ in range(10):  # histories are kept for replays: in pieces, so that they do not fill memory
            load.run(9_000)
            load.events.clear()
        assert load.ended.total() == len(load.ended) == load.submitted


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    config=st.builds(
        SchedulerConfig,
        max_rows=st.integers(1, 6),
        max_queue=st.integers(0, 8),
        busy_prefill_tokens=st.sampled_from([1, 100, 256, 600]),
        idle_prefill_tokens=st.sampled_from([1, 544, 3000]),
        active_bytes=st.sampled_from([None, 4_000, 12_000, 60_000]),
        idle_bytes=st.sampled_from([0, 5_000]),
    ),
    weather=st.builds(
        Weather,
        arrives=st.sampled_from([0.05, 0.3, 1.0]),
        restored=st.sampled_from([0.1, 1.0]),
        ends=st.sampled_from([0.01, 0.5]),
        dropped=st.sampled_from([0.0, 0.1]),
        prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=4).map(tuple),
        answers=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
        second=st.sampled_from([0.01, 1.0, 20.0]),
    ),
)
def test_in_any_weather_every_bound_holds_and_the_same_history_gives_the_same_plans(
    seed: int, config: SchedulerConfig, weather: Weather
) -> None:
    load = Load(seed, config, weather)
    load.ticks = []
    load.run(150)
    assert load.ended.total() == len(load.ended) == load.submitted
    assert replayed(load) == load.ticks


def under_way(state: State) -> Scheduler:
    """A scheduler whose row 1 is in `state`."""
    scheduler = Scheduler(CONFIG)
    scheduler.submit(row(1), Demand(prompt_tokens=257), 0.0)
    if state is State.QUEUED:
        return scheduler
    scheduler.plan(0.0)
    if state is State.RESTORING:
        return scheduler
    scheduler.restored(row(1), [Call(0, 256, stop=False), Call(256, 257, stop=True)])
    if state is State.PREFILL:
        return scheduler
    scheduler.plan(0.0)
    scheduler.plan(0.0)
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
        assert scheduler.plan(0.0) == twin.plan(0.0)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE], ids=lambda s: s.value)
def test_a_row_can_be_dropped_anywhere_and_once(state: State) -> None:
    scheduler = under_way(state)
    assert scheduler.drop(row(1))
    assert (scheduler.state(row(1)), scheduler.count(*State), scheduler.is_idle) == (State.DONE, 0, True)
    assert not scheduler.drop(row(1))
    assert scheduler.plan(0.0) == Tick()


def test_the_table_has_one_end_and_one_way_back() -> None:
    assert TRANSITIONS.keys() == set(State)
    order = list(State)
    back = {(State.DECODE, State.RESTORING)}  # state that was lost
    for state, following in TRANSITIONS.items():
        assert all(order.index(later) > order.index(state) or (state, later) in back for later in following)
        assert (State.DONE in following) == (state is not State.DONE)


# -- who comes in


def filled(config: SchedulerConfig, *demands: Demand, now: float = 0.0) -> Scheduler:
    """A scheduler with rows 0, 1, ... in its queue."""
    scheduler = Scheduler(config)
    scheduler.footprint = FOOTPRINT
    for number, demand in enumerate(demands):
        scheduler.submit(row(number), demand, now)
    return scheduler


def test_the_urgent_are_admitted_first_then_the_oldest() -> None:
    scheduler = filled(
        SchedulerConfig(max_rows=3, max_queue=9), *(Demand(priority=priority) for priority in (0, 5, 0, 5, -1, 0))
    )
    assert scheduler.plan(0.0).admit == (1, 3, 0)
    assert scheduler.plan(0.0).admit == ()
    scheduler.drop(row(3))
    scheduler.drop(row(0))
    assert scheduler.plan(0.0).admit == (2, 5)


@pytest.mark.parametrize("waited", [-0.1, 0.1])
def test_waiting_makes_up_for_priority(waited: float) -> None:
    scheduler = filled(SchedulerConfig(max_rows=1), Demand(priority=-1))
    now = 2 * SECONDS_PER_PRIORITY + waited
    scheduler.submit(row(1), Demand(priority=1), now)
    assert scheduler.plan(now).admit == ((0,) if waited > 0 else (1,))


def test_no_priority_however_low_waits_behind_an_endless_stream_of_urgent_calls() -> None:
    scheduler = filled(SchedulerConfig(max_rows=1), Demand(priority=-(2**31)))
    for number in range(1, 10_000):
        scheduler.submit(row(number), Demand(priority=2**31 - 1), float(number))
        (admitted,) = scheduler.plan(float(number)).admit
        scheduler.drop(admitted)
        if admitted == 0:
            break
    assert number == 2 * HIGHEST_PRIORITY * SECONDS_PER_PRIORITY


def test_members_of_a_group_are_admitted_together() -> None:
    demands = [Demand(group=group) for group in ("", "fork", "", "other", "fork", "fork")]
    scheduler = filled(SchedulerConfig(max_rows=4), *demands)
    assert scheduler.plan(0.0).admit == (0, 1, 4, 5)


def test_members_of_a_group_pass_nobody_behind_one_that_has_to_wait_itself() -> None:
    """A fork's first call has a long prompt and waits for a row; short calls of its group come without an end."""
    config = SchedulerConfig(max_rows=1)
    scheduler = filled(config, Demand(prompt_tokens=3000), Demand(prompt_tokens=3000, group="fork"), Demand())
    scheduler.submit(row(3), Demand(group="fork"), 1.0)
    assert scheduler.plan(1.0).admit == (0, 2)
    scheduler.submit(row(4), Demand(), 2.0)
    for number in range(5, 50):
        scheduler.submit(row(number), Demand(group="fork"), float(number))
    order = [3]
    scheduler.drop(row(2))
    assert list(scheduler.plan(50.0).admit) == order
    scheduler.drop(row(3))
    assert scheduler.plan(51.0).admit == (4,)


def test_long_prompts_in_every_row_leave_room_for_short_ones() -> None:
    config = SchedulerConfig(max_rows=2)
    scheduler = filled(config, *[Demand(prompt_tokens=3000)] * 3, *[Demand(prompt_tokens=20)] * 3)
    assert scheduler.plan(0.0).admit == (0, 1, 3, 4)  # the third long one waits for a row, the third short one as well


def test_a_short_prompt_takes_no_decode_slot_before_a_long_one_that_is_ready() -> None:
    scheduler = filled(SchedulerConfig(max_rows=1), Demand(prompt_tokens=300), Demand(prompt_tokens=20))
    assert scheduler.plan(0.0).admit == (0, 1)
    scheduler.restored(row(0), [Call(0, 300, stop=True)])
    scheduler.restored(row(1), [Call(0, 20, stop=True)])
    for _ in range(3):
        tick = scheduler.plan(0.0)
        assert row(1) not in tick.finish_prefill
    assert scheduler.state(row(0)) is State.DECODE
    scheduler.finish(row(0), save=False)
    assert scheduler.plan(0.0).finish_prefill == (1,)


def test_a_call_whose_deadline_passes_in_the_queue_is_ended_there() -> None:
    scheduler = filled(SchedulerConfig(max_rows=1), Demand(), Demand(deadline=5.0), Demand(deadline=6.0))
    assert scheduler.plan(4.9).admit == (0,)
    assert scheduler.plan(5.0) == Tick(expired=(row(1),))
    assert [scheduler.state(row(n)) for n in range(3)] == [State.RESTORING, State.DONE, State.QUEUED]


# -- memory


def test_what_rows_can_grow_to_is_reserved_and_smaller_calls_pass_one_that_waits_for_a_while() -> None:
    size = FOOTPRINT.row_bytes(256)
    demands = [Demand(prompt_tokens=n, new_tokens=6) for n in (250, 500, 250, 250)]
    scheduler = filled(SchedulerConfig(active_bytes=2 * size), *demands[:3])
    assert scheduler.plan(0.0).admit == (0, 2)
    assert scheduler.reserved_bytes == 2 * size
    scheduler.submit(row(3), demands[3], 0.0)
    scheduler.drop(row(0))
    assert scheduler.plan(PATIENCE + 0.1).admit == ()  # row 1 does not fit yet, and is passed no more
    scheduler.drop(row(2))
    assert scheduler.plan(PATIENCE + 0.2).admit == (1,)


def test_kept_state_gives_up_memory_before_calls_have_to_wait() -> None:
    size = FOOTPRINT.row_bytes(256)
    config = SchedulerConfig(active_bytes=size, idle_bytes=size)
    scheduler = filled(config, *[Demand(prompt_tokens=256)] * 3)
    tick = scheduler.plan(0.0)
    assert (tick.admit, tick.borrowed) == ((0, 1), size)
    scheduler.drop(row(0))
    scheduler.drop(row(1))
    assert scheduler.plan(0.0) == Tick(admit=(row(2),), borrowed=0)


def test_a_call_for_which_nothing_is_lent_waits_and_is_ended_once_it_would_wait_for_nobody() -> None:
    size = FOOTPRINT.row_bytes(256)
    demands = [Demand(prompt_tokens=256), Demand(prompt_tokens=512)]
    scheduler = filled(SchedulerConfig(active_bytes=size, idle_bytes=2 * size), *demands)
    asked: list[int] = []

    def refuse(wanted: int) -> int:
        asked.append(wanted)
        return 1

    assert scheduler.plan(0.0, refuse).admit == (0,)
    assert asked == [FOOTPRINT.row_bytes(512)]
    assert (scheduler.waits_for_loan, scheduler.is_idle) == (True, True)
    assert scheduler.plan(PATIENCE + 1, refuse).unlent == ()
    scheduler.drop(row(0))
    assert scheduler.plan(PATIENCE + 2, refuse).unlent == (1,)
    assert scheduler.count(*State) == 0
    assert not scheduler.waits_for_loan


def test_a_call_that_could_never_fit_is_refused_at_once() -> None:
    limit = FOOTPRINT.row_bytes(512)
    config = SchedulerConfig(active_bytes=limit - 100, idle_bytes=100)
    filled(config, Demand(prompt_tokens=500, new_tokens=12))
    with pytest.raises(NeverFits) as caught:
        filled(config, Demand(prompt_tokens=500, new_tokens=13))
    assert (caught.value.needed, caught.value.limit) == (FOOTPRINT.row_bytes(513), limit)


# -- prefill


def test_four_short_prompts_behind_a_long_one_start_within_two_ticks_while_a_row_decodes() -> None:
    scheduler = filled(SchedulerConfig(), Demand(prompt_tokens=1), Demand(prompt_tokens=8192))
    scheduler.plan(0.0)
    scheduler.restored(row(0), [])
    scheduler.restored(row(1), plan_calls(0, 8192, []))
    for _ in range(5):
        scheduler.plan(0.0)
    for number in range(2, 6):
        scheduler.submit(row(number), Demand(prompt_tokens=20), 1.0)
    assert scheduler.plan(1.0).admit == (2, 3, 4, 5)
    for number in range(2, 6):
        scheduler.restored(row(number), plan_calls(0, 20, []))
    ticks = [scheduler.plan(1.0) for _ in range(2)]
    assert {name for tick in ticks for name in tick.finish_prefill} == {2, 3, 4, 5}
    assert sum(call.end - call.start for tick in ticks for _, call in tick.prefill) <= 256 + 4 * 20


def test_a_long_prompt_has_every_second_tick_however_many_short_ones_come() -> None:
    scheduler = filled(SchedulerConfig(max_rows=4), Demand(prompt_tokens=1), Demand(prompt_tokens=2560))
    scheduler.plan(0.0)
    scheduler.restored(row(0), [])
    scheduler.restored(row(1), plan_calls(0, 2560, []))
    scheduler.plan(0.0)
    ticks = 0
    while scheduler.state(row(1)) is State.PREFILL:
        ticks += 1
        scheduler.submit(row(1 + ticks), Demand(prompt_tokens=200, samples=False), 0.0)
        scheduler.plan(0.0)
        for name in map(row, range(1, 2 + ticks)):
            if scheduler.state(name) is State.RESTORING:
                scheduler.restored(name, plan_calls(0, 200, []))
    assert 15 < ticks <= 20


def test_a_row_fully_restored_decodes_in_the_next_step_without_a_call() -> None:
    scheduler = filled(CONFIG, Demand())
    assert scheduler.plan(0.0) == Tick(admit=(row(0),))
    assert scheduler.is_idle  # a restore is under way: there is nothing to do until it arrives
    scheduler.restored(row(0), [])
    assert scheduler.plan(0.0) == Tick(finish_prefill=(row(0),))
    assert scheduler.plan(0.0) == Tick(decode=(row(0),), shared=((row(0),),))


def test_saving_rows_take_their_calls_out_of_the_budget() -> None:
    scheduler = filled(SchedulerConfig(max_rows=8), *[Demand(prompt_tokens=10)] * 8)
    scheduler.plan(0.0)
    for number in range(6):
        scheduler.restored(row(number), [])
    scheduler.plan(0.0)
    for number in range(5):
        scheduler.finish(row(number), save=True)
    for number in (6, 7):
        scheduler.restored(row(number), plan_calls(0, 100, []))
    tick = scheduler.plan(0.0)
    assert (len(tick.save), len(tick.decode), len(tick.prefill)) == (5, 1, 1)


# -- decode


def decoding(*lengths: int, config: SchedulerConfig = CONFIG) -> Scheduler:
    scheduler = filled(replace(config, max_rows=8), *[Demand(prompt_tokens=n, new_tokens=50) for n in lengths])
    scheduler.plan(0.0)
    for number in range(len(lengths)):
        scheduler.restored(row(number), [])
    scheduler.plan(0.0)
    return scheduler


def test_rows_of_like_length_share_a_call_and_a_long_one_has_its_own() -> None:
    scheduler = decoding(200, 250, 100_000, 220)
    assert scheduler.plan(0.0).shared == ((0, 1, 3), (2,))
    scheduler.drop(row(2))
    assert scheduler.plan(0.0).shared == ((0, 1, 3),)


def test_padding_takes_no_memory_that_is_reserved() -> None:
    lengths = (100, 150, 300)
    reserved = sum(FOOTPRINT.row_bytes(n + 50) for n in lengths)
    room = decoding(*lengths, config=replace(CONFIG, active_bytes=reserved + 10 * 1000))
    assert room.plan(0.0).shared == ((0, 1, 2),)
    tight = decoding(*lengths, config=replace(CONFIG, active_bytes=reserved + 10 * 60))
    assert tight.plan(0.0).shared == ((0, 1), (2,))
    none = decoding(*lengths, config=replace(CONFIG, active_bytes=reserved))
    assert none.plan(0.0).shared == ((0,), (1,), (2,))


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5_000), max_size=6),
    weights=st.sampled_from([0, 10_000, 1_000_000]),
    room=st.none() | st.integers(0, 50_000),
)
def test_no_other_cut_of_the_rows_is_cheaper(lengths: list[int], weights: int, room: int | None) -> None:
    footprint = Footprint(per_token=10, weights=weights)
    shared = footprint.share_calls(lengths, room=room)
    assert sorted(i for call in shared.calls for i in call) == list(range(len(lengths)))
    paddings = [sum(max(lengths[i] for i in call) - lengths[j] for j in call) for call in shared.calls]
    assert shared.padding == 10 * sum(paddings) and (room is None or shared.padding <= room)
    if room is None:
        price = weights / 2 / 10
        mine = sum(paddings) + price * len(shared.calls)
        ordered = sorted(lengths)
        for cuts in range(2 ** max(0, len(ordered) - 1)):
            calls: list[list[int]] = []
            for i, length in enumerate(ordered):
                if i and not cuts >> (i - 1) & 1:
                    calls[-1].append(length)
                else:
                    calls.append([length])
            other = sum(len(c) * max(c) - sum(c) for c in calls) + price * len(calls)
            assert mine <= other + 1e-6


# -- text


def test_counts_and_text_tell_the_states() -> None:
    scheduler = under_way(State.PREFILL)
    scheduler.submit(row(2), Demand(), 0.0)
    assert scheduler.count(State.PREFILL) == scheduler.count(State.QUEUED) == 1
    assert scheduler.count(*State) == 2
    assert repr(scheduler) == "<Scheduler queued=1, restoring=0, prefill=1, decode=0, saving=0>"
