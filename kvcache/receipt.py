"""The receipt of one call. Owns how tokens are accounted: cached + recomputed + new == prompt, as the model saw it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MissReason(enum.Enum):
    """Why stored state could not be used to the end; the numbers are the contract's."""

    NONE = 0
    BETWEEN_CHECKPOINTS = 1
    EVICTED = 2
    NOT_WRITTEN = 3
    CORRUPT = 4
    CHEAPER_TO_COMPUTE = 5
    PROVENANCE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call's context before the first new token, and what was generated."""

    prompt_tokens: int
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    completion_tokens: int = 0
    memory_tokens: int = 0  # of cached: from the memory tier
    disk_tokens: int = 0  # of cached: from the disk tier
    disk_bytes_read: int = 0
    diverged_at: int | None = None
    miss_reason: MissReason = MissReason.NONE

    def __post_init__(self) -> None:
        assert self.cached_tokens + self.recomputed_tokens + self.new_tokens == self.prompt_tokens, self
