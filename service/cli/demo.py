"""`kvfork demo`: one server, one story, told through the public client. Owns the story and its receipt table.

Everything printed came over gRPC from the server that the demo started; nothing is computed here.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfork_client import Client, InputLike, Snapshot, Usage

_HANDBOOK = """\
You are the night porter of the Hotel Meridian, a small house by the sea with forty rooms on four floors. You answer \
guests briefly, kindly and truthfully, in one or two sentences. The kitchen closes at ten in the evening and opens at \
six in the morning; a cold plate can be had all night. The sauna is on the fourth floor and is free until midnight. \
The last ferry leaves at a quarter past eleven, the first one at five. Taxis wait at the harbour and cost about twelve \
coins to the railway station. Room keys that were lost are replaced at the desk for five coins. Dogs are welcome on \
the ground floor only. Wake-up calls are written into the red book. The lift rests between one and four. There is a \
doctor in Lime Street, five minutes on foot, and a pharmacy beside the church that is open day and night. Breakfast is \
served in the winter garden from seven to half past ten, with eggs from the farm behind the dunes and bread from our \
own oven. The library has a chess board with one pawn missing; a walnut stands in for it. Bicycles are lent without a \
deposit. If the fire bell rings, guests gather at the flagpole and are counted by floor. Umbrellas may be kept. Guests \
who ask for the hotel's history are told that it was a lighthouse keeper's school, that the tower is still climbed on \
Sundays, and that its lamp was turned by hand until the year the railway came. The wind blows from the west most of \
the year, so rooms to the east are quieter and rooms to the west have the better sunsets. Nobody smokes indoors. """

_VIEWS = ("the harbour", "the dunes", "the garden", "the church", "the lighthouse")
_GUESTS = ("a couple from Lund", "a travelling dentist", "two sisters", "a painter and his dog", "nobody tonight")
_REGISTER = " ".join(
    f"Room {floor}{room:02} looks over {_VIEWS[(floor * 3 + room) % 5]} and has {_GUESTS[(floor + room * 2) % 5]}."
    for floor in range(1, 5)
    for room in range(1, 9)
)

_QUESTION = "How do I get to the railway station tonight?"
_BRANCHES = ("Answer in one short sentence.", "Answer as a list of two steps.", "Answer for a child.")
_NEXT_TURN = "And when is breakfast?"
_SEES = "tiny-vision"  # the model whose story is of pictures
_SAID = "Gladly."  # what is left of an answer once the rest was dropped


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="see a generation, a fork and a rollback with their receipts",
        description="Start a server on loopback and play a short story through the public client.",
        epilog="examples:\n  kvfork demo\n  kvfork demo --model gemma3       the sliding-window model\n"
        "  kvfork demo --model tiny-vision  questions about two pictures",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="a name from `kvfork models list`, or an MLX model folder")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="length of each answer (default: 40)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plays the story; 0 if every receipt says what it should."""
    from kvfork_client import Client

    from service.models import ModelError, resolve

    try:
        resolve(args.model)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with _server(args.model) as address, Client(address, timeout=600) as client:
        _wait_until_loaded(client)
        if args.model == _SEES:
            from service.cli.demo_pictures import PictureStory  # Pillow is of the vision extra

            return PictureStory(client).play()
        return _Story(client, args.tokens).play()


@dataclass(frozen=True, slots=True)
class _Receipt:
    """One line of the table."""

    step: str
    usage: Usage
    generated: int
    ttft: float | None  # seconds


class _Story:
    def __init__(self, client: Client, tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._model = client.model()
        self._receipts: list[_Receipt] = []

    def play(self) -> int:
        from kvfork_client import KVForkError

        print(
            f"\n{self._model.name.removeprefix('models/')}: {self._model.context_tokens:,} tokens of context, ", end=""
        )
        print("its cache can be cut anywhere" if self._model.trimmable else "its cache cannot be cut by itself")
        opening = self._opening([_QUESTION])

        _heading("1. Generate: the prompt's end is kept as A, the answer's end as B")
        answer_at, a, b = self._generate("generate", opening, None)
        assert a is not None and b is not None and answer_at is not None
        print(f"  A = {a.name} ({a.token_count} tokens)   B = {b.name} ({b.token_count} tokens)")

        _heading("2. Fork A into three, decoded together in one batch")
        try:
            children = a.fork([self._addition(text) for text in _BRANCHES])
        except KVForkError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        self._receipts.append(_Receipt("fork of A into 3", children.usage, 0, None))
        self._decode_together(list(children))

        _heading("3. Roll B back to A (the answer is dropped), then take a new turn")
        back = b.rollback(token_count=a.token_count)
        assert back.usage is not None
        rolled_back = back.usage
        self._receipts.append(_Receipt("rollback of B to A", rolled_back, 0, None))
        warm, _, _ = self._generate("new turn, warm", self._addition(_NEXT_TURN), back)

        _heading("The same prompt cold: its first word differs, so nothing stored fits")
        cold, _, _ = self._generate("new turn, cold", self._opening([_QUESTION, _NEXT_TURN], first="Tonight"), None)

        self._print_table()
        if warm is not None and cold is not None:
            print(f"\nThe new turn's first token came {cold / warm:.0f} times sooner than cold.")
        if rolled_back.recomputed_tokens:
            print(f"error: the rollback computed {rolled_back.recomputed_tokens} tokens again", file=sys.stderr)
            return 1
        print("The rollback computed nothing again: 0 tokens recomputed.")
        return 0

    def _opening(self, questions: list[str], first: str = "") -> InputLike:
        """System prompt and user turns, each but the last answered in a word; as chat where there is a template."""
        from kvfork_client import Message, raw

        handbook = f"{first} {_HANDBOOK}{_REGISTER}".strip()
        if self._has_template():
            messages = [Message.system(handbook)]
            for question in questions:
                messages += [Message.user(question), Message.assistant(_SAID)]
            return messages[:-1]
        turns = f" {_SAID}\n".join(f"Guest: {question}\nPorter:" for question in questions)
        return raw(f"{handbook}\n\n{turns}", add_special_tokens=True)

    def _addition(self, text: str) -> InputLike:
        """What continues the open answer: it is said briefly, then the guest speaks again."""
        from kvfork_client import Message, raw

        if self._has_template():
            return [Message.assistant(_SAID), Message.user(text)]
        return raw(f" {_SAID}\nGuest: {text}\nPorter:")

    def _has_template(self) -> bool:
        from kvfork_client import FailedPrecondition, Message

        try:
            self._client.count_tokens([Message.user("?")])
        except FailedPrecondition:
            return False
        return True

    def _generate(
        self, step: str, given: InputLike, parent: Snapshot | None
    ) -> tuple[float | None, Snapshot | None, Snapshot | None]:
        """(TTFT in seconds, the snapshot at the prompt's end, the one at the answer's end); streams the text."""
        from kvfork_client import Mark, Sampling, Stopping

        began = time.perf_counter()
        first: float | None = None
        print("  ", end="", flush=True)
        generation = self._client.generate(
            given,
            parent,
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=self._tokens, stop=["\nGuest:"]),
            save=True,
            marks=[Mark.prompt_end()],
        )
        with generation:
            for delta in generation:
                if first is None:
                    first = time.perf_counter() - began
                print(delta.text.replace("\n", "\n  "), end="", flush=True)
            print()
            finished = generation.finished
            assert finished is not None
            self._receipts.append(_Receipt(step, finished.usage, finished.usage.completion_tokens, first))
            return first, generation.marks.get(0), finished.snapshot

    def _decode_together(self, children: list[Snapshot]) -> None:
        """Each child in a thread of its own; the server decodes them in one batch."""
        from kvfork_client import Sampling, Stopping

        results: queue.SimpleQueue[tuple[int, str, Usage, float]] = queue.SimpleQueue()

        def decode(index: int, child: Snapshot) -> None:
            began = time.perf_counter()
            first = 0.0
            generation = child.generate(
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=self._tokens, stop=["\nGuest:"]),
            )
            with generation:
                for _ in generation:
                    first = first or time.perf_counter() - began
                result = generation.result()
            results.put((index, result.text, result.finished.usage, first))

        threads = [threading.Thread(target=decode, args=item) for item in enumerate(children)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, text, usage, first in sorted(results.get() for _ in children):
            print(f"  {_BRANCHES[index]}")
            print("    " + text.strip().replace("\n", "\n    "))
            self._receipts.append(_Receipt(f"child {index + 1}", usage, usage.completion_tokens, first))

    def _print_table(self) -> None:
        _heading("Receipts, counted where the model is called (tokens)")
        names = ("step", "prompt", "restored", "(memory", "disk)", "recomputed", "new", "generated", "read", "TTFT")
        rows = [names]
        for r in self._receipts:
            u = r.usage
            rows.append(
                (
                    r.step,
                    f"{u.prompt_tokens:,}",
                    f"{u.cached_tokens:,}",
                    f"{u.memory_tokens:,}",
                    f"{u.disk_tokens:,}",
                    f"{u.recomputed_tokens:,}",
                    f"{u.new_tokens:,}",
                    f"{r.generated:,}" if r.generated else "",
                    f"{u.disk_bytes_read / 2**20:.1f} MiB" if u.disk_bytes_read else "",
                    f"{r.ttft:.2f} s" if r.ttft is not None else "",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        for row in rows:
            cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            print("  " + "  ".join(cells).rstrip())


def _heading(text: str) -> None:
    print(f"\n{text}\n")


@contextmanager
def _server(model: str) -> Iterator[str]:
    """A server of our own on a free loopback port; yields its address."""
    command = [sys.executable, "-m", "service", "serve", "--model", model, "--address", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"error: the server did not start (exit code {process.wait()})")
        yield line.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_loaded(client: Client) -> None:
    """Shows that something happens while the model is read."""
    from kvfork_client import ModelState

    began = time.perf_counter()
    print("loading the model …", file=sys.stderr, flush=True)
    while (state := client.model().state) is ModelState.LOADING:
        time.sleep(0.1)
    print(f"loaded in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    if state is not ModelState.READY:
        raise SystemExit("error: the model could not be loaded; the reason is above")
