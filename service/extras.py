"""How an optional part is installed. Owns the one line that a release changes: until then there is only a clone."""

from __future__ import annotations


def install(*extras: str) -> str:
    """What to type, and where, for these extras of `pyproject.toml`."""
    return f"pip install -e '.[{','.join(extras)}]' in a clone of kvfork"
