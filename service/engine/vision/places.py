"""Rotary places in three axes (time, height, width). A pure function of where images are and of their grids.

Text moves all three axes together. An image's first patch stands right behind the text before it and its other patches
at their rows and columns from there, so an image of h × w merged patches moves what follows by max(h, w) and not by
h · w: from then on a token's place is its position less a constant, which decode adds row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from service.plan import RowImage


def places(start: int, end: int, images: Sequence[RowImage], merge: int) -> NDArray[np.int32]:
    """Places of the positions [start, end), shape (3, end - start). `images` in order; `merge`: patches a side."""
    found = np.empty((3, end - start), dtype=np.int32)
    delta, at = 0, start
    for image in images:
        if image.start >= end:
            break
        if image.end > start:
            _text(found, start, at, image.start, delta)
            first, last = max(start, image.start), min(end, image.end)
            inside = _inside(image, merge)[:, first - image.start : last - image.start]
            found[:, first - start : last - start] = image.start + delta + inside
            at = last
        delta += _extent(image, merge) - len(image.ids)
    _text(found, start, at, end, delta)
    return found


def place_behind(position: int, images: Sequence[RowImage], merge: int) -> int:
    """The place, the same in every axis, of a position behind all of `images`."""
    return position + sum(_extent(image, merge) - len(image.ids) for image in images)


def _text(found: NDArray[np.int32], start: int, first: int, last: int, delta: int) -> None:
    if first < last:
        found[:, first - start : last - start] = np.arange(first + delta, last + delta, dtype=np.int32)


def _merged(image: RowImage, merge: int) -> tuple[int, int, int]:
    times, height, width = image.grid
    return times, height // merge, width // merge


def _extent(image: RowImage, merge: int) -> int:
    return max(_merged(image, merge))


def _inside(image: RowImage, merge: int) -> NDArray[np.int32]:
    """Places inside the image, from its first one on: (3, positions)."""
    shape = _merged(image, merge)
    if np.prod(shape) != len(image.ids):
        raise ValueError(f"an image of {shape} patches takes no {len(image.ids)} positions")
    return np.indices(shape, dtype=np.int32).reshape(3, -1)
