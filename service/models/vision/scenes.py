"""Pictures of coloured shapes. Owns what may be on a picture, where, and which pictures are held out; draws nothing.

A picture has nine places, three by three, and a place holds at most one shape, whole. So every statement about places
and counts is true by construction. Whether a picture is held out follows from what is where on it, not from its seed:
no arrangement of the held-out pictures is ever trained on.
"""

import dataclasses
import hashlib
import random

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 205, 30),
    "purple": (140, 50, 170),
    "orange": (245, 130, 20),
}
PLACES = (
    ("top left", "top centre", "top right"),
    ("middle left", "centre", "middle right"),
    ("bottom left", "bottom centre", "bottom right"),
)
MOST_THINGS = 3
_HELD_OUT_IN = 8  # one arrangement in eight is held out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One shape in its place."""

    shape: str
    colour: str
    row: int
    column: int
    x: float
    """Of its middle; a fraction of the picture's width, as `y` is of the height."""
    y: float
    radius: float
    """A fraction of the shorter side."""
    shade: tuple[int, int, int]
    """Red, green and blue as drawn: the colour and a little more or less of each."""

    @property
    def name(self) -> str:
        """As in "red circle"."""
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        return PLACES[self.row][self.column]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is on one picture."""

    things: tuple[Thing, ...]
    ground: tuple[int, int, int]

    @property
    def held_out(self) -> bool:
        """Whether this arrangement belongs to the pictures that are never trained on."""
        what = ";".join(sorted(f"{thing.name} {thing.place}" for thing in self.things))
        return hashlib.sha256(what.encode()).digest()[0] % _HELD_OUT_IN == 0


def make_scene(rng: random.Random, *, held_out: bool, most: int = MOST_THINGS) -> Scene:
    """A random picture of one to `most` things of the wanted side of the split."""
    while True:
        scene = _any_scene(rng, most)
        if scene.held_out == held_out:
            return scene


def _any_scene(rng: random.Random, most: int) -> Scene:
    places = [(row, column) for row in range(3) for column in range(3)]
    things = []
    # Few colours and shapes in one picture make counts above one and things that differ in one respect only.
    shapes = rng.sample(SHAPES, rng.choice((2, 4)))
    colours = rng.sample(list(COLOURS), rng.choice((2, 3, 6)))
    for row, column in rng.sample(places, rng.randint(1, most)):
        colour = rng.choice(colours)
        radius = rng.uniform(0.125, 0.155)
        slack = 1 / 6 - radius
        things.append(
            Thing(
                shape=rng.choice(shapes),
                colour=colour,
                row=row,
                column=column,
                x=(column + 0.5) / 3 + rng.uniform(-slack, slack),
                y=(row + 0.5) / 3 + rng.uniform(-slack, slack),
                radius=radius,
                shade=_vary(rng, COLOURS[colour], 12),
            )
        )
    grey = rng.randint(205, 255)  # any colour stands out from a light ground
    return Scene(things=tuple(things), ground=_vary(rng, (grey, grey, grey), 8))


def _vary(rng: random.Random, colour: tuple[int, int, int], by: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-by, by))) for part in colour)
    return red, green, blue
