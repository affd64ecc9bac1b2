"""The first example of each client's page, as somebody pastes it who has read no further: text, a fork, a rollback."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.absent import missing
from tests.conformance.drivers import CLIENTS, ToolchainMissing, prepared
from tests.e2e.live import LiveServer

DEFAULT_ADDRESS = "127.0.0.1:50051"
PATIENCE = 600.0  # seconds for one command, which may compile the client anew


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """How a page's first block becomes a project of its own: its language there, files, and commands in order."""

    block: str
    lay: Callable[[Path, str], None]
    commands: Callable[[Path], list[list[str]]]


def _lay_go(folder: Path, code: str) -> None:
    (folder / "main.go").write_text(code, encoding="utf-8")
    (folder / "go.mod").write_text("module first\n\ngo 1.26\n", encoding="utf-8")


def _go_commands(folder: Path) -> list[list[str]]:
    given = ["-require=kvfork.example/go@v0.0.0", f"-replace=kvfork.example/go={CLIENTS / 'go'}"]
    return [["go", "mod", "edit", *given], ["go", "mod", "tidy"], ["go", "run", "."]]


def _lay_typescript(folder: Path, code: str) -> None:
    (folder / "first.ts").write_text(code, encoding="utf-8")
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    modules = folder / "node_modules"
    modules.mkdir()
    (modules / "kvfork-client").symlink_to(CLIENTS / "typescript")
    (modules / "@types").symlink_to(CLIENTS / "typescript" / "node_modules" / "@types")


def _typescript_commands(folder: Path) -> list[list[str]]:
    tsc = CLIENTS / "typescript" / "node_modules" / ".bin" / "tsc"
    flags = ["--strict", "--module", "nodenext", "--target", "es2022", "--lib", "es2023,esnext.disposable"]
    return [[str(tsc), *flags, "--types", "node", "--skipLibCheck", "first.ts"], ["node", "first.js"]]


def _lay_rust(folder: Path, code: str) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "main.rs").write_text(code, encoding="utf-8")
    (folder / "Cargo.toml").write_text(
        '[package]\nname = "first"\nversion = "0.0.0"\nedition = "2024"\n\n[dependencies]\n'
        f'kvfork-client = {{ path = "{CLIENTS / "rust"}" }}\n'
        'tokio = { version = "1", features = ["macros", "rt-multi-thread"] }\n\n'
        '[profile.dev]\ndebug = "line-tables-only"\n',
        encoding="utf-8",
    )


def _lay_java(folder: Path, code: str) -> None:
    (folder / "First.java").write_text(code, encoding="utf-8")


def _java_commands(folder: Path) -> list[list[str]]:
    target = CLIENTS / "java" / "target"
    classpath = os.pathsep.join([str(target / "classes"), str(target / "jars" / "*"), str(folder)])
    return [["javac", "-cp", classpath, "First.java"], ["java", "-cp", classpath, "First"]]


STEPS = {
    "go": FirstSteps(block="go", lay=_lay_go, commands=_go_commands),
    "typescript": FirstSteps(block="ts", lay=_lay_typescript, commands=_typescript_commands),
    "rust": FirstSteps(block="rust", lay=_lay_rust, commands=lambda folder: [["cargo", "run", "--quiet"]]),
    "java": FirstSteps(block="java", lay=_lay_java, commands=_java_commands),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("tiny-gemma3") as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", STEPS)
def test_the_first_example_of_the_page_runs(language: str, server: LiveServer, tmp_path: Path) -> None:
    steps = STEPS[language]
    try:
        driver = prepared(language)  # what the page has its reader do once
    except ToolchainMissing as absent:
        missing(str(absent))
    page = (CLIENTS / language / "README.md").read_text(encoding="utf-8")
    first = re.search(rf"```{steps.block}\n(.*?)```", page, re.DOTALL)
    assert first is not None and DEFAULT_ADDRESS in first[1]
    steps.lay(tmp_path, first[1].replace(DEFAULT_ADDRESS, server.address))
    for command in steps.commands(tmp_path):
        done = subprocess.run(
            command, cwd=tmp_path, env=driver.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    told = done.stdout.strip().splitlines()
    assert len(told) >= 4  # the text, its receipt, two children, and what the rollback cost: nothing
    assert told[-1] == "0" or "recomputed_tokens: 0," in told[-1], done.stdout
    server.idle()
