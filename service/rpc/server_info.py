"""ServerService. Owns the order read, ask, write of each RPC; these answer whatever state the model is in."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from kvfork.v1 import server_service_pb2 as pb
from kvfork.v1 import server_service_pb2_grpc as pb_grpc

from service.core_api import Inference
from service.rpc import mapping_out, mapping_snapshots
from service.rpc.caller import caller_of, is_admin, require_admin
from service.rpc.paging import encode_place

MOST_ROWS = 256  # the contract's

Context = grpc.aio.ServicerContext[Any, Any]


class ServerServicer(pb_grpc.ServerServiceServicer):
    """Tells about the process."""

    def __init__(self, core: Inference) -> None:
        self._core = core

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return mapping_out.write_server(self._core.server())

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        page = mapping_snapshots.read_list_models(request)
        last = page.after[1] if page.after else ""
        views = sorted((view for view in self._core.models() if view.name > last), key=lambda view: view.name)
        shown = views[: page.size]
        more = len(views) > page.size
        return pb.ListModelsResponse(
            models=[mapping_out.write_model(view) for view in shown],
            next_page_token=encode_place((0.0, shown[-1].name), page.listing) if more else "",
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        view = self._core.model(mapping_snapshots.read_model_name(request))
        return pb.GetModelResponse(model=mapping_out.write_model(view))

    async def GetCacheStats(self, request: pb.GetCacheStatsRequest, context: Context) -> pb.GetCacheStatsResponse:
        # Looks at every snapshot: beside the loop, which has health to answer.
        owner = caller_of(context)
        if is_admin(context):
            stats, counted = await asyncio.to_thread(self._core.stats), ""
        else:
            stats, counted = await asyncio.to_thread(self._core.owner_stats, owner), owner
        rows = self._core.rows(owner)[:MOST_ROWS]
        return pb.GetCacheStatsResponse(
            stats=mapping_out.write_stats(stats), rows=[mapping_out.write_row(row) for row in rows], owner=counted
        )

    async def TrimCache(self, request: pb.TrimCacheRequest, context: Context) -> pb.TrimCacheResponse:
        require_admin(context, "TrimCache")
        stats = await self._core.trim_cache(
            memory_bytes=request.memory_bytes if request.HasField("memory_bytes") else None,
            disk_bytes=request.disk_bytes if request.HasField("disk_bytes") else None,
        )
        return pb.TrimCacheResponse(stats=mapping_out.write_stats(stats))
