"""A picture as one model takes it. Owns the way through upstream's processor; may run on any thread.

The processor is asked about the image alone: a text that is nothing but the image's marker becomes the ids of the whole
span, separators included, so that neither the prompt is tokenized twice nor its ids change.
"""

from __future__ import annotations

import hashlib
import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np

from kvcache.media import MIN_POSITIONS, MediaKey
from service.engine.vision import upstream
from service.engine.vision.families import Family, Opens
from service.media import ImageRefused, Picture, Prepared


class UpstreamPreparer:
    """See `service.media.Preparer`."""

    def __init__(self, folder: Path, model_type: str, family: Family, placeholder_id: int, opened: Opens) -> None:
        self._processor = upstream.load_processor(folder, model_type)
        tokenizer = self._processor.tokenizer
        self._three_axes = family.three_axes
        self._settings = _settings(folder)
        self._lock = threading.Lock()  # a tokenizer serves one caller at a time
        self.placeholder_id = placeholder_id
        self.marker = str(getattr(self._processor, family.marker))
        self.marker_id = int(tokenizer.convert_tokens_to_ids(self.marker))
        self.whole_images = opened is not Opens.NO_LAYER
        head, tail = self._text_around(tokenizer)
        self._trim = slice(len(head), -len(tail) or None)
        self.written = tokenizer.decode(head) + self.marker + tokenizer.decode(tail)
        before, behind = ((int(tokenizer.convert_tokens_to_ids(name)),) if name else () for name in family.around)
        self.opening = (*head, *before)
        self.closing = (*behind, *tail)

    def prepare(self, picture: Picture) -> Prepared:
        width, height = picture.size
        try:
            ids, inputs = self._processed(picture.pixels)
        except ValueError as error:  # how processors refuse a shape
            raise ImageRefused(
                "IMAGE_SHAPE", f"the model takes no image of {width} x {height} pixels: {error}"
            ) from error
        ids = ids[self._trim]
        if len(ids) < MIN_POSITIONS:
            raise ImageRefused("IMAGE_SHAPE", f"an image of {width} x {height} pixels takes {len(ids)} positions only")
        grid = tuple(int(n) for n in inputs["image_grid_thw"].reshape(-1)) if self._three_axes else ()
        return Prepared(
            key=MediaKey(hashlib.sha256(self._settings + picture.digest).digest()),
            ids=tuple(ids),
            grid=grid,
            inputs=inputs,
        )

    def _processed(self, pixels: np.ndarray) -> tuple[list[int], dict[str, np.ndarray]]:
        from PIL import Image

        with self._lock:
            return upstream.image_inputs(self._processor, self.marker, Image.fromarray(pixels))

    def _text_around(self, tokenizer) -> tuple[list[int], list[int]]:
        """Ids of plain text that the processor writes before and behind an image's own tokens.

        Text belongs to the prompt: its tokens depend on what is beside it.
        """
        ids, _ = self._processed(np.zeros((64, 64, 3), dtype=np.uint8))
        own = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        places = [place for place, number in enumerate(ids) if number in own]
        return ids[: places[0]], ids[places[-1] + 1 :]


def _settings(folder: Path) -> bytes:
    """What decides how a picture is prepared: 32 bytes."""
    digest = hashlib.sha256()
    for name in upstream.PROCESSOR_FILES:
        path = folder / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"") + b"\0")
    for package in ("mlx-vlm", "transformers", "pillow"):
        digest.update(f"{package} {version(package)}\0".encode())
    return digest.digest()
