"""Chats to arrays. Owns the tokens of a chat, its rotary positions, a picture's patches and where its answers stand.

What the model is trained on has to be what the folder's own template and processor give at use; a test compares them.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from service.models.vision import folder, tokens
from service.models.vision.chats import FORMS, Chat, make_chat
from service.models.vision.drawing import draw
from service.models.vision.pointing import Pointing, cells_of
from service.models.vision.scenes import Scene

_USUAL_LENGTH = {"single": 32, "one": 112, "another": 144, "text": 48, "long": 400}  # in tokens
GRID = (folder.SIDE // folder.PATCH // folder.MERGE,) * 2  # tokens of a usual picture
_PLAIN = 0.16
_STEP = 32  # lengths are rounded up to it: few shapes, so memory is reused


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of equal length, padded at the end."""

    ids: np.ndarray
    """int32, rows × length."""
    positions: np.ndarray
    """int32, 3 × rows × length: time, height and width of the rotary embedding."""
    answers: np.ndarray
    """float32, rows × length: 1 where the token is the assistant's, its end of turn included."""
    points: np.ndarray
    """float32, rows × length × length: where a word of a question should look, in shares; nothing for other tokens."""
    recalls: np.ndarray
    """The same of an answer's tokens: the word that its question is about."""
    scenes: tuple[Scene, ...]
    """Of the pictures."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One chat."""

    ids: list[int]
    answers: list[bool]
    points: list[tuple[int, list[int]]]
    """A token and those where it should look, itself among them."""
    recalls: list[tuple[int, int]]
    """A token before one of an answer, and where it should look."""
    scenes: list[Scene]


def encode_chat(tokenizer: Tokenizer, chat: Chat, grid: tuple[int, int], pointing: Pointing | None = None) -> Row:
    """Tokens of a chat whose pictures take so many rows and columns of tokens each."""
    ids: list[int] = []
    answers: list[bool] = []
    points: list[tuple[int, list[int]]] = []
    scenes: list[Scene] = []
    recalls: list[tuple[int, int]] = []
    first = 0  # token of the newest picture
    asked = 0  # last word of what the newest question is about

    def say(text: str, *, answer: bool = False) -> list[int]:
        new: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(new)
        answers.extend([answer] * len(new))
        return new

    for message in chat:
        picture = tokens.VISION_START + tokens.IMAGE * (grid[0] * grid[1]) + tokens.VISION_END
        own = message.role == "assistant"
        say(f"<|im_start|>{message.role}\n" + picture * len(message.pictures))
        scenes += message.pictures
        if message.pictures:
            first = len(ids) - 1 - grid[0] * grid[1]
        start = len(ids)
        new = say(message.text + tokens.TURN_END, answer=own)
        if pointing is not None and message.role == "user" and scenes:
            for place, fitting in pointing.read(new, cells_of(scenes[-1], *grid)):
                asked = start + place
                points.append((asked, [asked, *(first + cell for cell in fitting)]))
        if message.kind and asked:
            recalls += [(place - 1, asked) for place in range(start, start + len(new))]
        say("\n")
    return Row(ids=ids, answers=answers, points=points, recalls=recalls, scenes=scenes)


def positions_of(ids: Sequence[int], grid: tuple[int, int]) -> np.ndarray:
    """Rotary positions of a row, int32, 3 × length; `grid` counts a picture's tokens, rows × columns."""
    image = tokens.SPECIALS.index(tokens.IMAGE)
    height, width = grid
    found = np.zeros((3, len(ids)), np.int32)
    place, following = 0, 0
    while place < len(ids):
        if ids[place] == image:
            rows, columns = np.divmod(np.arange(height * width), width)
            found[:, place : place + height * width] = following + np.stack([rows * 0, rows, columns])
            place, following = place + height * width, following + max(height, width)
        else:
            found[:, place] = following
            place, following = place + 1, following + 1
    return found


def patches_of(scene: Scene, size: tuple[int, int]) -> np.ndarray:
    """A drawn picture as the tower takes it, float32, patches × values."""
    width, height = size
    image = np.asarray(draw(scene, width, height), np.float32) / 127.5 - 1.0
    side, merge = folder.PATCH, folder.MERGE
    blocks = image.reshape(height // side // merge, merge, side, width // side // merge, merge, side, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row and column in it, colour, y, x
    frames = np.repeat(blocks[:, :, :, :, :, None], folder.FRAMES, axis=5)
    return frames.reshape((height // side) * (width // side), -1)


def make_batch(
    tokenizer: Tokenizer,
    pointing: Pointing,
    rng: random.Random,
    picture: Callable[[], Scene],
    budget: int,
    progress: float,
) -> Batch:
    """Chats of one form, as many as `budget` tokens hold.

    `progress` from 0 to 1: the first chats are one question on one picture.
    """
    form = rng.choices(list(FORMS), list(FORMS.values()))[0] if progress >= _PLAIN else "single"
    count = max(2, budget // _USUAL_LENGTH[form])
    chats = [make_chat(rng, form, picture) for _ in range(2 * count)]
    # Half of them, of about the same length: less padding.
    rows = sorted((encode_chat(tokenizer, chat, GRID, pointing) for chat in chats), key=lambda row: len(row.ids))
    first = count * (rng.random() < 0.3)
    return stack(rows[first : first + count], (folder.SIDE, folder.SIDE))


def stack(rows: Sequence[Row], size: tuple[int, int]) -> Batch:
    """Rows whose pictures all have the same size."""
    height, width = size[1] // folder.PATCH // folder.MERGE, size[0] // folder.PATCH // folder.MERGE
    length = -(-max(len(row.ids) for row in rows) // _STEP) * _STEP
    ids = np.zeros((len(rows), length), np.int32)
    answers = np.zeros((len(rows), length), np.float32)
    positions = np.zeros((3, len(rows), length), np.int32)
    points, recalls = (np.zeros((len(rows), length, length), np.float32) for _ in range(2))
    for index, row in enumerate(rows):
        for place, looked in row.points:
            points[index, place, looked] = 1 / len(looked)
        for place, word in row.recalls:
            recalls[index, place, word] = 1
        ids[index, : len(row.ids)] = row.ids
        answers[index, : len(row.ids)] = row.answers
        positions[:, index, : len(row.ids)] = positions_of(row.ids, (height, width))
    scenes = tuple(scene for row in rows for scene in row.scenes)
    return Batch(ids=ids, positions=positions, answers=answers, points=points, recalls=recalls, scenes=scenes)
