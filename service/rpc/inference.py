"""InferenceService. Owns the order read, ask, write of each RPC; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc.aio
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import inference_service_pb2_grpc as pb_grpc

from service.core_api import Inference
from service.events import Event
from service.rpc import mapping_in, mapping_out
from service.rpc.caller import caller_of, is_admin
from service.rpc.reader import Reader

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """The calls that need the model."""

    def __init__(self, core: Inference, *, write_stall: float) -> None:
        self._core = core
        self._limits = core.server().limits
        self._write_stall = write_stall  # seconds that one write may block

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes one message per event. Nothing is sent before the first: until then a client may retry as it is."""
        call = mapping_in.read_generate(request, self._limits, deadline=context.time_remaining())
        # The iterator is a generator in all but name: closing it is what frees the row, however this call ends.
        events = cast(AsyncGenerator[Event, None], self._core.generate(call, caller_of(context)))
        async with Reader(context, events, patience=self._write_stall, observer=self._core.observer) as reader:
            async for event in events:
                await reader.write(mapping_out.write_event(event))

    async def StopGeneration(self, request: pb.StopGenerationRequest, context: Context) -> pb.StopGenerationResponse:
        generation = mapping_in.read_stop_generation(request)
        was_running = await self._core.stop_generation(generation, caller_of(context))
        return pb.StopGenerationResponse(was_running=was_running)

    async def CreateSnapshot(self, request: pb.CreateSnapshotRequest, context: Context) -> pb.CreateSnapshotResponse:
        call = mapping_in.read_create_snapshot(request, self._limits)
        return mapping_out.write_created(await self._core.create_snapshot(call, caller_of(context)))

    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        call = mapping_in.read_fork(request, self._limits)
        return mapping_out.write_forked(await self._core.fork(call, caller_of(context)))

    async def Rollback(self, request: pb.RollbackRequest, context: Context) -> pb.RollbackResponse:
        call = mapping_in.read_rollback(request, self._limits)
        return mapping_out.write_rolled_back(await self._core.rollback(call, caller_of(context)))

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        call = mapping_in.read_count_tokens(request, self._limits)
        reply = mapping_out.write_counted(await self._core.count_tokens(call, caller_of(context)))
        if reply.HasField("plan") and not is_admin(context):
            reply.plan.ClearField("free_bytes")  # to the byte, what others have is theirs to know
        return reply
