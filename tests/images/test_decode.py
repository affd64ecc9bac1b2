"""Image files into pixels: what is taken, as what, and how everything else is refused before it costs anything."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from service.images.decode import decode, judge
from service.images.header import read_header
from service.images.limits import ImageLimits
from service.media import ImageRefused, Picture
from tests.images.malformed import Case, after_start, before_end, cases, chunk, encoded, exif, picture, segment

LIMITS = ImageLimits(max_bytes=32 << 20, max_pixels=4096**2)
ROOT = Path(__file__).parents[2]


def taken(file: bytes, mime_type: str = "") -> Picture:
    return decode(judge(file, mime_type, LIMITS))


def answer(case: Case) -> str | None:
    try:
        taken(case.build(), case.mime_type)
    except ImageRefused as refused:
        return refused.reason
    return None


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_malformed_file_gets_its_answer(case: Case) -> None:
    assert answer(case) == case.answer


def test_malformed_files_take_bounded_memory() -> None:
    """All of them one after the other, in a process of its own; the files themselves are built there as well."""
    code = """
        import json, resource
        from tests.images.malformed import cases
        from tests.images.test_decode import answer
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers = [answer(case) for case in cases()]
        print(json.dumps([len(answers), before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    count, before, after = json.loads(done.stdout)
    scale = 1 if sys.platform == "darwin" else 1024
    assert count >= 60
    assert (after - before) * scale < 300 << 20  # a bomb of theirs is 200 MiB each, a picture of all pixels 50


def test_equal_pixels_are_one_picture_in_every_lossless_form() -> None:
    image = picture()
    forms = [
        encoded(image),
        encoded(image, compress_level=0),
        encoded(image, "WEBP", lossless=True),
        encoded(image.convert("RGBA")),
        before_end(encoded(image), chunk(b"tEXt", b"Comment\0hello")),
    ]
    pictures = [taken(file) for file in forms]
    assert len({p.digest for p in pictures}) == 1
    assert all(np.array_equal(p.pixels, np.asarray(image)) for p in pictures)
    assert taken(encoded(picture(seed=1))).digest != pictures[0].digest


def test_the_same_bytes_in_another_shape_are_another_picture() -> None:
    plain = np.zeros((4, 8, 3), np.uint8)
    one, other = (taken(encoded(Image.fromarray(plain.reshape(shape)))) for shape in ((4, 8, 3), (8, 4, 3)))
    assert one.digest != other.digest
    assert (one.size, other.size) == ((8, 4), (4, 8))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_stand_upright(kind: str, orientation: int) -> None:
    turns = {2: [0], 3: [3], 4: [1], 5: [5], 6: [4], 7: [6], 8: [2]}  # Pillow's numbers for the same turns
    image = picture()
    plain = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    with_exif = {
        "PNG": lambda: before_end(plain, chunk(b"eXIf", exif(orientation))),
        "JPEG": lambda: after_start(plain, segment(0xE1, b"Exif\0\0" + exif(orientation))),
        "WEBP": lambda: encoded(image, "WEBP", lossless=True, exif=b"Exif\0\0" + exif(orientation)),
    }[kind]()
    upright = Image.fromarray(np.asarray(taken(plain).pixels))
    for turn in turns.get(orientation, []):
        upright = upright.transpose(Image.Transpose(turn))
    assert np.array_equal(taken(with_exif).pixels, np.asarray(upright))


def test_what_is_see_through_lies_on_white() -> None:
    clear = Image.new("RGBA", (2, 1))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    half = Image.new("LA", (1, 1), (0, 128))
    assert taken(encoded(clear)).pixels.tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert taken(encoded(half)).pixels.tolist() == [[[127, 127, 127]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert taken(encoded(palette)).pixels.tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert taken(encoded(palette, transparency=1)).pixels.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_deep_and_flat_greys_keep_their_brightness() -> None:
    deep = Image.fromarray(np.array([[0, 256, 0x8000, 0xFFFF]], np.uint16))
    assert taken(encoded(deep)).pixels[0, :, 0].tolist() == [0, 1, 128, 255]
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    assert taken(encoded(bits)).pixels[0, :, 1].tolist() == [0, 255]
    grey = Image.fromarray(np.array([[7, 200]], np.uint8))
    assert taken(encoded(grey)).pixels[0].tolist() == [[7, 7, 7], [200, 200, 200]]


def test_cmyk_has_the_colours_of_rgb() -> None:
    plain = Image.new("RGB", (16, 16), (200, 30, 60))
    pixels = taken(encoded(plain.convert("CMYK"), "JPEG")).pixels.astype(int)
    assert abs(pixels - np.asarray(plain)).max() < 12


def test_bounds_are_met_and_not_passed() -> None:
    file = encoded(picture(40, 25))
    judge(file, "", ImageLimits(max_bytes=len(file), max_pixels=1000))
    for limits in (
        ImageLimits(max_bytes=len(file) - 1, max_pixels=1000),
        ImageLimits(max_bytes=len(file), max_pixels=999),
    ):
        with pytest.raises(ImageRefused) as refused:
            judge(file, "", limits)
        assert refused.value.reason == "IMAGE_TOO_LARGE"


def test_a_header_tells_the_size_as_stored() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        header = read_header(encoded(picture(33, 20), kind))
        assert (header.kind.name, header.width, header.height) == (kind, 33, 20)
