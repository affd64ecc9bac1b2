"""From a file to pixels: upright, without alpha, RGB. Owns what becomes of unusual pixels; pure, on any thread.

Transparency is put on white, palettes and greys become RGB, 16 bits a sample keep their upper 8. A profile is not
applied and CMYK is turned by formula, as the models' own processors do.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from service.images.header import Header, read_header
from service.images.limits import INVALID, MAX_SIDE, SCAN_WORK, TOO_LARGE, ImageLimits
from service.media import ImageRefused, Picture

if TYPE_CHECKING:
    from PIL import Image

_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: p.swapaxes(0, 1)[:, ::-1],
    7: lambda p: p.swapaxes(0, 1)[::-1, ::-1],
    8: lambda p: p.swapaxes(0, 1)[::-1],
}


def judge(data: bytes, mime_type: str, limits: ImageLimits) -> Header:
    """What the file is, if it may be decoded. Decompresses nothing. Raises ImageRefused."""
    if len(data) > limits.max_bytes:
        raise ImageRefused(TOO_LARGE, f"has {len(data):,} bytes; {limits.max_bytes:,} are taken")
    header = read_header(data)
    if mime_type and mime_type != header.kind.value:
        raise ImageRefused(INVALID, f"is {header.kind.value}, not {mime_type} as mime_type says")
    size = f"{header.width:,} × {header.height:,}"
    if header.pixels > limits.max_pixels:
        raise ImageRefused(TOO_LARGE, f"has {size} pixels; {limits.max_pixels:,} in all are taken")
    if max(header.width, header.height) > MAX_SIDE:
        raise ImageRefused(TOO_LARGE, f"has {size} pixels; a side has at most {MAX_SIDE:,}")
    if header.scans * header.pixels > SCAN_WORK * limits.max_pixels:
        raise ImageRefused(TOO_LARGE, f"is a JPEG of {size} pixels in {header.scans} scans: save it with fewer")
    if header.starved:
        raise ImageRefused(INVALID, f"has less data than a picture of {size} pixels takes: it is cut off")
    return header


def decode(header: Header) -> Picture:
    """The pixels of a file that was judged. Raises ImageRefused."""
    from PIL import Image  # here, since a server of text models runs without it

    try:
        with Image.open(io.BytesIO(header.file), formats=[header.kind.name]) as image:
            if image.size != (header.width, header.height):
                raise ImageRefused(INVALID, "has another size than its header says")
            image.load()
            pixels = _rgb(image)
    except ImageRefused:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error) as error:
        # The library's words may tell of the file's bytes, and mean nothing to a caller.
        raise ImageRefused(INVALID, f"is a {header.kind.name} that cannot be decoded: cut off or damaged") from error
    upright = np.ascontiguousarray(_TURNS[header.orientation](pixels) if header.orientation > 1 else pixels)
    upright.flags.writeable = False
    return Picture(pixels=upright, digest=_digest(upright))


def _rgb(image: Image.Image) -> np.ndarray:
    from PIL import Image

    if image.mode.startswith("I"):
        return _deep_grey(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        with image.convert("RGBA") as whole:
            flat = Image.new("RGB", whole.size, (255, 255, 255))
            flat.paste(whole, mask=whole.getchannel("A"))
            return np.asarray(flat)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _deep_grey(image: Image.Image) -> np.ndarray:
    """16-bit grey, which the library's own conversion would clip to white."""
    deep = np.asarray(image).astype(np.int32)
    grey = (deep >> 8).astype(np.uint8)
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):
        grey[deep == hidden] = 255
    return np.repeat(grey[:, :, None], 3, axis=2)


def _digest(pixels: np.ndarray) -> bytes:
    height, width, _ = pixels.shape
    digest = hashlib.sha256(struct.pack("<II", width, height))
    digest.update(pixels.data)
    return digest.digest()
