"""Chains of nodes as a whole: what one is made of, built from notes, and moved under another root. Pure.

A chain's keys begin with a root, and so say whose it is. A block that was cut from a longer one is named after that
one's key as well. Under another root every key is another, and the tokens and schedules are the same.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from kvcache.blocks import BLOCK_TOKENS, BlockKey
from kvcache.note_codec import NodeNote
from kvcache.schedule import trimmed_from, trimmed_schedule
from kvcache.tree import BlockTree, Node


def nodes_of(end: Node) -> list[Node]:
    """`end` and all that it follows or reads from, each once; `end` comes first, roots are left out."""
    found: dict[BlockKey, Node] = {}
    waiting = [end]
    while waiting:
        here = waiting.pop()
        if here.parent is None or here.key in found:
            continue
        found[here.key] = here
        waiting.append(here.parent)
        if here.borrows is not None:
            waiting.append(here.borrows)
    return list(found.values())


def transplant(end: Node, tree: BlockTree, root: Node) -> dict[BlockKey, Node]:
    """The chain of `end`, under `root` of `tree`: its nodes there, by the keys that they have here."""
    made: dict[BlockKey, Node] = {}
    # What a node follows begins before it; what it reads from begins where it does, and reads from nothing else.
    for here in sorted(nodes_of(end), key=lambda node: (node.start, node.borrows is not None)):
        assert here.parent is not None
        parent = made[here.parent.key] if here.parent.parent is not None else root
        whole = made[here.borrows.key] if here.borrows is not None else None
        schedule = trimmed_schedule(whole.key) if whole is not None else here.schedule
        node = made[here.key] = tree.add(parent, here.tokens, schedule)
        if whole is not None and node.borrows is None:
            node.borrows = whole
            whole.holds += 1
    return made


def build_chain(
    tree: BlockTree,
    key: BlockKey,
    notes: Mapping[BlockKey, NodeNote],
    roots: Container[BlockKey],
    key_ids: Mapping[BlockKey, int],
) -> Node | None:
    """The node of this key with all before it; None if a note is missing or does not fit. Leaves nothing half.

    `key_ids`: whose sealing key a note was found under.
    """
    chain: list[tuple[BlockKey, NodeNote]] = []
    here = key
    while here not in roots:
        node = tree.get(here)
        note = notes.get(here)
        if note is None:
            return None
        chain.append((here, note))
        if node is not None:
            break
        if note.borrows is not None and _missing(note.borrows, notes, roots):
            return None
        here = note.parent
    if not chain or any(len(note.tokens) < BLOCK_TOKENS for _, note in chain[1:]):
        return None  # nothing follows a tail
    built = tree.get(chain[-1][0])
    if built is None:
        built = tree.root(chain[-1][1].parent)
        built.key_id = key_ids[chain[-1][0]]
    else:
        chain.pop()
    for _, note in reversed(chain):
        built = tree.add(built, note.tokens, note.schedule)
        if note.borrows is not None and built.borrows is None:
            # Earlier versions noted the piece that a piece was cut from; the schedule always names the whole block.
            built.borrows = build_chain(tree, trimmed_from(note.schedule), notes, roots, key_ids)
            assert built.borrows is not None, "looked at before"
            built.borrows.holds += 1
    return built


def _missing(key: BlockKey, notes: Mapping[BlockKey, NodeNote], roots: Container[BlockKey]) -> bool:
    """Whether what a trimmed block reads from is not all there; that may be a trimmed block itself."""
    waiting, seen = [key], set[BlockKey]()
    while waiting:
        here = waiting.pop()
        if here in roots or here in seen:
            continue
        seen.add(here)
        note = notes.get(here)
        if note is None:
            return True
        waiting.append(note.parent)
        if note.borrows is not None:
            waiting.append(note.borrows)
    return False
