"""Files that are not what an image should be, each with its documented answer (docs/images.md). Built, never stored."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

INVALID, UNSUPPORTED, TOO_LARGE = "IMAGE_INVALID", "IMAGE_UNSUPPORTED", "IMAGE_TOO_LARGE"
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Case:
    """`answer`: the refusal's reason, or None if the file is taken."""

    name: str
    build: Callable[[], bytes]
    answer: str | None
    mime_type: str = ""


def picture(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """A picture without two equal rows."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(image: Image.Image | None = None, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def ihdr(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png(*chunks: bytes) -> bytes:
    return PNG + b"".join(chunks) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """So many zero bytes, compressed about a thousandfold."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 20)
    packed = b"".join(packer.compress(block[: min(len(block), count - at)]) for at in range(0, count, len(block)))
    return packed + packer.flush()


def before_end(file: bytes, *chunks: bytes) -> bytes:
    """A PNG with more chunks right after its header."""
    return file[:33] + b"".join(chunks) + file[33:]


def segment(marker: int, body: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def after_start(file: bytes, *segments: bytes) -> bytes:
    """A JPEG with more segments right at its beginning."""
    return file[:2] + b"".join(segments) + file[2:]


def exif(orientation: int, *, entries: int = 1) -> bytes:
    """A TIFF structure; more entries than there are bytes for, if asked for."""
    return b"II*\0" + struct.pack("<IHHHIHH", 8, entries, 0x0112, 3, 1, orientation, 0) + bytes(4)


def jpeg_sized(width: int, height: int) -> bytes:
    """A JPEG whose header claims another size."""
    file = bytearray(encoded(kind="JPEG"))
    at = file.index(b"\xff\xc0")
    file[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(file)


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(n + struct.pack("<I", len(b)) + b + bytes(len(b) & 1) for n, b in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def webp_canvas(width: int, height: int, flags: int = 0) -> tuple[bytes, bytes]:
    return b"VP8X", bytes([flags, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")


def webp_picture() -> tuple[bytes, bytes]:
    file = encoded(kind="WEBP", lossless=True)
    return file[12:16], file[20 : 20 + struct.unpack("<I", file[16:20])[0]]


def scan_bomb() -> bytes:
    """A progressive JPEG with its last scan a thousand times over."""
    file = encoded(kind="JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * 1000 + file[-2:]


def with_frames(kind: str) -> bytes:
    frames = [picture(seed=s) for s in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def flipped(file: bytes, at: int) -> bytes:
    return file[:at] + bytes([file[at] ^ 0xFF]) + file[at + 1 :]


def cases() -> Iterator[Case]:
    """About fifty, `max_pixels` taken to be 4096²."""
    png_file, jpeg_file, webp_file = encoded(), encoded(kind="JPEG"), encoded(kind="WEBP")
    # Not an image at all
    yield Case("zero bytes", lambda: b"", INVALID)
    yield Case("one byte", lambda: b"\x89", INVALID)
    yield Case("text", lambda: b"not an image, whatever its name says", INVALID)
    yield Case("a web page", lambda: b"<!DOCTYPE html><html><body>404</body></html>", INVALID)
    yield Case("zeros", lambda: bytes(100_000), INVALID)
    yield Case("the PNG signature alone", lambda: PNG, INVALID)
    yield Case("the JPEG signature alone", lambda: b"\xff\xd8\xff", INVALID)
    yield Case("the WebP signature alone", lambda: b"RIFF\x00\x00\x00\x00WEBP", INVALID)
    # Other formats
    yield Case("SVG", lambda: b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', UNSUPPORTED)
    yield Case("GIF", lambda: encoded(kind="GIF"), UNSUPPORTED)
    yield Case("animated GIF", lambda: with_frames("GIF"), UNSUPPORTED)
    yield Case("BMP", lambda: encoded(kind="BMP"), UNSUPPORTED)
    yield Case("TIFF", lambda: encoded(kind="TIFF"), UNSUPPORTED)
    yield Case("ICO", lambda: encoded(kind="ICO"), UNSUPPORTED)
    yield Case("AVIF", lambda: b"\x00\x00\x00\x20ftypavif" + bytes(64), UNSUPPORTED)
    yield Case("PDF", lambda: b"%PDF-1.7\n", UNSUPPORTED)
    # Cut off
    for share in (25, 50, 75, 99):
        yield Case(f"PNG cut at {share}%", lambda s=share: png_file[: len(png_file) * s // 100], INVALID)
        yield Case(f"JPEG cut at {share}%", lambda s=share: jpeg_file[: len(jpeg_file) * s // 100], INVALID)
        yield Case(f"WebP cut at {share}%", lambda s=share: webp_file[: len(webp_file) * s // 100], INVALID)
    yield Case("PNG without its end", lambda: png_file[:-12], INVALID)
    yield Case("PNG with half of its data", lambda: png(ihdr(64, 64), chunk(b"IDAT", zeros(64 * 96))), INVALID)
    # Damaged
    yield Case("PNG with a bad checksum in its header", lambda: flipped(png_file, 20), INVALID)
    yield Case("PNG with a bad checksum in its data", lambda: flipped(png_file, 60), INVALID)
    yield Case("PNG whose data is no zlib", lambda: png(ihdr(8, 8), chunk(b"IDAT", b"\xff" * 64)), INVALID)
    yield Case("PNG without data", lambda: png(ihdr(8, 8)), INVALID)
    yield Case("PNG with data first", lambda: png(chunk(b"IDAT", zeros(9)), ihdr(8, 8)), INVALID)
    yield Case("PNG with two headers", lambda: png(ihdr(8, 8), ihdr(9, 9), chunk(b"IDAT", zeros(200))), INVALID)
    yield Case("PNG without a palette", lambda: png(ihdr(8, 8, colour=3), chunk(b"IDAT", zeros(72))), INVALID)
    yield Case("PNG of 3 bits", lambda: png(ihdr(8, 8, depth=3), chunk(b"IDAT", zeros(200))), INVALID)
    yield Case("PNG of no pixels", lambda: png(ihdr(0, 8), chunk(b"IDAT", zeros(8))), INVALID)
    yield Case("JPEG of no pixels", lambda: jpeg_sized(0, 0), INVALID)
    yield Case("JPEG without a size", lambda: b"\xff\xd8" + segment(0xDA, bytes(10)) + bytes(50), INVALID)
    yield Case("JPEG with a picture larger than its data", lambda: jpeg_sized(4000, 4000), INVALID)
    yield Case("WebP whose canvas is larger", lambda: riff(webp_canvas(100, 100), webp_picture()), INVALID)
    yield Case("WebP of rubbish", lambda: riff((b"VP8L", b"\x2f" + bytes(40))), INVALID)
    # Bombs
    yield Case("PNG of 2³¹ pixels a side", lambda: png(ihdr(2**31 - 1, 2**31 - 1), chunk(b"IDAT", b"")), TOO_LARGE)
    yield Case("PNG of 65,000²", lambda: png(ihdr(65_000, 65_000), chunk(b"IDAT", zeros(65_001 * 1000))), TOO_LARGE)
    yield Case("PNG of 1 × 200,000", lambda: png(ihdr(1, 200_000), chunk(b"IDAT", zeros(800_000))), TOO_LARGE)
    yield Case("JPEG of 65,535²", lambda: jpeg_sized(65_535, 65_535), TOO_LARGE)
    yield Case("WebP of 16,384²", lambda: riff((b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(20))), TOO_LARGE)
    yield Case("WebP with a canvas of 2²⁴", lambda: riff(webp_canvas(2**24, 2**24), webp_picture()), INVALID)
    yield Case("JPEG of a thousand scans", scan_bomb, TOO_LARGE)
    bomb = zeros(200 << 20)
    yield Case("PNG whose data goes on for 200 MiB", lambda: png(ihdr(64, 64), chunk(b"IDAT", bomb)), None)
    text = chunk(b"zTXt", b"Comment\0\0" + bomb)
    yield Case("PNG with 200 MiB of text", lambda: before_end(png_file, text), None)
    yield Case("PNG with a thousand texts", lambda: before_end(png_file, *[text[:0]] * 1, *_texts(1000)), None)
    profile = chunk(b"iCCP", b"icc\0\0" + bomb)
    yield Case("PNG with a profile of 200 MiB", lambda: before_end(png_file, profile), None)
    yield Case("PNG whose EXIF goes in circles", lambda: before_end(png_file, chunk(b"eXIf", _circle())), None)
    yield Case("JPEG with 65,535 EXIF entries", lambda: _with_exif(exif(1, entries=65_535)), None)
    yield Case("JPEG whose EXIF is rubbish", lambda: _with_exif(b"\xff" * 60_000), None)
    yield Case(
        "JPEG with a broken second picture", lambda: after_start(jpeg_file, segment(0xE2, b"MPF\0II*\0xx")), None
    )
    # Not what they say
    yield Case("PNG said to be JPEG", lambda: png_file, INVALID, "image/jpeg")
    yield Case("WebP said to be PNG", lambda: webp_file, INVALID, "image/png")
    # Animated
    yield Case("animated PNG", lambda: with_frames("PNG"), UNSUPPORTED)
    yield Case("animated WebP", lambda: with_frames("WEBP"), UNSUPPORTED)
    # Rare, and taken
    yield Case("CMYK JPEG", lambda: encoded(picture().convert("CMYK"), "JPEG"), None)
    yield Case("16-bit PNG", lambda: encoded(_deep()), None)
    yield Case("one pixel", lambda: encoded(picture(1, 1)), None)
    yield Case("PNG with something behind its end", lambda: png_file + b"PK\x03\x04" * 100, None)


def _texts(count: int) -> list[bytes]:
    return [chunk(b"zTXt", b"c\0\0" + zeros(1 << 16)) for _ in range(count)]


def _circle() -> bytes:
    """A directory whose next one is itself."""
    return b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x010E, 2, 2**32 - 1, 8, 8)


def _with_exif(body: bytes) -> bytes:
    return after_start(encoded(kind="JPEG"), segment(0xE1, b"Exif\0\0" + body))


def _deep() -> Image.Image:
    return Image.fromarray(np.linspace(0, 65_535, 48 * 32).reshape(32, 48).astype(np.uint16))
