"""One driver plays every scenario against a server of its own. Owns the conversation and what the server's side saw."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfork_client import Client, Sampling, Stopping

from tests.conformance.drivers import Driver
from tests.conformance.peers import PEERS
from tests.conformance.scenarios import Row, Scenario, differences, read, server_differences
from tests.e2e.live import LiveServer, until

MODEL = "tiny-gemma3"
STALL_SECONDS = 2.0
PATIENCE = 120.0  # seconds for one scenario, before a driver is given up
REFERENCES = (12, 200)  # lengths of greedy text that scenarios are compared with
FLAGS = (
    *("--write-stall-seconds", f"{STALL_SECONDS:g}"),
    *("--max-request-bytes", str(8 * 2**20)),
    *("--max-text-bytes", str(8 * 2**20)),
    *("--drain-seconds", "1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one scenario went for one language; no problems is well."""

    language: str
    scenario: str
    problems: tuple[str, ...] = ()


class DriverEnded(Exception):
    """The driver's process is gone, or silent; the text says what it wrote on stderr."""


def play(driver: Driver, scenarios: Sequence[Scenario], tell: Callable[[str], None]) -> list[Outcome]:
    """Plays `scenarios` in order, the drain last. The driver must have been built."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvfork-conformance-") as folder:
        witnessed = Path(folder) / "rows"
        witnessed.touch()
        env = {"TESTS_WITNESS": str(witnessed)}
        listening = ("--unix-socket", str(Path(folder) / "socket"))
        with LiveServer(MODEL, *FLAGS, *listening, module="tests.conformance.witness", env=env) as server:
            reference = _reference(server)
            with conversation(driver, server.address, Path(folder) / "stderr") as ask:
                for scenario in sorted(scenarios, key=lambda one: one.drains):
                    problems = _play_one(scenario, server, witnessed, reference, ask, socket=listening[1])
                    tell(f"{driver.language:10} {scenario.id:16} {'ok' if not problems else 'FAILED'}")
                    outcomes.append(Outcome(language=driver.language, scenario=scenario.id, problems=tuple(problems)))
    return outcomes


def _reference(server: LiveServer) -> dict[int, str]:
    prompt = next(one for one in read() if one.id == "stream").given["prompt"]
    with Client(server.address, timeout=PATIENCE) as client:
        return {
            count: client.generate(
                prompt, sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=count, ignore_eos=True)
            )
            .result()
            .text
            for count in REFERENCES
        }


def _play_one(
    scenario: Scenario,
    server: LiveServer,
    witnessed: Path,
    reference: dict[int, str],
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    socket: str,
) -> list[str]:
    before = len(_rows(witnessed))
    given = {**scenario.given, "address": server.address, "socket": f"unix:{socket}"}
    peer = PEERS[scenario.peer](given) if scenario.peer else None
    drainer = _drain_once_busy(server) if scenario.drains else None
    try:
        told = ask({"scenario": scenario.id, "given": given})
    finally:
        if peer is not None:
            peer.close()
        if drainer is not None:
            drainer.join(PATIENCE)
    if "error" in told:
        return [str(told["error"])]
    problems = differences(scenario.observed, told["observed"], reference)
    if peer is not None:
        problems += differences(scenario.calls, peer.counted(), {}, "calls")
    if scenario.drains:
        if server.process.wait(PATIENCE) != 0:
            problems.append(f"server: exit code {server.process.returncode}")
        return problems
    # What a reader that is gone leaves behind is noticed within the stall limit, whatever its client does. The engine
    # closes a row a step after it has been given up, and only then is it told of.
    give_up = time.monotonic() + STALL_SECONDS + 10
    while server.stats().active_sequences or _given_up(_rows(witnessed)[before:]) < scenario.server.get(
        "cancelled_rows", 0
    ):
        if time.monotonic() > give_up:
            break  # the differences say what did not come
        time.sleep(0.02)
    if server.stats().active_sequences:
        problems.append("server: it still works for somebody")
    return problems + server_differences(scenario.server, _rows(witnessed)[before:])


def _given_up(rows: Sequence[Row]) -> int:
    return sum(row.cancelled is not None for row in rows)


def _rows(witnessed: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in witnessed.read_text().splitlines()]


def _drain_once_busy(server: LiveServer) -> threading.Thread:
    def run() -> None:
        until(lambda: server.stats().active_sequences, what="a generation to run", patience=PATIENCE)
        server.process.send_signal(signal.SIGTERM)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def conversation(
    driver: Driver, address: str, log: Path, *, patience: float = PATIENCE
) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Starts a driver; what it gives has one scenario played, and ends the driver after `patience` seconds.

    The driver's stderr goes to `log`. Raises DriverEnded.
    """
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*driver.start, address],
            cwd=driver.folder,
            env={**driver.environment, "NO_PROXY": "*"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        timer = threading.Timer(patience, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise DriverEnded(f"{driver.language} ended at {message['scenario']}\n{log.read_text()[-3000:]}")
        told: dict[str, Any] = json.loads(line)
        assert told["scenario"] == message["scenario"], told
        return told

    try:
        yield ask
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
