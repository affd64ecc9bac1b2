"""The caller as a value, and what an owner may be called. Owns no way of finding out who it is."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What fits into a line of a tokens file, a certificate's name and a log: no spaces, nothing that looks like an option.
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/+-]{0,127}")


@dataclass(frozen=True, slots=True)
class Caller:
    """In whose name a call runs. `admin`: may see and trim what belongs to everybody."""

    owner: str
    admin: bool = False


LOCAL = Caller("local", admin=True)
"""Whoever connects to a server without authentication: that only listens on this machine."""


def owner_name(text: str) -> str:
    """`text` if it can be an owner's name. Raises ValueError, which does not repeat it."""
    if not _OWNER.fullmatch(text):
        raise ValueError("an owner's name has 1 to 128 of A-Z a-z 0-9 . _ @ : / + - and begins with a letter or digit")
    return text


def owner_names(text: str) -> tuple[str, ...]:
    """Names from a list with commas between them."""
    return tuple(owner_name(part.strip()) for part in text.split(",") if part.strip())
