"""The engine loop on its own thread: loading, waking, idling and its end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcache import buffers
from kvcache.buffers import MAPPED_BUFFER_BYTES, new_buffer
from kvcache.cache import Keep
from kvcache.records import RecordId, RecordKind
from service.engine.fake import FakeEngine
from service.errors import (
    EngineDown,
    EngineFailed,
    RowFailed,
)
from service.footprint import Footprint
from service.loop import EngineLoop
from service.plan import RowId, StepPlan, StepResult
from service.scheduler import Scheduler, SchedulerConfig, State
from service.work import Ended, Failed, NodeAt, Work
from tests.service.loop_rig import LAYOUT, SNAPSHOT_WAIT, WAYS, LoopRig, prompt_of


class Gate(FakeEngine):
    """Waits at its first step until told, then goes on or breaks."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__(LAYOUT)
        self.reached, self.go, self.breaks = threading.Event(), threading.Event(), breaks

    def step(self, plan: StepPlan) -> StepResult:
        self.reached.set()
        assert self.go.wait(60)
        if self.breaks:
            raise RuntimeError("as planned")
        return super().step(plan)


class Listener:
    """Events of one work, from another thread."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.ended = threading.Event()

    def __call__(self, event: object) -> None:
        self.events.append(event)
        if isinstance(event, Ended | Failed):
            self.ended.set()

    def end(self) -> Ended | Failed:
        assert self.ended.wait(60)
        ends = [event for event in self.events if isinstance(event, Ended | Failed)]
        assert len(ends) == 1 and self.events[-1] is ends[0]
        return ends[0]


def threaded(load: Callable[[], object], rows: int = 1) -> EngineLoop:
    scheduler = Scheduler(SchedulerConfig(max_rows=rows))
    return EngineLoop(load, scheduler, lambda: None, snapshot_wait=SNAPSHOT_WAIT)  # type: ignore[arg-type]


def short_work() -> Work:
    return Work(owner="a", tokens=prompt_of(20), base=None, keep=frozenset(), generation=None)


def test_a_broken_engine_ends_every_work_and_the_thread_and_shows() -> None:
    rig = LoopRig(engine=Gate(breaks=True))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    assert loop.is_alive(1e9)
    late = Listener()
    loop.submit(short_work(), late)  # in the mailbox when it happens
    rig.engine.go.set()  # type: ignore[attr-defined]
    ends = [listener.end() for listener in [*works, late]]
    # What ran may be what it died of; what waited is told to try again.
    assert [type(end.error) for end in ends if isinstance(end, Failed)] == [EngineFailed] + 3 * [EngineDown]
    assert loop.has_failed
    loop.close()
    assert not loop.is_alive(1e9)
    assert rig.store.stats().pinned == 0
    assert [node for node in rig.cache._tree if node.holds] == []


def test_what_comes_after_the_end_is_answered_too() -> None:
    rig = LoopRig()
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    loop.close()
    late = Listener()
    loop.submit(short_work(), late)
    end = late.end()
    assert isinstance(end, Failed) and isinstance(end.error, EngineDown)
    loop.cancel(RowId(1))
    loop.close()


def test_a_model_that_cannot_be_loaded_ends_the_thread_and_shows() -> None:
    def load() -> object:
        raise OSError("no such model")

    loop = threaded(load)
    waiting = Listener()
    loop.submit(short_work(), waiting)
    loop.start()
    end = waiting.end()
    assert isinstance(end, Failed) and isinstance(end.error, EngineDown)
    loop.close()
    assert not loop.is_alive(1e9)


def test_closing_ends_what_runs_and_what_waits() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    closing = threading.Thread(target=loop.close)
    closing.start()
    rig.engine.go.set()  # type: ignore[attr-defined]
    closing.join(60)
    ends = [listener.end() for listener in works]
    assert all(isinstance(end, Ended) or isinstance(end.error, EngineDown) for end in ends)
    assert any(isinstance(end, Failed) for end in ends)
    assert not loop.is_alive(1e9)
    assert [node for node in rig.cache._tree if node.holds] == []


def test_a_step_that_takes_too_long_shows() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    now = itertools.count()
    clock = {"now": 0.0}
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig()),
        lambda: None,
        lambda: clock["now"],
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    listener = Listener()
    loop.submit(short_work(), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    clock["now"] = 31.0
    assert (loop.is_alive(30.0), loop.is_alive(32.0)) == (False, True)
    rig.engine.go.set()  # type: ignore[attr-defined]
    listener.end()
    loop.close()
    assert next(now) == 0


def test_a_thread_that_died_is_followed_by_another_with_the_same_cache() -> None:
    rig = LoopRig(engine=Gate(breaks=True))
    loop = threaded(lambda: (rig.engine, rig.cache))
    kept = rig.submit(prompt_of(300), keep=[300])
    rig.engine.go.set()  # type: ignore[attr-defined]
    rig.engine.breaks = False  # type: ignore[attr-defined]
    rig.run()
    rig.engine.breaks = True  # type: ignore[attr-defined]
    loop.start()
    first = Listener()
    row = loop.submit(short_work(), first)
    assert isinstance(first.end(), Failed)
    fresh = FakeEngine(LAYOUT)
    loop.restart(lambda: (fresh, rig.cache), Scheduler(SchedulerConfig(max_rows=1)))
    again = Listener()
    node = kept.nodes[300]
    tokens = [*node.all_tokens(), 7]
    assert loop.submit(replace(short_work(), owner="a", tokens=tokens, base=node), again) > row
    while not again.ended.wait(0.01):
        rig.store.run_pending()
    end = again.end()
    assert isinstance(end, Ended) and end.usage.cached_tokens == 300
    assert loop.is_alive(1e9) and not loop.has_failed
    loop.cancel(row)  # one of the dead thread's: nobody's now
    assert loop.close()
    rig.settle()


def test_works_of_a_step_that_hangs_are_given_up_and_the_thread_goes_on_without_them() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    clock = {"now": 0.0}
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig(max_rows=2)),
        lambda: None,
        lambda: clock["now"],
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    works = [Listener() for _ in range(3)]
    for listener in works:
        loop.submit(replace(short_work(), keep=frozenset({20})), listener)
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    late = Listener()
    loop.submit(short_work(), late)  # in the mailbox
    assert loop.give_up(30.0) == 0
    clock["now"] = 31.0
    assert loop.give_up(30.0) == 4
    assert {type(listener.end().error) for listener in works[:1]} == {EngineFailed}  # type: ignore[union-attr]
    assert isinstance(late.end(), Failed)
    assert loop.give_up(30.0) == 0  # nothing is left
    later = Listener()
    loop.submit(short_work(), later)
    assert loop.give_up(30.0) == 1 and isinstance(later.end(), Failed)
    assert not loop.is_alive(30.0)
    rig.engine.go.set()  # type: ignore[attr-defined]
    served = Listener()
    loop.submit(short_work(), served)
    assert isinstance(served.end(), Ended)
    assert loop.is_alive(30.0)
    loop.close()
    for listener in [*works, late, later]:
        listener.end()  # still the only end that each has
    assert rig.engine.rows == frozenset()
    assert rig.store.stats().pinned == 0
    assert [node for node in rig.cache._tree if node.holds] == []


def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    rig = LoopRig(engine=Gate(breaks=False))
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    loop.submit(short_work(), Listener())
    assert rig.engine.reached.wait(60)  # type: ignore[attr-defined]
    assert not loop.close(0.01)
    rig.engine.go.set()  # type: ignore[attr-defined]
    assert loop.close()


def test_a_work_that_cannot_begin_is_nobody_elses_end(rig: LoopRig) -> None:
    ill = rig.submit([-1, 2], generate=3)  # no token id
    well = rig.submit(prompt_of(20), generate=3)
    rig.run()
    assert isinstance(ill.error, RowFailed)
    assert well.tokens == rig.engine.continuation(prompt_of(20), 3)


class Restful(FakeEngine):
    """Counts how often it was told to give memory back."""

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.rests, self.rested = 0, threading.Event()

    def relax(self) -> None:
        self.rests += 1
        self.rested.set()


def test_memory_is_given_back_once_each_time_that_work_has_ceased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.loop.RELAX_AFTER", 0.01)
    engine = Restful()
    rig = LoopRig(engine=engine)
    loop = threaded(lambda: (rig.engine, rig.cache))
    loop.start()
    for times in (1, 2, 3):
        assert engine.rested.wait(60)
        assert engine.rests == times  # and not once more while it goes on waiting
        engine.rested.clear()
        listener = Listener()
        loop.submit(short_work(), listener)
        assert isinstance(listener.end(), Ended)
    assert engine.rested.wait(60)
    engine.rested.clear()
    loop.rest_again()  # an export, say, has taken some meanwhile
    assert engine.rested.wait(60)
    assert engine.rests == 5
    loop.close()


def test_memory_that_records_were_read_into_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.loop.RELAX_AFTER", 0.01)
    new_buffer(MAPPED_BUFFER_BYTES)  # gone at once, and so idle
    assert buffers._POOL.idle_bytes
    engine = Restful()
    loop = threaded(lambda: (engine, LoopRig(engine=engine).cache))
    loop.start()
    assert engine.rested.wait(60)
    loop.close()
    assert not buffers._POOL.idle_bytes


def test_asking_again_for_a_loan_gives_no_memory_back_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.loop.RELAX_AFTER", 0.01)
    engine, asked = Restful(), threading.Semaphore(0)
    engine.footprint = Footprint(per_token=10, fixed=500, weights=1000)
    rig = LoopRig(engine=engine)

    def refuse(size: int) -> int:
        asked.release()
        return size

    monkeypatch.setattr(rig.cache.store, "lend", refuse)
    loop = EngineLoop(
        lambda: (rig.engine, rig.cache),
        Scheduler(SchedulerConfig(active_bytes=1, idle_bytes=1 << 20)),
        lambda: None,
        lambda: 0.0,
        snapshot_wait=SNAPSHOT_WAIT,
    )
    loop.start()
    listener = Listener()
    row = loop.submit(short_work(), listener)
    for _ in range(20):
        assert asked.acquire(timeout=60)
    assert engine.rests <= 1
    loop.cancel(row)
    assert isinstance(listener.end(), Failed)
    loop.close()


def test_a_row_that_fails_last_leaves_no_loan_behind() -> None:
    rig = LoopRig(active=1)
    rig.engine.footprint = rig.scheduler.footprint = Footprint(per_token=10, fixed=500, weights=1000)
    heard = rig.submit([1, 2, 3], generate=50)
    rig.until(heard, State.DECODE)
    rig.turn()
    assert rig.store._placement.lent > 0
    rig.steps.rows.fail(heard.row, ValueError("the model refused it"), closed=True)
    assert rig.scheduler.count(*State) == 0
    assert rig.store._placement.lent == 0


@pytest.mark.parametrize("way", ["stop", "cancel and save"])
def test_an_early_end_hands_out_the_deepest_place_that_stands(two: LoopRig, way: str) -> None:
    prompt = prompt_of(2_000)
    heard = two.submit(prompt, keep=[700], generate=5, save=True)
    two.until(heard, State.PREFILL)
    while two.steps.rows[heard.row].position < 1_024:
        assert two.turn()
    last = two.steps.rows[heard.row].recorder.last_block
    for node in last.path():
        if node.end > 512:
            two.store.delete([RecordId(node.key, RecordKind.STATE)])
    WAYS[way](two, heard)
    two.run()
    (event,) = [event for event in heard.events if isinstance(event, NodeAt) and event.final]
    assert (event.node.end, event.lost) == (700, "")
    assert two.cache.stands(event.node)


@pytest.mark.parametrize("evicts", [False, True])
def test_a_stored_mark_stays_until_it_is_handed_out_though_its_snapshot_is_deleted(two: LoopRig, evicts: bool) -> None:
    prompt = prompt_of(700)
    first = two.submit(prompt, keep=[300])
    two.run()
    two.store.flush(0.0)
    snapshot = two.cache.add_snapshot("a", first.nodes[300], Keep(), parent=None)
    second = two.submit(prompt, keep=[300], generate=2)
    two.until(second, State.RESTORING)
    two.cache.delete(snapshot)
    two.cache.let_go(first.nodes[300])
    first.events = [event for event in first.events if not isinstance(event, NodeAt)]
    if evicts:
        two.store.trim(disk_bytes=1)
    two.run()
    assert second.receipt[0] == 512
    (event,) = [event for event in second.events if isinstance(event, NodeAt)]
    assert (event.node.end, event.lost) == (300, "")
