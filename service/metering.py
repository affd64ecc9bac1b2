"""What calls have met, in numbers. Counts what passes to them; what the engine thread itself measures is `totals`.

Written on the event loop and the engine thread, read on any: a reader may see a number a moment before its neighbour.
Nothing here has labels that clients choose.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from service.errors import CallError
from service.measures import Histogram
from service.work import Admitted, Ended, Failed, Tokens, Work, WorkEvent

QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Meter:
    """One per process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.calls: Counter[tuple[str, str]] = Counter()  # (method, code)
        self.calls_in_progress: Counter[str] = Counter()
        self.call_seconds: dict[str, float] = {}
        self.queue_seconds = Histogram(QUEUE_BUCKETS)
        self.ttft_seconds = Histogram(TTFT_BUCKETS)
        self.gap_seconds = Histogram(GAP_BUCKETS)
        self.prompt_tokens: Counter[str] = Counter()  # by where they came from: memory, disk, recomputed, new
        self.completion_tokens = 0
        self.sequences: Counter[tuple[str, str]] = Counter()  # (generation or snapshot, how it ended)
        self.stream_waits = 0.0  # seconds that writes to readers took
        self.slow_readers = 0
        self.refused: Counter[str] = Counter()  # calls that ended with an error of the contract's, by its reason

    # -- event loop -----------------------------------------------------------------------------------------------

    def call_began(self, method: str) -> None:
        self.calls_in_progress[method] += 1

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        self.calls_in_progress[method] -= 1
        self.calls[method, code] += 1
        self.call_seconds[method] = self.call_seconds.get(method, 0.0) + seconds

    # -- engine thread --------------------------------------------------------------------------------------------

    def watching(self, work: Work, emit: Callable[[WorkEvent], None]) -> Callable[[WorkEvent], None]:
        """`emit`, with an eye on what passes: the one place where calls are counted."""
        came = self._clock()
        kind = "snapshot" if work.generation is None else "generation"
        last: float | None = None

        def seen(event: WorkEvent) -> None:
            nonlocal last
            match event:
                case Tokens() if event.picked:
                    now = self._clock()
                    if last is None:
                        self.ttft_seconds.add(now - came)
                    else:
                        self.gap_seconds.add(now - last)
                    last = now
                    self.completion_tokens += len(event.picked)
                case Admitted():
                    self.queue_seconds.add(event.queue_seconds)
                case Ended():
                    self.sequences[kind, "done" if event.reason is None else event.reason.name.lower()] += 1
                    usage = event.usage
                    self.prompt_tokens["memory"] += usage.memory_tokens
                    self.prompt_tokens["disk"] += usage.disk_tokens
                    self.prompt_tokens["recomputed"] += usage.recomputed_tokens
                    self.prompt_tokens["new"] += usage.new_tokens
                case Failed():
                    reason = event.error.reason if isinstance(event.error, CallError) else "INTERNAL"
                    self.sequences[kind, reason.lower()] += 1
            emit(event)

        return seen
