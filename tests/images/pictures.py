"""Pictures that tests send, made of a seed."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image


@cache
def png(seed: int, width: int = 160, height: int = 128, kind: str = "PNG") -> bytes:
    """A picture file; another seed, another picture."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
    picture.save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return file.getvalue()
