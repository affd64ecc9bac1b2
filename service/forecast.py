"""What the scheduler foresees for calls that might come. Values only; `Scheduler.foresee` makes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Admission(enum.Enum):
    """What would become of a call."""

    NOW = 1
    QUEUED = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The answer, for all calls together. `reason`: why not at once; ROWS_BUSY or an error's reason."""

    admission: Admission
    reason: str
    need_bytes: int  # of working state, for all of them
    free_bytes: int  # reserved by nobody; `need_bytes` where memory is unbounded
