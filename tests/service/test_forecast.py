"""What the scheduler foresees: every answer, and that it then does what it foretold."""

from __future__ import annotations

import random

import pytest

from service.events import Admission, Forecast
from service.footprint import Footprint
from service.plan import RowId
from service.scheduler import Demand, NeverFits, QueueIsFull, Scheduler, SchedulerConfig, State

PRINT = Footprint(per_token=1, fixed=44)  # a row of 100 tokens: 400 bytes
SHORT = Demand(prompt_tokens=90, new_tokens=10)
LONG = Demand(prompt_tokens=900, new_tokens=10)


def scheduler(*demands: Demand, active: int | None = 100_000, rows: int = 4, queue: int = 2) -> Scheduler:
    """With so many sequences under way or, beyond the rows, waiting."""
    made = Scheduler(SchedulerConfig(max_rows=rows, max_queue=queue, active_bytes=active))
    made.footprint = PRINT
    for number, demand in enumerate(demands, start=1):
        made.submit(RowId(number), demand, now=0.0)
        made.plan(0.0)
    return made


def ask(of: Scheduler, demand: Demand = SHORT, count: int = 1) -> tuple[str, str, int, int]:
    found = of.foresee(demand, count, now=0.0)
    return found.admission.name, found.reason, found.need_bytes, found.free_bytes


@pytest.mark.parametrize(
    ("state", "demand", "count", "answer"),
    [
        (scheduler(), SHORT, 1, ("NOW", "", 400, 100_000)),
        (scheduler(), SHORT, 4, ("NOW", "", 1_600, 100_000)),
        (scheduler(), SHORT, 6, ("QUEUED", "ROWS_BUSY", 2_400, 100_000)),
        (scheduler(), SHORT, 7, ("REFUSED", "QUEUE_FULL", 2_800, 100_000)),
        (scheduler(*[SHORT] * 4), SHORT, 1, ("QUEUED", "ROWS_BUSY", 400, 98_400)),
        (scheduler(*[LONG] * 4), SHORT, 1, ("NOW", "", 400, 95_160)),  # long prompts leave room for short ones
        (scheduler(*[LONG] * 4), LONG, 1, ("QUEUED", "ROWS_BUSY", 1_210, 95_160)),
        (scheduler(SHORT, active=700), SHORT, 1, ("QUEUED", "ACTIVE_MEMORY", 400, 300)),
        (scheduler(active=700), SHORT, 2, ("QUEUED", "ACTIVE_MEMORY", 800, 700)),
        (scheduler(active=700), LONG, 1, ("REFUSED", "ACTIVE_MEMORY", 1_210, 700)),
    ],
)
def test_each_bound_has_its_answer(
    state: Scheduler, demand: Demand, count: int, answer: tuple[str, str, int, int]
) -> None:
    assert ask(state, demand, count) == answer


def test_without_a_bound_on_memory_there_is_always_enough() -> None:
    need = PRINT.row_bytes(2**30 + 10) * 2
    found = scheduler(active=None).foresee(Demand(prompt_tokens=2**30, new_tokens=10), 2, now=0.0)
    assert found == Forecast(admission=Admission.NOW, reason="", need_bytes=need, free_bytes=need)


@pytest.mark.parametrize("seed", range(60))
def test_the_scheduler_does_what_it_foretold_and_looking_changed_nothing(seed: int) -> None:
    rng = random.Random(seed)

    def demand() -> Demand:
        sizes = {"prompt_tokens": rng.choice((10, 200, 900)), "new_tokens": rng.choice((10, 3_000))}
        return Demand(**sizes, priority=rng.choice((0, 0, 3)), group=rng.choice(("", "a")))

    def history(scheduler: Scheduler, rng: random.Random) -> None:
        for number in range(1, rng.randrange(2, 10)):
            try:
                scheduler.submit(RowId(number), demand(), now=0.0)
            except (QueueIsFull, NeverFits):
                continue
            for admitted in scheduler.plan(0.0).admit:
                if rng.random() < 0.7:
                    scheduler.restored(admitted, [])
        scheduler.plan(0.0)

    subject = scheduler(active=8_000, rows=3, queue=4)
    history(subject, rng)
    before = repr(subject), dict(subject._entries), subject.reserved_bytes
    asked, count = demand(), rng.randrange(1, 4)
    found = subject.foresee(asked, count, now=1.0)
    assert (repr(subject), subject._entries, subject.reserved_bytes) == before

    rows = [RowId(100 + i) for i in range(count)]
    refused = False
    for row in rows:
        try:
            subject.submit(row, asked, now=1.0)
        except (QueueIsFull, NeverFits):
            refused = True
    admitted = set(subject.plan(1.0).admit)
    assert refused == (found.admission is Admission.REFUSED)
    if not refused:
        assert (admitted >= set(rows)) == (found.admission is Admission.NOW), found
        assert (found.admission is Admission.NOW) == (not any(subject.state(row) is State.QUEUED for row in rows))
