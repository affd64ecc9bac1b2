"""How each language's driver is built and started. Owns commands and folders; plays nothing.

What a build leaves behind lies in the cache directory or in folders that git ignores, so that the second run of any
of them takes seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from service.models.cache_dir import cache_root
from tests.conformance.scenarios import ROOT

CLIENTS = ROOT / "clients"
BUILD_SECONDS = 1500.0  # from nothing, with every dependency to fetch, on a busy machine


class ToolchainMissing(Exception):
    """A program that the driver needs is not on PATH."""


class BuildFailed(Exception):
    """A build or a client's tests; the text is what they printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """One language. `needs` are programs; `build` commands run in `folder`, then `start` plays given an address.

    `test` runs the client's own tests.
    """

    language: str
    folder: Path
    start: Sequence[str]
    needs: Sequence[str] = ()
    build: Sequence[Sequence[str]] = ()
    test: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}

    def prepare(self) -> None:
        """Builds the driver. Raises ToolchainMissing or BuildFailed."""
        absent = [program for program in self.needs if shutil.which(program) is None]
        if absent:
            raise ToolchainMissing(f"{self.language}: {', '.join(absent)} not on PATH")
        for command in self.build:
            self.run(command)

    def run(self, command: Sequence[str]) -> None:
        """Runs a command in the driver's folder. Raises BuildFailed."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_SECONDS,
        )
        if done.returncode != 0:
            raise BuildFailed(f"{self.language}: {' '.join(command)}\n{done.stdout[-6000:]}")


def _python() -> Driver:
    folder = CLIENTS / "python"
    path = os.pathsep.join([str(folder), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")])
    return Driver(
        language="python",
        folder=folder,
        start=[sys.executable, str(folder / "conformance" / "driver.py")],
        env={"PYTHONPATH": path},
    )


def _go() -> Driver:
    program = cache_root() / "build" / "go" / "conformance"
    return Driver(
        language="go",
        folder=CLIENTS / "go",
        needs=["go"],
        build=[["go", "build", "-o", str(program), "./conformance"]],
        test=["go", "test", "./..."],
        start=[str(program)],
        env={"CGO_ENABLED": "0"},
    )


def _typescript() -> Driver:
    folder = CLIENTS / "typescript"
    return Driver(
        language="typescript",
        folder=folder,
        needs=["node", "npm"],
        build=[["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]],
        test=["npm", "test"],
        start=["node", "--expose-gc", str(folder / "dist" / "conformance" / "driver.js")],
    )


def _rust() -> Driver:
    target = cache_root() / "build" / "rust"
    return Driver(
        language="rust",
        folder=CLIENTS / "rust",
        needs=["cargo"],
        build=[["cargo", "build", "--quiet", "--examples"]],
        test=["cargo", "test", "--quiet", "--lib"],
        start=[str(target / "debug" / "examples" / "conformance")],
        env={"CARGO_TARGET_DIR": str(target)},
    )


def _java() -> Driver:
    folder = CLIENTS / "java"
    classpath = os.pathsep.join(str(folder / "target" / name) for name in ("test-classes", "classes", "jars/*"))
    return Driver(
        language="java",
        folder=folder,
        needs=["java", "mvn"],
        build=[["mvn", "--batch-mode", "--quiet", "-DskipTests", "test-compile", "dependency:copy-dependencies"]],
        test=["mvn", "--batch-mode", "--quiet", "test"],
        start=["java", "-cp", classpath, "kvfork.client.conformance.Driver"],
    )


DRIVERS: dict[str, Callable[[], Driver]] = {
    "python": _python,
    "go": _go,
    "typescript": _typescript,
    "rust": _rust,
    "java": _java,
}


@cache
def prepared(language: str) -> Driver:
    """The driver, built once for as long as this process lives. Raises ToolchainMissing or BuildFailed."""
    driver = DRIVERS[language]()
    driver.prepare()
    return driver
