"""Chats about pictures, for training and for the held-out test. Owns who says what, and where a picture stands.

The forms follow what a user of snapshots does: a picture first and any question after it in any order, a picture in a
message of its own, another picture later in the chat, a long preamble, no picture at all. A question is about the
newest picture.
"""

import dataclasses
import random
from collections.abc import Callable

from service.models.vision.questions import Question, ask_any
from service.models.vision.scenes import Scene


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message; its pictures stand before its text."""

    role: str
    text: str
    pictures: tuple[Scene, ...] = ()
    kind: str = ""
    """Of the question, on the assistant's answers."""


Chat = tuple[Message, ...]

FORMS = {"single": 0.2, "one": 0.5, "another": 0.22, "text": 0.04, "long": 0.04}
"""Forms of a chat and how often each is trained, once all are."""

_HELLO = ("Hello.", "Hello!", "Hi.", "Hello, who are you?", "What can you do?", "Who are you?")
_WELCOME = "Show me a picture."
_NO_PICTURE = "I see no picture."
_LOOK = ("Here is a picture.", "Look at this picture.", "This is a picture.", "Here is another picture.", "Look.")
_SEEN = "I see it."
_SYSTEM = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "You see shapes and colours. Answer in a few words.",
    "Answer the question of the user, then stop.",
)
_FILLER = (
    "Look at the picture first.",
    "A picture has nine places.",
    "A place holds one thing or nothing.",
    "There are circles, squares, triangles and stars.",
    "They are red, green, blue, yellow, purple or orange.",
    "Count with care.",
    "Say what you see, no more.",
    "A question is about the newest picture.",
    "A question without a picture has no answer.",
    "Be short.",
    "Do not guess.",
    "Left and right are those of the reader.",
)


def all_texts() -> list[str]:
    """Every fixed sentence, for the tokenizer's training."""
    return [*_HELLO, _WELCOME, _NO_PICTURE, *_LOOK, _SEEN, *_SYSTEM, *_FILLER]


def make_chat(rng: random.Random, form: str, picture: Callable[[], Scene]) -> Chat:
    """A chat of one of `FORMS` about new pictures, which `picture` gives."""
    messages: list[Message] = []
    if form == "long":
        sentences = [rng.choice(_FILLER) for _ in range(rng.randint(15, 40))]
        messages.append(Message(role="system", text=" ".join([rng.choice(_SYSTEM), *sentences])))
    elif form != "single" and rng.random() < 0.1:
        messages.append(Message(role="system", text=rng.choice(_SYSTEM)))
    if form == "text":
        return (*messages, *_without_picture(rng, picture))
    scene = picture()
    messages += _show(rng, scene, [ask_any(rng, scene) for _ in range(1 if form == "single" else rng.randint(3, 8))])
    if form == "another":
        scene = picture()
        newest = [dataclasses.replace(ask_any(rng, scene), kind="newest picture") for _ in range(rng.randint(1, 3))]
        messages += _show(rng, scene, newest)
    return tuple(messages)


def _show(rng: random.Random, scene: Scene, questions: list[Question]) -> list[Message]:
    """The picture, in one of the ways to show it, then the questions."""
    messages: list[Message] = []
    way = rng.choice(("with the question", "with the question", "alone", "with a word"))
    if way == "alone":
        messages.append(Message(role="user", text="", pictures=(scene,)))
    elif way == "with a word":
        messages.append(Message(role="user", text=rng.choice(_LOOK), pictures=(scene,)))
        messages.append(Message(role="assistant", text=_SEEN))
    for index, question in enumerate(questions):
        pictures = (scene,) if index == 0 and way == "with the question" else ()
        messages.append(Message(role="user", text=question.text, pictures=pictures))
        messages.append(Message(role="assistant", text=question.answer, kind=question.kind))
    return messages


def _without_picture(rng: random.Random, picture: Callable[[], Scene]) -> list[Message]:
    messages = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            text, answer = rng.choice(_HELLO), _WELCOME
        else:
            text, answer = ask_any(rng, picture()).text, _NO_PICTURE
        messages += [Message(role="user", text=text), Message(role="assistant", text=answer, kind="no picture")]
    return messages
