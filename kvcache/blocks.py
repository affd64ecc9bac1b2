"""Block keys. Owns how tokens and the way they were computed become names; knows nothing of storage or MLX.

A key covers every token before it *and* the model calls that computed them, so equal keys mean bit-equal state on one
machine. Content keys leave the calls out: they say "these tokens were seen", never "this state may be used".
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

BLOCK_TOKENS = 256  # MLX grows KV buffers in 256-token steps, so a block never splits an allocation.

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: rolling SHA-256 over namespace, tokens and schedule."""

ContentKey = NewType("ContentKey", bytes)
"""32 bytes: rolling SHA-256 over namespace and tokens only."""


def root_key(fingerprint: str, owner: str) -> BlockKey:
    """The key before the first token: one chain space for each model fingerprint and owner."""
    digest = hashlib.sha256(b"kvfork-v1")
    for part in (fingerprint.encode(), owner.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, tokens: Sequence[int], schedule: bytes) -> BlockKey:
    """The key after `tokens` (1 to 256 of them), computed as `schedule` says, behind `parent`."""
    head = parent + len(schedule).to_bytes(4, "little") + schedule
    return BlockKey(hashlib.sha256(head + token_bytes(tokens)).digest())


def content_key(parent: ContentKey, tokens: Sequence[int]) -> ContentKey:
    """The content key after `tokens` behind `parent`."""
    return ContentKey(hashlib.sha256(parent + token_bytes(tokens)).digest())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, whatever the machine."""
    if sys.byteorder == "big":
        packed = array("I", tokens)
        packed.byteswap()
        return packed.tobytes()
    return as_array(tokens).tobytes()


def as_array(tokens: Sequence[int]) -> array[int]:
    """`tokens` themselves where they are an array, else a copy as one."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)


def tokens_of(data: bytes) -> array[int]:
    """The inverse of `token_bytes`."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
