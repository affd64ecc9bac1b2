"""A real file system of a few megabytes, for one script in a process of its own. Shared by the tests of disk faults.

The mount lives in a mount namespace that ends with the process, so nothing is left behind however it ends.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvcache.storage import FileStorage
from kvcache.store_dir import DirectoryStorage

ROOT = Path(__file__).resolve().parents[2]

_MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && shift 2 && exec "$@"'


class BlindFileStorage(FileStorage):
    """Does not see the end coming, as under a quota: the system's own ENOSPC is what it meets."""

    def free_bytes(self) -> int:
        return 1 << 40


class BlindDirectoryStorage(DirectoryStorage):
    """The same with names."""

    def free_bytes(self) -> int:
        return 1 << 40


@functools.cache
def why_not() -> str:
    """Why no file system can be mounted here; empty if one can."""
    if shutil.which("unshare") is None:
        return "there is no unshare here"
    command = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$1"', "sh", str(ROOT)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip() or "mounting failed"


def run_on_small_disk(script: str, folder: Path, *, megabytes: int, arguments: tuple[str, ...] = ()) -> str:
    """Runs `script` with `folder`, a fresh tmpfs of this size, as its first argument; what it prints."""
    if why_not():
        pytest.skip(f"A REAL FULL DISK IS NOT TESTED HERE: {why_not()}")
    mount = ("unshare", "-rm", "sh", "-c", _MOUNT, "sh", f"{megabytes}m", str(folder))
    return run_beside_tests(script, folder, *arguments, under=mount)


def run_beside_tests(script: str, *arguments: object, under: tuple[str, ...] = ()) -> str:
    """What a Python script prints that may import this project, its tests and their rigs."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*under, sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
