"""How one cache object is captured, restored and brought to normal form: a policy for each upstream class.

A *leaf* is a cache object that holds arrays itself; lists of caches are flattened by `layers`. A policy names a leaf's
arrays (`k`, `v`, `0`, ...), says which of them a record of block [start, end) holds, and puts them back. The table of
classes is in `layers`. Owns nothing of batches beyond reading one row out of a batched form.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from kvcache.layout import LayerKind, LayerSpec
from service.engine.foreign import BATCHED, JOINED, ONE_BY_ONE, SAME_AS
from service.engine.upstream import (
    LATENT_CACHE,
    LATENT_FIELDS,
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    batch_end,
    batch_in_order,
    chunk_tokens,
    in_order,
    qualified_name,
    set_chunk,
    set_window,
)

Arrays = dict[str, mx.array]


class StoredShort(ValueError):
    """The records do not add up to the position."""


class Policy(Protocol):
    """One cache class. `start`, `end` are absolute token positions; a leaf that is captured stands at `end`, or beyond
    it, not in normal form, where that is inside its last call.
    """

    def spec(self, leaf) -> LayerSpec:
        """What the layout says of a fresh leaf."""
        ...

    def alone(self, leaf) -> str:
        """Why rows with this leaf cannot decode in one call; empty if they can."""
        ...

    def live(self, leaf) -> list[mx.array]:
        """Every array that holds state."""
        ...

    def normalise(self, leaf) -> None:
        """Brings the leaf to the form that a restored one has, in place; tokens and their order stay."""
        ...

    def capture(self, leaf, start: int, end: int) -> Arrays:
        """What a record of [start, end) holds, from a row's own leaf."""
        ...

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        """The same from row `index` of the batched form."""
        ...

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        """Fills a fresh leaf. Raises StoredShort if `parts`, oldest block first, fall short of `position`."""
        ...


class _KeysAndValues:
    """What every cache with one array of keys and one of values shares."""

    def live(self, leaf) -> list[mx.array]:
        return [array for array in (leaf.keys, leaf.values) if array is not None]

    def normalise(self, leaf) -> None:
        pass

    def alone(self, leaf) -> str:
        return ""


class Full(_KeysAndValues):
    """`KVCache` and `ConcatenateKVCache`: every token, in order."""

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.FULL)

    def alone(self, leaf) -> str:
        return "" if hasattr(leaf, "merge") else f"{type(leaf).__name__} has no batched form"

    def capture(self, leaf, start: int, end: int) -> Arrays:
        return {"k": leaf.keys[..., start:end, :], "v": leaf.values[..., start:end, :]}

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        # Rows are right-aligned, so a block is the row's last tokens.
        row, tokens = slice(index, index + 1), slice(batch_end(leaf) - (end - start), batch_end(leaf))
        return {"k": leaf.keys[row, :, tokens], "v": leaf.values[row, :, tokens]}

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        keys, values = _whole(parts, "k", position), _whole(parts, "v", position)
        leaf.keys, leaf.values, leaf.offset = keys, values, position


class Quantized:
    """`QuantizedKVCache`: every token; each of K and V is packed values, scales and biases."""

    _names = (("k0", "k1", "k2"), ("v0", "v1", "v2"))

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.FULL, form=f"q{leaf.bits}g{leaf.group_size}")

    def alone(self, leaf) -> str:
        return "QuantizedKVCache has no batched form"

    def live(self, leaf) -> list[mx.array]:
        return [] if leaf.keys is None else [*leaf.keys, *leaf.values]

    def normalise(self, leaf) -> None:
        pass

    def capture(self, leaf, start: int, end: int) -> Arrays:
        held = zip((*self._names[0], *self._names[1]), self.live(leaf), strict=True)
        return {name: array[..., start:end, :] for name, array in held}

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        raise TypeError(self.alone(leaf))

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        leaf.keys, leaf.values = (tuple(_whole(parts, name, position) for name in names) for names in self._names)
        leaf.offset = position


class Window(_KeysAndValues):
    """`RotatingKVCache`: the last W tokens; with `keep`, its first `keep` tokens for good and the last W - keep."""

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.WINDOW, leaf.max_size, form=f"keep{leaf.keep}" if leaf.keep else "")

    def alone(self, leaf) -> str:
        return f"RotatingKVCache with keep={leaf.keep} has no batched form" if leaf.keep else ""

    def normalise(self, leaf) -> None:
        if leaf.keys is not None:
            keys, values = (self._held(leaf, in_order(leaf, array)) for array in (leaf.keys, leaf.values))
            set_window(leaf, keys, values, leaf.offset)

    def capture(self, leaf, start: int, end: int) -> Arrays:
        keys, values = in_order(leaf, leaf.keys), in_order(leaf, leaf.values)
        count = min(end - start, leaf.max_size - (leaf.keep if end > leaf.max_size else 0))
        upto = keys.shape[2] - (leaf.offset - end)  # less than all where a call went on beyond `end`
        arrays = {"k": _last(keys[..., :upto, :], count), "v": _last(values[..., :upto, :], count)}
        if leaf.keep:
            # The head is in every record, so that a restore reads no block behind the window for a few tokens.
            arrays |= {"hk": keys[..., : leaf.keep, :], "hv": values[..., : leaf.keep, :]}
        return arrays

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        row, count = slice(index, index + 1), min(end - start, leaf.max_size)
        keys, values = (_last(batch_in_order(leaf, array[row]), count) for array in (leaf.keys, leaf.values))
        return {"k": keys, "v": values}

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        head = leaf.keep if position > leaf.max_size else 0
        count = min(position, leaf.max_size) - head
        keys, values = (_last(_joined(parts, name, count), count) for name in ("k", "v"))
        if head:
            keys = mx.concatenate([parts[-1]["hk"], keys], axis=2)
            values = mx.concatenate([parts[-1]["hv"], values], axis=2)
        set_window(leaf, keys, values, position)

    def _held(self, leaf, array: mx.array) -> mx.array:
        if array.shape[2] <= leaf.max_size:
            return array
        tail = _last(array, leaf.max_size - leaf.keep)
        return mx.concatenate([array[..., : leaf.keep, :], tail], axis=2) if leaf.keep else tail


class Chunk(_KeysAndValues):
    """`ChunkedKVCache`: the last `chunk_size` tokens, in order; the model trims the front when its next call begins."""

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.WINDOW, leaf.chunk_size, form="chunk")

    def alone(self, leaf) -> str:
        return "ChunkedKVCache has no batched form"

    def normalise(self, leaf) -> None:
        if leaf.keys is not None:
            keys, values = (_last(chunk_tokens(leaf, a), leaf.chunk_size) for a in (leaf.keys, leaf.values))
            set_chunk(leaf, keys, values, leaf.offset)

    def capture(self, leaf, start: int, end: int) -> Arrays:
        count = min(end - start, leaf.chunk_size)
        return {
            "k": _last(chunk_tokens(leaf, leaf.keys), count),
            "v": _last(chunk_tokens(leaf, leaf.values), count),
        }

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        raise TypeError(self.alone(leaf))

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        count = min(position, leaf.chunk_size)
        keys, values = (_last(_joined(parts, name, count), count) for name in ("k", "v"))
        set_chunk(leaf, keys, values, position)


class State:
    """`ArraysCache`: whatever the model keeps, as it is at the boundary; a slot may be empty."""

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.STATE)

    def alone(self, leaf) -> str:
        return ""

    def live(self, leaf) -> list[mx.array]:
        return [array for array in leaf.cache if array is not None]

    def normalise(self, leaf) -> None:
        pass

    def capture(self, leaf, start: int, end: int) -> Arrays:
        return {str(slot): array for slot, array in enumerate(leaf.cache) if array is not None}

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        return {name: array[index : index + 1] for name, array in self.capture(leaf, start, end).items()}

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        (arrays,) = parts
        if not arrays:
            raise StoredShort("nothing is stored")
        for slot in range(len(leaf.cache)):
            leaf.cache[slot] = arrays.get(str(slot))


class Latent:
    """deepseek_v41's own cache: a window, compressed groups and the open group. It cannot be cut, so it is state.

    The compressed groups grow with the prefix, and so does a record: one row for every `ratio` tokens.
    """

    def spec(self, leaf) -> LayerSpec:
        return LayerSpec(LayerKind.STATE, form=f"latent{leaf.window_size}")

    def alone(self, leaf) -> str:
        return f"{qualified_name(leaf)} has no batched form"

    def live(self, leaf) -> list[mx.array]:
        return list(self.capture(leaf, 0, 0).values())

    def normalise(self, leaf) -> None:
        pass

    def capture(self, leaf, start: int, end: int) -> Arrays:
        held = {name: getattr(leaf, name) for name in LATENT_FIELDS}
        return {name: array for name, array in held.items() if array is not None}

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        raise TypeError(self.alone(leaf))

    def restore(self, leaf, parts: list[Arrays], position: int) -> None:
        (arrays,) = parts
        if not arrays:
            raise StoredShort("nothing is stored")
        for name in LATENT_FIELDS:
            setattr(leaf, name, arrays.get(name))
        leaf.offset = position


_FULL, _WINDOW, _STATE = Full(), Window(), State()

_BY_CLASS: dict[type, Policy] = {
    KVCache: _FULL,
    BatchKVCache: _FULL,
    ConcatenateKVCache: _FULL,
    QuantizedKVCache: Quantized(),
    RotatingKVCache: _WINDOW,
    BatchRotatingKVCache: _WINDOW,
    ChunkedKVCache: Chunk(),
    ArraysCache: _STATE,
}


class OneByOne:
    """A policy for a copy of its class, rows of which decode in one call each."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.spec, self.live, self.normalise = policy.spec, policy.live, policy.normalise
        self.capture, self.restore = policy.capture, policy.restore

    def alone(self, leaf) -> str:
        return self._policy.alone(leaf) or f"{qualified_name(leaf)}: {ONE_BY_ONE}"

    def capture_row(self, leaf, index: int, start: int, end: int) -> Arrays:
        raise TypeError(self.alone(leaf))


# Classes of single model modules go by name: importing the module for its class alone would cost every start.
_OF_NAME = {kind.__name__: policy for kind, policy in _BY_CLASS.items()}
_BY_NAME: dict[str, Policy] = {LATENT_CACHE: Latent()} | {
    name: _OF_NAME[same] if name in JOINED else OneByOne(_OF_NAME[same]) for name, same in SAME_AS.items()
}
_BATCHED_BY_NAME: dict[str, Policy] = {name: _OF_NAME[same] for name, same in BATCHED.items()}


def policy_of(leaf) -> Policy | None:
    """The policy of a cache object, batched forms included; None if there is none. Subclasses are other classes."""
    name = qualified_name(leaf)
    return _BY_CLASS.get(type(leaf)) or _BY_NAME.get(name) or _BATCHED_BY_NAME.get(name)


def row_policy_of(leaf) -> Policy | None:
    """The policy of what a model gives for one row; mlx-vlm's batched forms have none as such."""
    name = qualified_name(leaf)
    return None if name in BATCHED else policy_of(leaf)


def is_state(leaf) -> bool:
    """Whether a cache object is a list of arrays, as recurrent layers have it."""
    return policy_of(leaf) is _STATE


def is_window(leaf) -> bool:
    """Whether a cache object holds the last tokens only."""
    policy = row_policy_of(leaf)
    return policy is not None and policy.spec(leaf).kind is LayerKind.WINDOW


def _joined(parts: list[Arrays], name: str, count: int) -> mx.array:
    """The arrays `name` of consecutive blocks as one, at least `count` tokens long."""
    arrays = [part[name] for part in parts if name in part]
    held = sum(array.shape[2] for array in arrays)
    if len(arrays) != len(parts) or held < count or not arrays:
        raise StoredShort(f"{held} of {count} tokens are stored")
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)


def _whole(parts: list[Arrays], name: str, position: int) -> mx.array:
    return _joined(parts, name, position)[..., :position, :]


def _last(array: mx.array, count: int) -> mx.array:
    return array[..., max(0, array.shape[2] - count) :, :]
