"""What the pages say can be typed: grpcurl lines that a test runs as they stand, links, how extras are installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from service.extras import install

ROOT = Path(__file__).parent.parent


def test_every_grpcurl_line_is_one_that_a_test_runs() -> None:
    guide = (ROOT / "clients" / "grpcurl" / "README.md").read_text(encoding="utf-8").splitlines()
    shown = [
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("grpcurl ")
    ]
    assert len(shown) >= 3
    for line in shown:
        assert line in guide, line


def test_every_file_that_the_readme_links_to_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def _texts() -> Iterator[tuple[Path, str]]:
    for folder in ("service", "kvcache", "clients/python", "clients", "docs"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".md") and "node_modules" not in file.parts and "target" not in file.parts:
                yield file, file.read_text(encoding="utf-8")
    yield ROOT / "README.md", (ROOT / "README.md").read_text(encoding="utf-8")


def test_extras_are_installed_from_a_clone_until_there_is_a_release() -> None:
    """One function says how; a page says the same, with extras that there are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    said = [
        (file, words[1], words[2].split(","))
        for file, text in _texts()
        for words in re.finditer(r"(pip install [^\n'\"`]*'[^\n']*\[([a-z,]+)\]')", text)
    ]
    pages = {file.relative_to(ROOT).as_posix() for file, _, _ in said}
    assert {"docs/gateway.md", "docs/models.md", "docs/replicas.md"} <= pages
    for file, words, named in said:
        assert set(named) <= set(extras), (file, words)
        assert install(*named).startswith(words), (file, words)
