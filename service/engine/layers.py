"""Upstream cache objects ⇄ records. Owns the policy of each cache class; every other class is refused by name.

| class             | kind   | a record of block [s, e) holds            | restored from                       |
|-------------------|--------|-------------------------------------------|-------------------------------------|
| `KVCache`         | full   | K, V of [s, e)                            | every block up to the position      |
| `RotatingKVCache` | window | K, V of the block's last min(e-s, W)      | blocks that reach into the window   |
| `ArraysCache`     | state  | every array, as it is at e                | the record of exactly that position |

Normal form: a window layer stands in temporal order with at most W tokens. Both a cold and a restored run are brought
to it at every cut, so that the physical order of the ring, which decides the order of summation, never differs.
"""

from __future__ import annotations

import mlx.core as mx

from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.mlx_arrays import from_payload, to_payload
from kvcache.records import RecordKind
from service.engine.upstream import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    batch_end,
    batch_in_order,
    in_order,
    set_window,
)
from service.plan import Capture, Restored

LOGITS = "logits"


class UnsupportedLayer(ValueError):
    """The model has a cache that has no policy here."""


def layout_of(caches: list) -> CacheLayout:
    """Classifies a fresh model cache. Raises UnsupportedLayer with the layer's number, class and reason."""
    specs: list[LayerSpec] = []
    for number, cache in enumerate(caches):
        if type(cache) is KVCache:
            specs.append(LayerSpec(LayerKind.FULL))
        elif type(cache) is RotatingKVCache:
            if cache.keep:
                raise UnsupportedLayer(f"layer {number}: RotatingKVCache with keep={cache.keep} is not supported yet")
            specs.append(LayerSpec(LayerKind.WINDOW, cache.max_size))
        elif type(cache) is ArraysCache:
            specs.append(LayerSpec(LayerKind.STATE))
        else:
            raise UnsupportedLayer(f"layer {number}: no snapshot policy for cache class {type(cache).__name__}")
    return CacheLayout(tuple(specs))


def live_arrays(caches: list) -> list[mx.array]:
    """Every array that holds state, to evaluate them without asking for logits."""
    arrays: list[mx.array] = []
    for cache in caches:
        held = cache.cache if isinstance(cache, ArraysCache) else (cache.keys, cache.values)
        arrays += [a for a in held if a is not None]
    return arrays


def normalise(caches: list) -> None:
    """Brings window layers to normal form, in place; values and order of the tokens stay."""
    for cache in caches:
        if type(cache) is RotatingKVCache and cache.keys is not None:
            keys, values = in_order(cache, cache.keys), in_order(cache, cache.values)
            set_window(cache, _last(keys, cache.max_size), _last(values, cache.max_size), cache.offset)


def capture(caches: list, layout: CacheLayout, what: Capture, logits: mx.array | None) -> dict[RecordKind, bytearray]:
    """The records of [what.start, what.end) from a row's own caches, which stand at what.end."""
    length = what.end - what.start
    groups: dict[RecordKind, dict[str, mx.array]] = {kind: {} for kind in what.kinds}
    for number, (cache, spec) in enumerate(zip(caches, layout.layers, strict=True)):
        if spec.kind is LayerKind.FULL and RecordKind.FULL in groups:
            groups[RecordKind.FULL][f"{number}.k"] = cache.keys[..., what.start : what.end, :]
            groups[RecordKind.FULL][f"{number}.v"] = cache.values[..., what.start : what.end, :]
        elif spec.kind is LayerKind.WINDOW and RecordKind.WINDOW in groups:
            keep = min(length, spec.window)
            groups[RecordKind.WINDOW][f"{number}.k"] = _last(in_order(cache, cache.keys), keep)
            groups[RecordKind.WINDOW][f"{number}.v"] = _last(in_order(cache, cache.values), keep)
        elif spec.kind is LayerKind.STATE and RecordKind.STATE in groups:
            for slot, array in enumerate(cache.cache):
                if array is not None:
                    groups[RecordKind.STATE][f"{number}.{slot}"] = array
    return _payloads(groups, logits)


def capture_batched(batch: list, index: int, layout: CacheLayout, what: Capture) -> dict[RecordKind, bytearray]:
    """The same from row `index` of the decode batch; rows are right-aligned, so a block is the row's last tokens."""
    length = what.end - what.start
    groups: dict[RecordKind, dict[str, mx.array]] = {kind: {} for kind in what.kinds}
    for number, (cache, spec) in enumerate(zip(batch, layout.layers, strict=True)):
        row = slice(index, index + 1)
        if spec.kind is LayerKind.FULL and RecordKind.FULL in groups:
            tokens = slice(batch_end(cache) - length, batch_end(cache))
            groups[RecordKind.FULL][f"{number}.k"] = cache.keys[row, :, tokens]
            groups[RecordKind.FULL][f"{number}.v"] = cache.values[row, :, tokens]
        elif spec.kind is LayerKind.WINDOW and RecordKind.WINDOW in groups:
            keep = min(length, spec.window)
            groups[RecordKind.WINDOW][f"{number}.k"] = _last(batch_in_order(cache, cache.keys[row]), keep)
            groups[RecordKind.WINDOW][f"{number}.v"] = _last(batch_in_order(cache, cache.values[row]), keep)
        elif spec.kind is LayerKind.STATE and RecordKind.STATE in groups:
            for slot, array in enumerate(cache.cache):
                if array is not None:
                    groups[RecordKind.STATE][f"{number}.{slot}"] = array[row]
    return _payloads(groups, None)


def restore(caches: list, layout: CacheLayout, restored: Restored) -> mx.array | None:
    """Fills fresh caches with stored state, whole or not at all; returns the stored logits, if any.

    Raises ValueError if the records do not add up to the position: a restore is never partly filled.
    """
    position = restored.position
    blocks: dict[RecordKind, list[tuple[int, dict[str, mx.array]]]] = {}
    for kind, start, payload in zip(restored.kinds, restored.starts, restored.payloads, strict=True):
        blocks.setdefault(kind, []).append((start, from_payload(payload)))
    for number, (cache, spec) in enumerate(zip(caches, layout.layers, strict=True)):
        if spec.kind is LayerKind.FULL:
            keys, values = _joined(blocks.get(RecordKind.FULL, []), number)
            if keys.shape[2] < position:
                raise ValueError(f"layer {number}: {keys.shape[2]} of {position} tokens are stored")
            cache.keys, cache.values = keys[..., :position, :], values[..., :position, :]
            cache.offset = position
        elif spec.kind is LayerKind.WINDOW:
            keys, values = _joined(blocks.get(RecordKind.WINDOW, []), number)
            keep = min(position, spec.window)
            if keys.shape[2] < keep:
                raise ValueError(f"layer {number}: {keys.shape[2]} of a window of {keep} tokens are stored")
            set_window(cache, _last(keys, keep), _last(values, keep), position)
        else:
            ((_, arrays),) = blocks.get(RecordKind.STATE, [])
            for slot in range(len(cache.cache)):
                cache.cache[slot] = arrays.get(f"{number}.{slot}")
    arrays = live_arrays(caches)
    logits = blocks[RecordKind.LOGITS][0][1][LOGITS] if RecordKind.LOGITS in blocks else None
    mx.eval(arrays, *([logits] if logits is not None else []))
    return logits


def join(batch: list | None, rows: list[list]) -> list:
    """The decode batch with `rows` (each a list of normal-form caches) added at its end."""
    added = [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]
    if batch is None:
        return added
    for cache, other in zip(batch, added, strict=True):
        cache.extend(other)
    return batch


def extract(batch: list, index: int) -> list:
    """Row `index` of the decode batch as caches of its own, in normal form."""
    caches = [cache.extract(index) for cache in batch]
    normalise(caches)
    mx.eval(live_arrays(caches))
    return caches


def nbytes(caches: list) -> int:
    """Bytes held by a list of caches."""
    return sum(array.nbytes for array in live_arrays(caches))


def _joined(blocks: list[tuple[int, dict[str, mx.array]]], number: int) -> tuple[mx.array, mx.array]:
    if not blocks:
        raise ValueError(f"layer {number}: nothing is stored")
    keys = [arrays[f"{number}.k"] for _, arrays in blocks]
    values = [arrays[f"{number}.v"] for _, arrays in blocks]
    if len(keys) == 1:
        return keys[0], values[0]
    return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


def _last(array: mx.array, count: int) -> mx.array:
    return array[..., max(0, array.shape[2] - count) :, :]


def _payloads(groups: dict[RecordKind, dict[str, mx.array]], logits: mx.array | None) -> dict[RecordKind, bytearray]:
    if RecordKind.LOGITS in groups:
        assert logits is not None, "logits were asked for where none were computed"
        groups[RecordKind.LOGITS] = {LOGITS: logits}
    return {kind: to_payload(arrays) for kind, arrays in groups.items()}
