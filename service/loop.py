"""The engine thread and its mailbox. Owns the thread's life: load, drain, step, flush, end, and a new one after that.

What a step does is `steps`; one wake-up of the event loop a step carries every row's events (`Outlet.flush`).

An exception out of the engine itself ends every row and the thread: `is_alive` turns False and health with it.
`restart` begins a new thread. A thread that hangs inside the engine cannot be ended: `give_up` ends its works instead,
and should it come back it goes on without them. `service.watchdog` decides when.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcache.buffers import give_up_idle
from kvcache.cache import PrefixCache
from service.engine import Engine
from service.errors import CallError, EngineFailed
from service.events import Forecast, RowView
from service.failures import not_begun
from service.plan import RowId, StepPlan, StepResult
from service.scheduler import Demand, Scheduler, State
from service.steps import Steps
from service.totals import Totals
from service.work import Failed, Work, WorkEvent

log = logging.getLogger("kvfork.loop")

RELAX_AFTER = 5.0  # seconds without a step after which working memory goes back to the system
TEARDOWN_SECONDS = 2.0  # milliseconds are usual


@dataclass(frozen=True, slots=True)
class _Submit:
    row: RowId
    work: Work
    emit: Callable[[WorkEvent], None]


@dataclass(frozen=True, slots=True)
class _End:
    row: RowId
    clean: bool
    save: bool


_Message = _Submit | _End | Callable[[], None] | None  # to be called, or to end the thread


class EngineLoop:
    """`submit`, `stop` and `cancel` may be called from any thread and never wait."""

    def __init__(
        self,
        load: Callable[[], tuple[Engine, PrefixCache]],
        scheduler: Scheduler,
        flush: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        snapshot_wait: float,
    ) -> None:
        """`snapshot_wait`: seconds that state which somebody asked for may wait for a full store to take it."""
        self._load = load
        self._scheduler = scheduler
        self._flush = flush
        self._clock = clock
        self._snapshot_wait = snapshot_wait
        self._engine: Engine | None = None
        self._steps: Steps | None = None  # of the last thread whose engine was loaded
        self._inbox: deque[_Message] = deque()
        self._wake = threading.Condition()
        self._next_row = 0
        self._thread = self._new_thread()
        self._busy_since: float | None = None
        self._relax_at: float | None = None  # unless there is a step before; None: memory was given back
        self._in_engine = False  # under the lock: while it is set, the thread touches nothing but the engine
        self._given_up = False  # under the lock: while in the engine, its works were ended
        self._failed = False
        self._stopping = False
        self._end_error: CallError | None = None  # set once the thread takes no more messages
        self.totals = Totals()

    # -- any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def restart(self, load: Callable[[], tuple[Engine, PrefixCache]], scheduler: Scheduler) -> None:
        """A new thread in place of one that has failed; row ids and totals go on."""
        assert self.has_failed
        self._thread.join()
        with self._wake:
            self._load, self._scheduler = load, scheduler
            self._busy_since, self._failed, self._end_error = None, False, None
            self._thread = self._new_thread()
            self._thread.start()

    def close(self, patience: float | None = None) -> bool:
        """Ends the thread; running works fail. False if it has not come back within `patience` seconds."""
        if self._thread.ident is None:
            return True  # it was never started
        self._post(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            return False
        _wait_for_teardown(self._thread)
        return True

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="engine", daemon=True)

    def submit(self, work: Work, emit: Callable[[WorkEvent], None]) -> RowId:
        """Queues a work. `emit` is called on the engine thread (on the caller's once that has ended).

        Exactly one Ended or Failed comes last.
        """
        with self._wake:
            self._next_row += 1
            row = RowId(self._next_row)
            error = self._end_error
            if error is None:
                self._inbox.append(_Submit(row, work, emit))
                self._wake.notify()
        if error is not None:
            emit(Failed(error))
            self._flush()
        return row

    def stop(self, row: RowId) -> None:
        """Ends a work cleanly, with what it has."""
        self._post(_End(row, clean=True, save=True))

    def cancel(self, row: RowId, *, save: bool = False) -> None:
        """Gives a work up within one step."""
        self._post(_End(row, clean=False, save=save))

    def is_alive(self, stuck_after: float) -> bool:
        """False once the thread has died, or when one step has taken longer than `stuck_after` seconds."""
        return self._thread.is_alive() and not self._failed and not self._is_stuck(stuck_after)

    @property
    def has_failed(self) -> bool:
        """The thread is over, or about to be, and nobody asked it to end."""
        return self._failed and not self._stopping

    def give_up(self, stuck_after: float) -> int:
        """Ends every work if the thread has been inside the engine for longer than that; how many."""
        with self._wake:
            if not self._in_engine or not self._is_stuck(stuck_after):
                return 0
            assert self._steps is not None
            self._given_up = True
            # The lock, and looking at `_given_up` before all else, is what keeps the thread away from all of this.
            error = EngineFailed("the model did not answer in time", hint="the server's log says for how long")
            ended = self._steps.end_all(error)
            waiting = [message for message in self._inbox if isinstance(message, _Submit)]
            self._inbox = deque(message for message in self._inbox if not isinstance(message, _Submit))
            for message in waiting:
                message.emit(Failed(not_begun(error)))
        self._flush()
        return ended + len(waiting)

    def _is_stuck(self, after: float) -> bool:
        busy = self._busy_since
        return busy is not None and self._clock() - busy > after

    def count(self, *states: State) -> int:
        """How many sequences are in one of `states`, at some recent moment."""
        try:
            return self._scheduler.count(*states)
        except RuntimeError:  # the engine thread changed the dictionary meanwhile; a number a moment old will do
            return len(self._steps.rows) if self._steps is not None else 0

    @property
    def reserved_bytes(self) -> int:
        """Working memory reserved by rows under way, at some recent moment."""
        while True:
            with contextlib.suppress(RuntimeError):  # the engine thread changed the dictionary meanwhile
                return self._scheduler.reserved_bytes

    def rest_again(self) -> None:
        """Somebody has taken memory for a while beside the rows: it is given back as theirs is."""
        self._post(lambda: None)

    def views(self, owner: str) -> list[RowView]:
        """The owner's sequences, oldest first, at some recent moment."""
        return self._steps.views(owner) if self._steps is not None else []

    def foresee(self, demand: Demand, count: int) -> Forecast:
        """What so many sequences would meet if they came at about this moment. The model must be loaded."""
        assert self._steps is not None
        while True:
            with contextlib.suppress(RuntimeError):  # as above
                return self._steps.foresee(demand, count)

    def _post(self, message: _Message) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    # -- engine thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            error = self._serve()
        except BaseException as failure:  # the engine is broken, or somebody ends threads: say so to everybody
            log.exception("the engine thread ends")
            # Its frames hold the model's memory, which a new thread will need.
            traceback.clear_frames(failure.__traceback__)
            self._failed = True
            error = EngineFailed("the model thread failed", hint="the server's log says why")
        if self._steps is not None:
            self._steps.close(error)
        self._engine = None
        with self._wake:
            left, self._inbox = list(self._inbox), deque()
            self._end_error = not_begun(error)  # from here on nobody reads the mailbox
        for message in left:
            if isinstance(message, _Submit):
                message.emit(Failed(self._end_error))
            elif callable(message):
                message()  # what was read for a row that is gone is let go of
        self._flush()

    def _serve(self) -> CallError:
        """Loads and steps until told to stop; returns what later calls are told."""
        try:
            steps = self._take_over(*self._load())
        except Exception:  # whatever is wrong with a model; whoever loads it says so in the log
            log.debug("the model was not loaded", exc_info=True)
            self._failed = True
            return EngineFailed("the model could not be loaded", hint="see the server's log")
        while not self._stopping:
            self._drain(steps)
            self._busy_since = self._clock()
            steps.tick()
            self._busy_since = None
            self._flush()
        return EngineFailed("the server has stopped")

    def _take_over(self, engine: Engine, cache: PrefixCache) -> Steps:
        self._engine = engine
        self._relax_at = self._clock() + RELAX_AFTER
        self._steps = Steps(
            self._step,
            engine.footprint,
            cache,
            self._scheduler,
            self.totals,
            self._post,
            self._clock,
            snapshot_wait=self._snapshot_wait,
        )
        return self._steps

    def _drain(self, steps: Steps) -> None:
        """Waits until there is something to do, and does what the messages say."""
        while not self._wait_for_work(steps):
            assert self._engine is not None
            self._engine.relax()
            give_up_idle()
            self._relax_at = None
        with self._wake:
            messages, self._inbox = list(self._inbox), deque()
        for message in messages:
            match message:
                case None:
                    self._stopping = True
                case _Submit():
                    steps.submit(message.row, message.work, message.emit)
                case _End():
                    steps.end(message.row, clean=message.clean, save=message.save)
                case act:
                    act()
        if messages and self._relax_at is None:
            self._relax_at = self._clock() + RELAX_AFTER
        steps.start_restores()  # for rows whose restore has to be planned anew

    def _wait_for_work(self, steps: Steps) -> bool:
        """True once there is something to do; False if nothing has run for so long that memory should be given back."""
        with self._wake:
            look = steps.look_again_in()
            relax = None if self._relax_at is None else max(0.0, self._relax_at - self._clock())
            seconds = min((wait for wait in (look, relax) if wait is not None), default=None)
            if self._wake.wait_for(lambda: bool(self._inbox) or steps.has_work, seconds):
                return True
            return look is not None and (relax is None or look <= relax)

    def _step(self, plan: StepPlan) -> StepResult | None:
        """Has the engine make a step; None if its works were given up meanwhile."""
        assert self._engine is not None
        with self._wake:
            self._in_engine = True
        try:
            result = self._engine.step(plan)
        finally:
            with self._wake:
                given_up, self._in_engine, self._given_up = self._given_up, False, False
            self._relax_at = self._clock() + RELAX_AFTER
        if given_up:
            log.warning("the model answers again; the works of that step are gone")
            return None
        return result


def _wait_for_teardown(thread: threading.Thread) -> None:
    """Waits until the system's thread is gone, which Python's own `join` does not.

    MLX ends a thread's streams in that last moment, and a process that ends meanwhile aborts.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    give_up = time.monotonic() + TEARDOWN_SECONDS
    while task.exists() and time.monotonic() < give_up:
        time.sleep(0.001)
