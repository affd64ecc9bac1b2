"""Where the table of tokens comes from: a file or a command. Owns reading it, and noticing that it has changed."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from service.auth.files import read_file
from service.auth.tokens import TokensUnusable, TokenTable, parse_tokens

COMMAND_SECONDS = 60.0
MAX_BYTES = 16 * 2**20  # a hundred thousand lines and more

Stamp = tuple[int, int, int]


@dataclass(slots=True)
class TokenSource:
    """Exactly one of the two. Blocks while it reads: not for the event loop."""

    file: Path | None = None
    command: str = ""
    every: float = 60.0  # seconds between two runs of the command
    _stamp: Stamp | None = None
    _ran: float = 0.0

    @property
    def name(self) -> str:
        """For logs and errors; a command's own words may hold a secret."""
        return f"the tokens file {self.file}" if self.file is not None else "the token command"

    def due(self) -> bool:
        """Whether `read` may bring something new."""
        if self.file is None:
            return time.monotonic() - self._ran >= self.every
        return _stamp_of(self.file) != self._stamp

    def read(self) -> TokenTable:
        """Raises TokensUnusable. What was read, well or not, is not due again until it changes."""
        if self.file is None:
            self._ran = time.monotonic()
            return parse_tokens(_output(self.command), self.name)
        self._stamp = _stamp_of(self.file)  # before the content: a change in between is seen at the next look
        try:
            data, mode = read_file(self.file, MAX_BYTES + 1)
        except OSError as error:
            raise TokensUnusable(f"{self.name} cannot be read: {error.strerror or error}") from None
        if mode & 0o022:
            raise TokensUnusable(f"{self.name} can be changed by others (mode {mode & 0o777:04o}): chmod 600 it first")
        return parse_tokens(_text(data, self.name), self.name)


def _stamp_of(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _output(command: str) -> str:
    what = "the token command"
    try:
        done = subprocess.run(
            shlex.split(command),
            env=os.environ,  # as the process was given it: C's own has settings for libraries
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise TokensUnusable(f"{what} failed: {type(error).__name__}") from None
    if done.returncode != 0:
        raise TokensUnusable(f"{what} failed with exit code {done.returncode}")
    return _text(done.stdout, what)


def _text(data: bytes, what: str) -> str:
    if len(data) > MAX_BYTES:
        raise TokensUnusable(f"{what} has more than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise TokensUnusable(f"{what} is no UTF-8 text") from None
