"""What every call needs: the loaded model, its handles, the way to the engine thread and back.

Runs on the event loop. Tokenizing goes to a thread of its own. A handle is made here and nowhere else: the engine
thread hands out nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvcache.cache import PrefixCache
from kvcache.media import shown
from kvcache.receipt import Usage
from kvcache.snapshots import Snapshot
from service.answers import answered
from service.config import Config
from service.engine import Engine
from service.errors import (
    Draining,
    EngineDown,
    ModelLoading,
    ModelNotFound,
    SnapshotNotFound,
    StoreFull,
)
from service.events import ModelState, ModelView
from service.handles import RESOURCE, Handles, bare_id
from service.images.intake import CallImages, Intake
from service.images.limits import ImageLimits
from service.images.uploads import Uploads
from service.loop import EngineLoop
from service.media import Preparer
from service.metering import Meter
from service.outbox import Channel, Outlet
from service.plan import RowId
from service.request import Input, Mark
from service.resolve import Prompt, refuse_long_text, resolve_prompt
from service.text.constraint import Grammars
from service.text.formats import Format
from service.text.tokens import TextCodec
from service.text_threads import TextThreads
from service.tracing import Tracer
from service.work import Ended, Failed, NodeAt, Work

CANCEL_SECONDS = 0.25  # how late a cancel may reach the server after a look that followed it
SAVING_SECONDS = 10.0  # one step and one fsync are far below
TEXT_THREADS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready."""

    engine: Engine | None  # the engine thread's alone once it has it: with the thread its memory must go
    cache: PrefixCache
    codec: TextCodec
    view: ModelView
    channels: Format
    grammars: Grammars
    again: Callable[[], Engine]  # loads the same model once more, on a new engine thread
    preparer: Preparer | None = None  # None: the model takes no images
    uploads: Uploads = field(default_factory=lambda: Uploads(0))


@dataclass(slots=True, eq=False)
class Running:
    """A generation under way."""

    row: RowId
    owner: str
    parent: str  # snapshot id, or ""


@dataclass(slots=True, eq=False)
class Saving:
    """A running call that keeps its state even if it is cancelled."""

    named: asyncio.Event  # the name is there, or will not come
    cancelled: bool = False


class Runtime:
    """One per process, shared by everything that serves calls."""

    def __init__(self, config: Config, model_view: ModelView, instance: str, tracer: Tracer) -> None:
        self.config = config
        limits = ImageLimits(max_bytes=config.max_image_bytes, max_pixels=config.max_image_pixels)
        self._images = Intake(limits)
        self.instance = instance
        self.model_view = model_view
        self.loaded: Loaded | None = None
        self.handles: Handles | None = None
        self.draining = False
        self.meter = Meter()
        self.tracer = tracer
        self.running: dict[str, Running] = {}
        self.saving: dict[tuple[str, str], Saving] = {}  # by (owner, id)
        self.loop: EngineLoop  # set by start
        self._outlet: Outlet
        self._background: set[asyncio.Task[None]] = set()
        # Where there are several owners, none has every thread.
        self._texts = TextThreads(TEXT_THREADS, share=TEXT_THREADS - config.authenticates)

    def start(self, loop: EngineLoop, outlet: Outlet) -> None:
        """Both ends of the way to the engine thread."""
        self.loop, self._outlet = loop, outlet

    def close(self) -> None:
        """Ends what runs in the background on the event loop."""
        for task in list(self._background):
            task.cancel()
        self._texts.close()
        self._images.close()

    async def until_named(self, owner: str, name: str) -> None:
        """Waits while a cancelled call is still saving `name`: whoever cancelled it may look at once.

        The cancel itself may be a moment behind the look, so a call that would save it is given that moment.
        """
        saving = self.saving.get((owner, bare_id(name)))
        for patience in (CANCEL_SECONDS, SAVING_SECONDS):
            if saving is None or saving.named.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await saving.named.wait()
            if not saving.cancelled:
                return

    def check_model(self, name: str) -> ModelView:
        """The model, if `name` is its name or empty."""
        if name not in ("", self.model_view.name):
            raise ModelNotFound(
                f"there is no model {name}",
                hint=f"this server has {self.model_view.name}",
                metadata={"model": name},
                resource=("kvfork.v1.Model", name),
            )
        return self.model_view

    def need_model(self, name: str, *, names_snapshot: bool) -> tuple[Loaded, Handles]:
        """What a call that needs the model works with. Raises what stands in its way."""
        self.check_model(name)
        if self.draining:
            raise Draining(
                "the server is shutting down",
                hint=self._end_of_snapshots() if names_snapshot else "try another instance",
                metadata={"namesSnapshot": "true"} if names_snapshot else {},
                retry_after=None if names_snapshot else 1.0,
            )
        away = self.model_view.state in (ModelState.LOADING, ModelState.FAILED)
        if away or self.loaded is None or self.handles is None:
            raise self._not_loaded()
        if not self.loop.is_alive(self.config.watchdog_seconds):
            raise EngineDown("the model does not answer", hint="the server's log says why", retry_after=5.0)
        return self.loaded, self.handles

    def _end_of_snapshots(self) -> str:
        if self.config.store_dir is None:
            return "snapshots end with it"
        return "durable snapshots are there again after a restart, others end with it"

    def need_store(self, name: str) -> Handles:
        """Names to look `name` up in. Raises SnapshotNotFound before there are any, or what `check_names` does."""
        self.check_names()
        if self.handles is None:
            raise SnapshotNotFound(f"there is no snapshot {name}", resource=(RESOURCE, name))
        return self.handles

    def check_names(self) -> None:
        """Raises ModelLoading or EngineDown while a durable store is not read yet: what it holds is not gone."""
        if self.handles is None and self.config.store_dir is not None:
            raise self._not_loaded()

    def _not_loaded(self) -> ModelLoading | EngineDown:
        name = self.model_view.name
        if self.model_view.state is ModelState.FAILED:
            return EngineDown(f"{name} could not be loaded", hint="see the server's log", retry_after=5.0)
        return ModelLoading(f"{name} is being loaded", metadata={"model": name}, retry_after=1.0)

    async def on_text_thread(self, owner: str, work: Callable[[], T]) -> T:
        return await self._texts.run(owner, work)

    async def prompt(
        self,
        loaded: Loaded,
        owner: str,
        parent: Snapshot | None,
        given: Input | None,
        marks: Sequence[Mark] = (),
        at: str = "input",
        *,
        images: CallImages,
        bounded: bool = True,
    ) -> Prompt:
        """The parent's tokens and what `given` adds, tokenized on a text thread; `bounded`: it must fit the context."""
        context = parent.node.all_tokens() if parent else ()
        most = self.config.max_text_bytes
        refuse_long_text(loaded.codec, loaded.view, len(context), given, at, most=most, fits=bounded)
        pictures = await images.take(given, at)

        def resolve() -> Prompt:
            return resolve_prompt(
                loaded.codec, loaded.view, context, given, marks, at, form=loaded.preparer, pictures=pictures
            )

        prompt = await self.on_text_thread(owner, resolve)
        return replace(prompt, images=await images.placed(prompt.tokens))

    def images(self, loaded: Loaded, owner: str, held: ExitStack) -> CallImages:
        """For one call's images, held until `held` is closed."""
        return self._images.call(owner, loaded.preparer, loaded.uploads, held)

    def shown(self, tokens: Sequence[int]) -> Sequence[int]:
        """Token ids as callers see them: the model's placeholder at image positions."""
        preparer = self.loaded.preparer if self.loaded is not None else None
        return shown(tokens, preparer.placeholder_id) if preparer is not None else tokens

    def submit(self, work: Work) -> tuple[Channel, RowId]:
        assert self.loaded is not None
        channel = Channel(self.loaded.cache.let_go)
        emit = self.tracer.following(work, self.meter.watching(work, self._outlet.emit_to(channel)))
        return channel, self.loop.submit(work, emit)

    async def mend(
        self,
        parent: Snapshot | None,
        images: CallImages,
        held: ExitStack,
        *,
        limit: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Usage | None:
        """Before a call goes on from a cut whose state is lost: the block that it was cut from is computed again.

        Only so does the cut come back as it was. Returns what that cost, None if nothing was to be done. The block
        stays in use until `held` is closed. Raises RecomputeLimit beyond `limit` tokens.
        """
        assert self.loaded is not None
        cache = self.loaded.cache
        source = cache.follow_lost_source(parent.node) if parent is not None else None
        if parent is None or source is None:
            return None
        held.callback(cache.unfollow, source)
        tokens = source.all_tokens()
        work = Work(
            owner=parent.owner,
            tokens=tokens,
            images=await images.placed(tokens),
            base=source,
            keep=frozenset(),
            generation=None,
            max_recompute_tokens=limit,
            priority=priority,
            deadline=deadline,
        )
        _, usage = await self.run(work, None)
        return usage

    async def run(self, work: Work, parent: Snapshot | None) -> tuple[list[NodeAt], Usage]:
        """A work without generation, to its end. Returns held nodes in order; cancelling it leaves nothing behind."""
        channel, row = self.submit(work)
        nodes: list[NodeAt] = []
        try:
            while True:
                match await channel.get():
                    case NodeAt() as event if event.rehome:
                        self.rehome(parent, event)
                    case NodeAt() as event:
                        nodes.append(event)
                    case Ended() as event:
                        return nodes, event.usage
                    case Failed() as event:
                        raise event.error
                    case _:
                        pass
        except BaseException:  # a cancelled caller too must leave no row and no hold behind; it is raised on
            self.loop.cancel(row)
            channel.close()
            assert self.loaded is not None
            for event in nodes:
                self.loaded.cache.let_go(event.node)
            raise

    @staticmethod
    def engine_places(places: Sequence[int | None], parent: Snapshot | None) -> frozenset[int]:
        """Places in the prompt that lie beyond the parent: the engine will pass them."""
        return frozenset(p for p in places if p is not None and (parent is None or p > parent.token_count))

    async def written(self) -> None:
        """Waits until what was changed so far is on disk, where that is promised; what fails is tried again."""
        if self.loaded is not None and self.loaded.cache.store.durable:
            await answered(self.loaded.cache.settle)

    def rehome(self, parent: Snapshot | None, event: NodeAt) -> None:
        assert self.loaded is not None
        if parent is not None and not event.lost:
            self.loaded.cache.rehome(parent, event.node)
        self.loaded.cache.let_go(event.node)

    def stop_users(self, snapshot_ids: set[str], owner: str) -> None:
        for running in self.running.values():
            if running.owner == owner and running.parent in snapshot_ids:
                self.loop.stop(running.row)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


_WHY_NOT_KEPT = {
    "SKIPPED_QUEUE_FULL": "too much waits for the disk, and it did not get on in time",
    "SKIPPED_DISK_FULL": "the disk is full, or what is on it is all pinned",
    "SKIPPED_DISK_ERROR": "writes to the disk keep failing",
    "SKIPPED_MEMORY_FULL": "all of the memory budget is pinned",
    "EVICTED": "state that it stands on was evicted for want of room before it was named",
    "CORRUPT": "state that it stands on did not come back from the disk as it was",
    "NOT_STORED": "state that it stands on was not kept, or the disk did not take it after all",
    "SKIPPED_TOO_LARGE": "one record of it is larger than either budget",
}


_HINTS = {
    "EVICTED": "give the server more --memory-bytes, or try again when fewer calls run",
    "SKIPPED_TOO_LARGE": "give the server more --memory-bytes or --disk-bytes: no time helps",
}


def store_full(reason: str) -> StoreFull:
    """The error for state that could not be kept; `reason` is the store's word for it, or a text."""
    cause = reason.removeprefix("SKIPPED_")
    return StoreFull(
        f"the state could not be kept: {_WHY_NOT_KEPT.get(reason, reason)}",
        hint=_HINTS.get(reason, "free room, or try again later"),
        metadata={"cause": cause} if cause.isupper() else {},
        retry_after=1.0 if reason != "SKIPPED_TOO_LARGE" else None,
    )
