"""The service behind gRPC: resolves calls, names snapshots, drives the engine thread. Implements `core_api.Inference`.

Runs on the event loop. Tokenizing goes to a thread of its own, model work to the engine thread; everything else here is
bookkeeping. A handle is made here and nowhere else: the engine thread hands out nodes.

A model is loaded on the engine thread, which owns every MLX object. Until then inference calls are refused with
MODEL_LOADING, and there are no snapshots yet.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Protocol, TypeVar

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import PrefixCache
from kvcache.receipt import MissReason, Usage
from kvcache.snapshots import GoneReason, Snapshot
from kvcache.tree import Node
from service.config import Config
from service.engine import Engine
from service.errors import (
    CallError,
    Draining,
    EngineDown,
    InvalidField,
    ModelLoading,
    ModelNotFound,
    NotAnAncestor,
    RecomputeLimit,
    RollbackBeyondEnd,
    SnapshotNotFound,
    StoreFull,
)
from service.events import (
    Counted,
    Created,
    Delta,
    Event,
    Finished,
    Forked,
    LimitsView,
    Marked,
    ModelState,
    ModelView,
    Progress,
    Residency,
    RolledBack,
    ServerView,
    SnapshotView,
    Started,
    StatsView,
    TokenLogprob,
    TopLogprob,
)
from service.handles import Handles
from service.loop import EngineLoop
from service.outbox import Channel, Outlet
from service.plan import Picked, RowId
from service.request import (
    CountTokensCall,
    CreateSnapshotCall,
    ForkCall,
    GenerateCall,
    Input,
    Mark,
    Release,
    RollbackCall,
    Rounding,
    SaveOptions,
    SnapshotChange,
)
from service.resolve import Prompt, check_room, mark_positions, resolve_prompt, resolve_sampling
from service.scheduler import Scheduler, SchedulerConfig, State
from service.text.stream import TextStream
from service.text.tokens import TextCodec
from service.work import Admitted, Ended, Failed, Generation, NodeAt, Prefilled, Tokens, Work

log = logging.getLogger("kvfork.core")

STUCK_AFTER = 60.0  # seconds in one step before health gives the engine up; a 256-token call is far below
SWEEP_EVERY = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready."""

    engine: Engine
    cache: PrefixCache
    codec: TextCodec
    view: ModelView


class Loader(Protocol):
    """Loads the model; runs on the engine thread. Raises with a text that says what is wrong with the model."""

    def __call__(self) -> Loaded: ...


@dataclass(slots=True, eq=False)
class _Running:
    row: RowId
    owner: str
    parent: str  # snapshot id, or ""


class Core:
    """One per process. `start` and `close` bracket its life."""

    def __init__(self, config: Config, model_name: str, load: Loader) -> None:
        self._config = config
        self._load = load
        self._instance = f"kvfork-{secrets.token_hex(8)}"
        self._boot_id = secrets.token_hex(8)
        self._started = time.monotonic()
        self._model = ModelView(name=f"models/{model_name}", state=ModelState.LOADING)
        self._loaded: Loaded | None = None
        self._handles: Handles | None = None
        self._draining = False
        self._running: dict[str, _Running] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_rows=config.max_batch, max_queue=config.max_queue, idle_prefill_tokens=config.prefill_budget
            )
        )

    async def start(self) -> None:
        """Starts the engine thread, which begins by loading the model."""
        loop = asyncio.get_running_loop()
        self._outlet = Outlet(loop)

        def load() -> tuple[Engine, PrefixCache]:
            try:
                loaded = self._load()
            except Exception as error:
                loop.call_soon_threadsafe(self._failed_to_load, error)
                raise
            loop.call_soon_threadsafe(self._ready, loaded)
            return loaded.engine, loaded.cache

        self._loop = EngineLoop(load, self._scheduler, self._outlet.flush)
        self._loop.start()
        self._spawn(self._sweep())

    async def close(self) -> None:
        """Ends the engine thread and the store; works that still run fail."""
        for task in list(self._background):
            task.cancel()
        await asyncio.to_thread(self._loop.close)
        await asyncio.sleep(0)  # the last events are on their way to the channels
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.cache.store.close)
        self._text_thread.shutdown(wait=False)

    async def wait_ready(self) -> ModelView:
        """The model once it is READY or FAILED."""
        while self._model.state is ModelState.LOADING:
            await asyncio.sleep(0.02)
        return self._model

    # -- inference ------------------------------------------------------------------------------------------------

    async def generate(self, call: GenerateCall, owner: str) -> AsyncIterator[Event]:
        loaded, handles = self._need_model(call.model, names_snapshot=bool(call.parent))
        if call.save is not None:
            handles.check_new(owner, [call.save, *(m.options for m in call.marks)])
        else:
            handles.check_new(owner, [m.options for m in call.marks])
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            prompt = await self._prompt(loaded, parent, call.input)
            check_room(len(prompt.tokens), loaded.view, needs=1)
            places = mark_positions(call.marks, prompt)
            seed = call.sampling.seed if call.sampling.seed is not None else secrets.randbits(32)
            room = loaded.view.context_tokens - len(prompt.tokens)
            asked = call.stopping.max_tokens
            text = TextStream(
                loaded.codec,
                call.stopping,
                max_new_tokens=asked if asked is not None else self._config.default_max_tokens,
                context_room=room,
                context_tail=prompt.tokens[-8:],
            )
            work = Work(
                owner=owner,
                tokens=prompt.tokens,
                base=parent.node if parent else None,
                keep=self._engine_places(places, parent),
                generation=Generation(
                    sampling=resolve_sampling(call.sampling, loaded.view, seed),
                    stopping=call.stopping,
                    top_logprobs=call.output.top_logprobs,
                    text=text,
                    save=call.save is not None,
                    save_on_cancel=call.save_on_cancel,
                ),
                max_recompute_tokens=call.max_recompute_tokens,
                progress=call.output.progress,
                priority=call.priority,
            )
            generation = f"generations/{secrets.token_hex(12)}"
            channel, row = self._submit(work)
            self._running[generation] = _Running(row, owner, parent.id if parent else "")
            done = False
            try:
                async for event in self._events(call, owner, prompt, places, parent, channel, generation, seed):
                    done = isinstance(event, Finished)
                    yield event
            finally:
                del self._running[generation]
                if done or channel.ended.is_set():
                    channel.close()
                elif call.save_on_cancel and call.save is not None:
                    self._loop.cancel(row, save=True)
                    self._spawn(self._save_cancelled(channel, owner, call, parent))
                else:
                    self._loop.cancel(row)
                    channel.close()

    async def _events(
        self,
        call: GenerateCall,
        owner: str,
        prompt: Prompt,
        places: list[int],
        parent: Snapshot | None,
        channel: Channel,
        generation: str,
        seed: int,
    ) -> AsyncIterator[Event]:
        """One generation's events from its channel, with nodes turned into snapshots."""
        saved: SnapshotView | None = None
        save_error = ""
        gathered: Tokens | None = None
        while True:
            event = await channel.get()
            if gathered is not None and not (isinstance(event, Tokens)):
                yield self._delta(gathered, call)
                gathered = None
            match event:
                case Admitted():
                    yield Started(
                        generation=generation,
                        instance=self._instance,
                        prompt_tokens=len(prompt.tokens),
                        seed=seed,
                        queue_seconds=event.queue_seconds,
                    )
                    for marked in self._parent_marks(call.marks, places, owner, parent):
                        yield marked
                case Prefilled():
                    yield Progress(event.done, len(prompt.tokens))
                case NodeAt() if event.rehome:
                    self._rehome(parent, event)
                case NodeAt() if event.final:
                    saved, save_error = self._try_save(owner, event, call.save, parent)
                case NodeAt():
                    for marked in self._marked(event, call.marks, places, owner, parent):
                        yield marked
                case Tokens():
                    if gathered is not None:
                        gathered.text += event.text
                        gathered.picked += event.picked
                    else:
                        gathered = event
                    if len(gathered.picked) >= call.output.min_tokens_per_delta or not gathered.picked:
                        yield self._delta(gathered, call)
                        gathered = None
                case Ended():
                    assert event.reason is not None
                    if call.save is not None and saved is None and not save_error:
                        save_error = "NOTHING_TO_SAVE"
                    yield Finished(
                        reason=event.reason,
                        usage=event.usage,
                        timing=event.timing,
                        stop=event.stop,
                        stop_token_id=event.stop_token_id,
                        snapshot=saved,
                        save_error_reason=save_error,
                    )
                    return
                case Failed():
                    raise event.error

    async def stop_generation(self, generation: str, owner: str) -> bool:
        running = self._running.get(generation)
        if running is None or running.owner != owner:
            return False
        self._loop.stop(running.row)
        return True

    async def create_snapshot(self, call: CreateSnapshotCall, owner: str) -> Created:
        loaded, handles = self._need_model(call.model, names_snapshot=bool(call.parent))
        handles.check_new(owner, [call.options, *(m.options for m in call.marks)])
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            prompt = await self._prompt(loaded, parent, call.input)
            end = len(prompt.tokens)
            check_room(end, loaded.view, needs=0)
            places = mark_positions(call.marks, prompt)
            if parent is not None and end == parent.token_count:
                snapshot = handles.add(owner, loaded.cache.hold(parent.node), call.options, parent)
                usage = Usage(prompt_tokens=end, cached_tokens=end, memory_tokens=end)
                marks: list[Marked] = self._parent_marks(call.marks, places, owner, parent)
            else:
                keep = self._engine_places(places, parent) | {end}
                work = Work(
                    owner=owner,
                    tokens=prompt.tokens,
                    base=parent.node if parent else None,
                    keep=keep,
                    generation=None,
                )
                nodes, usage = await self._run(work, parent)
                marks = self._parent_marks(call.marks, places, owner, parent)
                for event in nodes:
                    if event.node.end < end or end in places:
                        copy = NodeAt(loaded.cache.hold(event.node), event.lost, final=False)
                        marks += self._marked(copy, call.marks, places, owner, parent)
                    if event.node.end < end:
                        loaded.cache.let_go(event.node)
                last = next(event for event in nodes if event.node.end == end)
                if last.lost:
                    loaded.cache.let_go(last.node)
                    raise _store_full(last.lost)
                snapshot = handles.add(owner, last.node, call.options, parent)
            kept = {m.mark: m.snapshot for m in marks if m.snapshot is not None}
            if len(kept) < len(call.marks):
                raise _store_full("a mark's state could not be kept")
            return Created(
                snapshot=handles.view(snapshot), usage=usage, marked=tuple(kept[i] for i in range(len(call.marks)))
            )

    async def fork(self, call: ForkCall, owner: str) -> Forked:
        loaded, handles = self._need_model("", names_snapshot=True)
        handles.check_new(owner, [branch.options for branch in call.branches])
        with handles.using(call.parent, owner) as parent:
            prompts = []
            for i, branch in enumerate(call.branches):
                at = f"branches[{i}].append"
                prompt = await self._prompt(loaded, parent, branch.append, at=at)
                check_room(len(prompt.tokens), loaded.view, needs=0, at=at)
                prompts.append(prompt)
            nodes, usage = await self._run_branches(loaded, parent, prompts, owner)
            snapshots: list[Snapshot] = []
            try:
                while nodes:
                    branch = call.branches[len(snapshots)]
                    snapshots.append(handles.add(owner, nodes.pop(0), branch.options, parent))
            except CallError:  # all or none
                for snapshot in snapshots:
                    handles.delete(snapshot, GoneReason.DELETED, in_use_ok=True)
                for node in nodes:
                    loaded.cache.let_go(node)
                raise
            return Forked(snapshots=tuple(handles.view(s) for s in snapshots), usage=usage)

    async def _run_branches(
        self, loaded: Loaded, parent: Snapshot, prompts: list[Prompt], owner: str
    ) -> tuple[list[Node], Usage]:
        """A held node for each prompt; branches that add tokens are prefilled side by side."""
        cache = loaded.cache
        works = [
            Work(owner=owner, tokens=p.tokens, base=parent.node, keep=frozenset({len(p.tokens)}), generation=None)
            for p in prompts
            if len(p.tokens) > parent.token_count
        ]
        results = await asyncio.gather(*(self._run(w, parent) for w in works), return_exceptions=True)
        failure = next((r for r in results if isinstance(r, BaseException)), None)
        done = [r for r in results if not isinstance(r, BaseException)]
        if failure is None:
            lost = next((e.lost for nodes, _ in done for e in nodes if e.lost), "")
            failure = _store_full(lost) if lost else None
        if failure is not None:
            for events, _ in done:
                for event in events:
                    cache.let_go(event.node)
            raise failure
        computed = iter(done)
        nodes: list[Node] = []
        usages: list[Usage] = []
        for prompt in prompts:
            if len(prompt.tokens) > parent.token_count:
                events, usage = next(computed)
                nodes.append(events[-1].node)
                usages.append(usage)
            else:
                nodes.append(cache.hold(parent.node))
        return nodes, _fork_usage(parent.token_count, usages)

    async def rollback(self, call: RollbackCall, owner: str) -> RolledBack:
        loaded, handles = self._need_model("", names_snapshot=True)
        handles.check_new(owner, [call.options])
        cache = loaded.cache
        with handles.using(call.source, owner) as source:
            position, node = self._rollback_target(call, source, owner, handles, cache)
            if node is None and call.rounding is Rounding.DOWN:
                stored = cache.checkpoints_before(source.node, position)
                node = cache.cut(source.node, stored) if stored else None
                if node is None:
                    raise _recompute_limit(position, 0, 0)
                position = stored
            if node is None:
                node, usage = await self._recompute(call, source, position, owner, cache)
            else:
                usage = Usage(prompt_tokens=position, cached_tokens=position, memory_tokens=position)
            if call.release is Release.SOURCE and source.uses > 1:
                cache.let_go(node)
                handles.delete(source, GoneReason.ROLLED_BACK, in_use_ok=False)
            snapshot = handles.add(owner, node, call.options, source)
            released = self._let_go_of(call.release, source, position, snapshot, handles, cache)
            return RolledBack(snapshot=handles.view(snapshot), released=tuple(released), usage=usage)

    def _rollback_target(
        self, call: RollbackCall, source: Snapshot, owner: str, handles: Handles, cache: PrefixCache
    ) -> tuple[int, Node | None]:
        """Where to cut, and a held node that stands there if no compute is needed."""
        if call.ancestor is not None:
            ancestor = handles.find(call.ancestor, owner)
            tokens = ancestor.node.all_tokens()
            if source.node.all_tokens()[: len(tokens)] != tokens:
                facts = {"source": call.source, "ancestor": call.ancestor}
                raise NotAnAncestor(
                    f"{call.ancestor} is not a prefix of {call.source}", hint="roll back by token_count", metadata=facts
                )
            return len(tokens), cache.hold(ancestor.node)
        position = call.token_count if call.token_count is not None else source.token_count - (call.drop_tokens or 0)
        if position > source.token_count or position < 0:
            facts = {"tokenCount": str(source.token_count)}
            raise RollbackBeyondEnd(
                f"{call.source} has {source.token_count} tokens", hint="cut within it", metadata=facts
            )
        if position == 0:
            field = "token_count" if call.token_count is not None else "drop_tokens"
            raise InvalidField.at(field, "nothing would be left: generate without a parent instead")
        return position, cache.cut(source.node, position)

    async def _recompute(
        self, call: RollbackCall, source: Snapshot, position: int, owner: str, cache: PrefixCache
    ) -> tuple[Node, Usage]:
        """Computes the state at `position` from the deepest stored place before it."""
        base = cache.hold_base(source.node, position)
        try:
            stored = base.end
            limit = call.max_recompute_tokens
            if limit is not None and position - stored > limit:
                raise _recompute_limit(position - stored, limit, stored)
            work = Work(
                owner=owner,
                tokens=source.node.all_tokens()[:position],
                base=base if base.parent is not None else None,
                keep=frozenset({position}),
                generation=None,
            )
            events, usage = await self._run(work, None)
        finally:
            cache.let_go(base)
        (event,) = events
        if event.lost:
            cache.let_go(event.node)
            raise _store_full(event.lost)
        # All of it was in the source once.
        again = usage.recomputed_tokens + usage.new_tokens
        reason = usage.miss_reason if usage.miss_reason is not MissReason.NONE else MissReason.BETWEEN_CHECKPOINTS
        return event.node, replace(
            usage,
            recomputed_tokens=again,
            new_tokens=0,
            diverged_at=None,
            miss_reason=reason if again else MissReason.NONE,
        )

    def _let_go_of(
        self,
        release: Release,
        source: Snapshot,
        position: int,
        result: Snapshot,
        handles: Handles,
        cache: PrefixCache,
    ) -> list[str]:
        if release is Release.NONE:
            return []
        going = [source] if release is Release.SOURCE else cache.abandoned_by(source, position)
        going = [snapshot for snapshot in going if snapshot is not result]
        if release is Release.ABANDONED:
            self._stop_users({snapshot.id for snapshot in going}, source.owner)
        for snapshot in going:
            handles.delete(snapshot, GoneReason.ROLLED_BACK, in_use_ok=True)
        return [f"snapshots/{snapshot.id}" for snapshot in going]

    async def count_tokens(self, call: CountTokensCall, owner: str) -> Counted:
        loaded, handles = self._need_model(call.model, names_snapshot=bool(call.parent))
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            prompt = await self._prompt(loaded, parent, call.input)
            total = len(prompt.tokens)
            lookup = loaded.cache.lookup(owner, prompt.tokens, base=parent.node if parent else None, keep=())
            loaded.cache.release(lookup)
            return Counted(
                total_tokens=total,
                cached_tokens=lookup.position,
                remaining_tokens=max(0, loaded.view.context_tokens - total),
                token_ids=tuple(prompt.added) if call.include_rendered else (),
                text=prompt.text if call.include_rendered else "",
            )

    # -- snapshots ------------------------------------------------------------------------------------------------

    def get_snapshot(self, name: str, owner: str) -> SnapshotView:
        handles = self._need_store(name)
        return handles.view(handles.find(name, owner))

    def snapshot_tokens(self, name: str, owner: str) -> Sequence[int]:
        return self._need_store(name).find(name, owner).node.all_tokens()

    def list_snapshots(
        self, owner: str, *, after: tuple[float, str] | None, limit: int, labels: dict[str, str], parent: str
    ) -> list[SnapshotView]:
        if self._handles is None or self._loaded is None:
            return []
        wanted_parent = parent.removeprefix("snapshots/")
        found: list[SnapshotView] = []
        for snapshot in self._loaded.cache.snapshots(owner):
            if len(found) == limit:
                break
            if after is not None and (snapshot.created, f"snapshots/{snapshot.id}") <= after:
                continue
            if wanted_parent and snapshot.parent != wanted_parent:
                continue
            if labels.items() <= snapshot.labels.items():
                found.append(self._handles.view(snapshot))
        return found

    def update_snapshot(self, change: SnapshotChange, owner: str) -> SnapshotView:
        handles = self._need_store(change.name)
        assert self._loaded is not None
        snapshot = handles.find(change.name, owner)
        handles.update(
            snapshot,
            labels=dict(change.labels) if change.labels is not None else None,
            expires=change.expire_time,
            ttl=change.ttl,
            pinned=change.pinned,
        )
        return handles.view(snapshot)

    def extend_snapshots(
        self, names: Sequence[str], ttl: float | None, owner: str
    ) -> tuple[list[SnapshotView], list[str]]:
        extended: list[SnapshotView] = []
        missing: list[str] = []
        for name in names:
            try:
                handles = self._need_store(name)
                snapshot = handles.find(name, owner)
            except SnapshotNotFound:
                missing.append(name)
                continue
            assert self._loaded is not None
            self._loaded.cache.extend(snapshot, ttl)
            extended.append(handles.view(snapshot))
        return extended, missing

    async def delete_snapshot(
        self, name: str, owner: str, *, descendants: bool, stop_active: bool, allow_missing: bool
    ) -> list[str]:
        try:
            handles = self._need_store(name)
            snapshot = handles.find(name, owner)
        except SnapshotNotFound:
            if allow_missing:
                return []
            raise
        assert self._loaded is not None
        going = [snapshot]
        if descendants:
            going += [s for s in self._loaded.cache.descendants(snapshot) if not s.pinned]
        if stop_active:
            self._stop_users({s.id for s in going}, owner)
        else:
            for each in going:
                handles.refuse_if_busy(each)
        for each in going:
            handles.delete(each, GoneReason.DELETED, in_use_ok=True)
        return [f"snapshots/{s.id}" for s in going]

    # -- the process ----------------------------------------------------------------------------------------------

    def server(self) -> ServerView:
        c = self._config
        return ServerView(
            instance=self._instance,
            boot_id=self._boot_id,
            version=version("kvfork"),
            features=("share_decoded",) if c.share_decoded else (),
            limits=LimitsView(
                max_request_bytes=c.max_request_bytes,
                max_fork_branches=c.max_fork_branches,
                max_queue=c.max_queue,
                max_batch=c.max_batch,
                max_snapshots=c.max_snapshots,
                max_pinned=c.max_pinned,
                max_ttl=c.max_ttl,
            ),
            uptime=time.monotonic() - self._started,
            draining=self._draining,
        )

    def models(self) -> list[ModelView]:
        return [self._model]

    def model(self, name: str) -> ModelView:
        if name not in ("", self._model.name):
            raise ModelNotFound(
                f"there is no model {name}",
                hint=f"this server has {self._model.name}",
                resource=("kvfork.v1.Model", name),
            )
        return self._model

    def stats(self) -> StatsView:
        tally = dict.fromkeys(Residency, 0)
        if self._loaded is None or self._handles is None:
            return _no_stats(self._config)
        for snapshot in self._loaded.cache.all_snapshots():
            tally[self._handles.view(snapshot).residency] += 1
        store = self._loaded.cache.store.stats()
        return StatsView(
            checkpoint_interval=BLOCK_TOKENS,
            active_sequences=self._loop.count(State.RESTORING, State.PREFILL, State.DECODE, State.SAVING),
            queued_calls=self._loop.count(State.QUEUED),
            memory_snapshots=tally[Residency.MEMORY],
            disk_snapshots=tally[Residency.DISK],
            token_snapshots=tally[Residency.TOKENS],
            memory_bytes=store.memory_bytes + store.pending_bytes,
            memory_limit_bytes=self._config.memory_bytes,
            disk_bytes=store.file_bytes,
            disk_limit_bytes=self._config.disk_bytes,
            prompt_tokens=self._loop.prompt_tokens,
            cached_tokens=self._loop.cached_tokens,
            recomputed_tokens=self._loop.recomputed_tokens,
            checkpoints_written=store.written.records,
            checkpoints_read=sum(usage.records for usage in store.read.values()),
            checkpoints_corrupt=store.corrupt,
            evictions=sum(usage.records for usage in store.evicted.values()),
        )

    def engine_alive(self) -> bool:
        return self._model.state is not ModelState.FAILED and self._loop.is_alive(STUCK_AFTER)

    def start_draining(self) -> None:
        self._draining = True

    async def finish_running(self, timeout: float) -> None:
        for running in list(self._running.values()):
            self._loop.stop(running.row)
        until = time.monotonic() + timeout
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.01)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _ready(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._model = loaded.view
        self._handles = Handles(loaded.cache, loaded.view.name, self._instance)
        log.info("%s is ready", loaded.view.name)

    def _failed_to_load(self, error: Exception) -> None:
        self._model = replace(self._model, state=ModelState.FAILED, error=str(error))

    def _need_model(self, name: str, *, names_snapshot: bool) -> tuple[Loaded, Handles]:
        """What a call that needs the model works with. Raises what stands in its way."""
        self.model(name)
        if self._draining:
            raise Draining(
                "the server is shutting down",
                hint="snapshots end with it" if names_snapshot else "try another instance",
                metadata={"namesSnapshot": "true"} if names_snapshot else {},
                retry_after=None if names_snapshot else 1.0,
            )
        if self._model.state is ModelState.FAILED:
            raise EngineDown(f"{self._model.name} could not be loaded", hint="see the server's log", retry_after=5.0)
        if self._loaded is None or self._handles is None:
            raise ModelLoading(
                f"{self._model.name} is being loaded", metadata={"model": self._model.name}, retry_after=1.0
            )
        if not self._loop.is_alive(STUCK_AFTER):
            raise EngineDown("the model thread is down", hint="the server must be restarted", retry_after=5.0)
        return self._loaded, self._handles

    def _need_store(self, name: str) -> Handles:
        if self._handles is None:
            raise SnapshotNotFound(f"there is no snapshot {name}", resource=("kvfork.v1.Snapshot", name))
        return self._handles

    async def _in_text_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    async def _prompt(self, loaded: Loaded, parent: Snapshot | None, given: Input | None, at: str = "input") -> Prompt:
        context = parent.node.all_tokens() if parent else ()
        return await self._in_text_thread(lambda: resolve_prompt(loaded.codec, loaded.view, context, given, at))

    def _submit(self, work: Work) -> tuple[Channel, RowId]:
        assert self._loaded is not None
        channel = Channel(self._loaded.cache.let_go)
        return channel, self._loop.submit(work, self._outlet.emit_to(channel))

    async def _run(self, work: Work, parent: Snapshot | None) -> tuple[list[NodeAt], Usage]:
        """A work without generation, to its end. Returns held nodes in order; cancelling it leaves nothing behind."""
        channel, row = self._submit(work)
        nodes: list[NodeAt] = []
        try:
            while True:
                match await channel.get():
                    case NodeAt() as event if event.rehome:
                        self._rehome(parent, event)
                    case NodeAt() as event:
                        nodes.append(event)
                    case Ended() as event:
                        return nodes, event.usage
                    case Failed() as event:
                        raise event.error
                    case _:
                        pass
        except BaseException:
            self._loop.cancel(row)
            channel.close()
            assert self._loaded is not None
            for event in nodes:
                self._loaded.cache.let_go(event.node)
            raise

    @staticmethod
    def _engine_places(places: list[int], parent: Snapshot | None) -> frozenset[int]:
        """Places that lie beyond the parent: the engine will pass them."""
        return frozenset(p for p in places if parent is None or p > parent.token_count)

    def _parent_marks(
        self, marks: Sequence[Mark], places: list[int], owner: str, parent: Snapshot | None
    ) -> list[Marked]:
        """Marks at or before the parent's end: kept if a state stands there already, and said so if not."""
        if parent is None:
            return []
        assert self._loaded is not None and self._handles is not None
        found: list[Marked] = []
        for i, (mark, place) in enumerate(zip(marks, places, strict=True)):
            if place > parent.token_count:
                continue
            node = self._loaded.cache.cut(parent.node, place)
            if node is None:
                found.append(Marked(mark=i, snapshot=None, save_error_reason="NOT_STORED"))
            else:
                found += self._mark(i, NodeAt(node, "", final=False), mark, owner, parent)
        return found

    def _marked(
        self, event: NodeAt, marks: Sequence[Mark], places: list[int], owner: str, parent: Snapshot | None
    ) -> list[Marked]:
        """Every mark at the node's place; takes over the hold on the node."""
        assert self._loaded is not None
        found: list[Marked] = []
        for i, (mark, place) in enumerate(zip(marks, places, strict=True)):
            if place == event.node.end:
                copy = NodeAt(self._loaded.cache.hold(event.node), event.lost, final=False)
                found += self._mark(i, copy, mark, owner, parent)
        self._loaded.cache.let_go(event.node)
        return found

    def _mark(self, index: int, event: NodeAt, mark: Mark, owner: str, parent: Snapshot | None) -> list[Marked]:
        view, reason = self._try_save(owner, event, mark.options, parent)
        return [Marked(mark=index, snapshot=view, save_error_reason=reason)]

    def _try_save(
        self, owner: str, event: NodeAt, options: SaveOptions | None, parent: Snapshot | None
    ) -> tuple[SnapshotView | None, str]:
        """Names a node if all of it was stored; the reason if not."""
        assert self._loaded is not None and self._handles is not None
        if event.lost or options is None:
            self._loaded.cache.let_go(event.node)
            return None, "STORE_FULL" if event.lost else ""
        try:
            return self._handles.view(self._handles.add(owner, event.node, options, parent)), ""
        except CallError as error:
            return None, error.reason

    def _rehome(self, parent: Snapshot | None, event: NodeAt) -> None:
        assert self._loaded is not None
        if parent is not None and not event.lost:
            self._loaded.cache.rehome(parent, event.node)
        self._loaded.cache.let_go(event.node)

    async def _save_cancelled(self, channel: Channel, owner: str, call: GenerateCall, parent: Snapshot | None) -> None:
        """Nobody listens any more, but the state was asked for: waits for it and names it."""
        while True:
            event = await channel.get()
            if isinstance(event, NodeAt):
                self._try_save(owner, event, call.save if event.final else None, parent)
            if isinstance(event, Ended | Failed):
                channel.close()
                return

    def _stop_users(self, snapshot_ids: set[str], owner: str) -> None:
        for running in self._running.values():
            if running.owner == owner and running.parent in snapshot_ids:
                self._loop.stop(running.row)

    def _delta(self, tokens: Tokens, call: GenerateCall) -> Delta:
        assert self._loaded is not None
        codec = self._loaded.codec

        def logprob(pick: Picked) -> TokenLogprob:
            return TokenLogprob(
                token_id=pick.token,
                logprob=pick.logprob if pick.logprob is not None else 0.0,
                token_bytes=codec.token_bytes(pick.token),
                top=tuple(TopLogprob(t.token, t.logprob, codec.token_bytes(t.token)) for t in pick.top),
            )

        return Delta(
            text=tokens.text,
            first_position=tokens.first_position,
            token_count=len(tokens.picked),
            token_ids=tuple(p.token for p in tokens.picked) if call.output.token_ids else (),
            logprobs=tuple(logprob(p) for p in tokens.picked) if call.output.top_logprobs is not None else (),
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY)
            if self._loaded is not None:
                self._loaded.cache.sweep()


def _store_full(reason: str) -> StoreFull:
    return StoreFull(f"the state could not be kept: {reason}", hint="free room, or try again later", retry_after=1.0)


def _recompute_limit(needed: int, allowed: int, nearest: int) -> RecomputeLimit:
    facts = {"needed": str(needed), "allowed": str(allowed), "nearestCheckpoint": str(nearest)}
    return RecomputeLimit(
        f"{needed} tokens would be computed again, {allowed} are allowed",
        hint="raise max_recompute_tokens, or cut at the nearest checkpoint",
        metadata=facts,
    )


def _fork_usage(parent_tokens: int, usages: list[Usage]) -> Usage:
    """Over all branches; the parent counts once."""
    recomputed = max((u.recomputed_tokens for u in usages), default=0)
    first = usages[0] if usages else None
    return Usage(
        prompt_tokens=parent_tokens + sum(u.prompt_tokens - parent_tokens for u in usages),
        cached_tokens=parent_tokens - recomputed,
        recomputed_tokens=recomputed,
        new_tokens=sum(u.prompt_tokens - parent_tokens for u in usages),
        memory_tokens=first.memory_tokens if first else parent_tokens,
        disk_tokens=first.disk_tokens if first else 0,
        disk_bytes_read=sum(u.disk_bytes_read for u in usages),
        diverged_at=parent_tokens if usages else None,
        miss_reason=next((u.miss_reason for u in usages if u.recomputed_tokens), MissReason.NONE),
    )


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
        disk_limit_bytes=config.disk_bytes,
        prompt_tokens=0,
        cached_tokens=0,
        recomputed_tokens=0,
        checkpoints_written=0,
        checkpoints_read=0,
        checkpoints_corrupt=0,
        evictions=0,
    )
