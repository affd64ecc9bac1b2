"""SnapshotService. Owns the order read, ask, write of each RPC, and how a listing is paged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import grpc.aio
from kvfork.v1 import snapshot_service_pb2 as pb
from kvfork.v1 import snapshot_service_pb2_grpc as pb_grpc

from service.core_api import Inference
from service.events import ExportPiece, Watched
from service.rpc import mapping_exchange, mapping_out, mapping_snapshots
from service.rpc.caller import caller_of
from service.rpc.coming import Coming
from service.rpc.paging import encode_place
from service.rpc.reader import Reader, written

Context = grpc.aio.ServicerContext[Any, Any]


class SnapshotServicer(pb_grpc.SnapshotServiceServicer):
    """The calls that need the store but not the model."""

    def __init__(self, core: Inference, *, write_stall: float, patience: float) -> None:
        """Seconds: that one write of an export may block, that the next data of an import may take to arrive."""
        self._core = core
        self._write_stall = write_stall
        self._patience = patience
        self._limits = core.server().limits

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:
        name, owner = mapping_snapshots.read_snapshot_name(request.name), caller_of(context)
        await self._core.until_named(name, owner)
        view = self._core.get_snapshot(name, owner)
        tokens = self._core.snapshot_tokens(name, owner) if request.include_tokens else ()
        return pb.GetSnapshotResponse(snapshot=mapping_out.write_snapshot(view), token_ids=tokens)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        owner = caller_of(context)
        page = mapping_snapshots.read_list_snapshots(request, owner)
        # One more than asked for tells whether there is another page.
        views = await asyncio.to_thread(
            self._core.list_snapshots,
            owner,
            after=page.after,
            limit=page.size + 1,
            labels=page.labels,
            parent=page.parent,
        )
        shown = views[: page.size]
        more = len(views) > page.size
        return pb.ListSnapshotsResponse(
            snapshots=[mapping_out.write_snapshot(view) for view in shown],
            next_page_token=encode_place((shown[-1].create_time, shown[-1].name), page.listing) if more else "",
        )

    async def UpdateSnapshot(self, request: pb.UpdateSnapshotRequest, context: Context) -> pb.UpdateSnapshotResponse:
        change = mapping_snapshots.read_update(request, self._limits, now=time.time())
        view = self._core.update_snapshot(change, caller_of(context))
        return pb.UpdateSnapshotResponse(snapshot=mapping_out.write_snapshot(view))

    async def ExtendSnapshots(self, request: pb.ExtendSnapshotsRequest, context: Context) -> pb.ExtendSnapshotsResponse:
        names, ttl = mapping_snapshots.read_extend(request, self._limits)
        extended, missing = self._core.extend_snapshots(names, ttl, caller_of(context))
        return pb.ExtendSnapshotsResponse(
            snapshots=[mapping_out.write_snapshot(view) for view in extended], missing=missing
        )

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotResponse:
        name, owner = mapping_snapshots.read_snapshot_name(request.name), caller_of(context)
        await self._core.until_named(name, owner)
        deleted = await self._core.delete_snapshot(
            name,
            owner,
            descendants=request.descendants,
            stop_active=request.stop_active,
            allow_missing=request.allow_missing,
        )
        return pb.DeleteSnapshotResponse(deleted=deleted)

    async def WatchSnapshots(self, request: pb.WatchSnapshotsRequest, context: Context) -> None:
        """Writes one message per event. A reader that stops is waited for: meanwhile the watch costs nothing."""
        labels = mapping_snapshots.read_watch(request)
        watch = self._core.watch_snapshots(caller_of(context), labels, request.resume_token)
        async with aclosing(cast(AsyncGenerator[Watched, None], watch)) as events:
            async for watched in events:
                await written(context, mapping_out.write_watched(watched))

    async def ExportSnapshot(self, request: pb.ExportSnapshotRequest, context: Context) -> None:
        """Writes one message per piece. A reader that stops for too long is ended: what is read for it is pinned."""
        call = mapping_exchange.read_export(request)
        pieces = cast(AsyncGenerator[ExportPiece, None], self._core.export_snapshot(call, caller_of(context)))
        async with Reader(context, pieces, patience=self._write_stall, observer=self._core.observer) as reader:
            async for piece in pieces:
                await reader.write(mapping_exchange.write_piece(piece))

    async def CheckImport(self, request: pb.CheckImportRequest, context: Context) -> pb.CheckImportResponse:
        return mapping_exchange.write_check(await self._core.check_import(request.manifest, caller_of(context)))

    async def ImportSnapshot(self, messages: object, context: Context) -> pb.ImportSnapshotResponse:
        """Reads for itself: gRPC holds back a sender that is faster than the store."""
        del messages
        coming = Coming(context, patience=self._patience, brings=lambda message: bool(message.data))
        first = await coming.first()
        options = mapping_exchange.read_options(first, self._limits)
        begin = [first.data]
        del first  # as long as the import takes, no message of it is kept

        async def data() -> AsyncGenerator[bytes, None]:
            yield begin.pop()
            async with aclosing(coming.others()) as others:
                async for message in others:
                    piece = [mapping_exchange.read_data(message)]
                    del message
                    yield piece.pop()

        async with aclosing(data()) as pieces:
            imported = await self._core.import_snapshot(options, pieces, caller_of(context))
        return mapping_exchange.write_imported(imported)
