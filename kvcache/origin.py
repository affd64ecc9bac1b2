"""Whose tokens a prefix has. A value, which requests carry too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A stretch of a prefix, from token `start` up to the next one's: the call that brought these tokens.

    Equal tokens of two calls have two origins. So what came of the same computation is told from what only reads alike.
    """

    call: str
    start: int
