"""Pictures that the trained tower has seen once. Owns their features, so that a chat about one costs no tower.

A training chats thousands of times about the same few thousand pictures, each time with other questions.
"""

import random
from collections.abc import Sequence

import numpy as np

from service.models.vision import batches, folder, net
from service.models.vision.net import mx
from service.models.vision.scenes import Scene, make_scene

_AT_ONCE = 64


class Gallery:
    """`count` pictures of one side of the split, and what the tower makes of them."""

    def __init__(self, model: net.Model, seed: str, count: int, *, held_out: bool) -> None:
        rng = random.Random(f"gallery {seed}")
        self.scenes = [make_scene(rng, held_out=held_out) for _ in range(count)]
        self._places = {scene: place for place, scene in enumerate(self.scenes)}
        seen = [see(model, self.scenes[first : first + _AT_ONCE]) for first in range(0, count, _AT_ONCE)]
        self._features = np.concatenate([np.array(features) for features in seen])

    def features(self, scenes: Sequence[Scene]) -> np.ndarray:
        """float32, pictures × tokens × width."""
        return self._features[[self._places[scene] for scene in scenes]]


def see(model: net.Model, scenes: Sequence[Scene]) -> mx.array:
    """The tower's features of drawn scenes of the usual size."""
    return net.see(model, pixels_of(scenes), (folder.SIDE // folder.PATCH, folder.SIDE // folder.PATCH))


def pixels_of(scenes: Sequence[Scene]) -> mx.array:
    """Patches as the tower takes them, of drawn scenes of the usual size."""
    return mx.array(np.stack([batches.patches_of(scene, (folder.SIDE, folder.SIDE)) for scene in scenes]))
