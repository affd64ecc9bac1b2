"""`--log-level debug` tells what this server does, and not what gRPC and other libraries say of themselves."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.e2e.live import ROOT

PROGRAM = """
import asyncio, logging, sys
from service.cli.serve import _set_up_logging
_set_up_logging(sys.argv[1], "text")
import grpc.aio
async def story():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(0)
asyncio.run(story(), debug=False)
for name in ("kvfork", "kvfork.calls", "service.rpc.server", "kvcache.store"):
    logging.getLogger(name).debug("own words of %s", name)
for name in ("grpc._cython.cygrpc", "asyncio", "anything"):
    logging.getLogger(name).debug("foreign words")
    logging.getLogger(name).info("foreign news")
"""


def said(level: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.partition(" ")[2].partition(" ")[2] for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("level", "own", "foreign"), [("debug", True, True), ("info", False, True), ("warning", False, False)]
)
def test_a_level_is_our_own_and_libraries_say_at_most_what_is_worth_knowing(
    level: str, own: bool, foreign: bool
) -> None:
    names = ("kvfork", "kvfork.calls", "service.rpc.server", "kvcache.store")
    libraries = ("grpc._cython.cygrpc", "asyncio", "anything")
    ours = [f"DEBUG {name}: own words of {name}" for name in names]
    theirs = [f"INFO {name}: foreign news" for name in libraries]
    assert said(level) == [*(ours if own else []), *(theirs if foreign else [])]
    assert logging.getLogger("kvfork").level == logging.NOTSET  # nothing of it happened in this process
