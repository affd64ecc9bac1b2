"""The clients' generated code is what the contract gives. Java's is always checked; the rest where it can be made."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.absent import missing
from tests.conformance.scenarios import ROOT

NEEDS = {"go": "go", "typescript": "npm", "rust": "cargo"}


def check(language: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "clients/generate.py", "--check", language]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, stdin=subprocess.DEVNULL)


def test_java_is_up_to_date() -> None:
    done = check("java")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", NEEDS)
def test_generated_code_is_up_to_date(language: str) -> None:
    done = check(language)
    if done.returncode == 2 and os.environ.get("CI") != "true":
        missing(done.stderr)
    assert done.returncode == 0, done.stderr


def test_reasons_are_those_of_the_python_client() -> None:
    """One table for all: a reason that is new in one client is in every other by `make gen-clients`."""
    from kvfork_client import errors

    names = {kind.REASON for kind in vars(errors).values() if isinstance(kind, type) and getattr(kind, "REASON", "")}
    for file in ("go/reasons.go", "typescript/src/gen/reasons.ts", "rust/src/gen/reasons.rs"):
        text = (ROOT / "clients" / file).read_text(encoding="utf-8")
        assert [name for name in names if name not in text] == [], file
