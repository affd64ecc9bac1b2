"""What this process has done, in numbers: counters, histograms and paces. Owns arithmetic; who shows it is elsewhere.

Written on the engine thread for the most part, read on any: a reader may see a number a moment before its neighbour.
Nothing here has labels that clients choose.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from service.errors import CallError
from service.work import Admitted, Ended, Failed, Tokens, Work, WorkEvent

QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROW_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
RESTORE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

MEMORY = 0.9  # of a pace: how much of what was known stays when a sample of its usual size comes


@dataclass(slots=True)
class Histogram:
    """How often a value was at most each of `bounds`, or above all of them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Pace:
    """Amounts a second, the recent ones counting most."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self.amount = self.amount * MEMORY + amount
            self.seconds = self.seconds * MEMORY + seconds

    def predict(self, amount: float) -> float | None:
        """Seconds for `amount`; 0 for nothing; None until something was measured."""
        if amount == 0:
            return 0.0
        return amount * self.seconds / self.amount if self.amount else None


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
        self.restore_seconds = Histogram(RESTORE_BUCKETS)
        self.decode_rows = Histogram(ROW_BUCKETS)
        self.prompt_tokens: Counter[str] = Counter()  # by where they came from: memory, disk, recomputed, new
        self.completion_tokens = 0
        self.sequences: Counter[tuple[str, str]] = Counter()  # (generation or snapshot, how it ended)
        self.prefill_tokens = 0  # counted at the model call
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self.stream_waits = 0.0  # seconds that writes to readers took
        self.slow_readers = 0
        self.store_waits = 0  # times that state had to wait for a store with a full queue
        self.prefill_pace = Pace()  # tokens
        self.memory_pace = Pace()  # bytes of restores from memory alone
        self.disk_pace = Pace()  # bytes of restores that read the disk

    # -- event loop -----------------------------------------------------------------------------------------------

    def call_began(self, method: str) -> None:
        self.calls_in_progress[method] += 1

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        self.calls_in_progress[method] -= 1
        self.calls[method, code] += 1
        self.call_seconds[method] = self.call_seconds.get(method, 0.0) + seconds

    # -- engine thread --------------------------------------------------------------------------------------------

    def stepped(self, *, rows: int, prefill_tokens: int, prefill_seconds: float, decode_seconds: float) -> None:
        """One step was made; `rows`: of its decode, 0 for none."""
        if rows:
            self.decode_rows.add(rows)
        self.prefill_tokens += prefill_tokens
        self.prefill_seconds += prefill_seconds
        self.decode_seconds += decode_seconds
        self.prefill_pace.add(prefill_tokens, prefill_seconds)

    def restored(self, *, memory_bytes: int, disk_bytes: int, seconds: float) -> None:
        """One row's state was read."""
        self.restore_seconds.add(seconds)
        (self.disk_pace if disk_bytes else self.memory_pace).add(memory_bytes + disk_bytes, seconds)

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

    # -- anybody --------------------------------------------------------------------------------------------------

    def predict_load(self, *, memory_bytes: int, disk_bytes: int) -> float | None:
        """Seconds to read so much; None until this process has read some."""
        return (self.disk_pace if disk_bytes else self.memory_pace).predict(memory_bytes + disk_bytes)
