"""Each client's page, followed word by word by somebody who has a clone, an empty folder and a server.

Of what the page says only two things are put in their places: where the clone is and where the server listens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guide import in_place, read_steps, run, untrue_part

from service.models.cache_dir import cache_root
from tests.absent import missing
from tests.conformance.drivers import CLIENTS
from tests.e2e.live import ROOT, LiveServer

ADDRESS, CLONE = "127.0.0.1:50051", "/path/to/kvfork"
PATIENCE = 1500.0  # seconds for a page, which may fetch and compile all that its client needs

# The programs that a page takes for granted.
NEEDS = {
    "python": ["python3"],
    "go": ["go"],
    "typescript": ["node", "npm", "npx"],
    "rust": ["cargo"],
    "java": ["java", "mvn"],
}

# What a compiler made before is taken from where the other tests of a client leave it.
KEPT = {
    "rust": {
        "CARGO_TARGET_DIR": str(cache_root() / "build" / "rust"),
        "CARGO_PROFILE_DEV_DEBUG": "line-tables-only",
    },
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of this tree, as it is now: no environment, no build, nothing that a test left."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        missing("the pages begin with a clone, and this is no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    folder = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", NEEDS)
def test_a_page_can_be_followed_word_by_word(language: str, clone: Path, tmp_path: Path) -> None:
    absent = [program for program in NEEDS[language] if shutil.which(program) is None]
    if absent:
        missing(f"{language}: {', '.join(absent)} not on PATH")
    page = CLIENTS / language / "README.md"
    assert ADDRESS in page.read_text(encoding="utf-8") and CLONE in page.read_text(encoding="utf-8")
    with LiveServer("smollm2") as server:
        steps = in_place(read_steps(page), {ADDRESS: server.address, CLONE: str(clone)})
        outcomes = run(steps, env=_environment(language), folder=tmp_path, patience=PATIENCE)
        server.idle()

    told = "\n".join(outcome.output for outcome in outcomes)[-6000:]
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(steps), told
    assert [untrue_part(outcome, volatile=frozenset()) for outcome in outcomes] == [None] * len(steps), told
    assert "0 cached + 0 recomputed + 21 new" in steps[-1].shown  # the page ends in what the program prints


def _environment(language: str) -> dict[str, str]:
    """A shell's own: without what this process adds to find the tree under test."""
    ours = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    environment = str(Path(sys.executable).parent)
    path = [folder for folder in kept.get("PATH", "").split(os.pathsep) if folder != environment]
    return {**kept, "PATH": os.pathsep.join(path), **KEPT.get(language, {})}
