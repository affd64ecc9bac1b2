"""The orchestrators' examples, as somebody runs them: each holds its own figures and says so by its exit code.

Those that take an address share a server, so that a figure must hold on one that has been in use, too.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvfork_client import Stopping
from toolchains import missing

from tests.e2e.live import LiveServer

EXAMPLES = Path(__file__).parents[2] / "clients" / "python" / "examples"
MODEL = "tiny-gemma3"

# Every example that takes an address, with the figures it must print.
SHARED = {
    "tree_search": {"computed_tokens", "shared_prefix_forwarded", "recomputed_tokens", "snapshots_left"},
    "tool_pause": {
        "recomputed_after_the_pause",
        "computed_after_the_pause",
        "recomputed_without_a_pin",
        "unpinned_state_lost",
    },
    "shared_system_prompt": {"computed_tokens", "system_prompt_forwarded", "recomputed_tokens"},
    "langgraph_time_travel": {"turns_behind_the_branch", "recomputed_tokens", "computed_tokens", "snapshots_left"},
    "agents_sdk": {
        "computed_share_behind_the_first_turn",
        "computed",
        "computed_on_the_branch",
        "computed_behind_another_gateway",
        "answers_kept",
    },
    "best_of_n": {"finished_or_cancelled", "not_cancelled", "rows_left", "prompt_tokens_computed"},
}

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(MODEL) as running:
        yield running


def needs(name: str) -> None:
    """Skips, or fails in CI, where what an example asks for beyond the base install is missing."""
    wanted = {"langgraph_time_travel": ("langgraph",), "agents_sdk": ("agents", "uvicorn")}.get(name, ())
    absent = [one for one in wanted if importlib.util.find_spec(one) is None]
    if absent:
        missing(f"NO EXAMPLE {name}: {', '.join(absent)} not installed (the dev extra has it)")


def run(name: str, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def figures(name: str, *words: str, timeout: float = 120) -> dict[str, float]:
    done = run(name, *words, "--json", timeout=timeout)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, float] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", SHARED)
def test_an_example_keeps_its_figures_on_a_running_server(server: LiveServer, name: str) -> None:
    needs(name)
    assert figures(name, server.address).keys() == SHARED[name]
    server.idle()
    stats = server.stats()
    assert stats.memory_snapshots + stats.disk_snapshots + stats.token_snapshots == 0  # it has cleared up behind itself


def test_a_server_killed_in_the_middle_is_no_loss() -> None:
    told = figures("crash_and_resume", "--model", MODEL)
    assert told.pop("restored_tokens") > 256  # a stored block and a tail
    assert told == {"recomputed_tokens": 0, "same_tokens": 16, "bit_equal_log_probabilities": 16}


def test_a_missed_figure_is_told_and_ends_with_exit_code_1(server: LiveServer) -> None:
    """Somebody else's row runs all the while, so that one is left when the race is over."""
    endless = Stopping(max_tokens=20000, ignore_eos=True)
    with server.client() as client, client.generate("Once upon a time", stopping=endless) as busy:
        next(busy)
        missed = run("best_of_n", server.address)
    assert missed.returncode == 1
    assert "ok      finished or cancelled: 6 (exactly 6)" in missed.stdout
    assert "MISSED  rows left: 1 (exactly 0)" in missed.stdout
    assert missed.stderr == "error: rows_left is 1, not exactly 0\n"


@pytest.mark.slow
def test_twenty_turns_without_reasoning_cost_what_is_new() -> None:
    told = figures("reasoning_stripped", timeout=280)
    turns = told.pop("turns")
    assert isinstance(turns, list) and len(turns) == 20
    assert told["computed_over_new_tokens"] <= 1.1
    assert told["recomputed_by_rollbacks"] == 0
    assert sum(turn["computed_tokens"] for turn in turns) <= 1.1 * told["new_tokens"]
