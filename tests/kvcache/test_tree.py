"""Which prefixes are known: nodes by key and by content, paths, and nodes that go when nothing follows them."""

from __future__ import annotations

import random

import pytest

from kvcache.blocks import BLOCK_TOKENS, root_key
from kvcache.schedule import decode_schedule
from kvcache.tree import BlockTree, Node

P = b"P"


def block(number: int) -> list[int]:
    return [number * 1000 + i for i in range(BLOCK_TOKENS)]


@pytest.fixture
def tree() -> BlockTree:
    return BlockTree()


@pytest.fixture
def root(tree: BlockTree) -> Node:
    return tree.root(root_key("model", "owner"))


def line(tree: BlockTree, root: Node, *numbers: int) -> Node:
    """A chain of whole blocks."""
    node = root
    for number in numbers:
        node = tree.add(node, block(number), P)
    return node


def test_the_same_tokens_computed_the_same_way_are_one_node(tree: BlockTree, root: Node) -> None:
    first = line(tree, root, 1, 2)
    assert line(tree, root, 1, 2) is first
    assert tree.get(first.key) is first
    assert (len(tree), set(tree)) == (2, set(first.path()))
    other = tree.add(first.parent, block(2), b"P\x05")
    assert other is not first
    assert tree.variants(first) == tree.variants(other) == {first, other}


def test_owners_share_nothing(tree: BlockTree, root: Node) -> None:
    mine = line(tree, root, 1)
    foreign = tree.root(root_key("model", "somebody else"))
    theirs = line(tree, foreign, 1)
    assert (mine.key, mine.content) != (theirs.key, theirs.content)
    assert tree.variants(mine) == {mine}
    assert tree.known_prefix(foreign, block(1) + block(2)) == ([theirs], 256)


def test_a_path_tells_positions_and_tokens(tree: BlockTree, root: Node) -> None:
    tail = tree.add(line(tree, root, 1, 2), [7, 8, 9], P)
    assert [(n.start, n.end, n.is_tail) for n in tail.path()] == [(0, 256, False), (256, 512, False), (512, 515, True)]
    assert list(tail.all_tokens()) == [*block(1), *block(2), 7, 8, 9]
    assert (root.path(), root.end, root.is_tail, list(root.all_tokens())) == ([], 0, False, [])


def test_the_ancestor_at_a_position_is_the_last_whole_block_before_it(tree: BlockTree, root: Node) -> None:
    tail = tree.add(line(tree, root, 1, 2), [7, 8, 9], P)
    wanted = {0: 0, 1: 0, 255: 0, 256: 256, 257: 256, 511: 256, 512: 512, 514: 512, 515: 512, 9999: 512}
    assert {position: tail.ancestor_at(position).end for position in wanted} == wanted


def test_nothing_can_follow_a_tail(tree: BlockTree, root: Node) -> None:
    tail = tree.add(root, [1, 2], P)
    with pytest.raises(AssertionError):
        tree.add(tail, [3], P)
    for wrong in ([], [1] * 257):
        with pytest.raises(AssertionError):
            tree.add(root, wrong, P)


def test_a_discarded_node_is_forgotten_by_key_and_by_content(tree: BlockTree, root: Node) -> None:
    node = line(tree, root, 1, 2, 3)
    third, second = node, node.parent
    assert second is not None and second.parent is not None
    assert tree.discard(third) == [second]
    assert (tree.get(third.key), tree.variants(third), second.children) == (None, set(), set())
    assert tree.discard(second) == [second.parent]
    assert tree.discard(second.parent) == []  # a root is never a candidate
    assert (len(tree), tree.known_prefix(root, block(1))) == (0, ([], 0))
    assert line(tree, root, 1) is not second.parent  # a new node under the same key
    assert len(tree) == 1


def test_a_parent_with_another_child_is_no_candidate(tree: BlockTree, root: Node) -> None:
    parent = line(tree, root, 1)
    a, b = tree.add(parent, block(2), P), tree.add(parent, block(2), decode_schedule(bytes(16)))
    assert tree.discard(a) == []
    assert tree.variants(b) == {b}
    assert tree.discard(b) == [parent]


def test_what_is_held_or_followed_cannot_be_discarded(tree: BlockTree, root: Node) -> None:
    node = line(tree, root, 1, 2)
    parent = node.parent
    assert parent is not None
    for held in (parent, root):
        with pytest.raises(AssertionError):
            tree.discard(held)
    node.holds = 1
    with pytest.raises(AssertionError):
        tree.discard(node)
    assert set(tree) == {parent, node}


def test_a_known_prefix_ends_at_the_token_where_the_prompt_leaves_every_chain(tree: BlockTree, root: Node) -> None:
    """Against the plain definition: the longest common prefix with any chain that was ever added."""
    rng = random.Random(5)
    chains: list[list[int]] = []
    for _ in range(60):
        tokens: list[int] = []
        node = root
        for _ in range(rng.randrange(1, 4)):
            size = rng.choice([BLOCK_TOKENS, BLOCK_TOKENS, rng.randrange(1, BLOCK_TOKENS)])
            piece = [rng.randrange(2)] * size
            if rng.random() < 0.5:
                piece[rng.randrange(size)] = 2
            node = tree.add(node, piece, rng.choice([P, b"P\x07"]))
            tokens += piece
            chains.append(list(tokens))
            if size < BLOCK_TOKENS:
                break
    for _ in range(300):
        prompt = list(rng.choice(chains))
        if rng.random() < 0.7:
            prompt[rng.randrange(len(prompt))] = rng.randrange(4)
        prompt += [rng.randrange(2)] * rng.choice([0, 1, 300])
        nodes, known = tree.known_prefix(root, prompt)
        wanted = max(next((i for i, (a, b) in enumerate(zip(chain, prompt)) if a != b), min(len(chain), len(prompt))) for chain in chains)  # fmt: skip  # noqa: E501, B905
        assert known == wanted
        assert [node.end for node in nodes] == list(range(256, known // 256 * 256 + 1, 256))
        for node in nodes:
            assert list(node.all_tokens()) == prompt[: node.end]
