"""From a sequence's progress to nodes in the tree. Owns the block under construction; the cache owns the blocks done.

Runs on the engine thread. Knows which call ends lie inside the current block, since they are part of its key.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Commit, Lookup, PrefixCache
from kvcache.media import ends_inside
from kvcache.records import RecordKind
from kvcache.schedule import NONCE_BYTES, continued_schedule, decode_schedule, prefill_schedule
from kvcache.tree import Node
from service.plan import Capture, Payloads


class Recorder:
    """Follows one sequence. `tokens` is the sequence's own growing list, shared and read only."""

    def __init__(self, cache: PrefixCache, owner: str, tokens: Sequence[int], base: Node | None = None) -> None:
        """`base`: the explicit parent that the sequence goes on from."""
        self._cache = cache
        self._tokens = tokens
        root = cache.root(owner) if base is None else cache.root_of(base)
        self._node = cache.follow(root)  # the last full block
        self._tail: Node | None = None  # where the current block was entered, if inside it
        self._ends: set[int] = set()
        self._nonce: bytes | None = None

    def start_at(self, lookup: Lookup) -> None:
        """Stands where `lookup` was restored to."""
        if lookup.plan is None:
            return
        last = lookup.plan.nodes[-1]
        assert last.parent is not None
        if lookup.plan.position == last.end and not last.is_tail:
            self._move_to(self._cache.follow(last))
        else:
            self._move_to(self._cache.follow(last.parent))
            self._tail = self._cache.hold(last)
            if lookup.plan.position < last.end:
                # Cut short of a kept place: nothing that follows may share a key with anything else.
                self._nonce = secrets.token_bytes(NONCE_BYTES)

    def called(self, end: int, *, decoded: bool = False) -> None:
        """A model call ended at `end`."""
        if decoded and self._nonce is None:
            self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._ends.add(end)

    def capture(self, end: int, *, logits: bool, kinds: Collection[RecordKind] | None = None) -> Capture:
        """What to take from the engine at `end`, a place that the last call passes or ends at: what is not stored yet.

        `kinds`: the layer kinds that are worth keeping there; None: all of them. Beyond the block under construction,
        where an image takes a call, all of it is taken: what it follows has no node yet.
        """
        start = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert self._node.end <= start < end
        if start > self._node.end:
            passed = range(self._node.end + BLOCK_TOKENS, start + 1, BLOCK_TOKENS)
            assert all(ends_inside(self._tokens[boundary - 1 : boundary]) for boundary in passed)
            wanted = self._cache.layout.kinds + ((RecordKind.LOGITS,) if logits else ())
        else:
            wanted = self._cache.wants(self._node, self._tokens[start:end], self._schedule(end), logits=logits)
        if kinds is not None:
            wanted = tuple(kind for kind in wanted if kind in kinds or kind is RecordKind.LOGITS)
        return Capture(start=start, end=end, kinds=wanted)

    def commit(
        self,
        end: int,
        payloads: Payloads,
        *,
        explicit: bool,
        passing: Collection[RecordKind] = (),
        in_memory: Collection[RecordKind] = (),
        patient: bool = False,
    ) -> Commit:
        """Hands the state at `end` over. The node is held for the caller. See `PrefixCache.commit`."""
        start = self._node.end
        commit = self._cache.commit(
            self._node,
            self._tokens[start:end],
            self._schedule(end),
            payloads,
            explicit=explicit,
            passing=passing,
            in_memory=in_memory,
            patient=patient,
        )
        if end == start + BLOCK_TOKENS:
            self._move_to(self._cache.follow(commit.node))
            if RecordKind.STATE in payloads or RecordKind.WINDOW in payloads:
                self._cache.thin(commit.node)
        return commit

    @property
    def last_block(self) -> Node:
        """The last full block passed, or the root."""
        return self._node

    def close(self) -> None:
        """Lets go of everything."""
        self._cache.unfollow(self._node)
        if self._tail is not None:
            self._cache.let_go(self._tail)
            self._tail = None

    def _schedule(self, end: int) -> bytes:
        start = self._node.end
        if self._nonce is not None:
            return decode_schedule(self._nonce)
        inside = [e for e in self._ends if start < e < end]
        if self._tail is not None:
            return continued_schedule(self._tail.schedule, start, self._tail.end, end, inside)
        return prefill_schedule(start, end, inside)

    def _move_to(self, followed: Node) -> None:
        self._cache.unfollow(self._node)
        self._node = followed
        if self._tail is not None:
            self._cache.let_go(self._tail)
        self._tail, self._nonce = None, None
        self._ends = {e for e in self._ends if e > followed.end}
