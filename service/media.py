"""Images on their way to the model, as plain values. Owns the nouns; knows nothing of protobuf, codecs or MLX.

    bytes ─ decode ─► Picture ─ Preparer ─► Prepared ─► symbols in the context (`kvcache.media`)
                                               └─ vision step ─► features ─► the prefill calls that its span touches

`Preparer` is the model's image processor: pure, on any thread. The vision tower runs on the engine thread as a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcache.media import MediaKey

if TYPE_CHECKING:  # the scheduler's language mentions images, and must load in no time
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A decoded image, upright, without alpha. `pixels`: uint8, shape (height, width, 3)."""

    pixels: np.ndarray
    digest: bytes  # 32 bytes: SHA-256 over size and pixels; equal for re-encoded equal pixels

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """An image as one model takes it.

    `ids`: the token ids that the model sees over the whole span, separators between rows or tiles included.
    `grid`: what positions are computed from: patches in time, height and width before merging; () where unused.
    `inputs`: arrays for the vision tower, by upstream's names; None once only the layout is needed.
    """

    key: MediaKey
    ids: tuple[int, ...]
    grid: tuple[int, ...]
    inputs: Mapping[str, np.ndarray] | None

    @property
    def shape(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Images of one shape may be encoded in one call."""
        return tuple(sorted((name, array.shape) for name, array in (self.inputs or {}).items()))


class ImageRefused(ValueError):
    """The model cannot take this picture; `reason` is stable, the text says what to do."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ImageForm(Protocol):
    """How a model's prompts show images. An image takes the place of one `marker_id` in a tokenized prompt.

    `written` is what stands in a prompt's text in place of the marker that a chat template wrote, before the text is
    tokenized: the marker with what the model's own processor writes around it.
    """

    placeholder_id: int  # what callers see at image positions
    marker_id: int  # what a chat template puts where an image goes; the whole span stands in its place
    marker: str  # the same as text
    written: str
    whole_images: bool  # the model must see an image's run in one call: attention inside it goes both ways
    opening: tuple[int, ...]  # token ids before an image that no template placed
    closing: tuple[int, ...]  # and behind it


class Preparer(ImageForm, Protocol):
    """A model's image processor."""

    def prepare(self, picture: Picture) -> Prepared:
        """Raises ImageRefused."""
        ...
