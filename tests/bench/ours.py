"""Our server as a user runs it, and the calls that benches make. Owns the process and the stubs' plumbing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
from kvfork.v1 import inference_service_pb2 as inference
from kvfork.v1 import server_service_pb2 as info
from kvfork.v1 import snapshot_service_pb2 as snapshots
from kvfork.v1 import types_pb2 as types
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.server_service_pb2_grpc import ServerServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

TIMED = ("-m", "tests.bench.timed_serve")  # a `program` for `Server`

START_SECONDS = 300.0  # a first run may have to fetch and convert the model
CALL_SECONDS = 600.0

# The benches drive whole models over loopback: no message limit of ours is being measured.
_CHANNEL = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Process:
    """A server process that says `listening on ADDRESS` on stdout, and is ended by its id."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        # A plain file for stdout too: nobody has to keep reading for the server to go on.
        self._out = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=self._out, stderr=self._log, env={**os.environ, **(environment or {})}
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_line(self, start: str) -> str:
        """The rest of the first line that begins with `start`."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            for line in self.output().splitlines():
                if line.startswith(start):
                    return line.removeprefix(start).strip()
            self.check()
            time.sleep(0.05)
        raise TimeoutError(f"the server did not come up in {START_SECONDS:g} s:\n{self.log_tail()}")

    def check(self) -> None:
        """Raises with the log's end if the process has gone."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self.log_tail()}")

    def output(self) -> str:
        """What it has written to stdout so far."""
        return Path(self._out.name).read_text()

    def log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def terminate(self) -> None:
        """Ends it and waits; safe to repeat. Its output stays readable until `stop`."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def stop(self) -> None:
        self.terminate()
        self._log.close()
        self._out.close()


@dataclass(slots=True)
class Reply:
    """One generation as its client saw it. Times are seconds on the client's monotonic clock."""

    sent: float
    times: list[float] = field(default_factory=list)  # arrival of each token
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[inference.TokenLogprob] = field(default_factory=list)
    marked: list[types.Snapshot] = field(default_factory=list)
    finished: inference.Finished | None = None
    done: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def usage(self) -> types.Usage:
        assert self.finished is not None
        return self.finished.usage

    @property
    def snapshot(self) -> str:
        assert self.finished is not None and not self.finished.save_error_reason, self.finished
        return self.finished.snapshot.name


class Server:
    """`kvfork serve` on a free port of loopback."""

    def __init__(
        self,
        model: str,
        *flags: str,
        program: Sequence[str] = ("-m", "service", "serve"),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`credentials`: how its own calls are made; None in the clear."""
        self.model = model
        self._credentials = credentials
        self.process = Process(
            [sys.executable, *program, "--model", model, "--address", "127.0.0.1:0", "--log-level", "warning", *flags]
        )

    def __enter__(self) -> Server:
        try:
            self.address = self.process.wait_line("listening on ")
        except BaseException:
            self.process.stop()
            raise
        if self._credentials is None:
            self.channel = grpc.insecure_channel(self.address, options=_CHANNEL)
        else:
            self.channel = grpc.secure_channel(self.address, self._credentials, options=_CHANNEL)
        self.inference = InferenceServiceStub(self.channel)
        self.snapshots = SnapshotServiceStub(self.channel)
        self.info = ServerServiceStub(self.channel)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        self.process.stop()

    def ended_steps(self) -> list[dict[str, float]]:
        """Ends a server that was started as `TIMED` and returns what its stop watch saw."""
        self.process.terminate()
        lines = [line for line in self.process.output().splitlines() if line.startswith('{"steps"')]
        return list(json.loads(lines[-1])["steps"])

    def _wait_ready(self) -> None:
        """The server listens before its model is loaded."""
        until = time.monotonic() + START_SECONDS
        while self.get_model().state != info.Model.STATE_READY:
            self.process.check()
            if time.monotonic() > until:
                raise TimeoutError(f"the model was not loaded in {START_SECONDS:g} s:\n{self.process.log_tail()}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self.process.pid

    # -- calls ----------------------------------------------------------------------------------------------------

    def count(self, text: str, *, special: bool = True) -> int:
        """Tokens of a raw text, with the tokenizer's special tokens or without."""
        request = inference.CountTokensRequest(input=raw(text, special=special))
        return int(self.inference.CountTokens(request, timeout=CALL_SECONDS).total_tokens)

    def tokens(self, text: str) -> list[int]:
        request = inference.CountTokensRequest(input=raw(text), include_rendered=True)
        return list(self.inference.CountTokens(request, timeout=CALL_SECONDS).token_ids)

    def stats(self) -> info.CacheStats:
        return self.info.GetCacheStats(info.GetCacheStatsRequest(), timeout=CALL_SECONDS).stats

    def get_model(self) -> info.Model:
        return self.info.GetModel(info.GetModelRequest(), timeout=CALL_SECONDS).model

    def rollback(self, source: str, tokens: int) -> inference.RollbackResponse:
        request = inference.RollbackRequest(source=source, token_count=tokens)
        return self.inference.Rollback(request, timeout=CALL_SECONDS)

    def create_snapshot(self, what: types.Input) -> inference.CreateSnapshotResponse:
        return self.inference.CreateSnapshot(inference.CreateSnapshotRequest(input=what), timeout=CALL_SECONDS)

    def fork(self, parent: str, appends: Sequence[types.Input]) -> inference.ForkResponse:
        branches = [inference.ForkBranch(append=append) for append in appends]
        return self.inference.Fork(inference.ForkRequest(parent=parent, branches=branches), timeout=CALL_SECONDS)

    def delete(self, name: str) -> None:
        request = snapshots.DeleteSnapshotRequest(name=name, allow_missing=True)
        self.snapshots.DeleteSnapshot(request, timeout=CALL_SECONDS)

    def generate(
        self,
        what: types.Input | None,
        max_tokens: int,
        *,
        parent: str = "",
        save: bool = False,
        mark_prompt_end: bool = False,
        mark_at: int | None = None,
        ids: bool = False,
        top_logprobs: int | None = None,
        constraint: inference.Constraint | None = None,
        into: Reply | None = None,
    ) -> Reply:
        """Greedy, to the full length whatever the model says; returns when it has ended. `into` grows meanwhile."""
        request = inference.GenerateRequest(
            parent=parent,
            input=what,
            sampling=types.Sampling(temperature=0.0),
            stopping=types.Stopping(max_tokens=max_tokens, ignore_eos=True),
            output=inference.OutputOptions(token_ids=ids, top_logprobs=top_logprobs),
            constraint=constraint,
        )
        if save:
            request.save.SetInParent()
        if mark_prompt_end:
            request.marks.add(landmark=types.LANDMARK_PROMPT_END)
        if mark_at is not None:
            request.marks.add(token_count=mark_at)
        reply = into if into is not None else Reply(sent=0.0)
        reply.sent = time.perf_counter()
        for response in self.inference.Generate(request, timeout=CALL_SECONDS):
            match response.WhichOneof("event"):
                case "delta":
                    now = time.perf_counter()
                    reply.times += [now] * response.delta.token_count
                    reply.text += response.delta.text
                    reply.ids += response.delta.token_ids
                    reply.logprobs += response.delta.logprobs
                case "marked":
                    reply.marked.append(response.marked.snapshot)
                case "finished":
                    reply.finished = response.finished
        reply.done = time.perf_counter()
        return reply


def raw(text: str = "", *, tokens: Sequence[int] = (), special: bool = True) -> types.Input:
    """Untemplated input: text, or token ids as they are."""
    part = types.Part(text=text) if text else types.Part(tokens=types.TokenRun(ids=tokens))
    return types.Input(raw=types.RawInput(parts=[part], add_special_tokens=special and not tokens))
