"""Six minutes without a word, in a prefill and in the queue, for every client at once, each with its own keepalive.

Nothing that a server sends of itself (bookmarks, progress) resets anything here: its engine is held within one step.
`tests/rpc/test_silence.py` has the same in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract_peer import OPTIONS
from kvfork_client import AsyncClient, Sampling, Stopping

from service.config import Config
from service.rpc import server
from tests.absent import missing
from tests.conformance.drivers import DRIVERS, ToolchainMissing, prepared
from tests.conformance.play import conversation
from tests.e2e.live import LiveServer, until

SILENCE = 360.0  # seconds; gRPC's own strikes would end a call after two minutes
PATIENCE = SILENCE + 180.0
PROMPT = "All roads lead to " * 500  # so many blocks that no prefill ends while the calls gather
GATHERING = "2"  # seconds a step

Ask = Callable[[], list[str]]  # the kinds of events that a call brought


def pings(options: list[tuple[str, int]]) -> dict[str, int]:
    return {name: value for name, value in options if "ping" in name or name.startswith("grpc.keepalive_permit")}


def test_the_contract_peer_allows_the_pings_that_a_server_allows() -> None:
    assert pings(OPTIONS) == pings(server.options(Config()))


async def python_async(address: str) -> list[str]:
    async with AsyncClient(address) as client:
        generation = client.generate(PROMPT, sampling=Sampling(temperature=0), stopping=Stopping(max_tokens=1))
        return [type(event).__name__.lower() async for event in generation.events()]


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(3_600)  # it may have to build every driver first
def test_six_silent_minutes_in_a_prefill_and_in_the_queue_end_no_clients_call(tmp_path: Path) -> None:
    drivers, absent = [], []
    for language in DRIVERS:
        try:
            drivers.append(prepared(language))
        except ToolchainMissing as gone:
            absent.append(str(gone))
    count = len(drivers) + 1  # and Python's other client
    pace, witnessed = tmp_path / "pace", tmp_path / "calls"
    pace.write_text(GATHERING)
    witnessed.touch()
    flags = ("--max-batch", str(count), "--watchdog-seconds", "3600")
    env = {"TESTS_PACE": str(pace), "TESTS_WITNESS": str(witnessed)}
    with LiveServer("tiny-llama", *flags, module="tests.e2e.paced", env=env) as live, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2 * count))

        def ask_by(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
            given = {"prompt": PROMPT, "max_tokens": 1, "address": live.address}
            told = ask({"scenario": "stream", "given": given})
            return list(told["observed"]["events"]) if "observed" in told else [str(told["error"])]

        def everybody(place: str) -> dict[str, Ask]:
            asks: dict[str, Ask] = {f"python async, {place}": lambda: asyncio.run(python_async(live.address))}
            for driver in drivers:
                log = tmp_path / f"{driver.language}-{len(asks)}-{place.replace(' ', '-')}"
                ask = stack.enter_context(conversation(driver, live.address, log, patience=PATIENCE))
                asks[f"{driver.language}, {place}"] = partial(ask_by, ask)
            return asks

        in_prefill, in_queue = everybody("in its prefill"), everybody("in the queue")

        def any_ended() -> bool:
            return any(end.done() for end in ends.values())

        ends: dict[str, Future[list[str]]] = {name: pool.submit(ask) for name, ask in in_prefill.items()}
        until(lambda: live.stats().active_sequences == count or any_ended(), what="every client's prefill to begin")
        ends |= {name: pool.submit(ask) for name, ask in in_queue.items()}
        until(lambda: live.stats().queued_calls == count or any_ended(), what="every client to wait in the queue")
        pace.write_text(str(2 * SILENCE))
        assert not any_ended(), {name: end.result() for name, end in ends.items() if end.done()}
        time.sleep(SILENCE)
        early = [name for name, end in ends.items() if end.done()]
        pace.write_text("0")
        told = {name: end.result() for name, end in ends.items()}
    assert early == []
    assert told == {name: ["started", "delta", "finished"] for name in ends}
    assert len(witnessed.read_text().splitlines()) == 2 * count, "a call was sent again, and lost its place"
    if absent:
        missing("; ".join(absent))
