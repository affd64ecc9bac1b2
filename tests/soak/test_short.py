"""The soak, seconds long: the target works, and nothing is wrong in a little mixed traffic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.live import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_seconds_of_mixed_traffic_leave_nothing_behind() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.34", "--round", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    summary = json.loads(done.stdout)
    assert (summary["ok"], done.returncode) == (True, 0), summary
    assert [run["model"] for run in summary["runs"]] == ["tiny-gemma3-w64", "tiny-llama", "tiny-qwen3_5"]
    assert all(run["calls"] > 20 and run["rounds"] >= 2 for run in summary["runs"])
