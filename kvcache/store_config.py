"""What a record store may use. Owns the numbers and their bounds; who goes by them is in `kvcache.placement`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcache.checkpoints import DEFAULT_CHECKPOINTS, Checkpoints

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """What the store may use. Sizes in bytes, times in seconds."""

    directory: Path | None = None  # whose file system to use; None: the system's temporary directory
    memory_bytes: int  # budget of the memory tier
    disk_bytes: int  # budget of all segment files together, headers and dead records included
    queue_bytes: int  # bound on PENDING payloads for implicit records; explicit ones may use twice as much. One record
    # of any size may wait besides explicit ones of `queue_bytes`, or alone
    segment_bytes: int = 64 * MIB
    min_free_bytes: int = 1024 * MIB  # writing never takes the file system's free space below this
    encrypt: bool = True
    checkpoints: Checkpoints = DEFAULT_CHECKPOINTS  # THROUGH: all may be written; MARKS: explicit records; OFF: none
    daily_write_bytes: int | None = None  # implicit records are not written beyond it; None: no limit
    retry_pause_s: float = 1.0  # first pause after writes failed; doubles
    longest_pause_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "queue_bytes", "min_free_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.daily_write_bytes is not None and self.daily_write_bytes < 0:
            raise ValueError("daily_write_bytes must not be negative")
        if self.segment_bytes <= 0:
            raise ValueError("segment_bytes must be positive")
