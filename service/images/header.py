"""What an image file says of itself, read before anything in it is decompressed. Owns formats and their structure.

Whatever a decoder could be led astray with is left out of what it is given: text and profile chunks, thumbnails, second
pictures. Of what describes a picture only the orientation is read. Raises ImageRefused.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from service.images.limits import INVALID, MAX_SCANS, TOO_LARGE, UNSUPPORTED
from service.media import ImageRefused


class Kind(enum.Enum):
    """A format that is taken; the value is its MIME type."""

    PNG = "image/png"
    JPEG = "image/jpeg"
    WEBP = "image/webp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """An image file, looked through. `file` is what a decoder is given; width and height in pixels as stored."""

    kind: Kind
    width: int
    height: int
    orientation: int  # 1 to 8, as EXIF has it
    file: bytes
    scans: int = 1
    starved: bool = False  # has less data than a picture of its size takes

    @property
    def pixels(self) -> int:
        return self.width * self.height


_PNG = b"\x89PNG\r\n\x1a\n"
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}
_OTHERS = (
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"qoif", "QOI"),
)
_TEXT_BYTES = 512  # looked at to tell a web page or SVG from rubbish
_TAKEN = "send PNG, JPEG or WebP"


def read_header(data: bytes) -> Header:
    """Raises ImageRefused: IMAGE_INVALID for what is broken or no image, IMAGE_UNSUPPORTED for other formats."""
    if not data:
        raise ImageRefused(INVALID, "is empty")
    if data.startswith(_PNG):
        return _read_png(data)
    if data.startswith(b"\xff\xd8"):
        return _read_jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp(data)
    other = next((name for mark, name in _OTHERS if data.startswith(mark)), None)
    if other is None and data[4:8] == b"ftyp":
        other = _BRANDS.get(data[8:12])
    if other is None and b"<svg" in data[:_TEXT_BYTES].lower():
        other = "SVG"
    if other is not None:
        raise ImageRefused(UNSUPPORTED, f"is {other}, which is not taken: {_TAKEN}")
    if data[:_TEXT_BYTES].lstrip().startswith(b"<"):
        raise ImageRefused(INVALID, "is no image but a web page or XML")
    raise ImageRefused(INVALID, f"is no image file: {_TAKEN}")


# PNG

_PNG_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
_PALETTE = 3
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def _read_png(data: bytes) -> Header:
    kept = [_PNG]
    orientation, width, height, colour = 1, 0, 0, 0
    seen: set[bytes] = set()
    for name, body, whole in _png_chunks(data):
        if not seen:
            if name != b"IHDR":
                raise ImageRefused(INVALID, "is a PNG that does not begin with its header")
            width, height, colour = _read_ihdr(body)
        elif name == b"IHDR":
            raise ImageRefused(INVALID, "is a PNG with two headers")
        if name == b"acTL" and len(body) == 8 and int.from_bytes(body[:4], "big") > 1:
            raise ImageRefused(UNSUPPORTED, _animated(int.from_bytes(body[:4], "big")))
        if name == b"eXIf" and name not in seen:
            orientation = _orientation(body)
        if name[0] & 0x20 == 0 and name not in _PNG_NEEDED:
            raise ImageRefused(INVALID, "is a PNG with a critical chunk that nobody knows")
        if name in _PNG_NEEDED:
            kept.append(whole)
        seen.add(name)
    if b"IDAT" not in seen or (colour == _PALETTE and b"PLTE" not in seen):
        raise ImageRefused(INVALID, "is a PNG without picture data or its palette")
    return Header(kind=Kind.PNG, width=width, height=height, orientation=orientation, file=b"".join(kept))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(name, body, all of it) of each chunk up to IEND, sums checked."""
    at = len(_PNG)
    while True:
        head = data[at : at + 8]
        if len(head) < 8:
            raise ImageRefused(INVALID, "is a PNG that is cut off")
        size, name = struct.unpack(">I4s", head)
        end = at + 12 + size
        if not name.isalpha():
            raise ImageRefused(INVALID, "is a PNG with a damaged chunk")
        if end > len(data):
            raise ImageRefused(INVALID, "is a PNG that is cut off")
        whole = data[at:end]
        if zlib.crc32(whole[4:-4]) != int.from_bytes(whole[-4:], "big"):
            raise ImageRefused(INVALID, "is a PNG whose checksum does not fit: it was damaged on the way")
        yield name, whole[8:-4], whole
        if name == b"IEND":
            return
        at = end


def _read_ihdr(body: bytes) -> tuple[int, int, int]:
    if len(body) != 13:
        raise ImageRefused(INVALID, "is a PNG with a damaged header")
    width, height, depth, colour, packing, filtering, interlace = struct.unpack(">IIBBBBB", body)
    if depth not in _PNG_DEPTHS.get(colour, ()) or packing or filtering or interlace > 1:
        raise ImageRefused(INVALID, "is a PNG with a header that says what no PNG is")
    return *_size(width, height, "PNG"), colour


# JPEG

_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended, progressive
_OTHER_FRAMES = {0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)}  # lossless, arithmetic, layered
_JFIF, _EXIF, _ADOBE = 0xE0, 0xE1, 0xEE
_SCAN = 0xDA


def _read_jpeg(data: bytes) -> Header:
    kept = [b"\xff\xd8"]
    orientation, size = 1, None
    found_exif = False
    at = 2
    while True:
        if at + 4 > len(data):
            raise ImageRefused(INVALID, "is a JPEG that is cut off")
        if data[at] != 0xFF:
            raise ImageRefused(INVALID, "is a JPEG with a damaged header")
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in (0x01, *range(0xD0, 0xDA)):
            raise ImageRefused(INVALID, "is a JPEG with a damaged header")
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        body = data[at + 4 : end]
        if end > len(data) or end < at + 4:
            raise ImageRefused(INVALID, "is a JPEG that is cut off")
        if marker in _OTHER_FRAMES:
            raise ImageRefused(UNSUPPORTED, "is a lossless, layered or arithmetic JPEG, which is not taken")
        if marker in _FRAMES:
            if size is not None:
                raise ImageRefused(INVALID, "is a JPEG with two headers")
            size = _read_frame(body)
        if marker == _EXIF and body.startswith(b"Exif\0\0") and not found_exif:
            orientation, found_exif = _orientation(body[6:]), True
        if marker in (_JFIF, _ADOBE) or (not 0xE0 <= marker <= 0xEF and marker != 0xFE):
            kept.append(data[at:end])
        at = end
        if marker == _SCAN:
            break
    if size is None:
        raise ImageRefused(INVALID, "is a JPEG whose picture comes before its size")
    rest = data[at:]
    scans = 1 + rest.count(b"\xff\xda")  # inside a scan's data the two bytes cannot stand
    if scans > MAX_SCANS:
        raise ImageRefused(TOO_LARGE, f"is a JPEG of {scans} scans; {MAX_SCANS} are taken")
    kept.append(rest)
    return Header(
        kind=Kind.JPEG,
        width=size[0],
        height=size[1],
        orientation=orientation,
        file=b"".join(kept),
        scans=scans,
        starved=8 * len(rest) < size[0] * size[1] // 64,  # a block of 64 pixels takes a bit at least
    )


def _read_frame(body: bytes) -> tuple[int, int]:
    if len(body) < 6:
        raise ImageRefused(INVALID, "is a JPEG with a damaged header")
    depth, height, width = struct.unpack(">BHH", body[:5])
    if depth != 8:
        raise ImageRefused(UNSUPPORTED, f"is a JPEG of {depth} bits a sample, which is not taken")
    return _size(width, height, "JPEG")


# WebP


def _read_webp(data: bytes) -> Header:
    length = int.from_bytes(data[4:8], "little") + 8
    if length > len(data):
        raise ImageRefused(INVALID, "is a WebP that is cut off")
    canvas: tuple[int, int] | None = None
    size: tuple[int, int] | None = None
    orientation = 1
    animated, frames = False, 0
    at = 12
    while at + 8 <= length:
        name = data[at : at + 4]
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if end > length:
            raise ImageRefused(INVALID, "is a WebP that is cut off")
        body = data[at + 8 : end]
        if name == b"VP8X" and canvas is None and len(body) >= 10:
            canvas = (int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1)
            animated = bool(body[0] & 0x02)
        elif name == b"ANMF":
            frames += 1
        elif name in (b"VP8 ", b"VP8L") and size is None:
            size = _vp8_size(body) if name == b"VP8 " else _vp8l_size(body)
        elif name == b"EXIF":
            orientation = _orientation(body.removeprefix(b"Exif\0\0"))
        at = end + (end & 1)
    if animated or frames:
        raise ImageRefused(UNSUPPORTED, _animated(frames))
    if size is None:
        raise ImageRefused(INVALID, "is a WebP without picture data")
    if canvas is not None and canvas != size:
        raise ImageRefused(INVALID, "is a WebP whose picture is not as large as it says")
    return Header(kind=Kind.WEBP, width=size[0], height=size[1], orientation=orientation, file=data[:length])


def _vp8_size(body: bytes) -> tuple[int, int]:
    if len(body) < 10 or body[0] & 1 or body[3:6] != b"\x9d\x01\x2a":
        raise ImageRefused(INVALID, "is a WebP with a damaged header")
    width, height = struct.unpack("<HH", body[6:10])
    return _size(width & 0x3FFF, height & 0x3FFF, "WebP")


def _vp8l_size(body: bytes) -> tuple[int, int]:
    if len(body) < 5 or body[0] != 0x2F:
        raise ImageRefused(INVALID, "is a WebP with a damaged header")
    bits = int.from_bytes(body[1:5], "little")
    return _size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "WebP")


# Shared


def _size(width: int, height: int, kind: str) -> tuple[int, int]:
    if not width or not height or max(width, height) >= 1 << 31:
        raise ImageRefused(INVALID, f"is a {kind} of {width} × {height} pixels")
    return width, height


def _animated(frames: int) -> str:
    count = f" of {frames} frames" if frames > 1 else ""
    return f"is an animation{count}: send the one that is meant as a still picture"


def _orientation(exif: bytes) -> int:
    """From a TIFF structure's first directory; 1 if there is none or it makes no sense, as every viewer has it."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return 1
    (at,) = struct.unpack(order + "I", exif[4:8])
    if at + 2 > len(exif):
        return 1
    (count,) = struct.unpack(order + "H", exif[at : at + 2])
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, number, value = struct.unpack(order + "HHIH", exif[entry : entry + 10])
        if tag == 0x0112:
            return int(value) if kind == 3 and number == 1 and 1 <= value <= 8 else 1
    return 1
