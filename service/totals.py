"""What the engine thread has counted and measured since the process began. A new thread goes on with the same."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS
from kvcache.receipt import Usage


@dataclass(slots=True)
class Totals:
    """Written by the engine thread; others may read single fields at any time."""

    tokens_prefilled: int = 0  # counted where the model is called
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_pace: float = 0.0  # least seconds that a token of a whole block's prefill has taken; 0: none was seen yet

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step's prefill calls."""
        self.tokens_prefilled += tokens
        if tokens >= BLOCK_TOKENS:
            pace = seconds / tokens
            self.prefill_pace = min(self.prefill_pace, pace) if self.prefill_pace else pace

    def ended(self, usage: Usage) -> None:
        """A work that went well."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.recomputed_tokens += usage.recomputed_tokens
