"""Wrong restores, each of which must make the suite fail: what a store or a restore could get wrong, made on purpose.

A mutation changes the records of one kind in every restore that it can change. Imports MLX: only once the process is
prepared for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import mlx.core as mx

from kvcache.mlx_arrays import from_payload, to_payload
from kvcache.records import Buffer, RecordKind
from service.plan import Restored

Arrays = dict[str, mx.array]

NUDGE = 1e-6

FULL, WINDOW, STATE, LOGITS = RecordKind.FULL, RecordKind.WINDOW, RecordKind.STATE, RecordKind.LOGITS


@dataclass(frozen=True, slots=True)
class Mutation:
    """One way to be wrong about the records of one kind of layer.

    `change` is given a restore's records of that kind, oldest first, and those of earlier restores. It returns other
    ones, or None where there is nothing that it could get wrong.
    """

    kind: RecordKind
    name: str
    change: Callable[[list[Arrays], list[Arrays]], list[Arrays] | None]

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.name}"


class Mutating:
    """One mutation over all restores of a run; `applied` counts those whose bytes it changed."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation
        self.applied = 0
        self._earlier: list[Arrays] = []

    def __call__(self, restored: Restored) -> Restored:
        places = [at for at, kind in enumerate(restored.kinds) if kind is self.mutation.kind]
        records = [from_payload(restored.payloads[at]) for at in places]
        if not records:
            return restored
        changed = self.mutation.change([dict(record) for record in records], self._earlier)
        self._earlier += records
        if changed is None:
            return restored
        payloads: list[Buffer] = list(restored.payloads)
        for at, arrays in zip(places, changed, strict=True):
            payloads[at] = to_payload(arrays)
        if all(bytes(ours) == bytes(theirs) for ours, theirs in zip(payloads, restored.payloads, strict=True)):
            return restored
        self.applied += 1
        return replace(restored, payloads=tuple(payloads))


def _twins(records: list[Arrays]) -> tuple[int, int] | None:
    """The first and the last record of equal size; else the first and the last."""
    for later in range(len(records) - 1, 0, -1):
        for earlier in range(later):
            if _alike(records[earlier], records[later]):
                return earlier, later
    return (0, len(records) - 1) if len(records) > 1 else None


def _alike(ours: Arrays, theirs: Arrays) -> bool:
    return {name: array.shape for name, array in ours.items()} == {name: a.shape for name, a in theirs.items()}


def _swapped(records: list[Arrays], _: list[Arrays]) -> list[Arrays] | None:
    if (twins := _twins(records)) is None:
        return None
    one, other = twins
    records[one], records[other] = records[other], records[one]
    return records


def _doubled(records: list[Arrays], _: list[Arrays]) -> list[Arrays] | None:
    if (twins := _twins(records)) is None:
        return None
    one, other = twins
    records[other] = records[one]
    return records


def _stale(records: list[Arrays], earlier: list[Arrays]) -> list[Arrays] | None:
    """In the last record's place the newest one of its size that is another."""
    last = records[-1]
    for record in reversed(earlier):
        if _alike(record, last) and bytes(to_payload(record)) != bytes(to_payload(last)):
            return [*records[:-1], record]
    return None


def _over_tokens(move: Callable[[mx.array, int], mx.array]) -> Callable[[list[Arrays], list[Arrays]], list[Arrays]]:
    """Every array of the last record moved along its tokens; state, which has none, along its longest axis."""

    def change(records: list[Arrays], _: list[Arrays]) -> list[Arrays]:
        return [*records[:-1], {name: move(array, _axis(name, array)) for name, array in records[-1].items()}]

    return change


def _axis(name: str, array: mx.array) -> int:
    keys_or_values = name.rsplit(".", 1)[-1][:1] in ("k", "v", "h")
    return array.ndim - 2 if keys_or_values else max(range(array.ndim), key=lambda axis: array.shape[axis])


def _roll(array: mx.array, axis: int) -> mx.array:
    return mx.roll(array, 1, axis=axis)


def _turn(array: mx.array, axis: int) -> mx.array:
    """As a ring lies that was not brought in order: the newest tokens first."""
    return mx.roll(array, array.shape[axis] // 2, axis=axis)


def _nudged(records: list[Arrays], _: list[Arrays]) -> list[Arrays] | None:
    """One number of one layer, in the first record: the oldest tokens, which weigh least in what comes after."""
    floats = [name for name, array in records[0].items() if mx.issubdtype(array.dtype, mx.floating) and array.size]
    if not floats:
        return None
    array = records[0][floats[-1]]
    flat = array.reshape(-1)
    least = int(mx.argmin(mx.abs(flat)).item())  # so that the sum is another number in any type
    flat[least] = flat[least] + NUDGE
    records[0][floats[-1]] = flat.reshape(array.shape)
    return records


def _layer(records: list[Arrays], _: list[Arrays]) -> list[Arrays] | None:
    """Two layers whose records are of one size change places."""
    last = records[-1]
    by_layer: dict[str, Arrays] = {}
    for name, array in last.items():
        number, _dot, own = name.partition(".")
        by_layer.setdefault(number, {})[own] = array
    numbers = list(by_layer)
    for one, other in itertools.pairwise(numbers):
        if _alike(by_layer[one], by_layer[other]):
            pairs = ((one, by_layer[other]), (other, by_layer[one]))
            moved = {f"{number}.{own}": array for number, arrays in pairs for own, array in arrays.items()}
            return [*records[:-1], {**last, **moved}]
    return None


_MOVED, _TURNED = _over_tokens(_roll), _over_tokens(_turn)

MUTATIONS: tuple[Mutation, ...] = (
    *(Mutation(kind, "swapped between blocks", _swapped) for kind in (FULL, WINDOW)),
    *(Mutation(kind, "doubled", _doubled) for kind in (FULL, WINDOW)),
    *(Mutation(kind, "stale", _stale) for kind in (FULL, WINDOW, STATE, LOGITS)),
    *(Mutation(kind, "shifted by one", _MOVED) for kind in (FULL, WINDOW, STATE, LOGITS)),
    *(Mutation(kind, f"nudged by {NUDGE:g}", _nudged) for kind in (FULL, WINDOW, STATE, LOGITS)),
    *(Mutation(kind, "of another layer", _layer) for kind in (FULL, WINDOW, STATE)),
    Mutation(WINDOW, "in a ring's order", _TURNED),
)


def of_kinds(kinds: Iterable[RecordKind]) -> list[Mutation]:
    """Those that a model with these kinds of records can suffer."""
    have = {*kinds, LOGITS}
    return [mutation for mutation in MUTATIONS if mutation.kind in have]
