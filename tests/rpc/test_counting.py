"""Every call is counted once, under what its client got, and leaves a line without what was said."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2

from service import facts
from service.auth.tokens import new_token
from service.cli.serve import _JsonFormatter, _TextFormatter
from service.errors import Draining, QueueFull

from .conftest import FINISHED, STARTED, ScriptedCore, delta, drained, eventually, run, serving

SECRET = "the prompt's own words"
ASK = pb.GenerateRequest(
    input=types_pb2.Input(raw=types_pb2.RawInput(parts=[types_pb2.Part(text=SECRET)])), parent="snapshots/a-parent"
)


async def forever() -> None:
    await asyncio.Event().wait()


async def code_of(call) -> str:
    try:
        await drained(call) if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def test_a_call_is_counted_under_its_method_and_the_code_that_left():
    async def story():
        core = ScriptedCore()
        async with serving(core) as s:
            get = snapshot_pb.GetSnapshotRequest(name="snapshots/nobody")
            got = [
                await code_of(s.inference.Generate(ASK)),
                await code_of(s.snapshots.GetSnapshot(get)),
                await code_of(s.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest())),
            ]
            core.script = (STARTED, QueueFull("full"))
            got.append(await code_of(s.inference.Generate(ASK)))
            core.script = (STARTED, RuntimeError(SECRET))
            got.append(await code_of(s.inference.Generate(ASK)))
            core.script = (STARTED, forever)
            got.append(await code_of(s.inference.Generate(ASK, timeout=0.2)))
            stream = s.inference.Generate(ASK)
            await stream.read()
            assert core.meter.calls_in_progress["Generate"] >= 1
            stream.cancel()
            await eventually(lambda: core.meter.calls_in_progress["Generate"] == 0)
            unread = s.channel.unary_unary("/kvfork.v1.InferenceService/CountTokens")
            got.append(await code_of(unread(b"\xff\xff\xff")))
            got.append(await code_of(s.channel.unary_unary("/kvfork.v1.InferenceService/Train")(b"")))
        assert got == [
            "OK", "NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL", "DEADLINE_EXCEEDED",
            "INVALID_ARGUMENT", "UNIMPLEMENTED",
        ]  # fmt: skip
        assert core.meter.calls == {
            ("Generate", "OK"): 1,
            ("GetSnapshot", "NOT_FOUND"): 1,
            ("GetSnapshot", "INVALID_ARGUMENT"): 1,
            ("Generate", "RESOURCE_EXHAUSTED"): 1,
            ("Generate", "INTERNAL"): 1,
            ("Generate", "DEADLINE_EXCEEDED"): 1,
            ("Generate", "CANCELLED"): 1,
            ("CountTokens", "INVALID_ARGUMENT"): 1,
        }, "a method that is not there is nobody's name for a label"
        assert set(core.meter.calls_in_progress.values()) == {0}
        assert core.meter.call_seconds.keys() == {"Generate", "GetSnapshot", "CountTokens"}

    run(story)


def test_refusals_are_counted_by_reason_at_the_door_and_behind_it(tmp_path: Path):
    token, line = new_token("alice")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{line}\n")
    tokens.chmod(0o600)
    mine, info = (("authorization", f"Bearer {token}"),), "/kvfork.v1.ServerService/GetServerInfo"

    async def story():
        core = ScriptedCore(script=(STARTED, forever))
        async with serving(core, tokens=tokens, max_owner_calls=2, request_seconds=0.2) as s:
            ask = server_pb.GetServerInfoRequest()
            got = [
                await code_of(s.info.GetServerInfo(ask)),
                await code_of(s.channel.unary_unary("/x.Y/Z")(b"")),
                await code_of(s.info.GetServerInfo(ask, metadata=(("authorization", "Bearer no"),))),
                await code_of(s.info.TrimCache(server_pb.TrimCacheRequest(), metadata=mine)),
            ]
            silent = s.channel.stream_unary(info)(metadata=mine)
            got.append(await code_of(silent))
            held = [s.inference.Generate(ASK, metadata=mine) for _ in range(2)]
            for stream in held:
                await stream.read()
            got.append(await code_of(s.info.GetServerInfo(ask, metadata=mine)))
            for stream in held:
                stream.cancel()
            await eventually(lambda: core.running == 0)
            for error in (Draining("going"), QueueFull("full"), RuntimeError(SECRET)):
                core.script = (error,)
                got.append(await code_of(s.inference.Generate(ASK, metadata=mine)))
            core.script = (STARTED, FINISHED)
            got.append(await code_of(s.inference.Generate(ASK, metadata=mine)))
        assert got == [
            "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED",
            "RESOURCE_EXHAUSTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "OK",
        ]  # fmt: skip
        assert core.meter.refused == {
            "TOKEN_MISSING": 2, "TOKEN_UNKNOWN": 1, "ADMIN_REQUIRED": 1, "SLOW_SENDER": 1, "CALL_QUOTA": 1,
            "SERVER_DRAINING": 1, "QUEUE_FULL": 1, "INTERNAL": 1,
        }  # fmt: skip
        assert not any(method == "GetServerInfo" for method, _ in core.meter.calls), "what was not let in is no call"

    run(story)


def test_a_call_leaves_one_line_with_its_names_and_none_of_its_words(caplog: pytest.LogCaptureFixture):
    async def learns() -> None:
        facts.note(generation="generations/g1", snapshot="snapshots/s1", parent="")
        logging.getLogger("kvfork.elsewhere").warning("beside it")

    async def story():
        async with serving(ScriptedCore(script=(STARTED, learns, delta(SECRET), FINISHED))) as s:
            await drained(s.inference.Generate(ASK))
            await s.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest())

    caplog.set_level(logging.DEBUG)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(_JsonFormatter().format(record))  # type: ignore[method-assign]
    logging.getLogger("kvfork").addHandler(handler)
    try:
        run(story)
    finally:
        logging.getLogger("kvfork").removeHandler(handler)
    beside, generate, listed = (json.loads(line) for line in lines)
    assert generate.pop("time") and generate.pop("seconds") >= 0
    call = generate.pop("call")
    assert generate == {
        "level": "info",
        "logger": "kvfork.calls",
        "message": "Generate OK",
        "method": "Generate",
        "code": "OK",
        "generation": "generations/g1",
        "snapshot": "snapshots/s1",
    }
    assert (beside["message"], beside["call"]) == ("beside it", call), "what is said within a call names it"
    assert (listed["message"], listed["level"]) == ("ListSnapshots OK", "debug")
    assert SECRET not in "".join(lines) + caplog.text


def test_the_line_for_people_has_the_same(caplog: pytest.LogCaptureFixture):
    record = logging.LogRecord("kvfork.calls", logging.INFO, "", 0, "%s %s", ("Fork", "OK"), None)
    record.fields = {"call": "c1", "method": "Fork", "code": "OK", "snapshot": "snapshots/s1"}
    assert _TextFormatter("%(message)s").format(record) == "Fork OK call=c1 snapshot=snapshots/s1"


def test_every_call_has_a_span_that_ends_with_its_code():
    class Recorded:
        def __init__(self) -> None:
            self.ended: list[tuple[str, str, dict[str, str]]] = []

        @contextmanager
        def call(self, method, metadata):
            outer = self

            class Span:
                def end(self, code, facts):
                    outer.ended.append((method, code, dict(metadata)))

            yield Span()

        def following(self, work, emit):
            return emit

        def close(self):
            """Nothing to send."""

    tracer = Recorded()

    async def story():
        async with serving(ScriptedCore(tracer=tracer)) as s:
            await drained(s.inference.Generate(ASK, metadata=(("traceparent", "00-1-2-01"),)))
            await code_of(s.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest()))

    run(story)
    (first, code, metadata), (second, wrong, _) = tracer.ended
    assert (first, code) == ("kvfork.v1.InferenceService/Generate", "OK")
    assert metadata["traceparent"] == "00-1-2-01"
    assert (second, wrong) == ("kvfork.v1.SnapshotService/GetSnapshot", "INVALID_ARGUMENT")
