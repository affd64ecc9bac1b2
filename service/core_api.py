"""The seam between gRPC and the rest: what `service.rpc` needs from `service.core`. Owns no behaviour."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from service.events import (
    Counted,
    Created,
    Event,
    ExportPiece,
    Forked,
    ImportCheck,
    Imported,
    ModelView,
    RolledBack,
    RowView,
    ServerView,
    SnapshotView,
    StatsView,
    Watched,
)
from service.request import (
    CountTokensCall,
    CreateSnapshotCall,
    ExportCall,
    ForkCall,
    GenerateCall,
    RollbackCall,
    SaveOptions,
    SnapshotChange,
)


class Observer(Protocol):
    """Hears of calls as they begin and end, and of how readers keep up."""

    def call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> AbstractContextManager[Callable[[str], None]]:
        """Around one call ("kvfork.v1.InferenceService/Generate"); its value is to be told the status code's name."""
        ...

    def waited(self, seconds: float) -> None:
        """A stream's write has taken so long."""
        ...

    def gave_up(self) -> None:
        """A generation was ended since nobody read it."""
        ...

    def refused(self, reason: str) -> None:
        """A call ends with an error that has this reason, at the door or behind it."""
        ...


class Inference(Protocol):
    """Everything a servicer may ask for. Runs on the asyncio loop; raises `service.errors.CallError` only.

    `owner` is who calls; every name is looked up within it. Cancelling the awaiting task (client gone, deadline)
    frees the work within one scheduler step.
    """

    @property
    def observer(self) -> Observer:
        """Who wants to hear of calls."""
        ...

    def generate(self, call: GenerateCall, owner: str, /) -> AsyncIterator[Event]:
        """Started, then Progress, Marked and Delta, then Finished. Closing the iterator cancels the generation."""
        ...

    async def stop_generation(self, generation: str, owner: str) -> bool:
        """Ends a running generation cleanly; False if it was unknown or had ended."""
        ...

    async def create_snapshot(self, call: CreateSnapshotCall, owner: str, /) -> Created: ...

    async def fork(self, call: ForkCall, owner: str, /) -> Forked: ...

    async def rollback(self, call: RollbackCall, owner: str, /) -> RolledBack: ...

    async def count_tokens(self, call: CountTokensCall, owner: str) -> Counted: ...

    async def until_named(self, name: str, owner: str) -> None:
        """Waits, not for long, while a cancelled call is still saving `name`."""
        ...

    def get_snapshot(self, name: str, owner: str) -> SnapshotView: ...

    def snapshot_tokens(self, name: str, owner: str) -> Sequence[int]: ...

    def list_snapshots(
        self, owner: str, *, after: tuple[float, str] | None, limit: int, labels: dict[str, str], parent: str
    ) -> list[SnapshotView]:
        """Up to `limit` snapshots oldest first, those strictly after (create_time, name)."""
        ...

    def watch_snapshots(self, owner: str, labels: dict[str, str], resume_token: str) -> AsyncIterator[Watched]:
        """What there is, Synced, then changes; ends by an error alone. Closing the iterator ends the watch."""
        ...

    def end_watches(self) -> None:
        """All watches end: the server goes."""
        ...

    def update_snapshot(self, change: SnapshotChange, owner: str) -> SnapshotView: ...

    def extend_snapshots(
        self, names: Sequence[str], ttl: float | None, owner: str
    ) -> tuple[list[SnapshotView], list[str]]:
        """(extended, missing)."""
        ...

    async def delete_snapshot(
        self, name: str, owner: str, *, descendants: bool, stop_active: bool, allow_missing: bool
    ) -> list[str]:
        """Names dropped."""
        ...

    def export_snapshot(self, call: ExportCall, owner: str, /) -> AsyncIterator[ExportPiece]:
        """A snapshot's bytes for another instance, in order. Closing the iterator lets go of what it reads."""
        ...

    async def check_import(self, manifest: bytes, owner: str, /) -> ImportCheck:
        """What of an export is here already; `manifest` is its beginning."""
        ...

    async def import_snapshot(self, options: SaveOptions, data: AsyncIterator[bytes], owner: str, /) -> Imported:
        """Takes a snapshot in, all or nothing."""
        ...

    def server(self) -> ServerView: ...

    def models(self) -> list[ModelView]: ...

    def model(self, name: str) -> ModelView:
        """`name` "" means the only one; raises ModelNotFound."""
        ...

    def stats(self) -> StatsView:
        """Of the whole server, for admins."""
        ...

    def owner_stats(self, owner: str) -> StatsView:
        """Of one owner's snapshots and calls; what belongs to all is 0."""
        ...

    def rows(self, owner: str) -> list[RowView]:
        """The owner's sequences that run or wait, oldest first."""
        ...

    async def trim_cache(self, *, memory_bytes: int | None, disk_bytes: int | None) -> StatsView:
        """Evicts state down to these sizes once, as far as pins and uses allow; None leaves a tier alone."""
        ...

    def names_open(self) -> bool:
        """Whether snapshots can be asked for: their store is open, or there are none before the model is loaded."""
        ...

    def engine_alive(self) -> bool:
        """True while the model thread makes progress (or idles); what health is made of."""
        ...

    def start_draining(self) -> None:
        """New inference calls are refused with Draining from now on."""
        ...

    async def finish_running(self, timeout: float) -> None:
        """Stops running generations as StopGeneration does and waits until they have delivered, or time is up."""
        ...
