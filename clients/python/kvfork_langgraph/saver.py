"""A LangGraph checkpointer whose checkpoints are snapshots. Owns the life of the handles, and nothing of the storage.

A graph keeps the name of a KV snapshot in a channel of its own state, by default "kvfork"; any saver would store it
with every checkpoint, and hand it back on the way to an earlier one. What is missing then is that the name still means
something. `SnapshotSaver` wraps a saver and sees to that: a snapshot lives as long as a checkpoint that names it is
used, goes when the last such checkpoint is deleted, and where it went all the same (expired, another server) the
checkpoint comes back without the name, so that a node sends the whole text instead of failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvfork_client import Client, DeadlineExceeded, SnapshotInUse, Unavailable
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)

METADATA = "kvfork_snapshot"  # under this key a checkpoint's metadata names its snapshot, so that it can be looked for
AWAY = (Unavailable, DeadlineExceeded)  # nobody there, or somebody who does not answer within the client's `timeout`


class SnapshotSaver(BaseCheckpointSaver[Any]):
    """Checkpoints stored by `inner`, with the snapshots they name kept alive on `client`'s server.

    channel: of the graph's state; holds a snapshot's name, or nothing. ttl: seconds a snapshot is kept on from each
    time its checkpoint is stored or fetched; None: its own idle time again. The server being away fails no checkpoint;
    one that hangs holds a step up for the client's `timeout`, for ever if it has none. The client is shared with the
    graph's nodes; the async methods call it in a thread.
    """

    def __init__(
        self, inner: BaseCheckpointSaver[Any], client: Client, *, channel: str = "kvfork", ttl: float | None = None
    ) -> None:
        super().__init__(serde=inner.serde)
        self._inner, self._client = inner, client
        self._channel, self._ttl = channel, ttl

    # -- reading -------------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint; without the name of a snapshot that is gone."""
        found = self._inner.get_tuple(config)
        return None if found is None else self._usable(found)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = await self._inner.aget_tuple(config)
        return None if found is None else await asyncio.to_thread(self._usable, found)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """As they are stored: a look at the past keeps nothing alive."""
        return self._inner.list(config, filter=filter, before=before, limit=limit)

    def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        return self._inner.alist(config, filter=filter, before=before, limit=limit)

    def get_delta_channel_history(self, *, config: RunnableConfig, channels: Sequence[str]) -> Mapping[str, Any]:
        return self._inner.get_delta_channel_history(config=config, channels=channels)

    async def aget_delta_channel_history(self, *, config: RunnableConfig, channels: Sequence[str]) -> Mapping[str, Any]:
        return await self._inner.aget_delta_channel_history(config=config, channels=channels)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        stored = self._inner.put(config, checkpoint, self._naming(checkpoint, metadata), new_versions)
        self._lost(checkpoint)
        return stored

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        stored = await self._inner.aput(config, checkpoint, self._naming(checkpoint, metadata), new_versions)
        await asyncio.to_thread(self._lost, checkpoint)
        return stored

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self._inner.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await self._inner.aput_writes(config, writes, task_id, task_path)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Both threads name the same snapshots from then on."""
        self._inner.copy_thread(source_thread_id, target_thread_id)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self._inner.acopy_thread(source_thread_id, target_thread_id)

    # -- deleting: a snapshot goes with the last checkpoint that names it ----------------------------------------------

    def delete_thread(self, thread_id: str) -> None:
        self._forget(self._of_threads([thread_id]), lambda: self._inner.delete_thread(thread_id))

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        found = (one for run_id in run_ids for one in self._inner.list(None, filter={"run_id": run_id}))
        self._forget(found, lambda: self._inner.delete_for_runs(run_ids))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self._forget(self._of_threads(thread_ids), lambda: self._inner.prune(thread_ids, strategy=strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await asyncio.to_thread(lambda: self.prune(thread_ids, strategy=strategy))

    # -- what LangGraph asks of a saver besides ------------------------------------------------------------------------

    @property
    def config_specs(self) -> list[Any]:  # type: ignore[valid-type]  # `list` is a method above
        return self._inner.config_specs

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self._inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> SnapshotSaver:
        """A saver like this one around an inner saver that has it."""
        inner = self._inner.with_allowlist(extra_allowlist)
        return (
            self if inner is self._inner else SnapshotSaver(inner, self._client, channel=self._channel, ttl=self._ttl)
        )

    # -- the handles ---------------------------------------------------------------------------------------------------

    def _naming(self, checkpoint: Checkpoint, metadata: CheckpointMetadata) -> Any:
        name = checkpoint["channel_values"].get(self._channel)
        return {**metadata, METADATA: name} if name else metadata

    def _usable(self, found: CheckpointTuple) -> CheckpointTuple:
        if not self._lost(found.checkpoint):
            return found
        values = {key: value for key, value in found.checkpoint["channel_values"].items() if key != self._channel}
        return found._replace(checkpoint={**found.checkpoint, "channel_values": values})

    def _lost(self, checkpoint: Checkpoint) -> bool:
        """Gives the checkpoint's snapshot more time; True if there is one no more."""
        name = checkpoint["channel_values"].get(self._channel)
        if not name:
            return False
        try:
            return bool(self._client.extend_snapshots([name], self._ttl).missing)
        except AWAY:  # whether it is there is not known; whoever uses it will be told
            return False

    def _of_threads(self, thread_ids: Iterable[str]) -> Iterator[CheckpointTuple]:
        for thread_id in thread_ids:
            yield from self._inner.list({"configurable": {"thread_id": thread_id}})

    def _forget(self, found: Iterable[CheckpointTuple], delete: Callable[[], None]) -> None:
        """Deletes checkpoints, among them some of those `found`, and the snapshots that no other one names."""
        names = {str(one.metadata[METADATA]) for one in found if METADATA in one.metadata}  # type: ignore[literal-required]
        delete()
        for name in sorted(names):
            if any(True for _ in self._inner.list(None, filter={METADATA: name}, limit=1)):
                continue
            try:
                self._client.delete_snapshot(name, allow_missing=True)
            except (SnapshotInUse, *AWAY):  # its time to live ends it
                continue
