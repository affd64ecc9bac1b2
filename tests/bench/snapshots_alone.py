"""A process of its own that stores many snapshots of one conversation, and prints what they cost it in memory.

    python -m tests.bench.snapshots_alone COUNT

Every turn adds `TURN` tokens and is named; its records have the sizes of a small model's and go to disk, the memory
tier holds nothing. Prints `{"grown": resident bytes, "records": n, "disk": bytes}`: what the names, the tree, the index
and the order of eviction take together.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from array import array
from pathlib import Path

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import CacheLimits, Keep, PrefixCache
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.records import RecordKind
from kvcache.schedule import prefill_schedule
from kvcache.store import StoreConfig, TieredStore
from service.options import default_scratch_dir
from tests.bench.report import resident_bytes

MIB = 1 << 20
TURN = 48
SIZES = {RecordKind.FULL: 4096, RecordKind.WINDOW: 8192, RecordKind.LOGITS: 1024}


def main(count: int) -> None:
    layout = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, 512)))
    with tempfile.TemporaryDirectory(prefix="kvfork-bench-", dir=default_scratch_dir()) as folder:
        store = TieredStore(
            StoreConfig(
                directory=Path(folder),
                memory_bytes=0,
                disk_bytes=1024 * MIB,
                queue_bytes=16 * MIB,
                segment_bytes=16 * MIB,
                min_free_bytes=0,
            )
        )
        store.start()
        cache = PrefixCache(store, layout, "bench", limits=CacheLimits(max_snapshots=2 * count))
        prompt = array("I", (i * 7 % 5003 for i in range(count * TURN)))
        _keep(cache, prompt, TURN, "warm-up")
        gc.collect()
        before = resident_bytes(os.getpid())
        for turn in range(2, count + 1):
            _keep(cache, prompt, turn * TURN, f"turn-{turn:05}")
        assert store.flush(60)
        gc.collect()
        grown = resident_bytes(os.getpid()) - before
        records = sum(usage.records for usage in store.stats().usage.values())
        print(json.dumps({"grown": grown, "records": records, "disk": store.stats().disk_bytes}))
        store.close()


def _keep(cache: PrefixCache, prompt: array[int], end: int, name: str) -> None:
    """What a run up to `end` leaves: the blocks that it passes, and a named place at its end."""
    node = cache.root("bench")
    for start in range(0, end, BLOCK_TOKENS):
        stop = min(end, start + BLOCK_TOKENS)
        schedule = prefill_schedule(start, stop, ())
        kinds = cache.wants(node, prompt[start:stop], schedule, logits=stop == end)
        done = cache.commit(node, prompt[start:stop], schedule, {k: os.urandom(SIZES[k]) for k in kinds}, explicit=True)
        assert done.lost is None, done.lost
        if stop < end:
            cache.let_go(done.node)
        node = done.node
    cache.add_snapshot("bench", node, Keep(snapshot_id=name), parent=None)
    cache.let_go(node)
    cache.store.flush(60)


if __name__ == "__main__":
    main(int(sys.argv[1]))
