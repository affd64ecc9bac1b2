"""The examples and the README's code run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from contract_peer import Peer

CLIENT = Path(__file__).parents[2] / "clients" / "python"


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


def test_the_readmes_code_runs(peer: Peer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    shown = run("-c", code.replace("127.0.0.1:50051", peer.address))
    assert shown.startswith(peer.answer)
    assert shown.splitlines()[-1] == "0"
