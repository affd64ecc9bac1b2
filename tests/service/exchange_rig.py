"""Instances that exchange snapshots, in this process: the shipped `Exchange` over a real cache, without gRPC.

The store's thread is the test's own unless it is started, so that what waits for the disk waits until the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from kvcache.export import ExchangeKey
from kvcache.keys import KeyRing
from kvcache.snapshots import Snapshot
from service.config import Config
from service.engine.fake import FakeEngine
from service.events import ExportPiece, Imported, ModelState, ModelView
from service.exchange import Exchange
from service.handles import Handles
from service.images.uploads import Uploads
from service.loop import EngineLoop
from service.outbox import Outlet
from service.request import ExportCall, SaveOptions
from service.runtime import Loaded, Runtime
from service.scheduler import Scheduler, SchedulerConfig
from service.tracing import NoTracer
from tests.kvcache.durable_worlds import CrashStorage, DurableWorld, ring_at
from tests.kvcache.tiny_worlds import LAYOUTS, World

KEY = ExchangeKey(bytes(range(32)))
NOTHING_LEFT = (0, 0, 0)  # of `Instance.left`


@dataclass
class Instance:
    """One server's part that exchanges, over `world`. Use it as a context: its engine's thread ends with it."""

    world: World = field(default_factory=lambda: World(LAYOUTS["all"]))
    context_tokens: int = 100_000
    config: Config = field(default_factory=Config)
    uploads: Uploads = field(default_factory=lambda: Uploads(1 << 20))

    def __post_init__(self) -> None:
        world = self.world
        view = ModelView(
            name="models/tiny", state=ModelState.READY, fingerprint="model", context_tokens=self.context_tokens
        )
        self.rt = Runtime(self.config, view, "here", NoTracer())
        scheduler = Scheduler(SchedulerConfig(max_rows=1, max_queue=1, active_bytes=None, idle_bytes=0))
        self.loop = EngineLoop(
            lambda: (FakeEngine(world.cache.layout), world.cache), scheduler, lambda: None, snapshot_wait=0.0
        )
        self.rt.start(self.loop, cast(Outlet, None))  # no row is ever submitted, so nothing is written to it
        self.rt.loaded = Loaded(
            engine=None,
            cache=world.cache,
            codec=cast(Any, None),  # text never comes into it
            view=view,
            channels=cast(Any, None),
            grammars=cast(Any, None),
            again=lambda: FakeEngine(world.cache.layout),
            uploads=self.uploads,
        )
        self.rt.handles = Handles(world.cache, view.name, "here")
        self.exchange = Exchange(self.rt, KEY)

    def __enter__(self) -> Instance:
        self.loop.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.loop.close()
        self.rt.close()
        self.world.store.close()

    def export(self, name: str, owner: str = "a") -> AsyncGenerator[ExportPiece, None]:
        """An export, to be read piece by piece."""
        call = ExportCall(name=f"snapshots/{name}", manifest_only=False, held=frozenset())
        return self.exchange.export_snapshot(call, owner)

    async def whole(self, name: str, owner: str = "a") -> bytes:
        """An export from its first byte to its last."""
        async with aclosing(self.export(name, owner)) as pieces:
            return b"".join([piece.data async for piece in pieces])

    async def take(self, data: Iterable[bytes] | AsyncIterator[bytes], owner: str = "a", **options: Any) -> Imported:
        """An import of these messages."""
        messages = data if isinstance(data, AsyncIterator) else _each(data)
        return await self.exchange.import_snapshot(SaveOptions(**options), messages, owner)

    def find(self, name: str, owner: str = "a") -> Snapshot:
        return self.world.cache.snapshot(owner, name)

    @property
    def names(self) -> list[str]:
        return sorted(snapshot.id for snapshot in self.world.cache.all_snapshots())

    def left(self) -> tuple[int, int, int]:
        """What calls hold: nodes that no name stands on, uses, pins. Nothing is pinned by name."""
        cache = self.world.cache
        named = {id(snapshot.node) for snapshot in cache.all_snapshots()}
        nodes = sum(1 for node in cache._tree if node.followed or (node.holds and id(node) not in named))
        uses = sum(snapshot.uses for snapshot in cache.all_snapshots())
        return nodes, uses, self.world.store.stats().pinned


def durable_world(folder: Path, ring: KeyRing | None = None) -> DurableWorld:
    return DurableWorld(LAYOUTS["all"], CrashStorage(), ring or ring_at(folder / "keys"))


def after_a_crash(world: DurableWorld, folder: Path) -> DurableWorld:
    """What a start finds if the power went at this moment."""
    assert isinstance(world.storage, CrashStorage)
    return DurableWorld(LAYOUTS["all"], CrashStorage(world.storage.synced), ring_at(folder / "keys"), opening=2)


async def _each(data: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in data:
        yield message


async def until(condition: Any, what: str) -> None:
    """Lets the event loop go on until `condition` holds."""
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 - what is looked at changes on other threads, which set no event
            await asyncio.sleep(0.001)
    assert condition(), what
