"""A prefix cache over a real store in memory, with a row that "computes" payloads of a few bytes. Shared by tests.

The state of a place is a function of its tokens, so a wrong record can be told from a right one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS, token_bytes
from kvcache.cache import CacheLimits, Keep, Lookup, PrefixCache
from kvcache.checkpoints import DEFAULT_CHECKPOINTS, Checkpoints
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import FetchResult, Loss, RecordId, RecordKind
from kvcache.schedule import plan_calls
from kvcache.snapshots import Snapshot
from kvcache.storage import MemoryStorage
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.recorder import Recorder

FULL, STATE = LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.STATE)
WINDOW = LayerSpec(LayerKind.WINDOW, 300)
LAYOUTS = {
    "full": CacheLayout((FULL,)),
    "window": CacheLayout((FULL, WINDOW)),
    "state": CacheLayout((FULL, STATE)),
    "all": CacheLayout((STATE, FULL, WINDOW)),
}
LIMITS = CacheLimits()
SIZES = {
    RecordKind.FULL: 60,
    RecordKind.WINDOW: 50,
    RecordKind.STATE: 90,
    RecordKind.LOGITS: 40,
    RecordKind.FEATURES: 70,
}


def prompt_of(length: int, seed: object = 1) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(50_000) for _ in range(length)]


def payload_of(kind: RecordKind, prefix: Sequence[int]) -> bytes:
    """What a row's state of this kind is after `prefix`."""
    return hashlib.shake_128(bytes([kind]) + token_bytes(prefix)).digest(SIZES[kind])


@dataclass
class Ran:
    """One run over a prompt. The nodes are held."""

    lookup: Lookup
    calls: list[tuple[int, int]]
    nodes: dict[int, Node]
    lost: list[str]
    prompt_tokens: int

    @property
    def receipt(self) -> tuple[int, int, int]:
        """(cached, recomputed, new)."""
        position, known = self.lookup.position, self.lookup.known
        return position, known - position, self.prompt_tokens - known


class World:
    """A cache whose I/O thread is the test's own and whose clock stands still."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        memory: int = 100_000,
        disk: int = 1_000_000,
        queue: int = 10_000,
        limits: CacheLimits = LIMITS,
        share_decoded: bool = False,
        share_prefixes: bool = False,
        checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
    ) -> None:
        self.now = 1000.0
        self.storage = MemoryStorage()
        config = StoreConfig(
            memory_bytes=memory,
            disk_bytes=disk,
            queue_bytes=queue,
            segment_bytes=2_000,
            min_free_bytes=0,
            checkpoints=checkpoints,
        )
        self.store = TieredStore(config, self.storage, clock=lambda: self.now)
        self.cache = PrefixCache(
            self.store,
            layout,
            "model",
            limits=limits,
            share_decoded=share_decoded,
            share_prefixes=share_prefixes,
            clock=lambda: self.now,
        )

    @property
    def tree(self) -> dict[tuple[int, int], int]:
        """How many nodes there are by place."""
        places: dict[tuple[int, int], int] = {}
        for node in self.cache._tree:
            places[node.start, node.end] = places.get((node.start, node.end), 0) + 1
        return places

    def run(
        self,
        tokens: Sequence[int],
        *,
        keep: Iterable[int] = (),
        base: Node | None = None,
        owner: str = "a",
        decode: int = 0,
    ) -> Ran:
        """Prefills `tokens`, the last `decode` of them as if they were generated; nodes at `keep` and the end."""
        prompt = list(tokens[: len(tokens) - decode])
        keep = {*keep, len(prompt)}
        lookup = self.cache.lookup(owner, prompt, base=base, keep=keep)
        recorder = Recorder(self.cache, owner, tokens, base)
        if lookup.plan is not None:
            self.check_read(lookup, prompt, self.store.fetch_now(lookup.plan.records))
            recorder.start_at(lookup)
        self.cache.release(lookup)
        nodes = {node.end: self.cache.hold(node) for node in lookup.kept}
        lost: list[str] = []

        def take(end: int, *, kept: bool, logits: bool) -> None:
            capture = recorder.capture(end, logits=logits)
            payloads = {kind: payload_of(kind, tokens[:end]) for kind in capture.kinds}
            commit = recorder.commit(end, payloads, explicit=True)
            node = commit.node
            lost.extend([commit.lost.name] if commit.lost else [])
            if kept:
                nodes[end] = node
            else:
                self.cache.let_go(node)

        stops = keep | ({base.end} if base is not None else set())
        calls = plan_calls(lookup.position, len(prompt), stops, lookup.replay)
        for call in calls:
            recorder.called(call.end)
            if call.end in keep or call.end % BLOCK_TOKENS == 0:
                take(call.end, kept=call.end in keep, logits=call.end in keep)
        for end in range(len(prompt) + 1, len(tokens) + 1):
            recorder.called(end, decoded=True)
            if end % BLOCK_TOKENS == 0 or end == len(tokens):
                take(end, kept=end == len(tokens), logits=end == len(tokens))
        recorder.close()
        return Ran(lookup, [(c.start, c.end) for c in calls], nodes, lost, len(prompt))

    def check_read(self, lookup: Lookup, prompt: Sequence[int], read: FetchResult) -> None:
        """A restore reads what the prompt's own state is."""
        assert lookup.plan is not None and read.ok, read.error
        ends = {node.start: node.end for node in lookup.plan.nodes}
        for start, record, data in zip(lookup.plan.starts, lookup.plan.records, read.payloads, strict=True):
            node = next(n for n in lookup.plan.nodes if n.start == start)
            assert list(node.all_tokens()) == list(prompt[: node.end])
            if node.source == node.key or record.kind is not RecordKind.FULL:
                assert bytes(data) == payload_of(record.kind, prompt[: ends[start]])

    def save(
        self, node: Node, name: str, *, owner: str = "a", parent: Snapshot | None = None, **keep: object
    ) -> Snapshot:
        """A name for a held node, which it takes over."""
        snapshot = self.cache.add_snapshot(owner, node, Keep(snapshot_id=name, **keep), parent=parent)  # type: ignore[arg-type]
        self.cache.let_go(node)
        return snapshot

    def lose(self, node: Node, *kinds: RecordKind) -> None:
        """As if the store had given records of `node` up."""
        with self.store._lock:
            for kind in kinds:
                entry = self.store._index.get(RecordId(node.key, kind))
                assert entry is not None
                self.store._index.lose(entry, Loss.EVICTED)

    def starve(self) -> None:
        """Takes all room away: what no pin protects is gone."""
        self.store.trim(memory_bytes=0)
        self.store.flush(0.0)
        self.store.trim(disk_bytes=0)
        self.cache.sweep()

    def forget_everything(self) -> None:
        """Ends every name and empties the store."""
        for snapshot in self.cache.all_snapshots():
            self.cache.update(snapshot, pinned=False)
            self.cache.delete(snapshot, in_use_ok=True)
        self.starve()
