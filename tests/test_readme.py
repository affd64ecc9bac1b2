"""The README's grpcurl lines are lines of the guide, which `tests/clients/test_grpcurl.py` runs as they stand."""

from __future__ import annotations

from pathlib import Path

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
