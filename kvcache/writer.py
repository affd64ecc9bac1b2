"""The I/O thread, and the pause it takes when the disk keeps failing. Knows nothing of records.

Urgent jobs (reads, trims) run before background ones (writes), in order of arrival; a long background job lets waiting
urgent ones through by calling `run_urgent`. Hand-over is one lock with a condition: the thread sleeps until there is
something to do. A job that raises ends alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Job = Callable[[], None]
T = TypeVar("T")


class CircuitBreaker:
    """After some failures in a row, a pause that doubles with each further one; the first success ends it.

    Pure: the caller says what time it is, in seconds.
    """

    def __init__(self, *, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 60.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self.open_until = float("-inf")

    def is_open(self, now: float) -> bool:
        return now < self.open_until

    def success(self) -> bool:
        """Forget all failures; True if a pause may have to be ended."""
        had_failures, self._failures = self._failures > 0, 0
        self.open_until = float("-inf")
        return had_failures

    def failure(self, now: float) -> bool:
        """Count one failure; True if a pause begins now."""
        self._failures += 1
        if self._failures < self._threshold:
            return False
        doublings = min(self._failures - self._threshold, 32)
        self.open_until = now + min(self._first_pause_s * 2**doublings, self._longest_pause_s)
        return True


class IoThread:
    """Runs jobs one at a time. `step` runs them without a thread, for tools and for tests that choose the order."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._wake = threading.Condition()
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._paused_until = float("-inf")
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._running = threading.RLock()  # held while a job runs: inline callers and the thread exclude each other
        self.failed_jobs = 0
        self.last_failure = ""

    @property
    def started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        with self._wake:
            if self._thread is not None or self._stopping:
                raise RuntimeError(f"{self._name} was started before")
            # A daemon, so that a process that forgets `stop` can still end.
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Finish the job at hand and the urgent ones, forget the background ones, and end the thread."""
        with self._wake:
            self._stopping = True
            self._background.clear()
            self._wake.notify_all()
            thread = self._thread
        if thread is None:
            self.run_urgent()
        else:
            thread.join()

    def submit(self, job: Job, *, urgent: bool = False) -> bool:
        """Queue a job; False, and nothing queued, after `stop`."""
        with self._wake:
            if self._stopping:
                return False
            (self._urgent if urgent else self._background).append(job)
            self._wake.notify()
        return True

    def call(self, function: Callable[[], T]) -> T:
        """Run as an urgent job and wait for its result; in the calling thread if no other one would run it."""
        if self._thread is None or threading.current_thread() is self._thread:
            with self._running:
                return function()
        done = threading.Event()
        results: list[T] = []
        errors: list[Exception] = []

        def job() -> None:
            try:
                results.append(function())
            except Exception as error:  # handed to the caller below, whatever it is
                errors.append(error)
            finally:
                done.set()

        if not self.submit(job, urgent=True):
            with self._running:
                return function()
        done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def pause(self, until: float) -> None:
        """Run no background job before this time of the clock; a time in the past resumes."""
        with self._wake:
            self._paused_until = until
            self._wake.notify()

    def step(self) -> bool:
        """Run one job if one is due; False if not. Not for use beside a started thread."""
        with self._wake:
            job = self._next()
        if job is None:
            return False
        self._run(job)
        return True

    def run_urgent(self) -> None:
        """Run the urgent jobs that wait now, from inside a background job."""
        while True:
            with self._wake:
                if not self._urgent:
                    return
                job = self._urgent.popleft()
            self._run(job)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while (job := self._next()) is None:
                    if self._stopping:
                        return
                    self._wake.wait(self._paused_until - self._clock() if self._background else None)
            self._run(job)
            del job  # do not keep a payload alive while waiting for the next one

    def _next(self) -> Job | None:
        if self._urgent:
            return self._urgent.popleft()
        if self._background and self._clock() >= self._paused_until:
            return self._background.popleft()
        return None

    def _run(self, job: Job) -> None:
        try:
            with self._running:
                job()
        except Exception as error:  # the thread outlives every job: without it nothing is written or restored again
            self.failed_jobs += 1
            self.last_failure = f"{type(error).__name__}: {error}"
            log.exception("a job of %s failed", self._name)
