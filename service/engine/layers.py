"""Upstream cache objects ⇄ records. Owns how a model's caches are listed, captured, restored and joined to a batch.

| class                       | kind   | a record of block [s, e) holds                | restored from             |
|-----------------------------|--------|-----------------------------------------------|---------------------------|
| `KVCache`                   | full   | K, V of [s, e)                                | every block so far        |
| `ConcatenateKVCache`        | full   | the same                                      | the same                  |
| `QuantizedKVCache`          | full   | packed K, V, scales, biases of [s, e)         | the same                  |
| `RotatingKVCache`           | window | K, V of the block's last min(e-s, W)          | blocks that reach into W  |
| `RotatingKVCache`, keep > 0 | window | first `keep`; the block's last min(e-s, W')   | blocks that reach into W  |
| `ChunkedKVCache`            | window | K, V of the block's last min(e-s, chunk)      | blocks that reach into it |
| `ArraysCache`               | state  | every slot that is set, at e                  | the record of that place  |
| `deepseek_v41.LayerCache`   | state  | window, groups, index, open group             | the record of that place  |
| `CacheList`                 | –      | what its members hold, in order, at any depth | –                         |
| a leaf that no call fills   | none   | nothing                                       | –                         |

mlx-vlm's copies of these classes, and their batched forms, are served alike; its own classes are refused with their
reasons (`foreign`).

W' is W until the window is full, then W - keep. Any other class is refused at load with the layer's number, the class
and the reason. A layer that reads another layer's cache (KV-shared) has none of its own and needs no policy.

Rows decode in one call where every class has a batched form (`KVCache`, `RotatingKVCache` with keep 0, `ArraysCache`,
`CacheList` of these) and the model gives rows of unequal length what it gives each alone (`probe`); else one call each.

Normal form: a window layer stands in temporal order with at most W tokens. Both a cold and a restored run are brought
to it at every cut, so that the physical order of the ring, which decides the order of summation, never differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import mlx.core as mx

from kvcache.codec import ArrayBytes
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.mlx_arrays import to_array, to_payload, views
from kvcache.records import Buffer, RecordKind
from service.engine.foreign import CACHE_LIST, why_refused
from service.engine.policies import Arrays, is_state, policy_of, row_policy_of
from service.engine.upstream import CacheList, of_one_row, qualified_name
from service.plan import Capture, Restored

LOGITS = "logits"

ByLayer: TypeAlias = dict[str, dict[str, ArrayBytes]]
"""Of one record: arrays by their layer's number and their own name; what belongs to no layer has the number \"\"."""

RECORD_OF = {
    LayerKind.FULL: RecordKind.FULL,
    LayerKind.WINDOW: RecordKind.WINDOW,
    LayerKind.STATE: RecordKind.STATE,
}


class UnsupportedLayer(ValueError):
    """The model has a cache that has no policy here."""


def leaves(caches: list) -> Iterator:
    """The cache objects that hold arrays, in the model's order; members of a `CacheList` stand in its place."""
    for cache in caches:
        if isinstance(cache, CacheList) or qualified_name(cache) == CACHE_LIST:
            yield from leaves(cache.caches)
        else:
            yield cache


def layout_of(caches: list) -> CacheLayout:
    """Classifies a fresh model cache. Raises UnsupportedLayer with the layer's number, class and reason."""
    specs: list[LayerSpec] = []
    alone = ""
    for number, cache in enumerate(caches):
        for leaf in leaves([cache]):
            policy = row_policy_of(leaf)
            if policy is None:
                raise UnsupportedLayer(f"layer {number}: {why_refused(qualified_name(leaf))}")
            specs.append(policy.spec(leaf))
            alone = alone or policy.alone(leaf)
    if not specs:
        raise UnsupportedLayer("the model has no cache: nothing of it could be kept")
    return CacheLayout(tuple(specs), alone=alone)


def live_arrays(caches: list) -> list[mx.array]:
    """Every array that holds state, to evaluate them without asking for logits."""
    return [array for leaf in leaves(caches) for array in policy_of(leaf).live(leaf)]


def normalise(caches: list) -> None:
    """Brings window layers to normal form, in place; values and order of the tokens stay."""
    for leaf in leaves(caches):
        policy_of(leaf).normalise(leaf)


def capture(caches: list, layout: CacheLayout, what: Capture, logits: mx.array | None) -> dict[RecordKind, bytearray]:
    """The records of [what.start, what.end) from a row's own caches, which stand at what.end."""
    groups = _groups(what)
    for number, leaf, group in _recorded(caches, layout, groups):
        _add(group, number, policy_of(leaf).capture(leaf, what.start, what.end))
    if RecordKind.LOGITS in groups:
        assert logits is not None, "logits were asked for where none were computed"
        groups[RecordKind.LOGITS] = {LOGITS: logits}
    return {kind: to_payload(arrays) for kind, arrays in groups.items()}


def capture_batched(
    batch: list, index: int, layout: CacheLayout, what: Capture, logits: mx.array | None
) -> dict[RecordKind, bytearray]:
    """The same from row `index` of the decode batch."""
    groups = _groups(what)
    for number, leaf, group in _recorded(batch, layout, groups):
        _add(group, number, policy_of(leaf).capture_row(leaf, index, what.start, what.end))
    if RecordKind.LOGITS in groups:
        assert logits is not None, "logits were asked for where none were computed"
        groups[RecordKind.LOGITS] = {LOGITS: logits}
    return {kind: to_payload(arrays) for kind, arrays in groups.items()}


class SharedPayloads:
    """Payloads as what they hold of each layer, for one step. One that several rows restore is decoded once."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Buffer, ByLayer]] = {}  # an id is one for as long as its payload is held

    def by_layer(self, payload: Buffer) -> ByLayer:
        """Views into the payload: what is made of them is each caller's own."""
        held = self._held.get(id(payload))
        if held is None:
            found: ByLayer = {}
            for name, part in views(payload).items():
                number, own = name.split(".", 1) if "." in name else ("", name)
                found.setdefault(number, {})[own] = part
            held = self._held[id(payload)] = payload, found
        return held[1]


def restore(
    caches: list, layout: CacheLayout, restored: Restored, payloads: SharedPayloads | None = None
) -> mx.array | None:
    """Fills fresh caches with stored state; returns the stored logits, if any.

    Raises ValueError if the records do not add up to the position; the caches are of no use then. Goes layer by layer,
    so that the blocks' copies of one can be given back before the next needs room: a restore takes little more than
    the state it makes.
    """
    payloads = payloads or SharedPayloads()
    blocks: dict[RecordKind, list[ByLayer]] = {}
    for kind, payload in zip(restored.kinds, restored.payloads, strict=True):
        blocks.setdefault(kind, []).append(payloads.by_layer(payload))
    for number, (leaf, spec) in enumerate(zip(leaves(caches), layout.layers, strict=True)):
        if spec.kind is LayerKind.NONE:
            continue
        own = [block.get(str(number), {}) for block in blocks.get(RECORD_OF[spec.kind], [])]
        policy = policy_of(leaf)
        try:
            policy.restore(leaf, [_arrays(part) for part in own], restored.position)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        mx.async_eval(policy.live(leaf))
    logits = _arrays(blocks[RecordKind.LOGITS][0][""])[LOGITS] if RecordKind.LOGITS in blocks else None
    mx.eval(live_arrays(caches), *([logits] if logits is not None else []))
    return logits


def join(batch: list | None, rows: list[list]) -> list:
    """The decode batch with `rows` (each a list of normal-form caches) added at its end."""
    added = [_merged(list(caches)) for caches in zip(*rows, strict=True)]
    if batch is None:
        return added
    for cache, other in zip(batch, added, strict=True):
        cache.extend(other)
    return batch


def extract(batch: list, index: int) -> list:
    """Row `index` of the decode batch as caches of its own, in normal form."""
    caches = [_extracted(cache, index) for cache in batch]
    normalise(caches)
    mx.eval(live_arrays(caches))
    return caches


def nbytes(caches: list) -> int:
    """Bytes held by a list of caches."""
    return sum(array.nbytes for array in live_arrays(caches))


def _merged(caches: list):
    """Caches of the same layer as one batched cache."""
    first = caches[0]
    if isinstance(first, CacheList):
        return CacheList(*(_merged(list(members)) for members in zip(*(c.caches for c in caches), strict=True)))
    if not is_state(first):
        return first.merge(caches)
    # Upstream's own merge and extract stop at a slot that is empty in every row.
    merged = type(first)(len(first.cache))
    for slot, arrays in enumerate(zip(*(c.cache for c in caches), strict=True)):
        held = [array for array in arrays if array is not None]
        if held and len(held) < len(arrays):
            raise ValueError("rows that hold different slots cannot share a call")
        merged.cache[slot] = mx.concatenate(held) if held else None
    return merged


def _extracted(cache, index: int):
    if isinstance(cache, CacheList):
        return CacheList(*(_extracted(member, index) for member in cache.caches))
    if not is_state(cache):
        return of_one_row(cache) if cache.keys is None else cache.extract(index)
    own = type(cache)(len(cache.cache))
    own.cache = [array if array is None else mx.contiguous(array[index : index + 1]) for array in cache.cache]
    return own


def _groups(what: Capture) -> dict[RecordKind, Arrays]:
    return {kind: {} for kind in what.kinds}


def _recorded(
    caches: list, layout: CacheLayout, groups: dict[RecordKind, Arrays]
) -> Iterator[tuple[int, object, Arrays]]:
    """The leaves that have a part in the records asked for, each with its number and its record."""
    for number, (leaf, spec) in enumerate(zip(leaves(caches), layout.layers, strict=True)):
        if spec.kind is LayerKind.NONE:
            if policy_of(leaf).live(leaf):
                raise ValueError(f"layer {number}: {qualified_name(leaf)} holds state, and held none at load")
        elif RECORD_OF[spec.kind] in groups:
            yield number, leaf, groups[RECORD_OF[spec.kind]]


def _add(group: Arrays, number: int, arrays: Arrays) -> None:
    group.update({f"{number}.{name}": array for name, array in arrays.items()})


def _arrays(parts: dict[str, ArrayBytes]) -> Arrays:
    return {name: to_array(part) for name, part in parts.items()}
