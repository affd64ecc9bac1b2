"""grpc.health.v1. Owns what the names mean and when they change; asks the core, believes no flag of its own.

    name                         SERVING while
    ""                           the process is worth keeping: not draining, and its model thread not dead or stuck
    kvfork.v1.InferenceService   a call would be taken up: model ready, thread alive, not draining
    kvfork.v1.SnapshotService    the store is open and the server does not drain
    kvfork.v1.ServerService      the server does not drain

grpcio-health-checking brings the messages; its servicer is not used because it has no List, writes to watchers under
the lock that a change needs, and keeps watchers open to the end, so that a stop always took its whole grace.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from service.core_api import Inference
from service.events import ModelState
from service.rpc.interceptor import describe

log = logging.getLogger(__name__)

PROCESS = ""
INFERENCE = "kvfork.v1.InferenceService"
SNAPSHOTS = "kvfork.v1.SnapshotService"
SERVER = "kvfork.v1.ServerService"
NAMES = (PROCESS, INFERENCE, SNAPSHOTS, SERVER)

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(pb_grpc.HealthServicer):  # type: ignore[misc]  # the base is untyped
    """Check, List and Watch over one table of names."""

    def __init__(self) -> None:
        self._serving = dict.fromkeys(NAMES, False)
        self._changed = asyncio.Event()  # set once, then replaced: one wake-up for all watchers
        self._draining = False
        self._closed = False

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        return pb.HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._status(name)) for name in self._serving}
        )

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """Follows a name, also one that is unknown; ends when the server does."""
        last = None
        while True:
            changed, status, closed = self._changed, self._status(request.service), self._closed
            if status != last:
                await context.write(pb.HealthCheckResponse(status=status))
                last = status
            if closed:
                return
            await changed.wait()

    def update(self, serving: dict[str, bool]) -> None:
        """New values for some names; ignored once draining has begun."""
        if not self._draining and any(self._serving[name] != value for name, value in serving.items()):
            self._serving.update(serving)
            self._wake()

    def start_draining(self) -> None:
        """All names NOT_SERVING, for good."""
        self.update(dict.fromkeys(NAMES, False))
        self._draining = True

    def close(self) -> None:
        """Ends all watches."""
        self._closed = True
        self._wake()

    def _status(self, name: str) -> pb.HealthCheckResponse.ServingStatus:
        if name not in self._serving:
            return UNKNOWN
        return SERVING if self._serving[name] else NOT_SERVING

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def observe(core: Inference) -> dict[str, bool]:
    """What each name is worth at this moment."""
    states = {model.state for model in core.models()}
    draining = core.server().draining
    alive = core.engine_alive()
    # While a model loads, its thread may not report yet; that is no reason to replace the process.
    sound = alive or (bool(states) and states <= {ModelState.LOADING})
    return {
        PROCESS: not draining and sound,
        INFERENCE: not draining and alive and ModelState.READY in states,
        SNAPSHOTS: not draining and core.names_open(),
        SERVER: not draining,
    }


async def follow(core: Inference, health: HealthServicer, *, every: float) -> None:
    """Watches the core until cancelled."""
    while True:
        try:
            serving = observe(core)
        except Exception as error:  # a watchdog that died would leave the last status standing for ever
            log.error("health: the core could not be asked: %s", describe(error))
            serving = dict.fromkeys(NAMES, False)
        health.update(serving)
        await asyncio.sleep(every)
