"""Asks a tiny-vision folder about held-out pictures: `python -m service.models.vision.evaluate [FOLDER]`.

Owns the measurement and nothing of the model: the folder is loaded by mlx-vlm, the text comes from the folder's chat
template, the pixels from its processor, and the answers are decoded greedily with upstream's caches. In a chat of
several questions the model's own answers stay in the chat. An answer counts when it is the right one to the letter.
"""

import argparse
import dataclasses
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from service.engine import cpu

mx = cpu.mlx()

import mlx_vlm  # noqa: E402 - after the CPU is prepared
from mlx.utils import tree_map  # noqa: E402

from service.models.vision import folder as vision_folder  # noqa: E402
from service.models.vision.chats import FORMS, Chat, Message, make_chat  # noqa: E402
from service.models.vision.drawing import draw  # noqa: E402
from service.models.vision.questions import KINDS, ask  # noqa: E402
from service.models.vision.scenes import make_scene  # noqa: E402

_LONGEST = 8  # tokens of an answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of one kind of question."""

    right: int
    asked: int


class Model:
    """A folder as mlx-vlm loads it, computing in float32. `text_first`: pictures are sent behind a message's text."""

    def __init__(self, folder: Path, *, text_first: bool = False) -> None:
        self._text_first = text_first
        self._model, self._processor = mlx_vlm.load(str(folder))
        self._model.update(tree_map(lambda value: value.astype(mx.float32), self._model.parameters()))

    def inputs(self, messages: list[Message], pictures: list[Any], *, add_generation_prompt: bool) -> dict[str, Any]:
        """What the folder's template and processor make of a chat whose pictures are drawn."""
        text = self._processor.apply_chat_template(
            [self._as_template_takes_it(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return dict(self._processor(images=pictures or None, text=[text]))

    def embed(self, given: dict[str, Any]) -> Any:
        """Upstream's embeddings and positions of such inputs."""
        extra = {"image_grid_thw": given["image_grid_thw"]} if "image_grid_thw" in given else {}
        return self._model.get_input_embeddings(mx.array(given["input_ids"]), given.get("pixel_values"), **extra)

    def answer(self, messages: list[Message], *, side: int = vision_folder.SIDE) -> str:
        """The greedy answer to a chat that ends with a user's message; its pictures are drawn `side` pixels wide."""
        pictures = [draw(scene, side, side) for message in messages for scene in message.pictures]
        given = self.inputs(messages, pictures, add_generation_prompt=True)
        ids, found = mx.array(given["input_ids"]), self.embed(given)
        language = self._model.language_model
        cache = language.make_cache()
        out = language(ids, inputs_embeds=found.inputs_embeds, position_ids=found.position_ids, cache=cache)
        # Text after a picture goes on below the picture's number of tokens.
        following = int(found.position_ids.max().item()) + 1
        tokens: list[int] = []
        while len(tokens) < _LONGEST:
            token = int(out.logits[0, -1].argmax().item())
            if token == vision_folder.CONFIG["eos_token_id"]:
                break
            tokens.append(token)
            positions = mx.full((3, 1, 1), following, dtype=mx.int32)
            out = language(mx.array([[token]]), position_ids=positions, cache=cache)
            following += 1
        return self._processor.tokenizer.decode(tokens)

    def _as_template_takes_it(self, message: Message) -> dict[str, Any]:
        pictures = [{"type": "image"} for _ in message.pictures]
        text = [{"type": "text", "text": message.text}]
        return {"role": message.role, "content": text + pictures if self._text_first else pictures + text}


def ask_chat(model: Model, chat: Chat) -> list[tuple[str, str, str]]:
    """(kind, right answer, given answer) of each question of a chat; the model's own answers stay in it."""
    said: list[Message] = []
    answers = []
    for message in chat:
        if message.role == "assistant" and message.kind:
            given = model.answer(said)
            answers.append((message.kind, message.text, given))
            said.append(dataclasses.replace(message, text=given))
        else:
            said.append(message)
    return answers


def evaluate(model: Model, *, each: int, seed: str) -> dict[str, Score]:
    """Scores by kind: `each` single questions of every kind, and of each form of chat a quarter as many chats."""
    rng = random.Random(f"held out {seed}")
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()

    def note(kind: str, expected: str, given: str) -> None:
        asked[kind] += 1
        right[kind] += given == expected

    for kind in KINDS:
        while asked[kind] < each:
            scene = make_scene(rng, held_out=True)
            question = ask(rng, scene, kind)
            if question is not None:
                note(kind, question.answer, model.answer([Message(role="user", text=question.text, pictures=(scene,))]))
    for form in FORMS:
        for _ in range(max(1, each // 4)):
            chat = make_chat(rng, form, lambda: make_scene(rng, held_out=True))
            for kind, expected, given in ask_chat(model, chat):
                label = {"single": "one question", "one": "several questions", "long": "long preamble"}.get(form, kind)
                if form != "another" or kind == "newest picture":
                    note(f"chat: {label}", expected, given)
    return {kind: Score(right=right[kind], asked=asked[kind]) for kind in asked}


def main(arguments: list[str] | None = None) -> int:
    """Print the scores by kind and in all; 1 when fewer than nine answers in ten are right."""
    parser = argparse.ArgumentParser(
        prog="python -m service.models.vision.evaluate", description="Ask tiny-vision about held-out pictures."
    )
    parser.add_argument("folder", type=Path, nargs="?", help="a tiny-vision folder (default: the package's weights)")
    parser.add_argument("--weights", type=Path, default=vision_folder.WEIGHTS, help="weights to make a folder of")
    parser.add_argument("--each", type=int, default=100, help="single questions of each kind")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--text-first", action="store_true", help="send pictures behind the text of their message")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        where = chosen.folder
        if where is None:
            where = Path(made)
            vision_folder.build(where, chosen.weights)
        scores = evaluate(Model(where, text_first=chosen.text_first), each=chosen.each, seed=chosen.seed)
    for kind, score in scores.items():
        sys.stdout.write(f"{kind:28} {score.right:5} of {score.asked:5}  {score.right / score.asked:6.1%}\n")
    right, asked = sum(score.right for score in scores.values()), sum(score.asked for score in scores.values())
    sys.stdout.write(f"{'in all':28} {right:5} of {asked:5}  {right / asked:6.1%}\n")
    return 0 if right >= 0.9 * asked else 1


if __name__ == "__main__":
    sys.exit(main())
