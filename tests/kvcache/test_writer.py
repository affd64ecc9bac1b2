"""The I/O thread: reads before writes, nothing kills it, and it pauses when told to. And the breaker that tells it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvcache.writer import CircuitBreaker, IoThread


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def thread() -> Iterator[IoThread]:
    made = IoThread("test-io")
    yield made
    made.stop()


def test_urgent_jobs_run_before_background_ones_each_in_order() -> None:
    io, ran = IoThread("test-io"), []
    for name in ("write 1", "write 2"):
        io.submit(lambda name=name: ran.append(name))
    for name in ("read 1", "read 2"):
        io.submit(lambda name=name: ran.append(name), urgent=True)
    while io.step():
        pass
    assert ran == ["read 1", "read 2", "write 1", "write 2"]


def test_a_long_background_job_lets_urgent_ones_through() -> None:
    io, ran = IoThread("test-io"), []

    def long_job() -> None:
        ran.append("first half")
        io.submit(lambda: ran.append("read"), urgent=True)
        io.run_urgent()
        ran.append("second half")

    io.submit(long_job)
    assert io.step()
    assert ran == ["first half", "read", "second half"]


def test_the_thread_outlives_a_job_that_raises(thread: IoThread, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise LookupError("no such luck")

    done = threading.Event()
    thread.start()
    thread.submit(fail)
    thread.submit(done.set)
    assert done.wait(10)
    assert (thread.failed_jobs, thread.last_failure) == (1, "LookupError: no such luck")
    assert "a job of test-io failed" in caplog.text


def test_a_call_gives_the_result_or_the_error_of_a_job_on_the_thread(thread: IoThread) -> None:
    thread.start()
    assert thread.call(threading.current_thread).name == "test-io"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    assert thread.failed_jobs == 0


def test_a_call_from_a_job_runs_in_place(thread: IoThread) -> None:
    thread.start()
    assert thread.call(lambda: thread.call(lambda: "nested")) == "nested"


def test_a_call_runs_here_before_the_start_and_after_the_stop(thread: IoThread) -> None:
    assert thread.call(threading.current_thread) is threading.current_thread()
    thread.start()
    thread.stop()
    assert thread.call(threading.current_thread) is threading.current_thread()


def test_stopping_runs_what_is_urgent_and_forgets_the_rest(thread: IoThread) -> None:
    entered, leave, ran = threading.Event(), threading.Event(), []

    def block() -> None:
        entered.set()
        leave.wait(10)

    thread.start()
    thread.submit(block)
    assert entered.wait(10)
    thread.submit(lambda: ran.append("write"))
    thread.submit(lambda: ran.append("read"), urgent=True)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    while thread.submit(lambda: None):
        pass  # until the stop has begun, which forgets these too
    leave.set()
    stopper.join(10)
    assert ran == ["read"]
    assert not thread.submit(lambda: ran.append("late"))
    assert not thread.submit(lambda: ran.append("late"), urgent=True)
    assert not thread.step()


def test_a_thread_starts_once(thread: IoThread) -> None:
    thread.start()
    with pytest.raises(RuntimeError):
        thread.start()
    thread.stop()
    with pytest.raises(RuntimeError):
        thread.start()


def test_a_pause_holds_background_jobs_only_and_ends_with_the_clock() -> None:
    clock, ran = Clock(), []
    io = IoThread("test-io", clock)
    io.pause(until=5.0)
    io.submit(lambda: ran.append("write"))
    io.submit(lambda: ran.append("read"), urgent=True)
    assert (io.step(), io.step()) == (True, False)
    clock.now = 5.0
    assert io.step()
    assert ran == ["read", "write"]


def test_a_running_thread_wakes_from_a_pause_by_itself_or_when_it_is_ended(thread: IoThread) -> None:
    first, second = threading.Event(), threading.Event()
    thread.start()
    thread.pause(until=thread._clock() + 0.01)
    thread.submit(first.set)
    assert first.wait(10)
    thread.pause(until=thread._clock() + 3600)
    thread.submit(second.set)
    thread.pause(until=0)
    assert second.wait(10)


def test_the_breaker_opens_after_failures_in_a_row_and_doubles_its_pause_up_to_a_limit() -> None:
    breaker = CircuitBreaker(threshold=3, first_pause_s=1.0, longest_pause_s=5.0)
    opened = [(breaker.failure(now=100.0), breaker.open_until - 100.0) for _ in range(7)]
    closed = float("-inf")
    assert opened == [(False, closed), (False, closed), (True, 1), (True, 2), (True, 4), (True, 5), (True, 5)]
    assert breaker.is_open(104.9)
    assert not breaker.is_open(105.0)


def test_one_success_closes_the_breaker() -> None:
    breaker = CircuitBreaker(threshold=1, first_pause_s=1.0)
    breaker.failure(now=0.0)
    assert breaker.success()
    assert not breaker.is_open(0.5)
    assert not breaker.success()
    breaker.failure(now=0.0)
    assert breaker.open_until == 1.0


def test_a_breaker_that_never_recovers_never_overflows() -> None:
    breaker = CircuitBreaker(threshold=1, first_pause_s=1.0, longest_pause_s=60.0)
    for _ in range(5000):
        breaker.failure(now=0.0)
    assert breaker.open_until == 60.0
