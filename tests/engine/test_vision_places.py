"""Rotary places in three axes are a pure function, and the one that upstream computes from whole prompts."""

from __future__ import annotations

import random

import numpy as np

from kvcache.media import MediaKey
from service.engine.vision.places import place_behind, places
from service.plan import RowImage


def some_images(rng: random.Random) -> tuple[list[RowImage], int]:
    at, images = 0, []
    for number in range(rng.randrange(4)):
        at += rng.choice([0, 0, 1, 7])
        height, width = rng.randrange(1, 6), rng.randrange(1, 6)
        ids = (9,) * (height * width)
        images.append(RowImage(start=at, key=MediaKey(bytes([number]) * 32), ids=ids, grid=(1, 2 * height, 2 * width)))
        at += len(ids)
    return images, at + rng.randrange(6)


def written_out(images: list[RowImage], end: int) -> np.ndarray:
    """Token by token."""
    rows, following, at = [], 0, 0
    for image in images:
        while at < image.start:
            rows.append([following] * 3)
            following, at = following + 1, at + 1
        _, height, width = (n // 2 for n in image.grid)
        rows += [[following, following + y, following + x] for y in range(height) for x in range(width)]
        following, at = following + max(height, width), image.end
    while at < end:
        rows.append([following] * 3)
        following, at = following + 1, at + 1
    return np.array([*rows, [following] * 3]).T


def test_any_part_has_the_places_that_the_whole_has_there() -> None:
    rng = random.Random(7)
    for _ in range(500):
        images, end = some_images(rng)
        whole = written_out(images, end)
        assert place_behind(end, images, 2) == whole[0, end]
        start = rng.randrange(end + 1)
        stop = rng.randrange(start, end + 1)
        assert np.array_equal(places(start, stop, images, 2), whole[:, start:stop])
