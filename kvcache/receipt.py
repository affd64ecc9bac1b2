"""The receipt of one call. Owns how tokens are accounted: cached + recomputed + new == prompt, as the model saw it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS


class MissReason(enum.Enum):
    """Why stored state could not be used to the end; the numbers are the contract's."""

    NONE = 0
    BETWEEN_CHECKPOINTS = 1
    EVICTED = 2
    NOT_WRITTEN = 3
    CORRUPT = 4
    CHEAPER_TO_COMPUTE = 5
    PROVENANCE = 6
    THINNED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call's context before the first new token, and what was generated."""

    prompt_tokens: int
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    new_tokens: int = 0
    image_tokens: int = 0  # of prompt_tokens: positions of images
    completion_tokens: int = 0
    memory_tokens: int = 0  # of cached: from the memory tier
    disk_tokens: int = 0  # of cached: from the disk tier
    disk_bytes_read: int = 0
    grid_tokens: int = 0  # of recomputed: past the last boundary, where no checkpoint would have been
    diverged_at: int | None = None
    miss_reason: MissReason = MissReason.NONE
    remade: bool = False  # something of the parent was lost that came back by other calls than those that made it

    def __post_init__(self) -> None:
        assert self.cached_tokens + self.recomputed_tokens + self.new_tokens == self.prompt_tokens, self
        assert 0 <= self.image_tokens <= self.prompt_tokens, self
        assert 0 <= self.grid_tokens <= self.recomputed_tokens, self
        assert min(self.cached_tokens, self.memory_tokens, self.disk_tokens) >= 0, self


def lost_to_grid(position: int, known: int, kept: int = 0) -> int:
    """Of the tokens [position, known) that are computed again: those that no checkpoint could have saved.

    With every boundary stored, a restore stands at the last one before `known`, or at `kept`, the place in it whose
    own state was stored once. What is computed beyond that is the price of the grid: always less than a block.
    """
    best = max(known - known % BLOCK_TOKENS, min(kept, known))
    return max(0, known - max(best, position))
