"""What the engine thread has counted and measured since the process began. A new thread goes on with the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.blocks import BLOCK_TOKENS
from kvcache.receipt import Usage
from kvcache.records import FetchResult, Tier
from service.measures import Histogram, Pace
from service.plan import StepPlan, StepResult

ROW_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
RESTORE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Totals:
    """Written by the engine thread; others may read single fields at any time."""

    tokens_prefilled: int = 0  # counted where the model is called
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    images_encoded: int = 0  # by the vision tower
    prefill_pace: float = 0.0  # least seconds that a token of a whole block's prefill has taken; 0: none was seen yet
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_rows: Histogram = field(default_factory=lambda: Histogram(ROW_BUCKETS))  # of each decode step
    late_rows: int = 0  # times that a row sat out a decode step, waiting for its constraint
    restore_seconds: Histogram = field(default_factory=lambda: Histogram(RESTORE_BUCKETS))
    store_waits: int = 0  # times that state had to wait for a store with a full queue
    prefill_speed: Pace = field(default_factory=Pace)  # tokens
    memory_speed: Pace = field(default_factory=Pace)  # bytes of restores from memory alone
    disk_speed: Pace = field(default_factory=Pace)  # bytes of restores that read the disk

    def stepped(self, plan: StepPlan, result: StepResult) -> None:
        """One step was made."""
        if plan.decode is not None:
            self.late_rows += len(result.unfed)
            if len(plan.decode.rows) > len(result.unfed):
                self.decode_rows.add(len(plan.decode.rows) - len(result.unfed))
        self.decode_seconds += result.decode_seconds
        self.prefilled(result.prefill_tokens, result.prefill_seconds)

    def restored(self, read: FetchResult, seconds: float) -> None:
        """One row's state was read, so long after its turn had come."""
        memory, disk = read.bytes_from(Tier.MEMORY), read.bytes_from(Tier.DISK)
        self.restore_seconds.add(seconds)
        (self.disk_speed if disk else self.memory_speed).add(memory + disk, seconds)

    def predict_load(self, *, memory_bytes: int, disk_bytes: int) -> float | None:
        """Seconds to read so much; None until this process has read some."""
        return (self.disk_speed if disk_bytes else self.memory_speed).predict(memory_bytes + disk_bytes)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step's prefill calls."""
        self.tokens_prefilled += tokens
        self.prefill_seconds += seconds
        self.prefill_speed.add(tokens, seconds)
        if tokens >= BLOCK_TOKENS:
            pace = seconds / tokens
            self.prefill_pace = min(self.prefill_pace, pace) if self.prefill_pace else pace

    def ended(self, usage: Usage) -> None:
        """A work that went well."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.recomputed_tokens += usage.recomputed_tokens
