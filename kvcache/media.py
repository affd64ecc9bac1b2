"""Pictures among tokens. Owns how an image's positions are written as numbers; knows nothing of pixels.

The model sees the same placeholder id at every position of every image, so a prefix of ids does not say which image it
holds. Here each position of an image carries a *symbol* instead: a number beyond every vocabulary, drawn from the
image's key and the position inside the image. Whatever works on tokens (block keys, the tree, divergence, journals)
then tells images apart without knowing of them, and a block that an image touches has the image in its key.

    bit 31  set: an image position         bit 30  set: the image's first position         bits 0-29  drawn from the key
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

MediaKey = NewType("MediaKey", bytes)
"""32 bytes: SHA-256 over the decoded pixels and the settings they are prepared with."""

MediaTag = NewType("MediaTag", bytes)
"""What a run of symbols tells of its key: the first 8 of them, 240 bits. Stands for the key where only tokens are."""

IMAGE = 1 << 31
FIRST = 1 << 30
_DRAWN = FIRST - 1
_TAG_SYMBOLS = 8  # words in a SHA-256
MIN_POSITIONS = 4  # fewer would tell less than 120 bits of the image


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image's positions [start, end) in a context."""

    start: int
    end: int
    tag: MediaTag


def symbols(key: MediaKey, count: int) -> array[int]:
    """What stands in a context for an image of `count` positions. ValueError below MIN_POSITIONS."""
    if count < MIN_POSITIONS:
        raise ValueError(f"an image takes {MIN_POSITIONS} positions or more, not {count}")
    drawn = array("I")
    for part in range(0, count, _TAG_SYMBOLS):
        words = hashlib.sha256(key + part.to_bytes(4, "little")).digest()
        drawn.extend(
            IMAGE | (int.from_bytes(words[at : at + 4], "little") & _DRAWN)
            for at in range(0, 4 * min(_TAG_SYMBOLS, count - part), 4)
        )
    drawn[0] |= FIRST
    return drawn


def tag_of(run: Sequence[int]) -> MediaTag:
    """The tag of a run of symbols from its first one on."""
    return MediaTag(b"".join(symbol.to_bytes(4, "little") for symbol in run[:_TAG_SYMBOLS]))


def spans_of(tokens: Sequence[int], start: int = 0) -> list[MediaSpan]:
    """The images in `tokens` from `start` on, in order. One that is cut at the end ends there."""
    found: list[MediaSpan] = []
    at = start
    while at < len(tokens):
        if not tokens[at] & IMAGE:
            at += 1
            continue
        end = at + 1
        while end < len(tokens) and tokens[end] & IMAGE and not tokens[end] & FIRST:
            end += 1
        found.append(MediaSpan(at, end, tag_of(tokens[at:end])))
        at = end
    return found


def cut_inside(spans: Sequence[MediaSpan], position: int) -> MediaSpan | None:
    """The image that a cut at `position` would split."""
    return next((span for span in spans if span.start < position < span.end), None)
