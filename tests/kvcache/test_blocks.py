"""A key names the tokens and how they were computed; a content key names the tokens alone."""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest

from kvcache.blocks import BLOCK_TOKENS, BlockKey, ContentKey, block_key, content_key, root_key, token_bytes

ROOT = root_key("fingerprint", "owner")
BLOCK = tuple(range(BLOCK_TOKENS))


def test_anything_that_state_depends_on_makes_another_key() -> None:
    ways = {
        "plain": block_key(ROOT, BLOCK, b"P"),
        "another cut": block_key(ROOT, BLOCK, b"P\x10"),
        "decoded": block_key(ROOT, BLOCK, b"D" + bytes(16)),
        "another token": block_key(ROOT, (*BLOCK[:-1], 7), b"P"),
        "tokens in another order": block_key(ROOT, BLOCK[::-1], b"P"),
        "shorter": block_key(ROOT, BLOCK[:-1], b"P"),
        "another owner": block_key(root_key("fingerprint", "other"), BLOCK, b"P"),
        "another model": block_key(root_key("other", "owner"), BLOCK, b"P"),
        "behind a block": block_key(block_key(ROOT, BLOCK, b"P"), BLOCK, b"P"),
    }
    assert len(set(ways.values())) == len(ways)
    assert {len(key) for key in ways.values()} == {32}
    assert block_key(ROOT, list(BLOCK), b"P") == ways["plain"]


def test_parts_do_not_run_into_each_other() -> None:
    # The same bytes in a row, divided in other places.
    assert root_key("ab", "c") != root_key("a", "bc")
    assert root_key("", "abc") != root_key("abc", "")
    four = int.from_bytes(b"P\x01\x02\x03", "little")
    assert block_key(ROOT, (four, 5), b"") != block_key(ROOT, (5,), b"P\x01\x02\x03")


def test_content_leaves_the_schedule_out_and_nothing_else() -> None:
    content = ContentKey(bytes(ROOT))
    chains = {}
    for tokens in itertools.product((1, 2), repeat=4):
        for cut in range(5):
            key = content
            if cut:
                key = content_key(key, tokens[:cut])
            if cut < 4:
                key = content_key(key, tokens[cut:])
            chains[tokens, cut] = key
    assert len(set(chains.values())) == len(chains) - 16  # a cut at 0 and one at the end are the same single piece
    assert content_key(content, BLOCK) != content_key(ContentKey(bytes(root_key("fingerprint", "other"))), BLOCK)


def test_a_key_is_the_documented_hash() -> None:
    head = bytes(ROOT) + (2).to_bytes(4, "little") + b"P\x05"
    packed = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3_000_000_000))
    assert block_key(ROOT, (1, 2, 3_000_000_000), b"P\x05") == hashlib.sha256(head + packed).digest()


def test_tokens_are_unsigned_and_little_endian() -> None:
    assert token_bytes((1, 0x01020304, 2**32 - 1)) == b"\x01\0\0\0\x04\x03\x02\x01\xff\xff\xff\xff"
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            token_bytes((wrong,))


def test_no_two_of_many_random_chains_share_a_key() -> None:
    rng = random.Random(1)
    seen: dict[BlockKey, tuple[object, ...]] = {}
    for _ in range(5_000):
        chain: tuple[object, ...] = ()
        key = ROOT
        for _ in range(rng.randrange(1, 4)):
            tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 4)))
            schedule = rng.choice([b"P", b"P\x01", b"T\x01", b"D" + bytes(16)])
            chain = (*chain, (tokens, schedule))
            key = block_key(key, tokens, schedule)
        assert seen.setdefault(key, chain) == chain
    assert len(set(seen.values())) == len(seen) > 1_000
