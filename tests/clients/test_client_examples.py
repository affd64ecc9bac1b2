"""The examples and the README's code run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from contract_peer import Peer

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "python"


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_fork_and_rollback(peer: Peer) -> None:
    shown = run(str(CLIENT / "examples" / "fork_and_rollback.py"), peer.address)
    assert shown.count(peer.answer) == 4
    assert "rolled back to 83 tokens [restored 83, recomputed 0, new 0]" in shown
    assert peer.snapshots == {}


@pytest.mark.parametrize(
    ("said", "kept"),
    [("<think>3 - 1</think> Two.", "Two."), ("3 - 1 is 2.\nAnswer: 2", "2"), ("Two\nare left.", "are left."), ("", "")],
)
def test_strip_reasoning(peer: Peer, said: str, kept: str) -> None:
    peer.answer = said
    shown = run(str(CLIENT / "examples" / "strip_reasoning.py"), peer.address)
    assert f"answer kept: {kept!r}" in shown
    assert f"dropped {len(said)} generated" in shown
    (_, second) = peer.requests("Generate")
    assert second.input.chat.messages[0].parts[0].text == kept
    assert peer.snapshots == {}


@pytest.mark.parametrize("page", [CLIENT / "README.md", ROOT / "README.md"], ids=["client", "project"])
def test_a_readmes_first_code_runs_prints_line_by_line_and_sets_limits(peer: Peer, page: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    shown = run("-c", code.replace("127.0.0.1:50051", peer.address)).splitlines()
    assert shown[0] == peer.answer
    receipt = [line for line in shown if "recomputed" in line][-1]
    assert re.search("recomputed_tokens=0|, 0 recomputed", receipt)  # the rollback's
    asked = peer.requests("Generate")
    assert len(asked) >= 2 and all(request.stopping.max_tokens for request in asked)
