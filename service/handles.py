"""Snapshot names as callers see them. Owns name forms, views and the translation of the cache's errors.

Runs on the event loop; every method is short and waits for nothing but the cache's lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Keep, PrefixCache
from kvcache.snapshots import (
    GoneReason,
    GoneSnapshot,
    LostSnapshot,
    NotDurableSnapshot,
    PinnedBytesLimit,
    Snapshot,
    SnapshotBusy,
    SnapshotError,
    SnapshotLimit,
    TakenSnapshotId,
    UnknownSnapshot,
)
from kvcache.tree import Node
from service.errors import SnapshotIdTaken, SnapshotInUse, SnapshotNotFound, SnapshotQuota, Unsupported
from service.events import Residency, SnapshotView
from service.request import Durability, SaveOptions

RESOURCE = "kvfork.v1.Snapshot"

_GONE = {
    GoneReason.DELETED: "was deleted",
    GoneReason.ROLLED_BACK: "was let go of by a rollback",
    GoneReason.EXPIRED: "expired",
}


@contextmanager
def translated() -> Iterator[None]:
    """The cache's errors as the contract's."""
    try:
        yield
    except NotDurableSnapshot as error:
        name = full_name(error.snapshot_id)
        raise SnapshotNotFound(
            f"snapshot {name} was not durable and ended with the process that made it",
            hint="create it again from its tokens; DURABILITY_DISK keeps one across restarts",
            reason="SNAPSHOT_NOT_DURABLE",
            metadata={"bootId": error.boot_id},
            resource=(RESOURCE, name),
        ) from None
    except LostSnapshot as error:
        name = full_name(error.snapshot_id)
        raise SnapshotNotFound(
            f"snapshot {name} was durable, and the store does not hold what it should: files are missing or damaged",
            hint="create it again from its tokens, or have the store's files put back; `kvfork store check` names them",
            reason="SNAPSHOT_LOST",
            metadata={"snapshot": name},
            resource=(RESOURCE, name),
        ) from None
    except UnknownSnapshot as error:
        name = full_name(error.snapshot_id)
        raise SnapshotNotFound(
            f"there is no snapshot {name}", metadata={"snapshot": name}, resource=(RESOURCE, name)
        ) from None
    except GoneSnapshot as error:
        name = full_name(error.snapshot_id)
        when = datetime.fromtimestamp(error.when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        key = "expireTime" if error.reason is GoneReason.EXPIRED else "goneTime"
        raise SnapshotNotFound(
            f"snapshot {name} {_GONE[error.reason]} at {when}",
            hint="create it again from its tokens",
            reason=error.reason.value,
            metadata={key: when, "snapshot": name},
            resource=(RESOURCE, name),
        ) from None
    except TakenSnapshotId as error:
        name = full_name(error.snapshot_id)
        raise SnapshotIdTaken(
            f"{name} names another prefix",
            hint="choose another snapshot_id",
            metadata={"snapshot": name},
            resource=(RESOURCE, name),
        ) from None
    except SnapshotLimit as error:
        raise SnapshotQuota(
            str(error),
            hint="delete snapshots, or unpin some" if error.pinned else "delete snapshots, or let them expire",
            reason="PIN_QUOTA" if error.pinned else "SNAPSHOT_QUOTA",
            metadata={"limit": str(error.limit)},
        ) from None
    except PinnedBytesLimit as error:
        raise SnapshotQuota(
            str(error),
            hint="unpin or delete some",
            reason="PIN_QUOTA",
            metadata={"limitBytes": str(error.limit), "pinnedBytes": str(error.have), "neededBytes": str(error.more)},
        ) from None
    except SnapshotBusy as error:
        name = full_name(error.snapshot_id)
        raise SnapshotInUse(
            str(error),
            hint="wait, or set stop_active",
            metadata={"activeUses": str(error.uses)},
            resource=(RESOURCE, name),
        ) from None


def full_name(snapshot_id: str) -> str:
    """snapshots/{id}."""
    return f"snapshots/{snapshot_id}"


def bare_id(name: str) -> str:
    """The id of snapshots/{id}."""
    return name.removeprefix("snapshots/")


def keep_of(options: SaveOptions, *, durable_store: bool) -> Keep:
    """How the cache is asked to keep a snapshot. Raises Unsupported for what only a durable store can promise."""
    durable = options.durability is Durability.DISK
    if durable and not durable_store:
        raise Unsupported(
            "snapshots that outlive the server need a durable store, and this server has none",
            hint="leave durability unset, or start the server with --store-dir",
            reason="DURABILITY_UNSUPPORTED",
        )
    return Keep(
        snapshot_id=options.snapshot_id,
        ttl=options.ttl,
        pinned=options.pinned,
        labels=options.labels,
        durable=durable,
        lineage=options.lineage,
        origins=options.origins,
    )


class Handles:
    """Names and views over one model's prefix cache."""

    def __init__(self, cache: PrefixCache, model_name: str, instance: str) -> None:
        self._cache = cache
        self._model_name = model_name
        self._instance = instance

    def _keep(self, options: SaveOptions) -> Keep:
        return keep_of(options, durable_store=self._cache.store.durable)

    def has(self, snapshot_id: str, owner: str) -> bool:
        """Whether a caller's chosen id names a snapshot already."""
        try:
            self._cache.snapshot(owner, snapshot_id)
        except SnapshotError:
            return False
        return True

    def find(self, name: str, owner: str) -> Snapshot:
        with translated():
            return self._cache.snapshot(owner, bare_id(name))

    @contextmanager
    def using(self, name: str, owner: str) -> Iterator[Snapshot]:
        """The snapshot, in use for the length of the block."""
        with translated():
            snapshot = self._cache.use(owner, bare_id(name))
        try:
            yield snapshot
        finally:
            self._cache.unuse(snapshot)

    def add(self, owner: str, node: Node, options: SaveOptions, parent: Snapshot | None, *, call: str = "") -> Snapshot:
        """Names `node`, taking over the caller's hold on it. `call` as `NamedSnapshots.add_snapshot` has it.

        A chosen id that names this very prefix is returned, with its state again if that was gone.
        """
        try:
            with translated():
                try:
                    return self._cache.add_snapshot(owner, node, self._keep(options), parent=parent, call=call)
                except TakenSnapshotId:
                    there = self._cache.snapshot(owner, options.snapshot_id)
                    if there.node.content != node.content:
                        raise
                    self._cache.regain(there, node)
                    return there
        finally:
            self._cache.let_go(node)

    def check_new(self, owner: str, wanted: list[SaveOptions]) -> None:
        """Raises before any work is done if the new names could not be kept. A retry needs no room of its own."""
        for options in wanted:
            self._keep(options)
        new = [options for options in wanted if not self.has(options.snapshot_id, owner)]
        with translated():
            self._cache.check_room(owner, count=len(new), pinned=sum(options.pinned for options in new))

    def check_id(self, owner: str, options: SaveOptions, tokens: array[int], *, grows: bool = False) -> None:
        """Raises SnapshotIdTaken if the chosen id names another prefix than `tokens`; `grows`: than one behind them."""
        if not self.has(options.snapshot_id, owner):
            return
        have = self._cache.snapshot(owner, options.snapshot_id).node.all_tokens()
        if (have[: len(tokens)] if grows else have) != tokens:
            with translated():
                raise TakenSnapshotId(options.snapshot_id, f"snapshot id {options.snapshot_id} is taken")

    def delete(self, snapshot: Snapshot, reason: GoneReason, *, in_use_ok: bool) -> None:
        with translated():
            self._cache.delete(snapshot, reason, in_use_ok=in_use_ok)

    def refuse_if_busy(self, snapshot: Snapshot, *, own_uses: int = 0) -> None:
        """Raises SnapshotInUse while calls read from it, the caller's own not counted."""
        with translated():
            if snapshot.uses > own_uses:
                raise SnapshotBusy(snapshot.id, snapshot.uses - own_uses)

    def update(
        self,
        snapshot: Snapshot,
        *,
        labels: dict[str, str] | None,
        expires: float | None,
        ttl: float | None,
        pinned: bool | None,
    ) -> None:
        with translated():
            self._cache.update(snapshot, labels=labels, expires=expires, ttl=ttl, pinned=pinned)

    def view(self, snapshot: Snapshot) -> SnapshotView:
        state = self._cache.state_of(snapshot)
        if state.missing >= BLOCK_TOKENS or state.restorable == 0:
            residency = Residency.TOKENS
        elif state.missing or state.disk_tokens:
            residency = Residency.DISK
        else:
            residency = Residency.MEMORY
        return SnapshotView(
            name=full_name(snapshot.id),
            parent=full_name(snapshot.parent) if snapshot.parent else "",
            model=self._model_name,
            model_fingerprint=self._cache.fingerprint,
            token_count=snapshot.token_count,
            image_spans=tuple((span.start, span.end) for span in snapshot.images),
            checkpointed_tokens=state.checkpointed,
            prefix_hash=bytes(snapshot.node.content),
            residency=residency,
            durable=state.on_disk,
            expire_time=None if snapshot.pinned else snapshot.expires,
            pinned=snapshot.pinned,
            labels=tuple(sorted(snapshot.labels.items())),
            create_time=snapshot.created,
            last_use_time=snapshot.last_use,
            exclusive_bytes=state.exclusive_bytes,
            instance=self._instance,
            active_uses=snapshot.uses,
            state_revision=snapshot.revision,
        )
