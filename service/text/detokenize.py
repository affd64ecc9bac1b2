"""Picked token ids to text, one at a time. Owns unfinished characters; knows no stop rules.

A character may be spread over several tokens. What is returned is always whole: its last bytes are held back until
the rest arrives, and bytes that can't become a character turn into U+FFFD, as Python's own decoder has it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from service.text.tokens import TextCodec

_LONGEST = 4  # bytes of a UTF-8 character


class Detokenizer:
    """One stream of text. It begins with the character that `context_tail` leaves unfinished, if the stream goes on
    with it.

    Nothing but the last tokens of the context decides that: a handle needs to store no decoder state.
    """

    def __init__(self, codec: TextCodec, context_tail: Sequence[int] = ()) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._inherited = dangling_bytes(codec, context_tail)  # until the first byte of this stream

    def push(self, token: int) -> str:
        """The text that became whole with `token`; often empty."""
        data = self._codec.token_bytes(token)
        if self._inherited and data:
            # Bytes that stay broken were the context's text, not this stream's.
            inherited, self._inherited = self._inherited, b""
            if _decoded_so_far(inherited + data[:1]) is not None:
                data = inherited + data
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else empty."""
        return self._decoder.decode(b"", final=True)


def dangling_bytes(codec: TextCodec, context: Sequence[int]) -> bytes:
    """The first bytes of the character that `context` ends in the middle of; empty at a border."""
    tail = b""
    for token in reversed(context):
        tail = codec.token_bytes(token) + tail
        if len(tail) >= _LONGEST:
            break
    for length in range(min(len(tail), _LONGEST - 1), 0, -1):
        candidate = tail[-length:]
        # Only if all of it waits for more is it one character's beginning.
        if _decoded_so_far(candidate) == "":
            return candidate
    return b""


def _decoded_so_far(data: bytes) -> str | None:
    """The whole characters of `data`, whose last one may be unfinished; None if anything in it is broken."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return None
