"""What the system lets the process do. Each case runs in a process of its own: a limit that was lowered stays low."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from service.cli.doctor import _files

_SHOW = "import json, resource; print(json.dumps([resource.getrlimit(getattr(resource, 'RLIMIT_' + n)) for n in "


def _run(code: str, files: tuple[int, int] = (300, 3000)) -> Any:
    """Runs `code` with these limits of open files, and core dumps on where that may be."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, preexec_fn=limited
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.mlx
def test_a_library_that_sets_the_number_of_open_files_leaves_it_as_it_is():
    code = "from service.engine import cpu; cpu.mlx(); import mlx_lm.utils; "
    assert _run(code + _SHOW + "['NOFILE']]))") == [[300, 3000]]


def test_a_server_takes_all_the_open_files_that_it_may_have():
    code = "from service.limits import take_all_files; take_all_files(); "
    assert _run(code + _SHOW + "['NOFILE']]))") == [[3000, 3000]]


def test_no_command_leaves_its_memory_behind_in_a_file():
    code = "from service.cli import main; main(['config', 'show']); "
    assert _run(code + _SHOW + "['CORE']]))")[0][0] == 0


@pytest.mark.parametrize(
    ("limits", "state", "says"),
    [
        ((256, 512), "warning", "512 open files"),
        ((1024, 4096), "ok", "4,096 open files, 1,024 unless asked for more"),
        ((20_000, 20_000), "ok", "20,000 open files"),
        ((256, -1), "ok", "any number of open files, 256 unless asked for more"),
    ],
)
def test_the_doctor_says_how_many_files_may_be_open(limits: tuple[int, int], state: str, says: str):
    check = _files(*limits)
    assert (check.state, check.found) == (state, says)
    assert ("LimitNOFILE" in check.advice) == (state == "warning")
