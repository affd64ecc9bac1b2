"""What the server and the processes that compile forms say to each other. Values and frames, and no library behind.

A frame is a kind (1 byte), a length (4 bytes) and a payload. What asks a process for a child is a `REQUEST` instead,
with the child's end of a socket beside it.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

HEAD = struct.Struct("!BI")
REQUEST = struct.Struct("!BQ")  # a `Request`, and which child
TOKEN = struct.Struct("!I")  # to a row: what was picked

TOKEN_SECONDS = 0.02  # of processor time that each token gives a row's masks, beside what they begin with


class Request(enum.IntEnum):
    """What the root or a form is asked."""

    FORK = 1
    KILL = 2


class Reply(enum.IntEnum):
    """A frame's kind. `READY` comes first from everyone; a row answers a token with one of the next four."""

    READY = 1
    INVALID = 2  # a form: what is wrong with it
    GOES_ON = 3  # a MASK follows
    IS_WHOLE = 4  # nothing can follow
    DEAD_END = 5  # no token fits, or the library gave up; with its words, if it has any
    MASK = 6  # a byte that is 1 where the text may end, then a bit for each token, lowest first
    NO_ROOM = 7  # in place of a child's READY: the system has no room for another process


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A model's tokens, and the limits that every form has."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    bos_id: int | None
    tokenizer: str  # the tokenizer's own file
    guards: tuple[str, ...]  # see `service.text.tokens.spans_of`
    form_seconds: float  # of processor time
    form_bytes: int
    mask_seconds: float  # of processor time
    watch: bool  # memory by looking at it, not by the kernel's limit
