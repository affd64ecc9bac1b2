"""Command-line tools that client tests drive: each pinned, built once, kept in the cache directory.

Owns where a tool comes from; where it cannot be had, the test ends as `tests.absent` says. Does not run the tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from service.models.cache_dir import cache_root
from tests.absent import missing

_BUILD_SECONDS = 1200.0  # a first build fetches and compiles some forty modules


@dataclass(frozen=True, slots=True, kw_only=True)
class GoTool:
    """A program in a Go module at one version. `package` is its import path; its last element names the program."""

    package: str
    version: str

    @property
    def name(self) -> str:
        return self.package.rsplit("/", 1)[-1]

    @property
    def folder(self) -> Path:
        return cache_root() / "tools" / f"{self.name}-{self.version}"


# The newest: go list -m -versions github.com/fullstorydev/grpcurl
GRPCURL = GoTool(package="github.com/fullstorydev/grpcurl/cmd/grpcurl", version="v1.9.4")


def go_tool(tool: GoTool) -> Path:
    """The program, built first if need be; two processes that ask at once build it once. Skips or fails without Go."""
    program = tool.folder / tool.name
    if program.exists():
        return program
    go = shutil.which("go")
    if go is None:
        missing(f"{tool.name} {tool.version} is built from its Go module, and there is no go on PATH")
    tool.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{tool.folder}.lock", timeout=_BUILD_SECONDS):
        if not program.exists():
            _build(go, tool, program)
    return program


def _build(go: str, tool: GoTool, program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tool.folder) as fresh:
        built = subprocess.run(
            # The program's own version is set by its release builds; `go install` leaves it out.
            [go, "install", f"-ldflags=-X main.version={tool.version}", f"{tool.package}@{tool.version}"],
            env={**os.environ, "GOBIN": fresh, "CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
        )
        if built.returncode != 0:
            missing(f"go install {tool.package}@{tool.version} failed:\n{built.stderr[-2000:]}")
        os.replace(Path(fresh) / tool.name, program)  # seen whole or not at all


def buf() -> Path:
    """The `buf` of the environment that runs the tests; it comes with the dev extra."""
    program = Path(sys.executable).with_name("buf")
    if not program.exists():
        missing(f"there is no buf beside {sys.executable}: install the dev extra")
    return program
