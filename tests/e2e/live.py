"""A real server in its own process, and how tests look at it. Owns start, stop and observation; judges nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2 as details_pb
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import types_pb2 as pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.server_service_pb2_grpc import ServerServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from kvfork_client import Client

ROOT = Path(__file__).resolve().parents[2]

PATIENCE = 60.0  # seconds before a test gives up on something that should come; never how long it should take

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class LiveServer:
    """`kvfork serve` as a subprocess, with a temporary directory and a store directory of its own.

    `wait=False` returns without waiting for the model. `inside` serves with a window (`tests.e2e.inside`), `module`
    with another one. `token`: in whose name the test's own calls run, where the flags ask for tokens.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        wait: bool = True,
        env: dict[str, str] | None = None,
        inside: bool = False,
        module: str = "service",
        token: str = "",
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvfork-e2e-")
        self.temp = Path(self._home.name) / "tmp"
        self.store = Path(self._home.name) / "store"
        self.log = Path(self._home.name) / "stderr"
        self._report = Path(self._home.name) / "report"
        self.release = Path(self._home.name) / "release"
        self.temp.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFORK_")}
        for name in ("KVFORK_CACHE_DIR", "KVFORK_ACCEPT_GEMMA_TERMS"):
            if name in os.environ:
                clean[name] = os.environ[name]
        module = "tests.e2e.inside" if inside else module
        command = [sys.executable, "-m", module, "serve", "--model", str(model), "--address", "127.0.0.1:0"]
        command += ["--scratch-dir", str(self.store), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={
                    **clean,
                    "TMPDIR": str(self.temp),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
                    "TESTS_REPORT": str(self._report),
                    "TESTS_RELEASE": str(self.release),
                    **(env or {}),
                },
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.process.wait(PATIENCE)
            log = self.log.read_text()
            self.process.stdout.close()
            self._home.cleanup()
            raise ServerDidNotStart(self.process.returncode, log)
        self.address = line.split()[-1]
        self.channel = grpc.insecure_channel(self.address, options=OPTIONS)
        if token:
            self.channel = with_token(self.channel, token)
        self.inference = InferenceServiceStub(self.channel)
        self.snapshots = SnapshotServiceStub(self.channel)
        self.server = ServerServiceStub(self.channel)
        if wait:
            until(lambda: self.model().state != pb_loading, what="the model to be loaded")
            assert self.model().state == server_pb.Model.STATE_READY, self.log.read_text()

    def client(self) -> Client:
        """A connection of its own."""
        return Client(self.address, timeout=PATIENCE)

    def model(self) -> server_pb.Model:
        return self.server.GetModel(server_pb.GetModelRequest()).model

    def stats(self) -> server_pb.CacheStats:
        return self.server.GetCacheStats(server_pb.GetCacheStatsRequest()).stats

    def idle(self) -> None:
        """Waits until nothing runs and nothing waits."""
        until(lambda: not (s := self.stats()).active_sequences and not s.queued_calls, what="the server to be idle")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def report(self) -> dict[str, int]:
        """What the process holds, as it counts itself; only of a server made with `inside`."""
        self._report.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until(self._report.exists, what="the report")
        counted: dict[str, int] = json.loads(self._report.read_text())
        return counted

    def left_behind(self) -> list[str]:
        """Everything under the temporary and the store directory, and these themselves if they were made."""
        found = [str(self.store)] if self.store.exists() else []
        found += [str(p) for top in (self.temp, self.store) if top.exists() for p in top.rglob("*")]
        return sorted(found)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def complaints(self) -> str:
        """The log, if it holds an error or a traceback; nothing that a client sends may cause one."""
        log = self.log.read_text()
        return log if " ERROR " in log or "Traceback" in log else ""

    def close(self) -> None:
        """Ends the server if it still runs and removes its directories."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._home.cleanup()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *raised: object) -> None:
        complaints = self.complaints()
        self.close()
        assert not complaints, complaints


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._field = ("authorization", f"Bearer {token}")

    def _shown(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), self._field))

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._shown(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._shown(client_call_details), request)


def with_token(channel: grpc.Channel, token: str) -> grpc.Channel:
    """A channel whose every call shows `token`."""
    return grpc.intercept_channel(channel, _Bearer(token))


pb_loading = server_pb.Model.STATE_LOADING


class ServerDidNotStart(Exception):
    """The process ended before it listened."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"exit code {code}\n{log}")
        self.code = code
        self.log = log


def until(condition: Callable[[], object], *, what: str, patience: float = PATIENCE) -> None:
    """Waits for `condition`; fails if it does not come true."""
    give_up = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up, f"waited {patience:g} s for {what}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Refusal:
    """How a call failed: code, reason and facts, and the kinds of its details."""

    code: str
    reason: str
    metadata: dict[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    text: str = ""
    retry_seconds: float | None = None
    resource: str = ""


def refusal_of(error: grpc.RpcError) -> Refusal:
    """The status of a failed call, decoded."""
    status = rpc_status.from_call(error)
    reason, metadata, fields, kinds, retry, resource = "", {}, (), set(), None, ""
    for packed in status.details if status is not None else ():
        kinds.add(packed.type_url.rpartition(".")[2])
        info, bad = details_pb.ErrorInfo(), details_pb.BadRequest()
        wait, what = details_pb.RetryInfo(), details_pb.ResourceInfo()
        if packed.Unpack(info):
            assert info.domain == "kvfork"
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(bad):
            fields = tuple(violation.field for violation in bad.field_violations)
        elif packed.Unpack(wait):
            retry = wait.retry_delay.seconds + wait.retry_delay.nanos / 1e9
        elif packed.Unpack(what):
            resource = what.resource_name
    return Refusal(
        code=error.code().name,
        reason=reason,
        metadata=metadata,
        fields=fields,
        kinds=frozenset(kinds),
        text=error.details() or "",
        retry_seconds=retry,
        resource=resource,
    )


def refused(call: Callable[[], Any]) -> Refusal:
    """Makes a call that must fail, streams to their end; the way it failed."""
    try:
        reply = call()
        got = list(reply) if isinstance(reply, grpc.RpcContext) else reply
    except grpc.RpcError as error:
        return refusal_of(error)
    raise AssertionError(f"it was accepted: {str(got)[:300]}")


# -- requests -------------------------------------------------------------------------------------------------------


def raw(*parts: str | Sequence[int]) -> pb.Input:
    """Untemplated input from texts and runs of token ids."""
    made = [pb.Part(text=p) if isinstance(p, str) else pb.Part(tokens=pb.TokenRun(ids=p)) for p in parts]
    return pb.Input(raw=pb.RawInput(parts=made))


def chat(*turns: tuple[str, str], open_turn: bool = True) -> pb.Input:
    """Templated input from (role, text) pairs."""
    messages = [
        pb.Message(role=pb.Role.Value(f"ROLE_{role.upper()}"), parts=[pb.Part(text=text)]) for role, text in turns
    ]
    return pb.Input(chat=pb.ChatInput(messages=messages, add_generation_prompt=open_turn))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ from seed to seed; none of them is special."""
    ids, state = [], seed * 7919 + 12345
    for _ in range(length):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        ids.append(5 + (state >> 8) % 500)
    return ids


GREEDY = pb.Sampling(temperature=0)


def greedy(given: pb.Input | None, *, parent: str = "", tokens: int = 16, **more: Any) -> inference_pb.GenerateRequest:
    """A request whose answer depends on the context alone: greedy, of exactly `tokens` tokens."""
    return inference_pb.GenerateRequest(
        parent=parent,
        input=given,
        sampling=more.pop("sampling", GREEDY),
        stopping=more.pop("stopping", pb.Stopping(max_tokens=tokens, ignore_eos=True)),
        output=more.pop("output", inference_pb.OutputOptions(token_ids=True)),
        **more,
    )


@dataclass
class Answer:
    """A stream that was read to its end."""

    started: inference_pb.Started
    finished: inference_pb.Finished
    deltas: list[inference_pb.Delta]
    marked: list[inference_pb.Marked]
    progress: list[inference_pb.Progress]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def usage(self) -> pb.Usage:
        return self.finished.usage

    @property
    def logprobs(self) -> list[inference_pb.TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


def answer_of(stream: Iterable[inference_pb.GenerateResponse]) -> Answer:
    """Reads a stream to its end, and checks the order that the contract promises."""
    events = [(event.WhichOneof("event"), event) for event in stream]
    kinds = [kind for kind, _ in events]
    assert kinds.count("started") == 1 and kinds[0] == "started", kinds
    assert kinds.count("finished") == 1 and kinds[-1] == "finished", kinds
    answer = Answer(
        started=events[0][1].started,
        finished=events[-1][1].finished,
        deltas=[event.delta for kind, event in events if kind == "delta"],
        marked=[event.marked for kind, event in events if kind == "marked"],
        progress=[event.progress for kind, event in events if kind == "progress"],
    )
    adds_up(answer.usage)
    # A prefill that was stopped has a receipt for what it did.
    whole = answer.usage.prompt_tokens == answer.started.prompt_tokens
    assert whole or (answer.usage.prompt_tokens < answer.started.prompt_tokens and not answer.usage.completion_tokens)
    position = answer.started.prompt_tokens
    for delta in answer.deltas:
        assert delta.first_position == position, "positions have no hole"
        position += delta.token_count
    assert position == answer.started.prompt_tokens + answer.usage.completion_tokens
    return answer


def generate(server: LiveServer, request: inference_pb.GenerateRequest) -> Answer:
    """One generation, read to its end."""
    return answer_of(server.inference.Generate(request, timeout=PATIENCE))


def adds_up(usage: pb.Usage) -> None:
    """The promises that every receipt keeps."""
    assert usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == usage.prompt_tokens, usage
    assert usage.memory_tokens + usage.disk_tokens == usage.cached_tokens, usage
    assert (usage.miss_reason != pb.MISS_REASON_UNSPECIFIED) == (usage.recomputed_tokens > 0), usage
    assert (usage.disk_bytes_read > 0) or usage.disk_tokens == 0, usage
