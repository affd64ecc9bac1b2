"""The world of tiny-vision: what a question says about a picture is so, and no held-out picture is trained on.

The answers are checked by a reader of its own, which knows the wordings and looks at the list of things.
"""

import random
import re

import pytest

from service.models.vision.chats import FORMS, Chat, make_chat
from service.models.vision.pointing import Pointing, cells_of
from service.models.vision.questions import KINDS, ask
from service.models.vision.scenes import COLOURS, MOST_THINGS, PLACES, SHAPES, Scene, Thing, make_scene
from service.models.vision.tokens import build_tokenizer

COUNT = 120


def scenes(seed: str, *, held_out: bool = False, count: int = COUNT) -> list[Scene]:
    rng = random.Random(seed)
    return [make_scene(rng, held_out=held_out) for _ in range(count)]


def fits(thing: Thing, words: str) -> bool:
    """Whether a noun phrase ("red circles", "star", "blue thing") fits a thing."""
    for word in words.split():
        single = word.removesuffix("s")
        if single != "thing" and single not in (thing.colour, thing.shape):
            return False
    return True


def only(scene: Scene, words: str) -> Thing:
    (thing,) = [thing for thing in scene.things if fits(thing, words)]
    return thing


def read(scene: Scene, text: str) -> str:
    """The answer to a question, found by its words alone."""
    if found := re.fullmatch(r"What colou?r is the (\w+)\?", text):
        return only(scene, found[1]).colour
    if found := re.fullmatch(r"What (?:shape is|is) the (\w+) thing\?", text):
        return only(scene, found[1]).shape
    if found := re.fullmatch(r"What is (?:at|in) the ([a-z ]+)\?", text):
        there = [thing for thing in scene.things if PLACES[int(thing.y * 3)][int(thing.x * 3)] == found[1]]
        return f"{there[0].colour} {there[0].shape}" if there else "nothing"
    if found := re.fullmatch(r"Where is the ([a-z ]+)\?", text):
        thing = only(scene, found[1])
        return PLACES[int(thing.y * 3)][int(thing.x * 3)]
    if found := re.fullmatch(r"How many ([a-z ]+) are there\?", text):
        return str(sum(fits(thing, found[1]) for thing in scene.things))
    if found := re.fullmatch(r"Is there an? ([a-z ]+)\?", text):
        return "yes" if any(fits(thing, found[1]) for thing in scene.things) else "no"
    raise AssertionError(f"no reading for {text!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_what_a_reader_of_the_question_finds_on_the_picture(kind):
    rng = random.Random(kind)
    asked = [(scene, ask(rng, scene, kind)) for scene in scenes(kind)]
    questions = [(scene, question) for scene, question in asked if question is not None]
    assert len(questions) > COUNT / 4
    assert [read(scene, question.text) for scene, question in questions] == [
        question.answer for _, question in questions
    ]


def test_things_keep_their_place_and_lie_apart():
    for scene in scenes("apart"):
        assert 1 <= len(scene.things) <= MOST_THINGS
        for thing in scene.things:
            for middle, place in ((thing.x, thing.column), (thing.y, thing.row)):
                assert place / 3 <= middle - thing.radius and middle + thing.radius <= (place + 1) / 3
        assert len({(thing.row, thing.column) for thing in scene.things}) == len(scene.things)


def arrangement(scene: Scene) -> frozenset[tuple[str, str, str]]:
    return frozenset((thing.shape, thing.colour, thing.place) for thing in scene.things)


def test_no_arrangement_is_both_trained_and_held_out():
    # Small pictures repeat, so the sets would meet if the split went by seed.
    trained = {arrangement(scene) for scene in scenes("same", count=1500)}
    held_out = {arrangement(scene) for scene in scenes("same", held_out=True, count=1500)}
    assert not trained & held_out
    assert any(len(things) == 1 for things in trained) and any(len(things) == 1 for things in held_out)


def test_every_shape_colour_and_place_is_on_both_sides_of_the_split():
    for held_out in (False, True):
        things = [thing for scene in scenes("all", held_out=held_out) for thing in scene.things]
        assert {thing.shape for thing in things} == set(SHAPES)
        assert {thing.colour for thing in things} == set(COLOURS)
        assert {thing.place for thing in things} == {place for row in PLACES for place in row}


def chat_of(rng: random.Random, form: str, *, held_out: bool) -> Chat:
    return make_chat(rng, form, lambda: make_scene(rng, held_out=held_out))


def test_the_same_seed_makes_the_same_chat():
    for form in FORMS:
        first, second = (chat_of(random.Random("x"), form, held_out=True) for _ in range(2))
        assert first == second
        assert all(scene.held_out for message in first for scene in message.pictures)


def test_a_chat_ends_with_an_answer_and_shows_the_pictures_of_its_form():
    pictures = {"single": 1, "one": 1, "another": 2, "text": 0, "long": 1}
    assert set(pictures) == set(FORMS)
    rng = random.Random(2)
    for form, count in pictures.items():
        for _ in range(30):
            chat = chat_of(rng, form, held_out=False)
            assert chat[-1].role == "assistant" and chat[-1].kind
            assert sum(len(message.pictures) for message in chat) == count


def test_a_drawn_picture_shows_its_things_where_they_are():
    drawing = pytest.importorskip("service.models.vision.drawing", exc_type=ImportError)
    for scene in scenes("drawn", count=40):
        picture = drawing.draw(scene, 240, 240)
        assert [picture.getpixel((int(thing.x * 240), int(thing.y * 240))) for thing in scene.things] == [
            thing.shade for thing in scene.things
        ]
        empty = {place for row in PLACES for place in row} - {thing.place for thing in scene.things}
        for row, column in ((row, column) for row in range(3) for column in range(3)):
            if PLACES[row][column] in empty:
                assert picture.crop((column * 80, row * 80, column * 80 + 80, row * 80 + 80)).getcolors() == [
                    (6400, scene.ground)
                ]


def test_a_phrase_points_at_the_tokens_of_which_it_is_true():
    tokenizer = build_tokenizer()
    pointing = Pointing(tokenizer)
    for scene in scenes("pointed at", count=30):
        cells = cells_of(scene, 3, 3)
        there = {thing.row * 3 + thing.column: thing for thing in scene.things}
        places = [place for row in PLACES for place in row]
        asked = [(shape, [cell for cell in there if there[cell].shape == shape]) for shape in SHAPES]
        asked += [(f"{colour} things", [cell for cell in there if there[cell].colour == colour]) for colour in COLOURS]
        asked += [
            ("things", list(there)),
            (scene.things[0].name, [c for c in there if fits(there[c], scene.things[0].name)]),
        ]
        asked += [(place, [number]) for number, place in enumerate(places)]
        for words, expected in asked:
            ids = tokenizer.encode(f"Well, the {words}?").ids
            ((place, found),) = pointing.read(ids, cells)
            assert (words.split()[-1], found) == (tokenizer.decode([ids[place]]).strip(), sorted(expected))
