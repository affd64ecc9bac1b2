"""The engine loop over `FakeEngine` and a real cache, turned by hand: `turn` is one step, in the calling thread."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.cache import PrefixCache
from kvcache.checkpoints import DEFAULT_CHECKPOINTS, Checkpoints
from kvcache.layout import CacheLayout, LayerKind, LayerSpec
from kvcache.receipt import Usage
from kvcache.storage import MemoryStorage, Storage
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.engine.fake import FakeEngine
from service.events import FinishReason
from service.loop import EngineLoop
from service.plan import RowId, TokenMask
from service.request import Sampling, Stopping
from service.scheduler import Scheduler, SchedulerConfig, State
from service.text.stream import Piece
from service.work import Admitted, Ended, Failed, Generation, NodeAt, Prefilled, Tokens, Work, WorkEvent

LAYOUT = CacheLayout((LayerSpec(LayerKind.FULL), LayerSpec(LayerKind.WINDOW, 300), LayerSpec(LayerKind.STATE)))
GREEDY = Sampling(temperature=0.0, seed=0)
MIB = 1 << 20
SNAPSHOT_WAIT = 10.0  # seconds


class PlainText:
    """`TextStream` without a vocabulary: every token is its number and a space."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.ended = 0

    def push(self, token: int, *, last: bool = False) -> Piece:
        self._left = 0 if last else self._left - 1
        return Piece(text=f"{token} ", finish=FinishReason.MAX_TOKENS if self._left == 0 else None)

    def end(self, reason: FinishReason) -> Piece:
        self.ended += 1
        return Piece(text="|", finish=reason)


@dataclass
class Heard:
    """What one work said."""

    row: RowId = field(default=RowId(0))
    events: list[WorkEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [pick.token for event in self.events if isinstance(event, Tokens) for pick in event.picked]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Tokens))

    @property
    def nodes(self) -> dict[int, Node]:
        return {event.node.end: event.node for event in self.events if isinstance(event, NodeAt)}

    @property
    def final(self) -> list[int]:
        return [event.node.end for event in self.events if isinstance(event, NodeAt) and event.final]

    @property
    def end(self) -> Ended | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Ended | Failed) else None

    @property
    def usage(self) -> Usage:
        assert isinstance(self.end, Ended), self.events
        return self.end.usage

    @property
    def error(self) -> Exception:
        assert isinstance(self.end, Failed), self.events
        return self.end.error

    @property
    def receipt(self) -> tuple[int, int, int]:
        return self.usage.cached_tokens, self.usage.recomputed_tokens, self.usage.new_tokens

    def names(self) -> list[str]:
        """Kinds of events, runs of one kind counted once."""
        kinds = [type(event).__name__ for event in self.events]
        return [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]

    def check(self) -> None:
        """The order that every reader relies on."""
        ends = [event for event in self.events if isinstance(event, Ended | Failed)]
        assert len(ends) == 1 and self.events[-1] is ends[0], self.events
        admitted = [i for i, event in enumerate(self.events) if isinstance(event, Admitted)]
        assert admitted == [0] or (len(self.events) == 1 and isinstance(self.end, Failed)), self.events
        position = None
        for event in self.events:
            if isinstance(event, Tokens):
                if position is not None:
                    assert event.first_position == position
                position = event.first_position + len(event.picked)
        done = [event.done for event in self.events if isinstance(event, Prefilled)]
        assert done == sorted(set(done))
        places = [event.node.end for event in self.events if isinstance(event, NodeAt) and not event.final]
        assert places == sorted(set(places))
        finals = [i for i, event in enumerate(self.events) if isinstance(event, NodeAt) and event.final]
        assert finals in ([], [len(self.events) - 2])


class LoopRig:
    """Time stands still unless told otherwise, and disk is read when `disk` is called (or by `run`)."""

    def __init__(
        self,
        *,
        engine: FakeEngine | None = None,
        memory: int = MIB,
        disk: int = 64 * MIB,
        rows: int = 4,
        queue: int = 8,
        active: int | None = None,
        share_decoded: bool = False,
        checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
        queue_bytes: int = MIB,
        snapshot_wait: float = SNAPSHOT_WAIT,
        storage: Storage | None = None,
        started: bool = False,
    ) -> None:
        """`storage`: what to write to, and no `damage` then. `started`: the store's thread runs, as it does in life."""
        self.now = 100.0
        self.engine = engine or FakeEngine(LAYOUT)
        self.storage = MemoryStorage()
        config = StoreConfig(
            memory_bytes=memory,
            disk_bytes=disk,
            queue_bytes=queue_bytes,
            segment_bytes=4096,
            min_free_bytes=0,
            checkpoints=checkpoints,
        )
        self.store = TieredStore(config, storage or self.storage, clock=lambda: self.now)
        self.cache = PrefixCache(
            self.store,
            self.engine._layout,
            "fake",
            share_decoded=share_decoded,
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_rows=rows, max_queue=queue, active_bytes=active, idle_bytes=memory)
        )
        self.scheduler.footprint = self.engine.footprint
        self.flushes = 0
        self.loop = EngineLoop(
            lambda: (self.engine, self.cache),
            self.scheduler,
            self._flushed,
            lambda: self.now,
            snapshot_wait=snapshot_wait,
        )
        self.steps = self.loop._take_over(self.engine, self.cache)
        self.heard: list[Heard] = []
        if started:
            self.store.start()

    def _flushed(self) -> None:
        self.flushes += 1

    def submit(
        self,
        tokens: Sequence[int],
        *,
        generate: int = 0,
        keep: Sequence[int] = (),
        base: Node | None = None,
        save: bool = False,
        save_on_cancel: bool = False,
        time_limit: float | None = None,
        sampling: Sampling = GREEDY,
        text: PlainText | None = None,
        owner: str = "a",
        constraint: TokenMask | None = None,
        mark_reasoning: bool = False,
        **work: object,
    ) -> Heard:
        generation = None
        if generate:
            generation = Generation(
                sampling=sampling,
                stopping=Stopping(time_limit=time_limit),
                top_logprobs=None,
                text=text or PlainText(generate),  # type: ignore[arg-type]
                save=save,
                save_on_cancel=save_on_cancel,
                constraint=constraint,
                mark_reasoning=mark_reasoning,
            )
        heard = Heard()
        asked = Work(
            owner=owner,
            tokens=list(tokens),
            base=base,
            keep=frozenset(keep),
            generation=generation,
            **work,  # type: ignore[arg-type]
        )
        heard.row = self.loop.submit(asked, heard.events.append)
        self.heard.append(heard)
        return heard

    def state(self, heard: Heard) -> State:
        return self.scheduler.state(heard.row)

    def turn(self) -> bool:
        """One step; False if there is nothing to do."""
        deadline = self.steps.parking.next_deadline()
        due = deadline is not None and deadline <= self.now
        if not self.loop._inbox and not self.steps.has_work and not due:
            return False
        self.drain()
        self.steps.tick()
        return True

    def drain(self) -> None:
        """What the loop does before a step."""
        self.loop._drain(self.steps)

    def until(self, heard: Heard, state: State) -> None:
        """Turns until the row is in `state`, and has picked a token if that is DECODE."""
        for _ in range(1000):
            if self.state(heard) is state and heard.row in self.steps.rows:
                return
            assert self.turn(), f"{heard.events} never reached {state}"
        raise AssertionError(state)

    def run_beside_the_disk(self, seconds: float = 60.0) -> None:
        """Turns until every work has ended, while the store's own thread reads and writes."""
        patience = time.monotonic() + seconds
        while any(heard.end is None for heard in self.heard):
            if not self.turn():
                assert time.monotonic() < patience, [heard.events for heard in self.heard if heard.end is None]
                time.sleep(0.001)

    def run(self, *, steps: int = 100_000) -> None:
        """Turns, reading the disk as well, until nothing is left to do."""
        for _ in range(steps):
            if not self.turn():
                self.store.run_pending()
                if self.scheduler.waits_for_loan:
                    self.now += 0.1
                    self.steps.tick()
                elif not self.loop._inbox:
                    return

    def settle(self) -> None:
        """Runs to the end, and nothing may be left: no row, no hold, no pin, no broken stream."""
        self.run()
        for heard in self.heard:
            heard.check()
            for event in heard.events:
                if isinstance(event, NodeAt):
                    self.cache.let_go(event.node)
        self.heard.clear()
        assert self.engine.rows == frozenset()
        assert self.scheduler.count(*State) == 0
        assert self.store.stats().pinned == 0
        assert [node for node in self.cache._tree if node.holds or node.is_tail] == []
        assert self.store.stats().failed_jobs == 0

    def damage(self, every: int = 1) -> None:
        """Writes what is pending, then zeroes the disk."""
        self.store.flush(0.0)
        for data in self.storage.segments.values():
            data[:] = bytes(len(data))


def prompt_of(length: int, seed: object = 1) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(400) for _ in range(length)]


WAYS = {
    "stop": lambda rig, heard: rig.loop.stop(heard.row),
    "cancel": lambda rig, heard: rig.loop.cancel(heard.row),
    "cancel and save": lambda rig, heard: rig.loop.cancel(heard.row, save=True),
}
