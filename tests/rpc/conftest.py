"""A scripted core and a real server around it. Owns the double that the gRPC layer is tested over; everything between
the client's channel and `Inference` is the shipped code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.server_service_pb2_grpc import ServerServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

from kvcache.receipt import Usage
from service.calls import Calls
from service.config import Config
from service.core_api import Inference, Observer
from service.errors import Draining, ModelNotFound, SnapshotNotFound
from service.events import (
    Counted,
    Created,
    Delta,
    Event,
    ExportPiece,
    ExportView,
    Finished,
    FinishReason,
    Forked,
    ImportCheck,
    Imported,
    LimitsView,
    ModelState,
    ModelView,
    Residency,
    RolledBack,
    RowView,
    ServerView,
    SnapshotView,
    Started,
    StatsView,
    Timing,
    Watched,
)
from service.metering import Meter
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
from service.rpc.server import RpcServer
from service.tracing import NoTracer, Tracer

LIMITS = LimitsView(
    max_request_bytes=64 * 2**20,
    max_image_bytes=2**20,
    max_images=3,
    max_image_pixels=10**6,
    max_fork_branches=4,
    max_queue=8,
    max_batch=2,
    max_snapshots=100,
    max_pinned=10,
    max_ttl=3600.0,
    max_watches=4,
)

STARTED = Started(generation="generations/g1", instance="i1", prompt_tokens=5, seed=7, queue_seconds=0.25)
USAGE = Usage(prompt_tokens=5, cached_tokens=2, recomputed_tokens=1, new_tokens=2, completion_tokens=2)
FINISHED = Finished(reason=FinishReason.EOS, usage=USAGE, timing=Timing())


def delta(text: str, position: int = 5) -> Delta:
    return Delta(text=text, first_position=position, token_count=1)


def snapshot(name: str = "snapshots/one", **changes: Any) -> SnapshotView:
    plain = SnapshotView(
        name=name,
        parent="",
        model="models/tiny",
        model_fingerprint="f1",
        token_count=5,
        checkpointed_tokens=0,
        prefix_hash=b"\x01" * 32,
        residency=Residency.MEMORY,
        durable=False,
        expire_time=1_800_000_000.5,
        pinned=False,
        labels=(),
        create_time=1_700_000_000.25,
        last_use_time=1_700_000_001.0,
        exclusive_bytes=10,
        instance="i1",
        active_uses=0,
    )
    return replace(plain, **changes)


Step = Event | Exception | Callable[[], Awaitable[None]]


@dataclass
class ScriptedCore:
    """Says what the test wrote down, and remembers what it was asked."""

    script: Sequence[Step] = (STARTED, delta("Hi"), FINISHED)
    failing: dict[str, Exception] = field(default_factory=dict)  # method name -> what it raises
    snapshots: list[SnapshotView] = field(default_factory=list)
    model_views: list[ModelView] = field(
        default_factory=lambda: [ModelView(name="models/tiny", state=ModelState.READY, context_tokens=512)]
    )
    limits: LimitsView = LIMITS
    meter: Meter = field(default_factory=Meter)
    tracer: Tracer = field(default_factory=NoTracer)

    @property
    def observer(self) -> Observer:
        return Calls(self.meter, self.tracer)

    alive: bool = True
    opened: bool = True  # the store of names
    draining: bool = False
    calls: list[tuple[object, ...]] = field(default_factory=list)
    running: int = 0  # generations whose iterator is open
    row_views: list[RowView] = field(default_factory=list)
    watched: Sequence[Watched] = ()
    watches_end: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[str] = field(default_factory=list)  # how each iterator ended
    exported: Sequence[bytes] = (b"abc", b"def")
    imported: list[bytes] = field(default_factory=list)
    failing_pieces: dict[bytes, Exception] = field(default_factory=dict)  # piece of an import -> what it raises

    def _asked(self, method: str, *what: object) -> None:
        self.calls.append((method, *what))
        if method in self.failing:
            raise self.failing[method]

    async def generate(self, call: GenerateCall, owner: str) -> AsyncIterator[Event]:
        self._asked("generate", call, owner)
        self.running += 1
        end = "closed"
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step()
                else:
                    yield step
            end = "finished"
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        except Exception:
            end = "raised"
            raise
        finally:
            self.running -= 1
            self.ended.append(end)

    async def stop_generation(self, generation: str, owner: str) -> bool:
        self._asked("stop_generation", generation, owner)
        return generation == STARTED.generation

    async def create_snapshot(self, call: CreateSnapshotCall, owner: str) -> Created:
        self._asked("create_snapshot", call, owner)
        return Created(snapshot=snapshot(), usage=USAGE, marked=(snapshot("snapshots/mark"),))

    async def fork(self, call: ForkCall, owner: str) -> Forked:
        self._asked("fork", call, owner)
        views = tuple(snapshot(f"snapshots/child-{i}", parent=call.parent) for i in range(len(call.branches)))
        return Forked(snapshots=views, usage=USAGE)

    async def rollback(self, call: RollbackCall, owner: str) -> RolledBack:
        self._asked("rollback", call, owner)
        return RolledBack(snapshot=snapshot("snapshots/short"), released=(call.source,), usage=USAGE)

    async def count_tokens(self, call: CountTokensCall, owner: str) -> Counted:
        self._asked("count_tokens", call, owner)
        return Counted(total_tokens=5, cached_tokens=2, remaining_tokens=507, token_ids=(1, 2, 3), text="abc")

    async def until_named(self, name: str, owner: str) -> None:
        """Nothing is being saved here."""

    def get_snapshot(self, name: str, owner: str) -> SnapshotView:
        self._asked("get_snapshot", name, owner)
        for view in self.snapshots:
            if view.name == name:
                return view
        raise SnapshotNotFound(f"{name} is not here", resource=("kvfork.v1.Snapshot", name))

    def snapshot_tokens(self, name: str, owner: str) -> Sequence[int]:
        self._asked("snapshot_tokens", name, owner)
        return (11, 12, 13)

    def list_snapshots(
        self, owner: str, *, after: tuple[float, str] | None, limit: int, labels: dict[str, str], parent: str
    ) -> list[SnapshotView]:
        self._asked("list_snapshots", owner, after, limit, labels, parent)
        keyed = sorted((view.create_time, view.name, view) for view in self.snapshots)
        return [view for time, name, view in keyed if after is None or (time, name) > after][:limit]

    async def watch_snapshots(self, owner: str, labels: dict[str, str], resume_token: str) -> AsyncIterator[Watched]:
        self._asked("watch_snapshots", owner, labels, resume_token)
        for watched in self.watched:
            yield watched
        await self.watches_end.wait()
        raise Draining("the server is shutting down")

    def end_watches(self) -> None:
        self.watches_end.set()

    def update_snapshot(self, change: SnapshotChange, owner: str) -> SnapshotView:
        self._asked("update_snapshot", change, owner)
        return snapshot(change.name)

    def extend_snapshots(
        self, names: Sequence[str], ttl: float | None, owner: str
    ) -> tuple[list[SnapshotView], list[str]]:
        self._asked("extend_snapshots", tuple(names), ttl, owner)
        return [snapshot(names[0])], list(names[1:])

    async def delete_snapshot(
        self, name: str, owner: str, *, descendants: bool, stop_active: bool, allow_missing: bool
    ) -> list[str]:
        self._asked("delete_snapshot", name, owner, descendants, stop_active, allow_missing)
        return [name]

    async def export_snapshot(self, call: ExportCall, owner: str) -> AsyncIterator[ExportPiece]:
        self._asked("export_snapshot", call, owner)
        self.running += 1
        try:
            about = ExportView(snapshot=snapshot(call.name), records=2, held_records=1, bytes=6, state_tokens=4)
            for number, piece in enumerate(self.exported):
                yield ExportPiece(piece, None if number else about)
        finally:
            self.running -= 1

    async def check_import(self, manifest: bytes, owner: str) -> ImportCheck:
        self._asked("check_import", manifest, owner)
        return ImportCheck(held=(b"h" * 33,), missing_records=2, missing_bytes=7)

    async def import_snapshot(self, options: SaveOptions, data: AsyncIterator[bytes], owner: str) -> Imported:
        self._asked("import_snapshot", options, owner)
        self.running += 1
        try:
            async for piece in data:
                self.imported.append(piece)
                if piece in self.failing_pieces:
                    raise self.failing_pieces[piece]
        finally:
            self.running -= 1
        return Imported(
            snapshot=snapshot("snapshots/came"), received_records=3, received_bytes=len(self.imported), held_records=1
        )

    def server(self) -> ServerView:
        return ServerView(
            instance="i1",
            boot_id="b1",
            version="0.1.0",
            features=("marks",),
            limits=self.limits,
            uptime=1.5,
            draining=self.draining,
        )

    def models(self) -> list[ModelView]:
        if "models" in self.failing:
            raise self.failing["models"]
        return self.model_views

    def model(self, name: str) -> ModelView:
        self._asked("model", name)
        for view in self.model_views:
            if name in ("", view.name):
                return view
        raise ModelNotFound(f"{name} is not here", resource=("kvfork.v1.Model", name))

    def stats(self) -> StatsView:
        numbers = {name: number for number, name in enumerate(StatsView.__dataclass_fields__, start=1)}
        texts = {"checkpoint_policy": "marks", "last_write_error": "OSError: no space"}
        others = {"checkpoints_skipped": {"queue_full": 5}, "writes_paused": True, "evictions_by_tier": {"disk": 3}}
        return StatsView(**{**numbers, **texts, **others})

    def rows(self, owner: str) -> list[RowView]:
        self._asked("rows", owner)
        return self.row_views

    def owner_stats(self, owner: str) -> StatsView:
        self._asked("owner_stats", owner)
        return replace(self.stats(), memory_bytes=0)

    async def trim_cache(self, *, memory_bytes: int | None, disk_bytes: int | None) -> StatsView:
        self.trimmed = (memory_bytes, disk_bytes)
        return self.stats()

    def names_open(self) -> bool:
        return self.opened

    def engine_alive(self) -> bool:
        return self.alive

    def start_draining(self) -> None:
        self.calls.append(("start_draining",))
        self.draining = True

    async def finish_running(self, timeout: float) -> None:
        self.calls.append(("finish_running", timeout))


def _is_a_core(core: ScriptedCore) -> Inference:
    return core  # a type checker sees that the double has the seam's shape


@dataclass
class Serving:
    """A running server and a client's view of it."""

    core: ScriptedCore
    server: RpcServer
    addresses: list[str]
    channel: grpc.aio.Channel

    @property
    def inference(self) -> InferenceServiceStub:
        return InferenceServiceStub(self.channel)

    @property
    def snapshots(self) -> SnapshotServiceStub:
        return SnapshotServiceStub(self.channel)

    @property
    def health(self) -> HealthStub:
        return HealthStub(self.channel)

    @property
    def info(self) -> ServerServiceStub:
        return ServerServiceStub(self.channel)


@asynccontextmanager
async def serving(core: ScriptedCore | None = None, **settings: Any) -> AsyncIterator[Serving]:
    """A server on a free port of loopback, and a channel to it."""
    core = core or ScriptedCore()
    config = Config(**{"address": "127.0.0.1:0", **settings})
    server = RpcServer(core, config)
    addresses = await server.start()
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    try:
        async with grpc.aio.insecure_channel(addresses[0], options=options) as channel:
            yield Serving(core, server, addresses, channel)
    finally:
        await server.stop(0)


async def drained(stream: AsyncIterator[Any], kinds: list[str] | None = None) -> list[Any]:
    """All messages of a Generate stream; `kinds` hears of each event before the stream can fail."""
    messages = []
    async for message in stream:
        messages.append(message)
        if kinds is not None:
            kinds.append(message.WhichOneof("event"))
    return messages


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds; the test's own time limit is the bound."""
    while not condition():  # noqa: ASYNC110  what is waited for has no event: it is the double's plain state
        await asyncio.sleep(0.005)


def run(story: Callable[[], Awaitable[None]], *, limit: float = 30.0) -> None:
    """Runs a test's story on a loop of its own, bounded."""

    async def bounded() -> None:
        async with asyncio.timeout(limit):
            await story()

    asyncio.run(bounded())
