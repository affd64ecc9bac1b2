"""Numbers of a process: histograms, paces, and what is counted of a call as its events pass."""

from __future__ import annotations

import pytest

from kvcache.receipt import MissReason, Usage
from kvcache.records import FetchResult, Tier
from service.errors import DeadlineUnmet
from service.events import FinishReason, Timing
from service.measures import Histogram, Pace
from service.metering import Meter
from service.plan import Picked
from service.totals import Totals
from service.work import Admitted, Ended, Failed, Tokens, Work, WorkEvent

USAGE = Usage(
    prompt_tokens=700,
    cached_tokens=512,
    memory_tokens=256,
    disk_tokens=256,
    recomputed_tokens=88,
    new_tokens=100,
    completion_tokens=3,
    miss_reason=MissReason.EVICTED,
    disk_bytes_read=9,
)
WORK = Work(owner="a", tokens=[1], base=None, keep=frozenset({1}), generation=None)


def test_a_value_at_a_bound_counts_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def test_a_pace_is_unknown_then_measured_then_forgets() -> None:
    pace = Pace()
    assert (pace.predict(0), pace.predict(10)) == (0.0, None)
    pace.add(0, 1.0)  # nothing was done: nothing is known
    assert pace.predict(10) is None
    pace.add(100, 2.0)
    assert pace.predict(50) == 1.0
    for _ in range(100):
        pace.add(100, 1.0)
    assert pace.predict(100) == pytest.approx(1.0, rel=1e-3)


def test_a_call_is_counted_as_its_events_pass() -> None:
    now = 0.0
    meter = Meter(clock=lambda: now)
    passed: list[WorkEvent] = []
    emit = meter.watching(WORK, passed.append)
    events: list[tuple[float, WorkEvent]] = [
        (0.5, Admitted(0.5)),
        (2.0, Tokens("a", 700, [Picked(token=1)])),
        (2.0, Tokens("held back", 700, [])),  # text without a token is none
        (2.25, Tokens("b", 701, [Picked(token=2), Picked(token=3)])),
        (3.0, Ended(usage=USAGE, timing=Timing(), reason=FinishReason.EOS)),
    ]
    for now, event in events:  # noqa: B007  the meter's clock reads it
        emit(event)
    assert passed == [event for _, event in events]
    assert (meter.queue_seconds.total, meter.ttft_seconds.total, meter.gap_seconds.total) == (0.5, 2.0, 0.25)
    assert sum(meter.ttft_seconds.counts) == sum(meter.gap_seconds.counts) == 1
    assert meter.prompt_tokens == {"memory": 256, "disk": 256, "recomputed": 88, "new": 100}
    assert meter.completion_tokens == 3
    assert meter.sequences == {("snapshot", "eos"): 1}


def test_a_failed_call_is_counted_by_its_reason_and_costs_no_tokens() -> None:
    meter = Meter()
    emit = meter.watching(WORK, lambda event: None)
    emit(Failed(DeadlineUnmet("late")))
    emit(Failed(RuntimeError("a bug")))
    assert meter.sequences == {("snapshot", "deadline_unmet"): 1, ("snapshot", "internal"): 1}
    assert not meter.prompt_tokens and not sum(meter.queue_seconds.counts)


def test_restores_with_and_without_the_disk_have_speeds_of_their_own() -> None:
    totals = Totals()

    def read(memory: int, disk: int) -> FetchResult:
        payloads = [bytes(memory), bytes(disk)]
        return FetchResult(payloads=payloads, tiers=[Tier.MEMORY, Tier.DISK], sizes=[memory, disk])

    totals.restored(read(1000, 0), 1.0)
    assert totals.predict_load(memory_bytes=500, disk_bytes=0) == 0.5
    assert totals.predict_load(memory_bytes=0, disk_bytes=1) is None
    totals.restored(read(50, 50), 1.0)
    assert totals.predict_load(memory_bytes=0, disk_bytes=200) == 2.0
    assert totals.predict_load(memory_bytes=0, disk_bytes=0) == 0.0
    assert sum(totals.restore_seconds.counts) == 2
