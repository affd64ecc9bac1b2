"""The service behind gRPC: builds what serves calls, brackets its life, and tells about the process.

Implements `core_api.Inference`; `Generations`, `Derivations` and `Directory` do the work. The model is loaded on the
engine thread, which owns every MLX object; until then inference calls are refused with MODEL_LOADING. There are no
snapshots yet: calls about names find none, or are refused in the same way where a durable store may hold some.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import PrefixCache
from kvcache.export import ExchangeKey
from service.calls import Calls
from service.config import Config
from service.derivations import Derivations
from service.directory import Directory
from service.engine import Engine
from service.events import (
    Admission,
    Counted,
    LimitsView,
    ModelState,
    ModelView,
    Residency,
    RowView,
    ServerView,
    StatsView,
)
from service.exchange import Exchange
from service.gate import Gate
from service.generations import Generations
from service.handles import Handles
from service.idempotency import Replays
from service.loop import EngineLoop
from service.open_store import OpenStore
from service.outbox import Outlet
from service.request import CountTokensCall
from service.runtime import Loaded, Runtime
from service.scheduler import Scheduler, SchedulerConfig, State
from service.totals import Totals
from service.tracing import NoTracer, Tracer
from service.watchdog import Watchdog
from service.watching import Watches

log = logging.getLogger("kvfork.core")

SPILL_SECONDS = 30.0  # how long TrimCache waits for state to reach the disk
SWEEP_EVERY = 5.0  # seconds between looks for expired snapshots; expiry itself is exact


class Core:
    """One per process. `start` and `close` bracket its life; `load` comes between, when the addresses are its own."""

    def __init__(
        self,
        config: Config,
        model_name: str,
        load: Callable[[], Loaded],
        store: OpenStore | None = None,
        tracer: Tracer | None = None,
        exchange_key: ExchangeKey | None = None,
    ) -> None:
        """`load` runs on the engine thread; it raises with a text that says what is wrong with the model.

        `store`: the durable store that `load` uses, which gives the instance a name that outlives the process unless
        the settings give it one.
        `exchange_key`: signs snapshots for other instances; None: there are none.
        """
        model = ModelView(name=f"models/{model_name}", state=ModelState.LOADING)
        instance = config.instance or f"kvfork-{store.instance if store else secrets.token_hex(8)}"
        self._rt = Runtime(config, model, instance=instance, tracer=tracer or NoTracer())
        self.meter = self._rt.meter
        self.observer = Calls(self._rt.meter, self._rt.tracer)
        self._load = load
        self._boot_id = store.boot_id if store else secrets.token_hex(8)
        self._started = time.monotonic()
        self.hangs = False  # after `close`: the engine thread is still inside the model
        generations = Generations(self._rt)
        replays = Replays()
        gate = self._gate = Gate(config.owner_running)
        self.generate = replays.generate(gate.generate(generations.generate))
        self.stop_generation = generations.stop
        derivations = Derivations(self._rt)
        self.create_snapshot = replays.unary("CreateSnapshot", gate.unary(derivations.create_snapshot))
        self.fork = replays.unary("Fork", gate.unary(derivations.fork))
        self.rollback = replays.unary("Rollback", gate.unary(derivations.rollback))
        self._count_tokens = gate.unary(derivations.count_tokens)
        directory = Directory(self._rt)
        self.until_named = directory.until_named
        self.get_snapshot = directory.get_snapshot
        self.snapshot_tokens = directory.snapshot_tokens
        self.list_snapshots = directory.list_snapshots
        self.update_snapshot = directory.update_snapshot
        self.extend_snapshots = directory.extend_snapshots
        self.delete_snapshot = directory.delete_snapshot
        exchange = Exchange(self._rt, exchange_key)
        self.export_snapshot = exchange.export_snapshot
        self.check_import = exchange.check_import
        self.import_snapshot = exchange.import_snapshot
        self._watches = Watches(self._boot_id, most=config.max_watches)
        self.watch_snapshots = self._watches.watch
        self.end_watches = self._watches.close

    async def start(self) -> None:
        """Everything but the model."""
        loop = asyncio.get_running_loop()
        outlet = Outlet(loop)

        def load() -> tuple[Engine, PrefixCache]:
            try:
                loaded = self._load()
            except Exception as error:
                loop.call_soon_threadsafe(self._failed_to_load, error)
                raise
            assert loaded.engine is not None
            loop.call_soon_threadsafe(self._ready, replace(loaded, engine=None))
            return loaded.engine, loaded.cache

        engine_loop = EngineLoop(
            load,
            self._new_scheduler(),
            outlet.flush,
            snapshot_wait=self._rt.config.snapshot_wait,
        )
        self._rt.start(engine_loop, outlet)
        self._rt.spawn(self._sweep())
        self._rt.spawn(self._watches.look())

    def load(self) -> None:
        """Starts the engine thread, which begins by loading the model."""
        self._rt.loop.start()

    def _new_scheduler(self) -> Scheduler:
        config = self._rt.config
        return Scheduler(
            SchedulerConfig(
                max_rows=config.max_batch,
                max_queue=config.max_queue,
                busy_prefill_tokens=config.prefill_budget,
                active_bytes=config.active_bytes,
                idle_bytes=config.memory_bytes,
            )
        )

    def _restart(self) -> None:
        """Gives the loop a new thread, which loads the model again; handles and store stay as they are."""
        loop, loaded = asyncio.get_running_loop(), self._rt.loaded
        assert loaded is not None
        self._rt.model_view = replace(loaded.view, state=ModelState.LOADING)
        again, cache = loaded.again, loaded.cache

        def load() -> tuple[Engine, PrefixCache]:
            try:
                engine = again()
            except Exception as error:
                loop.call_soon_threadsafe(self._failed_to_load, error)
                raise
            loop.call_soon_threadsafe(self._ready_again)
            return engine, cache

        self._rt.loop.restart(load, self._new_scheduler())

    def _ready_again(self) -> None:
        assert self._rt.loaded is not None
        self._rt.model_view = self._rt.loaded.view
        log.info("%s is ready again", self._rt.model_view.name)

    async def close(self) -> None:
        """Ends the engine thread and the store; works that still run fail."""
        self._rt.close()
        self.hangs = not await asyncio.to_thread(self._rt.loop.close, self._rt.config.watchdog_seconds)
        if self.hangs:
            log.error("the model thread does not come back; the process ends without it")
        await asyncio.sleep(0)  # the last events are on their way to the channels
        if self._rt.loaded is not None:
            self._rt.loaded.grammars.close()
            await asyncio.to_thread(self._rt.loaded.cache.close)

    def server(self) -> ServerView:
        c = self._rt.config
        return ServerView(
            instance=self._rt.instance,
            boot_id=self._boot_id,
            version=version("kvfork"),
            features=tuple(
                name
                for name, on in (
                    ("durable", c.store_dir is not None),
                    ("exchange", c.exchange_key is not None),
                    ("share_decoded", c.share_decoded),
                    ("share_prefixes", c.share_prefixes),
                )
                if on
            ),
            limits=LimitsView(
                max_request_bytes=c.max_request_bytes,
                max_image_bytes=c.max_image_bytes,
                max_images=c.max_images,
                max_image_pixels=c.max_image_pixels,
                max_fork_branches=c.max_fork_branches,
                max_queue=c.max_queue,
                max_batch=c.max_batch,
                max_snapshots=c.max_snapshots,
                max_pinned=c.max_pinned,
                max_ttl=c.max_ttl,
                max_watches=c.max_watches,
            ),
            uptime=time.monotonic() - self._started,
            draining=self._rt.draining,
        )

    def models(self) -> list[ModelView]:
        return [self._rt.model_view]

    def model(self, name: str) -> ModelView:
        return self._rt.check_model(name)

    def owner_stats(self, owner: str) -> StatsView:
        """Of one owner: its snapshots and calls. What all share tells of others' doings, so it is left out."""
        tally = dict.fromkeys(Residency, 0)
        if self._rt.loaded is not None and self._rt.handles is not None:
            for snapshot in self._rt.loaded.cache.snapshots(owner):
                tally[self._rt.handles.view(snapshot).residency] += 1
        return replace(
            _no_stats(self._rt.config),
            active_sequences=self._gate.inside(owner),
            queued_calls=self._gate.waiting(owner),
            memory_snapshots=tally[Residency.MEMORY],
            disk_snapshots=tally[Residency.DISK],
            token_snapshots=tally[Residency.TOKENS],
        )

    def stats(self) -> StatsView:
        tally = dict.fromkeys(Residency, 0)
        if self._rt.loaded is None or self._rt.handles is None:
            return _no_stats(self._rt.config)
        for snapshot in self._rt.loaded.cache.all_snapshots():
            tally[self._rt.handles.view(snapshot).residency] += 1
        store, totals = self._rt.loaded.cache.store.stats(), self._rt.loop.totals
        count = self._rt.loop.count
        return StatsView(
            checkpoint_interval=BLOCK_TOKENS,
            active_sequences=count(State.RESTORING, State.PREFILL, State.DECODE, State.SAVING),
            queued_calls=count(State.QUEUED),
            memory_snapshots=tally[Residency.MEMORY],
            disk_snapshots=tally[Residency.DISK],
            token_snapshots=tally[Residency.TOKENS],
            memory_bytes=store.memory_bytes,
            memory_limit_bytes=self._rt.config.memory_bytes,
            disk_bytes=store.file_bytes,
            disk_limit_bytes=self._rt.config.disk_budget,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            checkpoints_written=store.written.records,
            checkpoints_read=sum(usage.records for usage in store.read.values()),
            checkpoints_corrupt=store.corrupt,
            evictions=sum(usage.records for usage in store.evicted.values()),
            checkpoint_policy=self._rt.config.checkpoints.value,
            checkpoints_skipped={reason.value: count for reason, count in store.skipped.items() if count},
            pending_bytes=store.pending_bytes,
            written_today_bytes=store.written_today,
            daily_write_limit_bytes=self._rt.config.daily_write_bytes,
            write_errors=store.write_errors,
            writes_paused=store.paused,
            last_write_error=store.last_error,
            restoring_rows=count(State.RESTORING),
            prefilling_rows=count(State.PREFILL),
            decoding_rows=count(State.DECODE),
            saving_rows=count(State.SAVING),
            completion_tokens=self._rt.meter.completion_tokens,
            active_bytes=self._rt.loop.reserved_bytes,
            active_limit_bytes=self._rt.config.active_bytes,
            evictions_by_tier={tier.name.lower(): usage.records for tier, usage in store.evicted.items()},
            images_encoded=totals.images_encoded,
            image_bytes=self._rt.loaded.uploads.total_bytes,
            image_limit_bytes=self._rt.config.image_bytes,
        )

    def rows(self, owner: str) -> list[RowView]:
        """The owner's sequences, oldest first."""
        names = {int(running.row): (name, running.parent) for name, running in self._rt.running.items()}
        views = []
        for view in self._rt.loop.views(owner):
            generation, parent = names.get(view.row, ("", ""))
            views.append(replace(view, generation=generation, parent=f"snapshots/{parent}" if parent else ""))
        return views

    async def trim_cache(self, *, memory_bytes: int | None, disk_bytes: int | None) -> StatsView:
        if self._rt.loaded is not None:
            cache = self._rt.loaded.cache
            if memory_bytes is not None:
                await asyncio.to_thread(cache.store.trim, memory_bytes=memory_bytes)
                await asyncio.to_thread(cache.store.flush, SPILL_SECONDS)  # what left memory is on its way to disk
            if disk_bytes is not None:
                await asyncio.to_thread(cache.store.trim, disk_bytes=disk_bytes)
            cache.sweep()  # names stay; nodes that nothing holds go
        return self.stats()

    @property
    def totals(self) -> Totals:
        """What the engine thread has counted and measured; there once `start` was called."""
        return self._rt.loop.totals

    async def count_tokens(self, call: CountTokensCall, owner: str) -> Counted:
        """Measured by `Derivations`; a plan's calls would have to pass the gate as well."""
        counted = await self._count_tokens(call, owner)
        plan = counted.plan
        if call.plan is None or plan is None or self._gate.takes(owner, call.plan.branches):
            return counted
        if plan.forecast.admission is not Admission.NOW:
            return counted
        waits = replace(plan.forecast, admission=Admission.QUEUED, reason="OWNER_BUSY")
        return replace(counted, plan=replace(plan, forecast=waits))

    def watches(self) -> int:
        """Snapshot watches that are open."""
        return self._watches.count

    def snapshots_ended(self) -> dict[str, int]:
        """Names that ended since the start, by reason."""
        if self._rt.loaded is None:
            return {}
        return {reason.name.lower(): count for reason, count in self._rt.loaded.cache.ended.copy().items()}

    def names_open(self) -> bool:
        if self._rt.handles is not None:
            return True
        return self._rt.config.store_dir is None and self._rt.model_view.state is not ModelState.FAILED

    def engine_alive(self) -> bool:
        return self._rt.model_view.state is not ModelState.FAILED and self._rt.loop.is_alive(
            self._rt.config.watchdog_seconds
        )

    def start_draining(self) -> None:
        self._rt.draining = True

    async def finish_running(self, timeout: float) -> None:
        for running in list(self._rt.running.values()):
            self._rt.loop.stop(running.row)
        until = time.monotonic() + timeout
        while self._rt.running and time.monotonic() < until:  # noqa: ASYNC110 - once in a process's life
            await asyncio.sleep(0.01)

    def _ready(self, loaded: Loaded) -> None:
        self._rt.loaded = loaded
        self._rt.model_view = loaded.view
        self._rt.handles = Handles(loaded.cache, loaded.view.name, self._rt.instance)
        self._watches.attach(loaded.cache, self._rt.handles)
        config = self._rt.config
        watchdog = Watchdog(
            self._rt.loop, self._restart, stuck_after=config.watchdog_seconds, restarts=config.engine_restarts
        )
        self._rt.spawn(watchdog.run())
        log.info("%s is ready", loaded.view.name)

    def _failed_to_load(self, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        log.error("%s could not be loaded: %s", self._rt.model_view.name, reason)
        self._rt.model_view = replace(self._rt.model_view, state=ModelState.FAILED, error=str(error))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            if self._rt.loaded is not None:
                self._rt.loaded.cache.sweep()


def _no_stats(config: Config) -> StatsView:
    """Before the model is loaded."""
    return StatsView(
        checkpoint_interval=BLOCK_TOKENS,
        active_sequences=0,
        queued_calls=0,
        memory_snapshots=0,
        disk_snapshots=0,
        token_snapshots=0,
        memory_bytes=0,
        memory_limit_bytes=config.memory_bytes,
        disk_bytes=0,
        disk_limit_bytes=config.disk_budget,
        prompt_tokens=0,
        cached_tokens=0,
        recomputed_tokens=0,
        checkpoints_written=0,
        checkpoints_read=0,
        checkpoints_corrupt=0,
        evictions=0,
        checkpoint_policy=config.checkpoints.value,
        daily_write_limit_bytes=config.daily_write_bytes,
    )
