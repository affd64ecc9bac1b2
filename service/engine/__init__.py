"""The engine: carries out step plans on MLX. Decides nothing, never imports gRPC.

`Engine` is the seam that the loop drives; `mlx_engine` implements it. All of it runs on one thread, which owns every
MLX object.
"""

from __future__ import annotations

from typing import Protocol

from service.footprint import Footprint
from service.plan import StepPlan, StepResult


class Engine(Protocol):
    """Runs on the engine thread only."""

    footprint: Footprint  # of the model, known from the start

    def step(self, plan: StepPlan) -> StepResult:
        """Carries out one plan. Row failures are in the result; an exception means the engine is broken."""
        ...

    def active_bytes(self) -> int:
        """Bytes of working KV state held for rows."""
        ...

    def relax(self) -> None:
        """Gives memory that no row needs back to the system; called when nothing has run for a while."""
        ...
