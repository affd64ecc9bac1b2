"""What the orchestrators' examples share: a server to play on, and figures that are held to what was promised.

No example of its own. `play` gives a story a `Stage`: the address of its server, `say` for what a person reads, and
`expect` for a figure. With `--json` the figures come as one object and nothing else. It exits with 1 if one was missed.

Without an address it starts `kvfork serve` on a free port of loopback with an embedded model, and ends it again. Given
one, the figures that come from the server's own counters ask that nobody else uses it meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvfork_client import CacheStats, Client, ModelState, Usage


class Server:
    """A server of our own. `kill` is what a power cut does to it; leaving `serving` ends it in order."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "service", "serve", "--model", model, "--address", "127.0.0.1:0"]
        self._process = subprocess.Popen(
            [*command, "--log-level", "error", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"error: the server did not start (exit code {self._process.wait()})")
        self.address = line.removeprefix("listening on ").strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.terminate()  # nothing to a process that was killed and waited for
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    """A server that has loaded its model."""
    server = Server(model, *flags)
    try:
        with Client(server.address, timeout=300) as client:
            while (state := client.model().state) is ModelState.LOADING:
                time.sleep(0.05)
        if state is not ModelState.READY:
            raise SystemExit("error: the model could not be loaded; the reason is above")
        yield server
    finally:
        server.end()


@contextmanager
def gateway(address: str) -> Iterator[str]:
    """An OpenAI-compatible gateway in front of a server, and its URL. Whatever model is asked for is the server's."""
    with Client(address, timeout=300) as client:
        model = client.model().name.removeprefix("models/")
    command = [sys.executable, "-m", "service", "gateway", "--server", address, "--address", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--alias", f"*={model}"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("listening on "):
            raise SystemExit(f"error: the gateway did not start (exit code {process.wait()})")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


class Stage:
    """One performance: where its server is, what model it asked for, and the figures so far."""

    def __init__(self, address: str, model: str, *, quiet: bool) -> None:
        self.address, self.model = address, model
        self.figures: dict[str, object] = {}
        self._quiet = quiet
        self._missed: list[str] = []

    def say(self, text: str = "") -> None:
        if not self._quiet:
            print(text, flush=True)

    def expect(self, name: str, value: float, *, exactly: float | None = None, at_most: float | None = None) -> None:
        """Notes a figure and holds it to its bound."""
        self.figures[name] = round(value, 3)
        bound = f"at most {at_most:,g}" if exactly is None else f"exactly {exactly:,g}"
        kept = value <= at_most if exactly is None and at_most is not None else value == exactly
        if not kept:
            self._missed.append(f"{name} is {value:,g}, not {bound}")
        self.say(f"  {'ok    ' if kept else 'MISSED'}  {name.replace('_', ' ')}: {value:,g} ({bound})")

    def end(self) -> int:
        """The exit code; prints the figures if that is all that was asked for."""
        if self._quiet:
            print(json.dumps(self.figures, ensure_ascii=False))
        for missed in self._missed:
            print(f"error: {missed}", file=sys.stderr)
        return 1 if self._missed else 0


def computed(receipt: Usage | CacheStats) -> int:
    """Prompt tokens that went through the model: of one call, or of all calls since the server's start."""
    return receipt.prompt_tokens - receipt.cached_tokens


def snapshots(stats: CacheStats) -> int:
    """How many names the server holds, wherever their state is."""
    return stats.memory_snapshots + stats.disk_snapshots + stats.token_snapshots


def play(story: Callable[[Stage], None], about: str, *, model: str = "smollm2", alone: bool = False) -> int:
    """Runs a story and returns the exit code. `alone`: it starts servers itself, so there is no address to give."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0].partition(": ")[0])
    if not alone:
        parser.add_argument("address", nargs="?", help="of a running server (default: one is started)")
    parser.add_argument("--model", default=model, help="for the server that is started (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    args = parser.parse_args()
    given = None if alone else args.address
    if alone or given:
        stage = Stage(given or "", args.model, quiet=args.json)
        story(stage)
        return stage.end()
    with serving(args.model) as server:
        stage = Stage(server.address, args.model, quiet=args.json)
        story(stage)
        return stage.end()
