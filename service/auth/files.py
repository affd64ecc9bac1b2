"""Reading small files that say who may come in. Owns that reading one never waits, whatever is in its place."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_file(path: Path, most: int) -> tuple[bytes, int]:
    """Up to `most` bytes, and the file's mode. OSError, also for a pipe or device, which could block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError("it is no regular file")
        return file.read(most), mode
