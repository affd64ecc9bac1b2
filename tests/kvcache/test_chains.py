"""Chains built from notes: whole or not at all, and nothing in the tree that nobody needs."""

from __future__ import annotations

from array import array

import pytest

from kvcache.blocks import BLOCK_TOKENS, BlockKey, block_key, root_key
from kvcache.chains import build_chain
from kvcache.note_codec import NodeNote
from kvcache.schedule import trimmed_schedule
from kvcache.tree import BlockTree, Node

ROOT = root_key("model", "owner")
TOKENS = array("I", range(BLOCK_TOKENS))
WHOLE = block_key(ROOT, TOKENS, b"P")
NOTES = {
    key: NodeNote(parent=ROOT, borrows=borrows, schedule=schedule, tokens=TOKENS[:end])
    for end, borrows, schedule in (
        (BLOCK_TOKENS, None, b"P"),
        (200, WHOLE, trimmed_schedule(WHOLE)),
        # As earlier versions noted it: it names the piece that it was cut from.
        (100, block_key(ROOT, TOKENS[:200], trimmed_schedule(WHOLE)), trimmed_schedule(WHOLE)),
    )
    for key in [block_key(ROOT, TOKENS[:end], schedule)]
}
PIECE, PIECE_OF_A_PIECE = list(NOTES)[1:]


def build(tree: BlockTree, key: BlockKey, *without: BlockKey) -> Node | None:
    notes = {k: note for k, note in NOTES.items() if k not in without}
    return build_chain(tree, key, notes, (ROOT,), dict.fromkeys(notes, 7))


@pytest.mark.parametrize("key", [PIECE, PIECE_OF_A_PIECE], ids=["piece", "piece of a piece"])
def test_a_piece_comes_with_the_block_that_it_reads_from_and_no_other(key: BlockKey) -> None:
    tree = BlockTree()
    made = build(tree, key)
    assert made is not None and made.borrows is not None
    assert {node.key for node in tree} == {key, WHOLE}
    assert (made.source, made.borrows.holds, made.holds) == (WHOLE, 1, 0)
    assert list(made.all_tokens()) == list(NOTES[key].tokens)


@pytest.mark.parametrize("gone", [WHOLE, PIECE], ids=["block", "piece between"])
def test_what_a_piece_reads_from_is_there_or_nothing_is(gone: BlockKey) -> None:
    tree = BlockTree()
    assert build(tree, PIECE_OF_A_PIECE, gone) is None
    assert set(tree) == set()
