"""The orchestrators' examples, as somebody runs them: each holds its own figures and says so by its exit code.

Those that take an address share a server, so that a figure must hold on one that has been in use, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.absent import missing
from tests.e2e.live import LiveServer

EXAMPLES = Path(__file__).parents[2] / "clients" / "python" / "examples"
MODEL = "tiny-gemma3"

# Every example that takes an address, with the figures it must print.
SHARED = {
    "tree_search": {"computed_tokens", "recomputed_tokens", "snapshots_left"},
    "tool_pause": {
        "recomputed_after_the_pause",
        "computed_after_the_pause",
        "recomputed_without_a_pin",
        "unpinned_state_lost",
    },
    "shared_system_prompt": {"computed_tokens", "recomputed_tokens"},
    "langgraph_time_travel": {"turns_behind_the_branch", "recomputed_tokens", "computed_tokens", "snapshots_left"},
    "agents_sdk": {
        "computed_share_behind_the_first_turn",
        "computed",
        "computed_on_the_branch",
        "computed_behind_another_gateway",
        "answers_kept",
    },
    "best_of_n": {"finished_or_cancelled", "rows_left", "prompt_tokens_computed"},
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


STORY = """
import sys
from stage import Stage, play

def main(stage: Stage) -> None:
    stage.expect("kept", 1, exactly=1)
    stage.expect("too_many", 3, at_most=2)
    stage.expect("share", 0.10049, at_most=0.1)

sys.exit(play(main, "A story: `told`.", alone=True))
"""


def test_a_missed_figure_is_told_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    story = tmp_path / "story.py"
    story.write_text(STORY)
    path = f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    missed = subprocess.run(
        [sys.executable, str(story)], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": path}
    )
    assert missed.returncode == 1
    assert missed.stdout == (
        "  ok      kept: 1 (exactly 1)\n  MISSED  too many: 3 (at most 2)\n  MISSED  share: 0.10049 (at most 0.1)\n"
    )
    assert missed.stderr == "error: too_many is 3, not at most 2\nerror: share is 0.10049, not at most 0.1\n"


@pytest.mark.slow
def test_twenty_turns_without_reasoning_cost_what_is_new() -> None:
    told = figures("reasoning_stripped", timeout=280)
    turns = told.pop("turns")
    assert isinstance(turns, list) and len(turns) == 20
    assert told["computed_over_new_tokens"] <= 1.1
    assert told["recomputed_by_rollbacks"] == 0
    assert sum(turn["computed_tokens"] for turn in turns) <= 1.1 * told["new_tokens"]
