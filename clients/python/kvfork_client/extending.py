"""More time to live for any number of snapshots, wherever they are: which calls it takes, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import calls, encode
from .errors import KVForkError
from .messages import Seconds, SnapshotRef
from .values import Extended

MAX_NAMES_PER_EXTEND = 1000  # the contract's bound on ExtendSnapshotsRequest.names


def extend_calls(refs: Iterable[SnapshotRef], *, ttl: Seconds | None) -> list[calls.Call[Extended]]:
    """One call per instance and thousand names, to be made all; `join_extended` puts together what comes of them."""
    by_instance: dict[str, list[SnapshotRef]] = {}
    for ref in refs:
        by_instance.setdefault(encode.instance_of(ref), []).append(ref)
    return [
        calls.extend_snapshots(there[start : start + MAX_NAMES_PER_EXTEND], ttl=ttl)
        for there in by_instance.values()
        for start in range(0, len(there), MAX_NAMES_PER_EXTEND)
    ]


def join_extended(parts: Sequence[Extended | KVForkError]) -> Extended:
    """Raises the first error, which by then has kept no other call from being made."""
    whole: list[Extended] = []
    for part in parts:
        if isinstance(part, KVForkError):
            raise part
        whole.append(part)
    return Extended(
        snapshots=tuple(info for part in whole for info in part.snapshots),
        missing=tuple(name for part in whole for name in part.missing),
    )
