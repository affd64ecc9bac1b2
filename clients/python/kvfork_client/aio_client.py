"""The client for an event loop. Thin: every method is one call of `calls.py` carried out by an `AsyncConnection`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from . import calls
from .asynchronous import AsyncGeneration, AsyncSnapshot, created
from .connection import AsyncConnection
from .encode import instance_of
from .endpoint import Tls, endpoint, routed
from .errors import KVForkError
from .exchange_wire import export_request
from .exchanging import AsyncExport, async_imported
from .extending import extend_calls, join_extended
from .generating import GenerateOptions, generate_request
from .messages import InputLike, Mark, SaveOptions, Seconds, SnapshotRef
from .values import (
    CacheStats,
    Extended,
    HealthStatus,
    ImportCheck,
    Imported,
    ModelInfo,
    Plan,
    ServerInfo,
    SnapshotInfo,
    TokenCount,
)
from .watch_wire import watch_request
from .watching import AsyncWatch


class AsyncClient:
    """A connection to one server: "host:port" or "unix:/path". For the tasks of one event loop.

    token: sent as a bearer token. tls: True or a `Tls`; by default plaintext. timeout: seconds for calls that give none
    of their own. retry: repeat calls that found the server unavailable, up to 4 times, before any reply began.
    instance: the one that a proxy in front of several servers is to send calls to; see `routed`.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: Tls | bool | None = None,
        timeout: float | None = None,
        retry: bool = True,
        instance: str = "",
    ) -> None:
        where = endpoint(target, token=token, tls=tls, retry=retry)
        self._connection = AsyncConnection(routed(where, instance=instance, session=None), timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connection.where.target}>"

    async def close(self) -> None:
        """Cancels what runs and closes the connection. Snapshots stay on the server."""
        await self._connection.close()

    def with_token(self, token: str | None) -> AsyncClient:
        """A client that calls in another name over this one's connection: for a process that serves several callers.

        Closing it does nothing: the connection is closed with this one. Raises ValueError for a token as the
        constructor does.
        """
        made = object.__new__(AsyncClient)
        made._connection = self._connection.in_name_of(token)
        return made

    def routed(self, *, instance: str | None = None, session: str | None = None) -> AsyncClient:
        """A client over this one's connection whose calls a proxy in front of several servers sends to one of them.

        instance: that server, for every call that names no handle of another one: a name from elsewhere, listings,
        watches, server info. session: whichever server, but the same for all calls that say the same. Empty: no wish.
        A handle that came from a server goes there by itself. Closing does nothing, as with `with_token`.
        """
        made = object.__new__(AsyncClient)
        made._connection = self._connection.routed(instance, session)
        return made

    def generate(
        self,
        input: InputLike | None = None,
        parent: SnapshotRef | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Starts a generation from scratch or from a snapshot; see `GenerateOptions`.

        Errors come out of the returned object, the first time it is read.
        """
        request = generate_request(input, parent, **options)
        source = parent if isinstance(parent, AsyncSnapshot) else None
        return AsyncGeneration(
            self._connection, request.SerializeToString(), timeout, source=source, instance=instance_of(parent)
        )

    async def create_snapshot(
        self,
        input: InputLike,
        parent: SnapshotRef | None = None,
        *,
        model: str = "",
        marks: Sequence[Mark] = (),
        options: SaveOptions | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncSnapshot:
        """Prefills an input and names the result; `.marks` holds the snapshots of the marks."""
        call = calls.create_snapshot(input, parent, model=model, options=options, marks=marks, request_id=request_id)
        return created(self._connection, await self._connection.unary(call, timeout))

    def snapshot(self, name: str) -> AsyncSnapshot:
        """A handle for a name known from elsewhere. Asks the server nothing: its facts are empty until `refresh()`."""
        return AsyncSnapshot(self._connection, SnapshotInfo(name=name))

    async def get_snapshot(self, name: SnapshotRef, *, timeout: float | None = None) -> AsyncSnapshot:
        """Looks a snapshot up. Raises SnapshotNotFound."""
        return AsyncSnapshot(self._connection, await self._connection.unary(calls.get_snapshot(name), timeout))

    async def list_snapshots(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        parent: SnapshotRef | None = None,
        page_size: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[AsyncSnapshot]:
        """The caller's snapshots, oldest first, page after page as they are needed. `timeout` is per page."""
        token = ""
        while True:
            call = calls.list_snapshots(token, labels=labels, parent=parent, page_size=page_size)
            page = await self._connection.unary(call, timeout)
            for info in page.items:
                yield AsyncSnapshot(self._connection, info)
            token = page.next_page_token
            if not token:
                return

    def watch(
        self, *, labels: Mapping[str, str] | None = None, resume_token: str = "", timeout: float | None = None
    ) -> AsyncWatch:
        """Follows the caller's snapshots: what there is, Synced, then what happens. Ends by an error, or `cancel`.

        Behind a `resume_token` of the same labels: Synced at once, then all that happened since. Errors come out of the
        returned object. `timeout` is that of the whole watch; None, whatever the client's own, is for ever.
        """
        return AsyncWatch(self._connection, watch_request(labels, resume_token), timeout, resume_token)

    async def extend_snapshots(
        self, names: Iterable[SnapshotRef], ttl: Seconds | None = None, *, timeout: float | None = None
    ) -> Extended:
        """Keeps any number of snapshots alive. Missing names are told, not raised.

        One call for each server that holds some of them; an error of one is raised once all were asked.
        """
        parts: list[Extended | KVForkError] = []
        for call in extend_calls(names, ttl=ttl):
            try:
                part = await self._connection.unary(call, timeout)
                parts.append(part)
            except KVForkError as error:  # handles of other servers live on all the same
                parts.append(error)
        return join_extended(parts)

    async def delete_snapshot(
        self,
        name: SnapshotRef,
        *,
        descendants: bool = False,
        stop_active: bool = False,
        allow_missing: bool = False,
        timeout: float | None = None,
    ) -> tuple[str, ...]:
        """Drops a name and returns what was dropped; state shared with others stays."""
        call = calls.delete_snapshot(
            name, descendants=descendants, stop_active=stop_active, allow_missing=allow_missing
        )
        return await self._connection.unary(call, timeout)

    def export_snapshot(
        self,
        name: SnapshotRef,
        *,
        held: Iterable[bytes] = (),
        manifest_only: bool = False,
        timeout: float | None = None,
    ) -> AsyncExport:
        """Writes a snapshot out for another server: iterate the result for its bytes. Errors come out of it.

        `held`: records to leave out, as the other server's `check_import` names them.
        """
        request = export_request(name, held, manifest_only=manifest_only)
        return AsyncExport(self._connection, request, timeout, instance_of(name))

    async def check_import(self, manifest: bytes, *, timeout: float | None = None) -> ImportCheck:
        """What of an export is here already. `manifest`: all bytes of an export with `manifest_only`."""
        return await self._connection.unary(calls.check_import(manifest), timeout)

    async def import_snapshot(
        self,
        data: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        options: SaveOptions | None = None,
        timeout: float | None = None,
    ) -> Imported[AsyncSnapshot]:
        """Takes a snapshot in, all or nothing. `data`: an export, whole or in pieces of any size.

        What `options` leave out is what it had: id, ttl, labels. Raises ExportDamaged, FingerprintDiffers and others.
        """
        return await async_imported(self._connection, data, options, timeout)

    async def copy_snapshot(
        self,
        name: SnapshotRef,
        to: AsyncClient,
        *,
        options: SaveOptions | None = None,
        timeout: float | None = None,
    ) -> Imported[AsyncSnapshot]:
        """Brings a snapshot to another server; only what is missing there travels. Both need the same exchange key.

        Behind a proxy `to` is whichever server answers first, if it is not routed to one. `timeout` is that of each of
        the calls that it takes.
        """
        there = await to._one_server(timeout)
        async with self.export_snapshot(name, manifest_only=True, timeout=timeout) as manifest:
            found = await there.check_import(await manifest.read(), timeout=timeout)
        source = manifest.summary.snapshot if manifest.summary is not None else name  # says which server holds it
        async with self.export_snapshot(source, held=found.held, timeout=timeout) as export:
            return await there.import_snapshot(export, options=options, timeout=timeout)

    async def _one_server(self, timeout: float | None) -> AsyncClient:
        """For calls that belong together: a proxy may send each of them elsewhere."""
        if self._connection.where.instance:
            return self
        return self.routed(instance=(await self.server_info(timeout=timeout)).instance)

    async def count_tokens(
        self,
        input: InputLike,
        parent: SnapshotRef | None = None,
        *,
        model: str = "",
        rendered: bool = False,
        timeout: float | None = None,
    ) -> TokenCount:
        """Renders and tokenizes without running the model. `rendered`: also return the text and the ids."""
        return await self._connection.unary(calls.count_tokens(input, parent, model=model, rendered=rendered), timeout)

    async def plan(
        self,
        input: InputLike | None = None,
        parent: SnapshotRef | None = None,
        *,
        model: str = "",
        branches: int = 1,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Plan:
        """What a call would meet now: restored and computed tokens, TTFT, whether it would be admitted. Runs nothing.

        `branches`: so many calls that go on from there at once, as after a fork.
        """
        call = calls.plan(input, parent, model=model, branches=branches, max_tokens=max_tokens)
        return await self._connection.unary(call, timeout)

    async def stop(self, generation: str, *, timeout: float | None = None) -> bool:
        """Ends a generation by name ("generations/…"), cleanly. False if it had ended already."""
        return await self._connection.unary(calls.stop(generation), timeout)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """All models, loaded or not."""
        found: list[ModelInfo] = []
        token = ""
        while True:
            page = await self._connection.unary(calls.list_models(token), timeout)
            found.extend(page.items)
            token = page.next_page_token
            if not token:
                return found

    async def model(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """One model; empty: the only one."""
        return await self._connection.unary(calls.get_model(name), timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Versions, limits, features."""
        return await self._connection.unary(calls.server_info(), timeout)

    async def cache_stats(self, *, timeout: float | None = None) -> CacheStats:
        """Scheduler, memory and store in numbers."""
        return await self._connection.unary(calls.cache_stats(), timeout)

    async def trim_cache(
        self, *, memory_bytes: int | None = None, disk_bytes: int | None = None, timeout: float | None = None
    ) -> CacheStats:
        """Evicts state of all owners down to these sizes, pinned snapshots' excepted; None leaves a tier alone. Admin.

        Names stay: what lost its state has Residency.TOKENS, and is computed again by its next use. No `rows` are told.
        """
        call = calls.trim_cache(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        return await self._connection.unary(call, timeout)

    async def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """The state of one service ("InferenceService"; empty: the whole process). Raises NotFound for one it lacks."""
        return await self._connection.unary(calls.health(service), timeout)
