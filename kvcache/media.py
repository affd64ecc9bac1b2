"""Pictures among tokens. Owns how an image's positions are written as numbers; knows nothing of pixels.

The model sees the same placeholder id at every position of every image, so a prefix of ids does not say which image it
holds. Here each position of an image carries a *symbol* instead: a number beyond every vocabulary, drawn from the
image's key and the position inside the image. Whatever works on tokens (block keys, the tree, divergence, journals)
then tells images apart without knowing of them, and a block that an image touches has the image in its key.

    bit 31  set: an image position     bit 30  its first one     bit 29  its last one     bits 0-28  drawn from the key

So a run of tokens shows by itself whether it ends inside an image.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

MediaKey = NewType("MediaKey", bytes)
"""32 bytes: SHA-256 over the decoded pixels and the settings they are prepared with."""

MediaTag = NewType("MediaTag", bytes)
"""What a run of symbols tells of its key: the first 8 of them, 232 bits. Stands for the key where only tokens are."""

IMAGE = 1 << 31
FIRST = 1 << 30
LAST = 1 << 29
_DRAWN = LAST - 1
_TAG_SYMBOLS = 8  # words in a SHA-256
_RUN = re.compile(rb"[\x80-\xff][\x80-\xbf]*")  # any first symbol, then those that are not the first
MIN_POSITIONS = 4  # fewer would tell less than 116 bits of the image


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
    drawn[-1] |= LAST
    return drawn


def ends_inside(tokens: Sequence[int]) -> bool:
    """Whether `tokens` end inside an image."""
    return bool(tokens) and bool(tokens[-1] & IMAGE) and not tokens[-1] & LAST


def tag_of(run: Sequence[int]) -> MediaTag:
    """The tag of a run of symbols from its first one on; its length is no part of it."""
    return MediaTag(b"".join((symbol & ~LAST).to_bytes(4, "little") for symbol in run[:_TAG_SYMBOLS]))


def tag_for(key: MediaKey, count: int) -> MediaTag:
    """The tag of the image of this key where it takes `count` positions."""
    return tag_of(symbols(key, min(count, _TAG_SYMBOLS)))


def spans_of(tokens: Sequence[int], start: int = 0) -> list[MediaSpan]:
    """The images in `tokens` from `start` on, in order. One that is cut at the end ends there."""
    words = tokens[start:] if isinstance(tokens, array) else array("I", tokens[start:])
    # The highest byte of each word tells what it is, and a search over bytes is quick where a loop is not.
    highest = words.tobytes()[3::4] if sys.byteorder == "little" else words.tobytes()[0::4]
    found = (match.span() for match in _RUN.finditer(highest))
    return [MediaSpan(start + at, start + end, tag_of(words[at:end])) for at, end in found]


def image_positions(tokens: Sequence[int]) -> int:
    """How many of `tokens` are positions of images."""
    return sum(span.end - span.start for span in spans_of(tokens))


def shown(tokens: Sequence[int], placeholder_id: int) -> array[int]:
    """`tokens` as callers see them: the same id at every position of every image."""
    seen = array("I", tokens)
    for span in spans_of(seen):
        seen[span.start : span.end] = array("I", [placeholder_id]) * (span.end - span.start)
    return seen


def cut_inside(spans: Sequence[MediaSpan], position: int) -> MediaSpan | None:
    """The image that a cut at `position` would split."""
    return next((span for span in spans if span.start < position < span.end), None)
