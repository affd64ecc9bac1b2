"""Two ways of keeping a measurement: how often it was how large, and how fast something goes. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

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
