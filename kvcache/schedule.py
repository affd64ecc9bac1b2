"""The canonical schedule. Owns where a prefill is cut and how the cuts are written into block keys; pure.

The KV of a token depends, in the last bits, on how the prefill was cut. So the cuts are a function of absolute
positions only: multiples of 256, and *stops* (declared marks, a snapshot's end, the prompt's end). A warm run that
starts at any cut makes exactly the calls that a cold run makes from there.

An image that attention sees both ways is one call with all of it: a cut that would fall inside moves to its end. Its
blocks' keys hold its symbols, from which its end follows, so that the schedule of a block is still a function of what
is before it.

Next-token logits change no cut: a boundary that was only passed and one that was asked for
are the same state.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kvcache.blocks import BLOCK_TOKENS, BlockKey
from kvcache.layout import CacheLayout
from kvcache.media import MediaSpan, cut_inside, spans_of

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One model call over tokens [start, end). `stop`: its last position's logits and state are wanted."""

    start: int
    end: int
    stop: bool

    @property
    def passed(self) -> range:
        """Block boundaries strictly inside: an image that must be whole goes on beyond them."""
        return range(self.start - self.start % BLOCK_TOKENS + BLOCK_TOKENS, self.end, BLOCK_TOKENS)


def plan_calls(
    start: int, end: int, stops: Iterable[int], replay: Iterable[int] = (), whole: Sequence[MediaSpan] = ()
) -> list[Call]:
    """The calls that prefill [start, end), in order.

    `stops` are the places to keep; `end` is always one. `replay` are places where an earlier run cut, to be cut again
    so that the same state results. `whole` are images that no cut may split: one inside moves to the image's end.
    """
    moved = partial(after_image, whole)
    wanted = {moved(p) for p in stops if start < p <= end} | {end}
    fixed = {start, end} | wanted | {moved(p) for p in replay if start < p < end}
    fixed |= {moved(p) for p in range(start - start % BLOCK_TOKENS + BLOCK_TOKENS, end, BLOCK_TOKENS)}
    assert max(fixed) == end, "the last image is not whole"
    return [Call(left, right, stop=right in wanted) for left, right in itertools.pairwise(sorted(fixed))]


def whole_spans(tokens: Sequence[int], layout: CacheLayout) -> list[MediaSpan]:
    """The images in `tokens` that no cut may split."""
    return spans_of(tokens) if layout.whole_images else []


def after_image(whole: Sequence[MediaSpan], position: int) -> int:
    """`position`, or the end of the image that it is inside of."""
    inside = cut_inside(whole, position)
    return position if inside is None else inside.end


def cut_by_image(whole: Sequence[MediaSpan], start: int, end: int) -> list[int]:
    """Where an image that goes beyond the block boundary `start` cuts [start, end): at its end, if that is inside."""
    cut = after_image(whole, start)
    return [cut] if start < cut < end else []


def prefill_schedule(block_start: int, block_end: int, ends: Iterable[int]) -> bytes:
    """How a block was prefilled: the offsets of call ends strictly inside it."""
    inside = {e - block_start for e in ends if block_start < e < block_end}
    return b"P" + bytes(sorted(inside)) if inside else b"P"


def decode_schedule(nonce: bytes) -> bytes:
    """A block with decoded tokens in it. The batch's other rows are part of how it came about, so no two are equal."""
    assert len(nonce) == NONCE_BYTES
    return b"D" + nonce


def trimmed_schedule(source: bytes) -> bytes:
    """A block cut short from a longer one that was computed whole."""
    return b"T" + source


def trimmed_from(schedule: bytes) -> BlockKey:
    """The key of the whole block, from the schedule of one that was cut short."""
    assert schedule[:1] == b"T", schedule
    return BlockKey(schedule[1:])


def continued_schedule(tail: bytes, block_start: int, tail_end: int, block_end: int, ends: Iterable[int]) -> bytes:
    """A block that a run begun at a tail (`tail` is the tail's schedule) took further by prefill."""
    if tail[:1] == b"P":
        return prefill_schedule(block_start, block_end, {*replay_cuts(block_start, tail), tail_end, *ends})
    offsets = bytes(sorted({e - block_start for e in ends if tail_end < e < block_end}))
    # Same tail, same calls, same bits: the nonce is derived, so that two such runs share the block.
    return decode_schedule(hashlib.sha256(tail + bytes((tail_end - block_start,)) + offsets).digest()[:NONCE_BYTES])


def is_decoded(schedule: bytes) -> bool:
    """Whether decode (or a trimmed block) had a part in the block: no cold prefill gives the same bits."""
    return schedule[:1] in (b"D", b"T")


def is_trimmed(schedule: bytes) -> bool:
    """Whether the block was cut short from a longer one: it came about without a call that ended there."""
    return schedule[:1] == b"T"


def replay_cuts(block_start: int, schedule: bytes) -> list[int]:
    """Absolute cuts inside a prefilled block, to be made again when it has to be computed again."""
    return [block_start + offset for offset in schedule[1:]] if schedule[:1] == b"P" else []
