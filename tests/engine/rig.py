"""A rig around the real engine loop, cache and store, without gRPC: submit works, read back nodes and their bytes."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvcache.cache import PrefixCache
from kvcache.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, Checkpoints
from kvcache.receipt import Usage
from kvcache.records import RecordId, RecordKind
from kvcache.store import StoreConfig, TieredStore
from kvcache.tree import Node
from service.engine import cpu
from service.engine.loading import ModelFacts
from service.loop import EngineLoop
from service.models import resolve
from service.request import Constraint, Sampling, Stopping
from service.scheduler import Scheduler, SchedulerConfig
from service.text.constraint import Grammars, RowConstraint
from service.text.formats import detect
from service.text.stream import TextStream
from service.text.tokens import TextCodec
from service.work import Ended, Failed, Generation, NodeAt, Tokens, Work, WorkEvent

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, seed=0)
MIB = 1 << 20


@dataclass
class Outcome:
    """What one work gave."""

    nodes: dict[int, Node] = field(default_factory=dict)  # held until the rig closes
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: Usage | None = None
    error: Exception | None = None


class Ticket:
    """A work under way."""

    def __init__(self, rig: Rig, row: int) -> None:
        self._rig = rig
        self.row = row
        self.outcome = Outcome()
        self.ended = threading.Event()
        self.events: queue.SimpleQueue[WorkEvent] = queue.SimpleQueue()

    def take(self, event: WorkEvent) -> None:
        self.events.put(event)
        match event:
            case NodeAt():
                assert not event.lost
                self.outcome.nodes[event.node.end] = event.node
            case Tokens():
                self.outcome.tokens += [p.token for p in event.picked]
                self.outcome.text += event.text
            case Ended():
                self.outcome.usage = event.usage
                self.ended.set()
            case Failed():
                self.outcome.error = event.error
                self.ended.set()

    def wait(self) -> Outcome:
        assert self.ended.wait(240), "the work did not end"
        if self.outcome.error is not None:
            raise self.outcome.error
        return self.outcome


class Rig:
    """One model, one loop, one store."""

    def __init__(
        self,
        folder: Path,
        *,
        load: Callable[[], tuple[object, ModelFacts]] | None = None,
        engine: Callable[..., Any] | None = None,
        memory: int = 512 * MIB,
        rows: int = 8,
        checkpoints: Checkpoints = DEFAULT_CHECKPOINTS,
    ) -> None:
        """`folder` has the tokenizer, and the model too unless `load` gives another, on the engine thread.

        `engine` makes another engine than `MlxEngine` of a model and its layout.
        """
        self.folder = folder
        self._load_given = load
        self._engine_given = engine
        self._memory = memory
        self._checkpoints = checkpoints
        self.codec = TextCodec.load(folder)
        self.grammars = Grammars(self.codec, detect(self.codec))
        self._ready = threading.Event()
        self._broken: Exception | None = None
        self.loop = EngineLoop(self._load, Scheduler(SchedulerConfig(max_rows=rows)), lambda: None, snapshot_wait=10.0)
        self.loop.start()
        assert self._ready.wait(240)
        if self._broken is not None:
            self.loop.close()
            raise self._broken

    def _load(self):
        try:
            return self._load_all()
        except Exception as error:
            self._broken = error
            raise
        finally:
            self._ready.set()

    def _load_all(self):
        cpu.mlx()
        from service.engine.loading import load
        from service.engine.mlx_engine import MlxEngine

        model, facts = load(self.folder) if self._load_given is None else self._load_given()
        self.facts = facts
        self.model = model
        store = TieredStore(
            StoreConfig(
                memory_bytes=self._memory,
                disk_bytes=0 if self._checkpoints.policy is CheckpointPolicy.OFF else 2048 * MIB,
                queue_bytes=256 * MIB,
                min_free_bytes=0,
                checkpoints=self._checkpoints,
            )
        )
        store.start()
        self.cache = PrefixCache(store, facts.layout, facts.fingerprint)
        self.engine = (self._engine_given or MlxEngine)(model, facts.layout)
        return self.engine, self.cache

    def submit(
        self,
        tokens: Sequence[int],
        *,
        base: Node | None = None,
        keep: Sequence[int] = (),
        generate: int = 0,
        save: bool = False,
        sampling: Sampling = GREEDY,
        stopping: Stopping | None = None,
        owner: str = "owner",
        max_recompute: int | None = None,
        top_logprobs: int | None = None,
        form: Constraint | None = None,
        constraint: RowConstraint | None = None,
    ) -> Ticket:
        generation = None
        if generate:
            stopping = stopping or Stopping(ignore_eos=True)
            text = TextStream(
                self.codec, stopping, max_new_tokens=generate, context_room=100_000, context_tail=list(tokens[-8:])
            )
            generation = Generation(
                sampling=sampling,
                stopping=stopping,
                top_logprobs=top_logprobs,
                text=text,
                save=save,
                save_on_cancel=False,
                constraint=constraint if form is None else self.constraint(form, stopping, tokens, owner),
            )
        work = Work(
            owner=owner,
            tokens=list(tokens),
            base=base,
            keep=frozenset(keep),
            generation=generation,
            max_recompute_tokens=max_recompute,
        )
        box: list[Ticket] = []
        made = threading.Event()

        def emit(event: WorkEvent) -> None:
            made.wait()
            box[0].take(event)

        ticket = Ticket(self, self.loop.submit(work, emit))
        box.append(ticket)
        made.set()
        return ticket

    def constraint(self, form: Constraint, stopping: Stopping, tokens: Sequence[int], owner: str) -> RowConstraint:
        row = asyncio.run(self.grammars.open(owner, form))
        return self.grammars.follow(row, form, stopping, tokens)

    def run(self, tokens: Sequence[int], **how) -> Outcome:
        return self.submit(tokens, **how).wait()

    def records(self, node: Node) -> dict[RecordKind, bytes]:
        """Every record of a node, by kind; those that are not stored are left out."""
        found = {}
        for kind in RecordKind:
            record = RecordId(node.source if kind is RecordKind.FULL else node.key, kind)
            if self.cache.store.locate(record) is not None:
                (payload,) = self.cache.store.fetch_now([record]).payloads
                found[kind] = bytes(payload)
        return found

    def chain(self, node: Node) -> list[dict[RecordKind, bytes]]:
        return [self.records(n) for n in node.path()]

    def close(self) -> None:
        self.loop.close()
        self.grammars.close()
        self.cache.store.close()


def prompt_of(rig: Rig, length: int, seed: int = 1) -> list[int]:
    """Deterministic token ids within the model's vocabulary, away from special ones."""
    vocab = min(rig.facts.vocab_size, 400)
    state = seed
    tokens = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(20 + (state >> 8) % (vocab - 24))
    return tokens


def open_rig(name: str, **how: object) -> Rig:
    """A rig on a known model; gemma3 is skipped where its terms were not accepted."""
    if name == "gemma3" and os.environ.get("KVFORK_ACCEPT_GEMMA_TERMS") != "1":
        pytest.skip("gemma3 needs KVFORK_ACCEPT_GEMMA_TERMS=1 (make test sets it)")
    return Rig(resolve(name), **how)
