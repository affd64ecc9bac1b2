"""What the soak's callers do, and which ends of it are planned. Each kind of call is one function of a `Caller`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, LiveServer, answer_of, greedy, prompt_of, raw, refusal_of

ENDLESS = 20_000
SHARED = 40  # prompts that many callers begin with, so that state is found again


class Wrong(Exception):
    """A promise was broken; the text says which."""


@dataclass
class Caller:
    """One client that does random things. `ends` counts how each kind of call ended."""

    server: LiveServer
    rng: random.Random
    name: str
    ends: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    made: int = 0

    def act(self) -> None:
        """One call, or a few that belong together; the way it ended is noted."""
        kind = self.rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        try:
            end = KINDS[kind][1](self)
        except grpc.RpcError as error:
            refusal = refusal_of(error)
            end = f"{refusal.code} {refusal.reason}".strip()
        self.ends.append((kind, end))

    # -- kinds ----------------------------------------------------------------------------------------------------

    def short(self) -> str:
        request = greedy(self._prompt(40), tokens=self.rng.randrange(1, 24), sampling=self._sampling())
        self.tokens += len(answer_of(self.server.inference.Generate(request, timeout=PATIENCE)).ids)
        return "finished"

    def long(self) -> str:
        request = greedy(self._prompt(self.rng.randrange(1000, 4000)), tokens=self.rng.randrange(1, 100))
        self.tokens += len(answer_of(self.server.inference.Generate(request, timeout=PATIENCE)).ids)
        return "finished"

    def fork(self) -> str:
        """A snapshot, three branches with a turn each, and what they say twice."""
        root = self._snapshot(self.rng.randrange(200, 900))
        try:
            branches = [inference_pb.ForkBranch(append=raw(prompt_of(9, i))) for i in range(3)]
            forked = self.server.inference.Fork(
                inference_pb.ForkRequest(parent=root.name, branches=branches), timeout=PATIENCE
            )
            for branch in forked.snapshots:
                said = [
                    answer_of(
                        self.server.inference.Generate(greedy(None, parent=branch.name, tokens=8), timeout=PATIENCE)
                    )
                    for _ in range(2)
                ]
                if said[0].ids != said[1].ids:
                    raise Wrong(f"two runs of one branch: {said[0].ids} {said[1].ids}")
                self.tokens += 16
        finally:
            self._delete(root.name)
        return "finished"

    def rollback(self) -> str:
        """What is said after a rollback is what a run that never went further says."""
        root = self._snapshot(self.rng.randrange(300, 900))
        try:
            cut = self.rng.randrange(1, root.token_count)
            back = self.server.inference.Rollback(
                inference_pb.RollbackRequest(source=root.name, token_count=cut), timeout=PATIENCE
            ).snapshot
            if back.token_count != cut:
                raise Wrong(f"rolled back to {back.token_count}, not to {cut}")
            answer_of(self.server.inference.Generate(greedy(raw([7]), parent=back.name, tokens=6), timeout=PATIENCE))
            self.tokens += 6
        finally:
            self._delete(root.name)
        return "finished"

    def cancel(self) -> str:
        stream = self.server.inference.Generate(greedy(self._prompt(self._length()), tokens=ENDLESS), timeout=PATIENCE)
        timer = threading.Timer(self.rng.uniform(0, 0.2), stream.cancel)
        timer.start()
        try:
            for event in stream:
                self.tokens += event.delta.token_count
        finally:
            timer.cancel()
        return "finished"

    def deadline(self) -> str:
        request = greedy(self._prompt(self._length()), tokens=ENDLESS)
        for event in self.server.inference.Generate(request, timeout=self.rng.uniform(0.001, 0.2)):
            self.tokens += event.delta.token_count
        return "finished"

    def stop(self) -> str:
        stream = self.server.inference.Generate(greedy(self._prompt(self._length()), tokens=ENDLESS), timeout=PATIENCE)
        events = [next(stream)]
        threading.Timer(
            self.rng.uniform(0, 0.2),
            lambda: self.server.inference.StopGeneration(
                inference_pb.StopGenerationRequest(generation=events[0].started.generation)
            ),
        ).start()
        answer = answer_of([*events, *stream])
        self.tokens += len(answer.ids)
        return inference_pb.FinishReason.Name(answer.finished.reason)

    def time_limit(self) -> str:
        stopping = pb.Stopping(max_tokens=ENDLESS, ignore_eos=True, time_limit=duration_pb2.Duration(nanos=80_000_000))
        answer = answer_of(
            self.server.inference.Generate(greedy(self._prompt(50), stopping=stopping), timeout=PATIENCE)
        )
        self.tokens += len(answer.ids)
        return inference_pb.FinishReason.Name(answer.finished.reason)

    def save_on_cancel(self) -> str:
        """Cancelled in the middle; whoever goes on from what was kept computes nothing again."""
        self.made += 1
        kept = f"{self.name}-{self.made}"
        request = greedy(
            self._prompt(300), tokens=ENDLESS, save=pb.SnapshotOptions(snapshot_id=kept), save_on_cancel=True
        )
        stream = self.server.inference.Generate(request, timeout=PATIENCE)
        count = self.rng.randrange(1, 20)
        for event in stream:
            count -= event.delta.token_count
            if count <= 0:
                stream.cancel()
                break
        name = f"snapshots/{kept}"
        again = greedy(raw([9]), parent=name, tokens=4)
        try:
            usage = answer_of(self.server.inference.Generate(again, timeout=PATIENCE)).usage
        finally:
            self._delete(name)
        if usage.new_tokens != 1 or (usage.recomputed_tokens and usage.miss_reason == pb.MISS_REASON_UNSPECIFIED):
            raise Wrong(f"a retry computed again: {usage}")
        return "finished" if not usage.recomputed_tokens else "recomputed"

    def bad(self) -> str:
        request = self.rng.choice(BAD)
        list(self.server.inference.Generate(request, timeout=PATIENCE))
        return "accepted"

    def abandon(self) -> str:
        stream = self.server.inference.Generate(greedy(self._prompt(self._length()), tokens=ENDLESS))
        if self.rng.random() < 0.5:
            next(stream)
        return "dropped"

    # -- parts ----------------------------------------------------------------------------------------------------

    def _length(self) -> int:
        return self.rng.choice([5, 40, 300, 2000])

    def _prompt(self, length: int) -> pb.Input:
        shared = self.rng.random() < 0.5
        return raw(prompt_of(length, self.rng.randrange(SHARED) if shared else self.rng.randrange(1 << 30)))

    def _sampling(self) -> pb.Sampling:
        return self.rng.choice(
            [
                pb.Sampling(temperature=0),
                pb.Sampling(temperature=1.0, seed=self.rng.randrange(1 << 30)),
                pb.Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=1),
                pb.Sampling(temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
            ]
        )

    def _snapshot(self, length: int) -> pb.Snapshot:
        request = inference_pb.CreateSnapshotRequest(
            input=self._prompt(length), options=pb.SnapshotOptions(ttl=duration_pb2.Duration(seconds=600))
        )
        return self.server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot

    def _delete(self, name: str) -> None:
        self.server.snapshots.DeleteSnapshot(
            snapshot_pb.DeleteSnapshotRequest(name=name, descendants=True, stop_active=True, allow_missing=True),
            timeout=PATIENCE,
        )


BAD = (
    greedy(raw([511_000])),
    greedy(raw("Hello"), sampling=pb.Sampling(temperature=-1)),
    greedy(raw("Hello"), parent="snapshots/never-was"),
    greedy(raw("Hello"), model="models/other"),
    greedy(raw(prompt_of(33_000)), tokens=5),
    greedy(raw("Hello"), stopping=pb.Stopping(stop=[""])),
)

KINDS: dict[str, tuple[int, Callable[[Caller], str]]] = {
    "short": (8, Caller.short),
    "long": (2, Caller.long),
    "fork": (2, Caller.fork),
    "rollback": (2, Caller.rollback),
    "cancel": (4, Caller.cancel),
    "deadline": (2, Caller.deadline),
    "stop": (2, Caller.stop),
    "time_limit": (1, Caller.time_limit),
    "save_on_cancel": (2, Caller.save_on_cancel),
    "bad": (3, Caller.bad),
    "abandon": (2, Caller.abandon),
}

PLANNED: dict[str, frozenset[str]] = {
    "short": frozenset({"finished"}),
    "long": frozenset({"finished"}),
    "fork": frozenset({"finished"}),
    "rollback": frozenset({"finished"}),
    "cancel": frozenset({"CANCELLED"}),
    "deadline": frozenset({"DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_UNMET"}),
    "stop": frozenset({"FINISH_REASON_STOPPED"}),
    "time_limit": frozenset({"FINISH_REASON_TIME_LIMIT"}),
    "save_on_cancel": frozenset({"finished", "recomputed"}),
    "bad": frozenset(
        {
            "INVALID_ARGUMENT INVALID_FIELD",
            "NOT_FOUND SNAPSHOT_NOT_FOUND",
            "NOT_FOUND MODEL_NOT_FOUND",
            "INVALID_ARGUMENT CONTEXT_OVERFLOW",
        }
    ),
    "abandon": frozenset({"dropped"}),
}
