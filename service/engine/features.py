"""Features of images in the engine. Owns which of them are held, within bytes; who still needs them is told.

What an open row has yet to prefill is never let go of; beyond that the least recently used go first.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcache.media import MediaKey
from kvcache.mlx_arrays import from_payload, to_payload
from service.engine.calls import Features

FEATURE_BYTES = 256 << 20  # of features that no open row needs


class HeldFeatures(dict[MediaKey, Features]):
    """By key, the most recently used last."""

    def __init__(self, limit: int = FEATURE_BYTES) -> None:
        super().__init__()
        self._limit = limit

    def put(self, key: MediaKey, features: Features) -> None:
        """Holds features as the newest."""
        self.pop(key, None)
        self[key] = features

    def touch(self, key: MediaKey) -> bool:
        """Makes them the newest; False if they are not held."""
        features = self.pop(key, None)
        if features is not None:
            self[key] = features
        return features is not None

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(features) for features in self.values())

    def shrink(self, needed: Collection[MediaKey]) -> None:
        """Back within the limit: what nobody needs goes, the least recently used first."""
        spare = [key for key in self if key not in needed]
        over = sum(_nbytes(self[key]) for key in spare) - self._limit
        for key in spare:
            if over <= 0:
                return
            over -= _nbytes(self.pop(key))


def written(features: Features) -> bytearray:
    """As host bytes."""
    return to_payload(features)


def read(payload: bytes | bytearray | memoryview) -> Features:
    """From host bytes; raises PayloadError."""
    return from_payload(payload)


def _nbytes(features: Features) -> int:
    return sum(array.nbytes for array in features.values())
