"""The tree of blocks. Owns which prefixes are known and what keeps them known; pure, no bytes, no clock, no lock.

A node is a full block of 256 tokens, or a shorter one that ends a snapshot (a *tail*: always a leaf). A node lives as
long as something holds it: a child, a snapshot, a running sequence, or a record in the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvcache.blocks import BLOCK_TOKENS, BlockKey, ContentKey, block_key, content_key
from kvcache.receipt import MissReason
from kvcache.records import RecordKind


class Node:
    """Tokens [start, end) behind `parent`. Made and dropped by `BlockTree` only."""

    __slots__ = (
        "_lost",
        "borrows",
        "children",
        "content",
        "followed",
        "holds",
        "key",
        "key_id",
        "parent",
        "schedule",
        "start",
        "tokens",
    )

    def __init__(
        self, key: BlockKey, content: ContentKey, parent: Node | None, tokens: Sequence[int], schedule: bytes
    ) -> None:
        self.key = key
        self.content = content
        self.parent = parent
        self.start = parent.end if parent else 0
        self.tokens = array("I", tokens)
        self.schedule = schedule
        self.key_id: int = parent.key_id if parent else 0  # whose sealing key, where owners have keys of their own
        self.borrows: Node | None = None  # a block trimmed from a longer one reads that one's FULL record, and holds it
        self.children: set[Node] = set()
        self.holds = 0  # snapshots and sequences
        self.followed = 0  # of the holds: sequences that stand here and go on
        self._lost: dict[RecordKind, MissReason] | None = None  # what became of records of this node

    def note_lost(self, kind: RecordKind, why: MissReason) -> None:
        """A record of this node is not held, and this is why."""
        self._lost = {**(self._lost or {}), kind: why}

    def note_kept(self, kind: RecordKind) -> None:
        """It is held again."""
        if self._lost is not None and kind in self._lost:
            del self._lost[kind]

    def why_lost(self, kind: RecordKind) -> MissReason | None:
        """What became of a record that is missing; None: nobody has heard of it, so it was never wanted."""
        return self._lost.get(kind) if self._lost is not None else None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def source(self) -> BlockKey:
        """Whose FULL record has this node's tokens."""
        return self.borrows.key if self.borrows is not None else self.key

    @property
    def is_tail(self) -> bool:
        """Shorter than a block, so nothing can follow it."""
        return len(self.tokens) < BLOCK_TOKENS and self.parent is not None

    def path(self) -> list[Node]:
        """Nodes from the first block to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def all_tokens(self) -> array[int]:
        """Every token of the prefix."""
        tokens = array("I")
        for node in self.path():
            tokens.extend(node.tokens)
        return tokens

    def ancestor_at(self, position: int) -> Node:
        """The deepest full block (or root) that ends at or before `position`."""
        node = self
        while node.end > position or node.is_tail:
            assert node.parent is not None
            node = node.parent
        return node

    def __repr__(self) -> str:
        return f"<Node {self.start}..{self.end} {self.key.hex()[:8]} children={len(self.children)} holds={self.holds}>"


class BlockTree:
    """All nodes by key, and by content."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._roots: dict[BlockKey, Node] = {}
        self._content: dict[ContentKey, set[Node]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def root(self, key: BlockKey) -> Node:
        """The empty prefix of one chain space; roots are never dropped."""
        node = self._roots.get(key)
        if node is None:
            node = Node(key, ContentKey(bytes(key)), None, (), b"")
            self._roots[key] = node
            self._content[node.content] = {node}
        return node

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(BlockKey(key))

    def add(self, parent: Node, tokens: Sequence[int], schedule: bytes) -> Node:
        """The node for `tokens` behind `parent`: the known one, or a new one."""
        assert 0 < len(tokens) <= BLOCK_TOKENS and not parent.is_tail
        key = block_key(parent.key, tokens, schedule)
        node = self._nodes.get(key)
        if node is None:
            node = Node(key, content_key(parent.content, tokens), parent, tokens, schedule)
            self._nodes[key] = node
            self._content.setdefault(node.content, set()).add(node)
            parent.children.add(node)
        return node

    def discard(self, node: Node) -> list[Node]:
        """Drops a node that nothing holds, then its ancestors of which the same has become true.

        The caller makes sure that no record of `node` is left; ancestors are only returned as candidates since the
        tree does not know about records. Returns the parents that lost their last child.
        """
        assert node.parent is not None and not node.children and node.holds == 0
        del self._nodes[node.key]
        variants = self._content[node.content]
        variants.discard(node)
        if not variants:
            del self._content[node.content]
        node.parent.children.discard(node)
        return [node.parent] if not node.parent.children and node.parent.parent is not None else []

    def known_prefix(self, start: Node, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The longest content match: one node for each matched full block, and the length in tokens of the match.

        `start` is a root or a full block whose prefix `tokens` are known to begin with. The length goes on into the
        block where the prompt leaves every known chain.
        """
        matched: list[Node] = []
        content = start.content
        position = start.end
        while position + BLOCK_TOKENS <= len(tokens):
            block = tokens[position : position + BLOCK_TOKENS]
            following = content_key(content, block)
            variants = self._content.get(following)
            if not variants:
                break
            matched.append(next(iter(variants)))
            content = following
            position += BLOCK_TOKENS
        rest = tokens[position : position + BLOCK_TOKENS]
        common = 0
        for variant in self._content.get(content, ()):
            for child in variant.children:
                common = max(common, _common_length(child.tokens, rest))
        return matched, position + common

    def variants(self, node: Node) -> set[Node]:
        """Nodes with the same tokens, however computed."""
        return self._content.get(node.content, set())


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
