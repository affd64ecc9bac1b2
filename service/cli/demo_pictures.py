"""The demo's story for a model that sees: questions forked behind a picture, a rollback, another picture.

Owns the story and its receipts. The pictures are drawn here and were never trained on; every answer came over gRPC from
the server, and is judged by what was drawn.
"""

from __future__ import annotations

import io
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfork_client import Client, Image, Message, Snapshot, Usage

    from service.models.vision.questions import Question
    from service.models.vision.scenes import Scene

_SIDE = 192  # pixels
_SEED = "demo"


@dataclass(frozen=True, slots=True)
class _Receipt:
    """One line of the table; `encoded`: how often the tower saw a picture in this step."""

    step: str
    usage: Usage
    encoded: int


class PictureStory:
    """Played on a server of tiny-vision."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rng = random.Random(_SEED)
        self._receipts: list[_Receipt] = []
        self._right = self._asked = 0
        self._encoded = client.cache_stats().images_encoded

    def play(self) -> int:
        """0 if the first picture was encoded once and nothing of it was computed again."""
        from kvfork_client import ChatInput, Message

        first, second = self._scene(), self._scene()
        questions = self._questions(first, ("colour", "what is at", "is there"))

        _heading("1. A picture, and a snapshot A behind it")
        _tell(first)
        shown = ChatInput((Message.user(_png(first)),), add_generation_prompt=False)
        a = self._client.create_snapshot(shown)
        assert a.usage is not None
        self._note("picture, kept as A", a.usage)
        print(f"  A = {a.name} ({a.token_count} tokens)")

        _heading("2. A forked into three questions")
        children = a.fork([[Message.user(question.text)] for question in questions])
        self._note("fork of A into 3", children.usage)
        for number, (child, question) in enumerate(zip(children, questions, strict=True), 1):
            b = self._ask(f"answer {number}", child, None, question)

        _heading("3. The last answer rolled back to A, and another question")
        back = b.rollback(token_count=a.token_count)
        assert back.usage is not None
        self._note("rollback to A", back.usage)
        (question,) = self._questions(first, ("shape",))
        c = self._ask("question after it", back, [Message.user(question.text)], question)

        _heading("4. Another picture in the same chat")
        _tell(second)
        (question,) = self._questions(second, ("shape",))
        self._ask("second picture", c, [Message.user(_png(second), question.text)], question)

        self._print_table()
        print(f"\n{self._right} of {self._asked} answers are right. docs/models.md says how many are.")
        again = sum(receipt.usage.recomputed_tokens for receipt in self._receipts)
        encoded = sum(receipt.encoded for receipt in self._receipts)
        if again or encoded != 2:
            print(f"error: {again} tokens were computed again, {encoded} pictures encoded", file=sys.stderr)
            return 1
        print("Each picture was encoded once, and nothing was computed again.")
        return 0

    def _scene(self) -> Scene:
        from service.models.vision.scenes import make_scene

        while len((scene := make_scene(self._rng, held_out=True)).things) < 3:
            pass
        return scene

    def _questions(self, scene: Scene, kinds: tuple[str, ...]) -> list[Question]:
        from service.models.vision.questions import ask

        found = []
        for kind in kinds:
            while (question := ask(self._rng, scene, kind)) is None:
                pass
            found.append(question)
        return found

    def _ask(self, step: str, parent: Snapshot, given: list[Message] | None, question: Question) -> Snapshot:
        """The snapshot at the answer's end."""
        from kvfork_client import Sampling, Stopping

        generation = parent.generate(
            given, sampling=Sampling(temperature=0.0), stopping=Stopping(max_tokens=12), save=True
        )
        with generation:
            result = generation.result()
        answer = result.text.strip()
        self._asked += 1
        self._right += answer == question.answer
        verdict = "right" if answer == question.answer else f"wrong: {question.answer}"
        print(f"  {question.text:36} {answer:16} {verdict}")
        self._note(step, result.finished.usage)
        assert result.finished.snapshot is not None
        return result.finished.snapshot

    def _note(self, step: str, usage: Usage) -> None:
        now = self._client.cache_stats().images_encoded
        self._receipts.append(_Receipt(step, usage, now - self._encoded))
        self._encoded = now

    def _print_table(self) -> None:
        _heading("Receipts, counted where the model is called (tokens)")
        names = ("step", "prompt", "of images", "restored", "recomputed", "new", "generated", "images encoded")
        rows: list[tuple[str, ...]] = [names]
        for receipt in self._receipts:
            u = receipt.usage
            counts = (u.prompt_tokens, u.image_tokens, u.cached_tokens, u.recomputed_tokens, u.new_tokens)
            rows.append((receipt.step, *(str(n) for n in (*counts, u.completion_tokens, receipt.encoded))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        for row in rows:
            cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            print("  " + "  ".join(cells).rstrip())


def _png(scene: Scene) -> Image:
    from kvfork_client import Image

    from service.models.vision.drawing import draw

    file = io.BytesIO()
    draw(scene, _SIDE, _SIDE).save(file, "PNG")
    return Image(data=file.getvalue())


def _tell(scene: Scene) -> None:
    print("  drawn: " + ", ".join(f"{thing.name} {thing.place}" for thing in scene.things))


def _heading(text: str) -> None:
    print(f"\n{text}\n")
