"""tiny-vision under 500 shuffled cases: no answer comes from another picture's state, and most are right.

A case is one answered question about the newest picture of a chat. Between them chats begin, are forked, rolled back
and get another picture; the cache is trimmed, and the server with its durable store ends and comes back. Each answer is
compared with that of a second server, which is given the whole chat and has its cache emptied before.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, Answer, LiveServer, generate, greedy

pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")

from service.models.vision.drawing import draw
from service.models.vision.questions import Question, ask, ask_any
from service.models.vision.scenes import Scene, make_scene

pytestmark = [pytest.mark.mlx]

MODEL = "tiny-vision"
STOPPING = pb.Stopping(max_tokens=8)
LEARNT = ("colour", "shape", "what is at")  # the kinds that it answers best
SIZES = (96, 160, 256)  # pixels; the same scene in another size is another picture


@dataclass(frozen=True, slots=True)
class Picture:
    scene: Scene
    side: int


@dataclass(frozen=True, slots=True)
class Said:
    """A message; its picture stands before its text."""

    role: pb.Role
    text: str = ""
    picture: Picture | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A snapshot by its name, what it was made of, and whose picture is the newest."""

    name: str
    tokens: int
    said: tuple[Said, ...]
    picture: Picture
    durable: bool
    before: Chat | None = None
    """What it can be rolled back to."""


@cache
def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    draw(picture.scene, picture.side, picture.side).save(file, "PNG")
    return file.getvalue()


def input_of(said: tuple[Said, ...], *, open_turn: bool = True) -> pb.Input:
    messages = []
    for each in said:
        parts = [pb.Part(image=pb.Image(data=png(each.picture)))] if each.picture else []
        parts += [pb.Part(text=each.text)] if each.text else []
        messages.append(pb.Message(role=each.role, parts=parts))
    return pb.Input(chat=pb.ChatInput(messages=messages, add_generation_prompt=open_turn))


def _whole(usage: pb.Usage) -> None:
    """A receipt of a call that may have moved names only: state on disk then counts without being read."""
    assert usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == usage.prompt_tokens, usage
    assert usage.memory_tokens + usage.disk_tokens == usage.cached_tokens, usage


class Shuffle:
    """Chats on a server that ends and comes back, and what was found."""

    def __init__(self, seed: str, store: Path, cold: LiveServer) -> None:
        self._rng = random.Random(seed)
        self._store, self._cold = store, cold
        self._known: dict[tuple[Said, ...], list[int]] = {}
        self.server = self._serve()
        self.chats: list[Chat] = []
        self.counts: Counter[str] = Counter()
        self.wrong_state: list[str] = []
        self._pictures = [self._picture() for _ in range(40)]

    def _serve(self) -> LiveServer:
        return LiveServer(MODEL, "--store-dir", str(self._store))

    def run(self, cases: int) -> None:
        acts = {self.ask: 8, self.fork: 3, self.roll_back: 3, self.show_another: 3, self.begin: 3, self.trim: 1}
        restarts = {cases // 4, cases // 2, 3 * cases // 4}
        self.begin()
        while self.counts["cases"] < cases:
            if restarts and self.counts["cases"] >= min(restarts):
                restarts.remove(min(restarts))
                self.restart()
            self._rng.choices(list(acts), list(acts.values()))[0]()
            self.chats = self.chats[-30:]

    def begin(self) -> None:
        """A snapshot behind a picture alone."""
        said = (Said(pb.ROLE_USER, picture=self._rng.choice(self._pictures)),)
        self._keep(said)

    def show_another(self) -> None:
        """Another picture in a chat, and a question with it."""
        chat = self._any()
        if len(chat.said) > 12 or chat.said[-1].role != pb.ROLE_ASSISTANT:
            return
        picture = self._rng.choice(self._pictures)
        question = ask_any(self._rng, picture.scene)
        self._answer(chat, Said(pb.ROLE_USER, question.text, picture), picture, question)

    def ask(self) -> None:
        """A question behind a snapshot, whose answer becomes a snapshot."""
        chat = self._any()
        question = ask_any(self._rng, chat.picture.scene)
        self._answer(chat, Said(pb.ROLE_USER, question.text), chat.picture, question)

    def fork(self) -> None:
        """Three questions behind one snapshot, each in a child of its own."""
        parent = self._any()
        questions = [ask_any(self._rng, parent.picture.scene) for _ in range(3)]
        asked = [(Said(pb.ROLE_USER, question.text),) for question in questions]
        request = inference_pb.ForkRequest(
            parent=parent.name, branches=[inference_pb.ForkBranch(append=input_of(one)) for one in asked]
        )
        made = self.server.inference.Fork(request, timeout=PATIENCE)
        _whole(made.usage)
        self.counts["forks"] += 1
        for child, one, question in zip(made.snapshots, asked, questions, strict=True):
            answer = generate(self.server, greedy(None, parent=child.name, stopping=STOPPING))
            self._judge(answer, (*parent.said, *one), question)

    def roll_back(self) -> None:
        """To before the last question, then another one."""
        chat = self._any()
        if chat.before is None:
            return
        request = inference_pb.RollbackRequest(source=chat.name, token_count=chat.before.tokens)
        made = self.server.inference.Rollback(request, timeout=PATIENCE)
        _whole(made.usage)
        assert made.snapshot.token_count == chat.before.tokens
        self.counts["rollbacks"] += 1
        before = chat.before
        back = Chat(
            name=made.snapshot.name,
            tokens=before.tokens,
            said=before.said,
            picture=before.picture,
            durable=False,
            before=before.before,
        )
        question = ask_any(self._rng, before.picture.scene)
        self._answer(back, Said(pb.ROLE_USER, question.text), before.picture, question)

    def trim(self) -> None:
        """State goes, wholly or in part."""
        left = self._rng.choice((0, 1 << 20))
        self.server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=left, disk_bytes=left))
        self.counts["trims"] += 1

    def restart(self) -> None:
        """The server ends, by a signal or at once, and comes back with what it kept on disk."""
        if self.counts["restarts"] % 2:
            self.server.kill()
        else:
            assert self.server.terminate() == 0
        self.server.close()
        self.server = self._serve()
        self.counts["restarts"] += 1
        self.chats = [chat for chat in self.chats if chat.durable]
        self.counts["chats after a restart"] += len(self.chats)
        self.begin()

    def _picture(self) -> Picture:
        return Picture(make_scene(self._rng, held_out=True), self._rng.choice(SIZES))

    def _any(self) -> Chat:
        return self._rng.choice(self.chats)

    def _options(self) -> tuple[bool, pb.SnapshotOptions]:
        durable = self._rng.random() < 0.25
        return durable, pb.SnapshotOptions(durability=pb.DURABILITY_DISK if durable else pb.DURABILITY_UNSPECIFIED)

    def _keep(self, said: tuple[Said, ...]) -> None:
        durable, options = self._options()
        request = inference_pb.CreateSnapshotRequest(input=input_of(said, open_turn=False), options=options)
        made = self.server.inference.CreateSnapshot(request, timeout=PATIENCE)
        _whole(made.usage)
        picture = next(each.picture for each in reversed(said) if each.picture is not None)
        self.chats.append(
            Chat(
                name=made.snapshot.name,
                tokens=made.snapshot.token_count,
                said=said,
                picture=picture,
                durable=durable,
            )
        )

    def _answer(self, chat: Chat, asked: Said, picture: Picture, question: Question) -> None:
        durable, options = self._options()
        request = greedy(input_of((asked,)), parent=chat.name, stopping=STOPPING, save=options)
        answer = generate(self.server, request)
        said = (*chat.said, asked)
        self._judge(answer, said, question)
        if answer.finished.reason != inference_pb.FINISH_REASON_EOS or len(said) > 12:
            return  # the turn is still open, or the chat long enough
        kept = answer.finished.snapshot
        self.chats.append(
            Chat(
                name=kept.name,
                tokens=kept.token_count,
                said=(*said, Said(pb.ROLE_ASSISTANT, answer.text)),
                picture=picture,
                durable=durable,
                before=chat,
            )
        )

    def _judge(self, answer: Answer, said: tuple[Said, ...], question: Question) -> None:
        if said not in self._known:
            self._cold.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
            cold = generate(self._cold, greedy(input_of(said), stopping=STOPPING))
            assert cold.usage.cached_tokens == 0
            assert cold.usage.prompt_tokens == answer.usage.prompt_tokens
            self._known[said] = cold.ids
        self.counts["cases"] += 1
        self.counts["restored"] += answer.usage.cached_tokens > 0
        if answer.ids != self._known[said]:
            self.wrong_state.append(f"{said}: {answer.ids} instead of {self._known[said]}")
        self.counts["right"] += answer.text == question.answer


@pytest.fixture
def cold() -> Iterator[LiveServer]:
    with LiveServer(MODEL) as live:
        yield live


def test_answers_about_pictures_never_trained_on_are_right(cold: LiveServer) -> None:
    rng = random.Random("pictures")
    answers: list[tuple[str, str, str]] = []
    while len(answers) < 12:
        picture = Picture(make_scene(rng, held_out=True), 192)
        question = ask(rng, picture.scene, rng.choice(LEARNT))
        if question is not None:
            answer = generate(cold, greedy(input_of((Said(pb.ROLE_USER, question.text, picture),)), stopping=STOPPING))
            answers.append((question.text, question.answer, answer.text))
    assert sum(right == given for _, right, given in answers) >= 10, answers


@pytest.mark.slow
def test_500_shuffled_questions_are_answered_from_their_own_picture(tmp_path: Path, cold: LiveServer) -> None:
    shuffle = Shuffle("shuffle", tmp_path / "store", cold)
    try:
        shuffle.run(500)
        assert not shuffle.server.complaints()
    finally:
        shuffle.server.close()
    counts = shuffle.counts
    assert not shuffle.wrong_state, shuffle.wrong_state[:3]
    assert counts["right"] >= 0.8 * counts["cases"], counts
    # The shuffle went through what it is about.
    assert min(counts[what] for what in ("forks", "rollbacks", "trims", "chats after a restart")) >= 5, counts
    assert counts["restarts"] == 3 and counts["restored"] >= 250, counts
