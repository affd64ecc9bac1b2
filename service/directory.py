"""SnapshotService's half: find, list, change and drop names. Needs the store, never the model."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.snapshots import GoneReason
from service.errors import SnapshotNotFound
from service.events import SnapshotView
from service.request import SnapshotChange
from service.runtime import Runtime


class Directory:
    """Names of all owners, each seen by its own owner only."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    async def until_named(self, name: str, owner: str) -> None:
        await self._rt.until_named(owner, name)

    def get_snapshot(self, name: str, owner: str) -> SnapshotView:
        handles = self._rt.need_store(name)
        return handles.view(handles.find(name, owner))

    def snapshot_tokens(self, name: str, owner: str) -> Sequence[int]:
        return self._rt.shown(self._rt.need_store(name).find(name, owner).node.all_tokens())

    def list_snapshots(
        self, owner: str, *, after: tuple[float, str] | None, limit: int, labels: dict[str, str], parent: str
    ) -> list[SnapshotView]:
        self._rt.check_names()
        if self._rt.handles is None or self._rt.loaded is None:
            return []
        wanted_parent = parent.removeprefix("snapshots/")
        found: list[SnapshotView] = []
        for snapshot in self._rt.loaded.cache.snapshots(owner):
            if len(found) == limit:
                break
            if after is not None and (snapshot.created, f"snapshots/{snapshot.id}") <= after:
                continue
            if wanted_parent and snapshot.parent != wanted_parent:
                continue
            if labels.items() <= snapshot.labels.items():
                found.append(self._rt.handles.view(snapshot))
        return found

    def update_snapshot(self, change: SnapshotChange, owner: str) -> SnapshotView:
        handles = self._rt.need_store(change.name)
        assert self._rt.loaded is not None
        snapshot = handles.find(change.name, owner)
        handles.update(
            snapshot,
            labels=dict(change.labels) if change.labels is not None else None,
            expires=change.expire_time,
            ttl=change.ttl,
            pinned=change.pinned,
        )
        return handles.view(snapshot)

    def extend_snapshots(
        self, names: Sequence[str], ttl: float | None, owner: str
    ) -> tuple[list[SnapshotView], list[str]]:
        extended: list[SnapshotView] = []
        missing: list[str] = []
        for name in names:
            try:
                handles = self._rt.need_store(name)
                snapshot = handles.find(name, owner)
            except SnapshotNotFound:
                missing.append(name)
                continue
            assert self._rt.loaded is not None
            self._rt.loaded.cache.extend(snapshot, ttl)
            extended.append(handles.view(snapshot))
        return extended, missing

    async def delete_snapshot(
        self, name: str, owner: str, *, descendants: bool, stop_active: bool, allow_missing: bool
    ) -> list[str]:
        try:
            handles = self._rt.need_store(name)
            snapshot = handles.find(name, owner)
        except SnapshotNotFound:
            if allow_missing:
                return []
            raise
        assert self._rt.loaded is not None
        going = [snapshot]
        if descendants:
            going += [s for s in self._rt.loaded.cache.descendants(snapshot) if not s.pinned]
        if stop_active:
            self._rt.stop_users({s.id for s in going}, owner)
        else:
            for each in going:
                handles.refuse_if_busy(each)
        for each in going:
            handles.delete(each, GoneReason.DELETED, in_use_ok=True)
        await self._rt.written()
        return [f"snapshots/{s.id}" for s in going]
