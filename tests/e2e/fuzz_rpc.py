"""Random messages, valid and not, against every RPC of a running server, several clients at once.

    python -m tests.e2e.fuzz_rpc --minutes 10 [--seed N] [--model tiny-gemma3]

What may come back is the contract's: never INTERNAL, UNKNOWN, DATA_LOSS or UNAVAILABLE, and of calls that need no model
no deadline either. After each round the server is idle and healthy, holds nothing for a call that has ended, has
written no error to its log, and generates what it generated before. The first thing that is otherwise ends the run,
with the method and the message that it came of; calls run side by side, so a seed repeats the messages and not the
order in which the server met them.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor as protobuf
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvfork.v1 import inference_service_pb2, server_service_pb2, snapshot_service_pb2

from tests.e2e.exports import key_file
from tests.e2e.live import OPTIONS, LiveServer, generate, greedy, prompt_of, raw, refusal_of

FLAGS = (
    *("--max-snapshots", "150", "--max-pinned", "20", "--max-pinned-bytes", "8MiB", "--max-batch", "4"),
    *("--max-queue", "16", "--memory-bytes", "24MiB", "--disk-bytes", "96MiB", "--max-watches", "4"),
    *("--max-request-bytes", "1MiB", "--write-stall-seconds", "5"),
)
CLIENTS = 6
ROUND_SECONDS = 8.0
QUICK_SECONDS = 60.0  # for calls that need no model: beyond it the server hangs
BAD = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE"}
NEED_NO_MODEL = ("SnapshotService", "ServerService")
MOST_DEPTH = 6

TEXTS = (
    "", "a", "Hello there", "\x00", "<|im_start|>user\n", "</s>", "é" * 50, "\U0001f600", "x" * 3_000, "{}", "[]",
    "null", "start: x",
    '{"tools": [{"name": "f"}]}', '{"enable_thinking": false}', "[" * 4_000, '{"a":' * 2_000, '{"type": "object"}',
    '{"type": "string", "maxLength": 4}', '{"$ref": "#"}', "(a|b)*c", "(", "[a-z]{1,9999}", 'start: "a" | "b"',
    "models/tiny-gemma3", "models/none", "labels", "pinned", "ttl", "expire_time", "labels.a", "image/png", "name,,",
)  # fmt: skip
NUMBERS = (0, 1, 2, 5, 7, 255, 256, 257, 300, 512, 700, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8cfc0f01f00050001ff"
    "56c72f0d0000000049454e44ae426082"
)
# How likely a message that makes sense has a field; what is not here is set in one of seven.
LIKELY = {
    **dict.fromkeys(("parts", "input", "append", "branches", "stopping", "messages", "role", "ids", "key"), 0.95),
    **dict.fromkeys(("parent", "source", "name", "names", "generation", "snapshot", "update_mask", "paths"), 0.8),
    **dict.fromkeys(("max_tokens", "seconds", "options", "save", "add_generation_prompt"), 0.5),
    **dict.fromkeys(("constraint", "marks", "template_vars_json", "add_special_tokens", "mime_type", "model"), 0.02),
    **dict.fromkeys(("sampling", "time_limit", "repetition_penalty", "min_p", "nanos", "request_id"), 0.05),
}
ODDS = {"image": 0.02, "chat": 0.3, "ancestor": 0.2}  # of one kind, where there are several
WEIGHTS = {
    "Generate": 5,
    "CreateSnapshot": 5,
    "Fork": 3,
    "Rollback": 3,
    "CountTokens": 2,
    "DeleteSnapshot": 0.4,
    "TrimCache": 0.3,
}
GIVEN_BACK = frozenset({"name", "labels", "pinned", "ttl", "expire_time"})  # of Snapshot, what a request may have
PLAIN = ("a", "Hello there", "é" * 50, "\U0001f600", "x" * 300, "word " * 200)
PATHS = ("labels", "pinned", "ttl", "expire_time")


@dataclass
class Pool:
    """What replies told: names and tokens for later calls. Of all clients; a torn read costs nothing."""

    snapshots: list[str] = field(default_factory=list)
    generations: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # of pages and watches
    exports: list[bytes] = field(default_factory=list)
    requests: list[str] = field(default_factory=lambda: [str(uuid.UUID(int=i, version=4)) for i in range(20)])

    def learn(self, message: Message) -> None:
        for descriptor, value in message.ListFields():
            if descriptor.type == protobuf.FieldDescriptor.TYPE_MESSAGE and not _is_map(descriptor):
                for each in value if descriptor.is_repeated else (value,):
                    self.learn(each)
            elif descriptor.name == "name" and not descriptor.is_repeated and value.startswith("snapshots/"):
                self._add(self.snapshots, value)
            elif descriptor.name == "generation":
                self._add(self.generations, value)
            elif descriptor.name in ("next_page_token", "resume_token") and value:
                self._add(self.tokens, value)

    @staticmethod
    def _add(known: list[str], value: str) -> None:
        known.append(value)
        del known[:-100]


def _is_map(descriptor: Any) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry


class Maker:
    """Random messages of any kind, from their descriptors."""

    def __init__(self, rng: random.Random, pool: Pool) -> None:
        self.rng = rng
        self.pool = pool

    def message(self, kind: type[Message]) -> Message:
        made = kind()
        self.fill(made, 0, wild=self.rng.random() < 0.3)
        return made

    def fill(self, message: Message, depth: int, *, wild: bool) -> None:
        """`wild`: anything anywhere. Otherwise mostly what makes sense, so that calls get somewhere."""
        chosen = {oneof.name: self.kind(oneof, wild=wild) for oneof in message.DESCRIPTOR.oneofs}
        snapshot = message.DESCRIPTOR.name == "Snapshot" and not wild
        for descriptor in message.DESCRIPTOR.fields:
            oneof = descriptor.containing_oneof
            if snapshot and descriptor.name not in GIVEN_BACK and self.rng.random() < 0.98:
                continue
            if oneof is not None and len(oneof.fields) > 1:
                if chosen[oneof.name] != descriptor.name or self.rng.random() < (0.15 if wild else 0.03):
                    continue
            elif self.rng.random() > self.likely(descriptor.name, wild=wild):
                continue
            if depth >= MOST_DEPTH:
                continue
            self.set(message, descriptor, depth, wild=wild)

    def kind(self, oneof: Any, *, wild: bool) -> str:
        names = [field.name for field in oneof.fields]
        if wild:
            return str(self.rng.choice(names))
        return str(self.rng.choices(names, [ODDS.get(name, 1.0) for name in names])[0])

    @staticmethod
    def likely(name: str, *, wild: bool) -> float:
        return 0.5 if wild else LIKELY.get(name, 0.15)

    def set(self, message: Any, descriptor: Any, depth: int, *, wild: bool) -> None:
        name = descriptor.name
        if _is_map(descriptor):
            key, value = (descriptor.message_type.fields_by_name[part] for part in ("key", "value"))
            for _ in range(self.count(wild=wild)):
                getattr(message, name)[self.scalar(key, wild=wild)] = self.scalar(value, wild=wild)
        elif descriptor.type == protobuf.FieldDescriptor.TYPE_MESSAGE:
            if descriptor.is_repeated:
                for _ in range(self.count(wild=wild)):
                    self.fill(getattr(message, name).add(), depth + 1, wild=wild)
            else:
                getattr(message, name).SetInParent()
                self.fill(getattr(message, name), depth + 1, wild=wild)
        elif descriptor.is_repeated:
            many = self.rng.choice((1, 3, 20, 300)) if name == "ids" else self.count(wild=wild)
            getattr(message, name).extend(self.scalar(descriptor, wild=wild) for _ in range(many))
        else:
            setattr(message, name, self.scalar(descriptor, wild=wild))

    def count(self, *, wild: bool) -> int:
        return self.rng.choice((0, 1, 2, 3, 70) if wild else (1, 1, 2))

    def scalar(self, descriptor: Any, *, wild: bool) -> Any:
        kind = descriptor.type
        field_type = protobuf.FieldDescriptor
        if kind == field_type.TYPE_STRING:
            return self.text(descriptor.name, wild=wild)
        if kind == field_type.TYPE_BYTES:
            if descriptor.name == "data" and descriptor.containing_type.name == "ImportSnapshotRequest" and not wild:
                return b""  # what follows is the export
            if descriptor.name == "manifest" and self.pool.exports:
                return self.rng.choice(self.pool.exports)
            return self.rng.choice((b"", PNG, PNG[:40], self.rng.randbytes(32), self.rng.randbytes(500)))
        if kind == field_type.TYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == field_type.TYPE_ENUM:
            known = [value.number for value in descriptor.enum_type.values]
            return self.rng.choice([*known, 99, -1] if wild else known[1:])
        if kind in (field_type.TYPE_FLOAT, field_type.TYPE_DOUBLE):
            return self.rng.choice(
                (0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("nan")) if wild else (0.0, 0.7, 1.0)
            )
        return self.number(descriptor, wild=wild)

    def text(self, name: str, *, wild: bool) -> str:
        pool, rng = self.pool, self.rng
        if not wild or rng.random() < 0.4:
            if name in ("parent", "source", "ancestor", "name", "names") and pool.snapshots:
                return rng.choice(pool.snapshots)
            if name == "generation" and pool.generations:
                return rng.choice(pool.generations)
            if name in ("page_token", "resume_token") and pool.tokens:
                return rng.choice(pool.tokens)
            if name == "request_id":
                return rng.choice(pool.requests)
            if name == "snapshot_id":
                return f"fuzzed-{rng.randrange(60):04}"
            if name in ("model", "mime_type", "page_token", "resume_token"):
                return ""
            if name == "paths":
                return rng.choice(PATHS)
            if name == "template_vars_json":
                return "{}"
            if name not in ("parent", "source", "ancestor", "name", "names", "generation", "request_id"):
                return rng.choice(PLAIN)
        return rng.choice((*TEXTS, "snapshots/never-was-one", "snapshots/..", "generations/x"))

    def number(self, descriptor: Any, *, wild: bool) -> int:
        kinds = protobuf.FieldDescriptor
        signed = descriptor.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
        bits = 64 if descriptor.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 32
        most = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
        if descriptor.name in ("ids", "key", "token_ids") and not wild:
            return self.rng.randrange(5, 500)
        if descriptor.name == "max_tokens" and not wild:
            return self.rng.choice((1, 5, 40, 300))
        if descriptor.name == "seconds" and not wild:
            return self.rng.choice((0, 1, 60, 3_600))
        found = self.rng.choice(NUMBERS if wild else NUMBERS[:9])
        found = min(most, found)
        return -found if signed and self.rng.random() < 0.2 else found


@dataclass(frozen=True)
class Rpc:
    """One method of the contract."""

    path: str
    request: type[Message]
    response: type[Message]
    streams: bool
    sends: bool  # its caller streams

    @property
    def quick(self) -> bool:
        return any(f".{service}/" in self.path for service in NEED_NO_MODEL) and not self.streams


def rpcs() -> list[Rpc]:
    """Every RPC there is, from the descriptors."""
    found = []
    for module in (inference_service_pb2, snapshot_service_pb2, server_service_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                kinds = [getattr(module, kind.name) for kind in (method.input_type, method.output_type)]
                path = f"/{service.full_name}/{method.name}"
                found.append(Rpc(path, *kinds, method.server_streaming, method.client_streaming))
    return found


class Wrong(Exception):
    """The server did what it never may."""


class Client:
    """Makes one call after the other on a connection of its own."""

    def __init__(self, address: str, seed: str, pool: Pool, seen: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.maker = Maker(self.rng, pool)
        self.pool = pool
        self.seen = seen
        self.rpcs = rpcs()
        self.weights = [WEIGHTS.get(rpc.path.rpartition("/")[2], 1.0) for rpc in self.rpcs]
        self.channel = grpc.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    def run(self, until: float, stop: threading.Event) -> None:
        """Raises Wrong."""
        while time.monotonic() < until and not stop.is_set():
            self.once()

    def once(self) -> None:
        rpc = self.rng.choices(self.rpcs, self.weights)[0]
        message = self.maker.message(rpc.request)
        data = message.SerializeToString()
        if self.rng.random() < 0.1:
            data = self.damaged(data)
        deadline = QUICK_SECONDS if rpc.quick else self.rng.choice((0.02, 0.3, 2.0))
        make: Callable[..., Any] = self.channel.unary_stream if rpc.streams else self.channel.unary_unary
        sent: Any = data
        if rpc.sends:
            make, sent = self.channel.stream_unary, iter([data, *self.more(rpc)])
        call = make(rpc.path, request_serializer=lambda data: data, response_deserializer=rpc.response.FromString)
        try:
            if rpc.streams:
                self.read(call(sent, timeout=deadline))
            else:
                self.pool.learn(call(sent, timeout=deadline))
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
            told = code == "DATA_LOSS" and "Import" in rpc.path  # what was sent is damaged, and nothing of the server's
            if (code in BAD and not told) or (code == "DEADLINE_EXCEEDED" and rpc.quick):
                raise Wrong(f"{rpc.path}: {refusal_of(error)}\n{message}\nas {data[:2_000].hex()}") from None
        self.seen[f"{rpc.path.rpartition('/')[2]} {code}"] += 1

    def read(self, stream: Any) -> None:
        """To its end, or for a while."""
        left = self.rng.choice((0, 1, 5, 10_000))
        export = b""
        for message in stream:
            self.pool.learn(message)
            export += getattr(message, "data", b"")
            left -= 1
            if left <= 0:
                stream.cancel()
                return
        if export:
            self.pool.exports = [*self.pool.exports[-9:], export]

    def more(self, rpc: Rpc) -> list[bytes]:
        """Messages behind the first: an export, whole or not, or anything."""
        rng, exports = self.rng, self.pool.exports
        if not exports or rng.random() < 0.2:
            return [self.maker.message(rpc.request).SerializeToString() for _ in range(rng.randrange(4))]
        export = rng.choice(exports)
        if rng.random() < 0.3:
            export = self.damaged(export)
        size = rng.choice((1_000, 20_000, 1_000_000))
        return [rpc.request(data=export[at : at + size]).SerializeToString() for at in range(0, len(export), size)]

    def damaged(self, data: bytes) -> bytes:
        broken = bytearray(data)
        for _ in range(self.rng.choice((1, 2, 10))):
            place = self.rng.randrange(len(broken) + 1)
            kind = self.rng.randrange(3)
            if kind == 0:
                broken[place:place] = self.rng.randbytes(self.rng.choice((1, 8)))
            elif broken and kind == 1:
                broken[place % len(broken)] = self.rng.randrange(256)
            else:
                del broken[place : place + self.rng.choice((1, 20))]
        return bytes(broken)


def fuzz(seconds: float, seed: int, model: str = "tiny-gemma3") -> Counter[str]:
    """How often which method ended how. Raises Wrong, or AssertionError of what is left behind."""
    seen: Counter[str] = Counter()
    pool = Pool()
    until = time.monotonic() + seconds
    question = greedy(raw(prompt_of(40)), tokens=12)
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer(
            model,
            *FLAGS,
            "--exchange-key",
            str(key_file(Path(folder) / "exchange.key", secrets.token_hex(32))),
            inside=True,
            env={"TESTS_UNHURT": "1"},
        ) as server,
    ):
        expected = generate(server, question).ids
        clients = [Client(server.address, f"{seed} {number}", pool, seen) for number in range(CLIENTS)]
        stop = threading.Event()
        while time.monotonic() < until:
            ends = min(until, time.monotonic() + ROUND_SECONDS)
            with ThreadPoolExecutor(CLIENTS) as threads:
                running = [threads.submit(client.run, ends, stop) for client in clients]
                try:
                    for each in running:
                        each.result()
                finally:
                    stop.set()
                stop.clear()
            check(server, expected, question)
        for client in clients:
            client.channel.close()
    return seen


def check(server: LiveServer, expected: list[int], question: Any) -> None:
    """The server is as it was, but for the snapshots that were made; then without them, so that the next have room."""
    assert server.process.poll() is None, server.log.read_text()[-5_000:]
    complaints = server.complaints()
    if complaints:
        raise Wrong(complaints[-5_000:])
    server.idle()
    health = HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(service=""))
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert generate(server, question).ids == expected
    server.idle()
    left = server.report()
    for name in ("sequences", "scheduled", "rows", "row_bytes", "running", "saving", "held", "uses"):
        assert left[name] == 0, (name, left)
    while listed := server.snapshots.ListSnapshots(snapshot_service_pb2.ListSnapshotsRequest()).snapshots:
        for snapshot in listed:
            server.snapshots.DeleteSnapshot(
                snapshot_service_pb2.DeleteSnapshotRequest(name=snapshot.name, allow_missing=True)
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", default="tiny-gemma3")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    for line, count in sorted(fuzz(args.minutes * 60, seed, args.model).items()):
        print(f"{count:8} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
