"""Draws a scene. Owns what each shape looks like.

As a command it writes one picture to try: `python -m service.models.vision.drawing FILE.png --seed 7`.
"""

import argparse
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from service.models.vision.scenes import Scene, make_scene

_OVERSAMPLE = 2  # drawn larger, then reduced: smooth edges


def draw(scene: Scene, width: int, height: int) -> Image.Image:
    """The picture in RGB; sizes in pixels. The same scene can be drawn in any size."""
    wide, high = width * _OVERSAMPLE, height * _OVERSAMPLE
    picture = Image.new("RGB", (wide, high), scene.ground)
    pen = ImageDraw.Draw(picture)
    for thing in scene.things:
        x, y, r = thing.x * wide, thing.y * high, thing.radius * min(wide, high)
        _DRAW[thing.shape](pen, x, y, r, thing.shade)
    return picture.resize((width, height), Image.Resampling.BOX)


def _circle(pen: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)


def _square(pen: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    side = 0.86 * r
    pen.rectangle((x - side, y - side, x + side, y + side), fill=fill)


def _triangle(pen: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    pen.polygon([(x, y - r), (x + 0.95 * r, y + 0.8 * r), (x - 0.95 * r, y + 0.8 * r)], fill=fill)


_STAR = ((0.0, -1.0), (0.24, -0.32), (0.95, -0.31), (0.38, 0.12), (0.59, 0.81))  # right half, from the top point


def _star(pen: ImageDraw.ImageDraw, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    outline = [*_STAR, (0.0, 0.4), *((-dx, dy) for dx, dy in reversed(_STAR[1:]))]
    pen.polygon([(x + dx * r, y + dy * r) for dx, dy in outline], fill=fill)


_DRAW = {"circle": _circle, "square": _square, "triangle": _triangle, "star": _star}


def main(arguments: list[str] | None = None) -> int:
    """Write a held-out picture and say what is on it."""
    parser = argparse.ArgumentParser(prog="python -m service.models.vision.drawing", description="Draw one picture.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--side", type=int, default=256, help="width and height in pixels")
    chosen = parser.parse_args(arguments)
    scene = make_scene(random.Random(f"picture {chosen.seed}"), held_out=True)
    draw(scene, chosen.side, chosen.side).save(chosen.file)
    for thing in scene.things:
        sys.stdout.write(f"{thing.name}, {thing.place}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
