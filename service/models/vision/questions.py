"""Questions about a picture, with their answers. Owns the kinds, their wordings, and what the right answer is.

Every answer is computed from the scene. A question that would have no single right answer ("the circle" where there
are two) is not asked.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable

from service.models.vision.scenes import COLOURS, PLACES, SHAPES, Scene, Thing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question and its one right answer."""

    kind: str
    text: str
    answer: str


KINDS = ("colour", "shape", "what is at", "where", "count", "is there")

PLURAL = {"circle": "circles", "square": "squares", "triangle": "triangles", "star": "stars"}


def ask(rng: random.Random, scene: Scene, kind: str) -> Question | None:
    """A question of `kind` about `scene`; None where the scene has nothing to ask of that kind."""
    made = _ASK[kind](rng, scene)
    if made is None:
        return None
    text, answer = made
    return Question(kind=kind, text=text + "?", answer=answer)


def ask_any(rng: random.Random, scene: Scene) -> Question:
    """A question of a random kind."""
    while True:
        question = ask(rng, scene, rng.choice(KINDS))
        if question is not None:
            return question


def _colour(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    thing = _pick(rng, _single(scene, lambda thing: thing.shape))
    if thing is None:
        return None
    return rng.choice(("What colour is the {}", "What color is the {}")).format(thing.shape), thing.colour


def _shape(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    thing = _pick(rng, _single(scene, lambda thing: thing.colour))
    if thing is None:
        return None
    return rng.choice(("What shape is the {} thing", "What is the {} thing")).format(thing.colour), thing.shape


def _what_is_at(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    held = {thing.place: thing.name for thing in scene.things}
    place = rng.choice([place for row in PLACES for place in row])
    if rng.random() < 0.7:
        place = rng.choice(list(held))
    return f"What is {'in' if place == 'centre' else 'at'} the {place}", held.get(place, "nothing")


def _where(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    named = _named(rng, scene)
    if named is None:
        return None
    name, thing = named
    return f"Where is the {name}", thing.place


def _count(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    if rng.random() < 0.75:
        thing = rng.choice(scene.things)
        colour, shape = thing.colour, thing.shape
    way = rng.randrange(3)
    what, number = (
        ("things", len(scene.things)),
        (PLURAL[shape], sum(thing.shape == shape for thing in scene.things)),
        (f"{colour} things", sum(thing.colour == colour for thing in scene.things)),
    )[way]
    return f"How many {what} are there", str(number)


def _is_there(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    thing = rng.choice(scene.things)
    wanted = rng.random() < 0.5
    for _ in range(50):
        way = rng.randrange(3)
        colour, shape = thing.colour, thing.shape
        if not wanted:
            # Mostly near misses: one half of the name is there.
            colour = rng.choice((colour, rng.choice(list(COLOURS))))
            shape = rng.choice((shape, rng.choice(SHAPES)))
        name, there = (
            (f"{colour} {shape}", any(other.name == f"{colour} {shape}" for other in scene.things)),
            (shape, any(other.shape == shape for other in scene.things)),
            (f"{colour} thing", any(other.colour == colour for other in scene.things)),
        )[way]
        if there == wanted:
            return f"Is there a{_n(name)} {name}", "yes" if there else "no"
    return None


_ASK = {
    "colour": _colour,
    "shape": _shape,
    "what is at": _what_is_at,
    "where": _where,
    "count": _count,
    "is there": _is_there,
}


def _single(scene: Scene, key: Callable[[Thing], str]) -> list[Thing]:
    """The things that no other one shares the key with."""
    counts = Counter(key(thing) for thing in scene.things)
    return [thing for thing in scene.things if counts[key(thing)] == 1]


def _named(rng: random.Random, scene: Scene) -> tuple[str, Thing] | None:
    """A thing and a name that fits it alone: by its shape where that is enough, or by colour and shape."""
    names = [(thing.shape, thing) for thing in _single(scene, lambda thing: thing.shape)]
    names += [(thing.name, thing) for thing in _single(scene, lambda thing: thing.name)]
    return rng.choice(names) if names else None


def _pick(rng: random.Random, things: list[Thing]) -> Thing | None:
    return rng.choice(things) if things else None


def _n(name: str) -> str:
    return "n" if name[0] in "aeiou" else ""
