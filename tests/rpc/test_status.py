"""Errors into statuses: one row per class, and the whole status as a client decodes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message as protobuf
from google.rpc import error_details_pb2 as details_pb
from google.rpc import status_pb2
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service import errors
from service.errors import CallError, FieldViolation
from service.rpc import status
from service.rpc.interceptor import INTERNAL_TEXT, describe, names_snapshot
from service.tracing import OtelTracer

from .conftest import STARTED, ScriptedCore, delta, drained, run, serving

KINDS = (
    details_pb.ErrorInfo,
    details_pb.BadRequest,
    details_pb.ResourceInfo,
    details_pb.RetryInfo,
    details_pb.PreconditionFailure,
    details_pb.QuotaFailure,
    details_pb.RequestInfo,
)


def all_errors(kind: type[CallError] = CallError) -> Iterator[type[CallError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from all_errors(child)


def decoded(rich: status_pb2.Status) -> dict[str, protobuf.Message]:
    """Details by their type's name; each type at most once."""
    found: dict[str, protobuf.Message] = {}
    for packed in rich.details:
        kind = next(kind for kind in KINDS if packed.Is(kind.DESCRIPTOR))
        assert kind.__name__ not in found
        found[kind.__name__] = kind()
        packed.Unpack(found[kind.__name__])
    return found


def rich_of(result: Any) -> status_pb2.Status:
    packed = dict(result.trailing_metadata)["grpc-status-details-bin"]
    return status_pb2.Status.FromString(packed)


def test_every_error_has_a_row_of_its_own():
    assert set(status.CODES) == set(all_errors())
    assert grpc.StatusCode.OK not in status.CODES.values()
    assert grpc.StatusCode.UNKNOWN not in status.CODES.values()


def test_a_child_without_a_row_takes_its_parents():
    kind = type("SnapshotFrozen", (errors.SnapshotInUse,), {})
    try:
        assert status.code_of(kind("frozen")) is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        del kind
        import gc

        gc.collect()  # or the walk over all subclasses would find it


RESOURCE = ("kvfork.v1.Snapshot", "snapshots/a")
TABLE: list[tuple[CallError, grpc.StatusCode, set[str]]] = [
    (errors.InvalidField.at("a.b", "is wrong"), grpc.StatusCode.INVALID_ARGUMENT, {"BadRequest"}),
    (errors.Unsupported("later"), grpc.StatusCode.UNIMPLEMENTED, set()),
    (errors.ModelNotFound("no", resource=RESOURCE), grpc.StatusCode.NOT_FOUND, {"ResourceInfo"}),
    (errors.ModelLoading("soon"), grpc.StatusCode.UNAVAILABLE, {"RetryInfo"}),
    (errors.ModelMismatch("no"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.ModelChanged("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.EngineDown("dead"), grpc.StatusCode.UNAVAILABLE, set()),
    (errors.EngineFailed("dead"), grpc.StatusCode.UNAVAILABLE, set()),
    (errors.Draining("bye"), grpc.StatusCode.UNAVAILABLE, set()),  # the request names a snapshot: see below
    (errors.QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure", "RetryInfo"}),
    (errors.ActiveMemory("big"), grpc.StatusCode.RESOURCE_EXHAUSTED, set()),
    (errors.DeadlineUnmet("late"), grpc.StatusCode.DEADLINE_EXCEEDED, set()),
    (errors.SnapshotNotFound("no", resource=RESOURCE), grpc.StatusCode.NOT_FOUND, {"ResourceInfo"}),
    (errors.SnapshotIdTaken("no", resource=RESOURCE), grpc.StatusCode.ALREADY_EXISTS, {"ResourceInfo"}),
    (errors.SnapshotInUse("busy"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.SnapshotQuota("many"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure"}),
    (errors.StoreFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure"}),
    (errors.ForkMemory("big"), grpc.StatusCode.RESOURCE_EXHAUSTED, set()),
    (errors.RecomputeLimit("dear"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.RollbackBeyondEnd("far"), grpc.StatusCode.OUT_OF_RANGE, set()),
    (errors.NotAnAncestor("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.WrongInstance("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.TurnOpen("open"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.TemplateNotAppendable("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.TemplateMissing("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.ConstraintFailed("nothing fits"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.RequestInProgress("wait"), grpc.StatusCode.ABORTED, set()),
    (errors.RequestIdReused("no"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.PageTokenInvalid("no"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.ImmutableField("no"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.SlowReader("slow"), grpc.StatusCode.RESOURCE_EXHAUSTED, set()),
    (errors.WatchOverflow("behind"), grpc.StatusCode.RESOURCE_EXHAUSTED, set()),
    (errors.WatchQuota("many"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure"}),
    (errors.ResumeTokenExpired("old"), grpc.StatusCode.OUT_OF_RANGE, set()),
    (errors.ImageNotHeld("send it"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.ImageMemory("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure"}),
    (errors.ExchangeQuota("many"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure", "RetryInfo"}),
    (errors.ExchangeKeyDiffers("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.FingerprintDiffers("no"), grpc.StatusCode.FAILED_PRECONDITION, {"PreconditionFailure"}),
    (errors.ExportUnreadable("no"), grpc.StatusCode.INVALID_ARGUMENT, set()),
    (errors.ExportDamaged("no"), grpc.StatusCode.DATA_LOSS, set()),
    (errors.ExportIncomplete("no"), grpc.StatusCode.ABORTED, set()),
    (errors.SlowSender("slow"), grpc.StatusCode.RESOURCE_EXHAUSTED, set()),
    (errors.Unauthenticated("who"), grpc.StatusCode.UNAUTHENTICATED, set()),
    (errors.AdminRequired("no"), grpc.StatusCode.PERMISSION_DENIED, set()),
    (errors.CallQuota("many"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"QuotaFailure", "RetryInfo"}),
    (errors.Internal("ours", metadata={"incident": "i7"}), grpc.StatusCode.INTERNAL, {"RequestInfo"}),
    (errors.RowFailed("NaN"), grpc.StatusCode.INTERNAL, set()),
    (CallError("ours"), grpc.StatusCode.INTERNAL, set()),
]


def test_the_table_below_speaks_of_every_error():
    assert {type(error) for error, _, _ in TABLE} == set(all_errors())


@pytest.mark.parametrize(("error", "code", "kinds"), TABLE, ids=lambda value: type(value).__name__)
def test_each_error_over_the_wire(error, code, kinds):
    async def story():
        async with serving(ScriptedCore(failing={"fork": error})) as s:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.inference.Fork(pb.ForkRequest(parent="snapshots/a", branches=[pb.ForkBranch()]))
            assert caught.value.code() is code
            assert caught.value.details() == error.text
            rich = rpc_status.from_call(caught.value)
            details = decoded(rich)
            assert set(details) == kinds | {"ErrorInfo"}
            info = details["ErrorInfo"]
            assert (info.reason, info.domain, dict(info.metadata)) == (error.reason, "kvfork", error.metadata)

    run(story)


@pytest.mark.parametrize(("error", "code", "kinds"), TABLE, ids=lambda value: type(value).__name__)
def test_each_error_is_the_same_under_tracing(error, code, kinds):
    """Instrumentation that wraps a call's context has lost details elsewhere; ours must not."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def status_with(core: ScriptedCore) -> tuple[Any, Any, Any]:
        async with serving(core) as s:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(s.inference.Generate(pb.GenerateRequest(parent="snapshots/a")))
            return caught.value.code(), caught.value.details(), rpc_status.from_call(caught.value)

    async def story() -> None:
        plain = await status_with(ScriptedCore(script=(STARTED, delta("Hi"), error)))
        traced = await status_with(ScriptedCore(script=(STARTED, delta("Hi"), error), tracer=OtelTracer(provider)))
        assert traced == plain and plain[0] is code

    run(story)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None and span.attributes["rpc.grpc.status_code"] == code.name
    provider.shutdown()


def test_a_whole_status_as_a_client_decodes_it():
    error = errors.SnapshotNotFound(
        "snapshots/a expired at 12:00",
        hint="make it again, with a longer ttl",
        reason="SNAPSHOT_EXPIRED",
        metadata={"expireTime": "12:00"},
        resource=RESOURCE,
    )

    async def story():
        async with serving(ScriptedCore(failing={"generate": error})) as s:
            for _ in range(100):  # a stream's status must survive every time
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await drained(s.inference.Generate(pb.GenerateRequest(parent="snapshots/a")))
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
                assert caught.value.initial_metadata() == grpc.aio.Metadata()
                rich = rpc_status.from_call(caught.value)
                assert rich.message == "snapshots/a expired at 12:00 (make it again, with a longer ttl)"
                details = decoded(rich)
                assert details == {
                    "ErrorInfo": details_pb.ErrorInfo(
                        reason="SNAPSHOT_EXPIRED", domain="kvfork", metadata={"expireTime": "12:00"}
                    ),
                    "ResourceInfo": details_pb.ResourceInfo(
                        resource_type="kvfork.v1.Snapshot",
                        resource_name="snapshots/a",
                        description="snapshots/a expired at 12:00",
                    ),
                }

    run(story)


def test_wrong_fields_arrive_with_their_paths():
    async def story():
        async with serving() as s:
            request = pb.GenerateRequest(parent="snapshots/a")
            request.sampling.temperature = float("nan")
            request.input.raw.parts.add()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(s.inference.Generate(request))
            details = decoded(rpc_status.from_call(caught.value))
            assert [violation.field for violation in details["BadRequest"].field_violations] == [
                "input.raw.parts[0]",
                "sampling.temperature",
            ]
            assert s.core.calls == []  # the core was not even asked

    run(story)


def test_details_say_when_to_retry_and_about_what():
    queue = errors.QueueFull("64 calls wait", metadata={"queued": "64", "limit": "64"}, retry_after=0.25)
    rich = rich_of(status.status_of(queue))
    details = decoded(rich)
    assert (details["RetryInfo"].retry_delay.seconds, details["RetryInfo"].retry_delay.nanos) == (0, 250_000_000)
    assert details["QuotaFailure"].violations[0].description == "64 calls wait"
    ancestor = errors.NotAnAncestor("b is none of a's", resource=("kvfork.v1.Snapshot", "snapshots/b"))
    violation = decoded(rich_of(status.status_of(ancestor)))["PreconditionFailure"].violations[0]
    assert (violation.type, violation.subject) == ("NOT_AN_ANCESTOR", "snapshots/b")


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (pb.GenerateRequest(), False),
        (pb.GenerateRequest(parent="snapshots/a"), True),
        (pb.CreateSnapshotRequest(), False),
        (pb.ForkRequest(parent="snapshots/a"), True),
        (pb.RollbackRequest(source="snapshots/a"), True),
        (pb.CountTokensRequest(), False),
        (snapshot_pb.ExtendSnapshotsRequest(names=["snapshots/a"]), True),
    ],
)
def test_a_draining_server_sends_a_client_elsewhere_only_if_elsewhere_will_do(request_, named):
    assert names_snapshot(request_) is named
    result = status.status_of(errors.Draining("the server drains"), names_snapshot=named)
    assert ((status.PUSHBACK, "-1") in result.trailing_metadata) is named
    assert ("RetryInfo" in decoded(rich_of(result))) is not named


def test_a_client_with_a_retry_policy_does_what_a_draining_server_asks():
    policy = {"maxAttempts": 3, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1}
    policy["retryableStatusCodes"] = ["UNAVAILABLE"]
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    attempts = {}

    async def story():
        failing = {"generate": errors.Draining("the server drains")}
        async with serving(ScriptedCore(failing=failing)) as s:
            options = [("grpc.service_config", json.dumps(config))]
            async with grpc.aio.insecure_channel(s.addresses[0], options=options) as channel:
                stub = InferenceServiceStub(channel)
                text = pb.GenerateRequest()
                text.input.raw.parts.add().text = "Hi"
                for request in (text, pb.GenerateRequest(parent="snapshots/a")):
                    s.core.calls.clear()
                    with pytest.raises(grpc.aio.AioRpcError):
                        await drained(stub.Generate(request))
                    attempts[request.parent] = len(s.core.calls)

    run(story)
    assert attempts == {"": 3, "snapshots/a": 1}


# What does not leave the server.


class SecretError(Exception):
    """Carries what must not be told."""


@pytest.mark.parametrize("started", [False, True])
def test_an_unexpected_exception_leaves_an_incident_and_nothing_else(started, caplog):
    bug = SecretError("the prompt was: launch codes")
    bug.__cause__ = KeyError("launch codes")
    script = (STARTED, delta("Hi"), bug) if started else (bug,)

    async def story():
        async with serving(ScriptedCore(script=script)) as s:
            got: list[str] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drained(s.inference.Generate(pb.GenerateRequest(parent="snapshots/a")), got)
            assert got == (["started", "delta"] if started else [])
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
            rich = rpc_status.from_call(caught.value)
            assert b"launch" not in rich.SerializeToString()
            assert b"SecretError" not in rich.SerializeToString()
            incident = decoded(rich)["RequestInfo"].request_id
            assert incident in caplog.text
            assert "launch" not in caplog.text
            assert "SecretError" in caplog.text  # the log may say what and where,
            assert "conftest.py" in caplog.text  # but not the words

    with caplog.at_level(logging.DEBUG):
        run(story)


def test_an_exception_is_described_with_its_causes_but_without_their_words():
    try:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise ValueError("secret") from error
    except ValueError as error:
        told = describe(error)
    assert "secret" not in told
    assert told.index("builtins.ValueError") < told.index("after builtins.KeyError")
    assert told.count("test_status.py") == 2


def test_a_request_that_is_no_message_is_an_invalid_argument():
    async def story():
        async with serving() as s:
            stream = s.channel.unary_stream("/kvfork.v1.InferenceService/Generate")
            unary = s.channel.unary_unary("/kvfork.v1.InferenceService/Fork")
            for body in (b"\xff\xff\xff", b"\x12\x02\xff\xfe"):  # broken framing; broken UTF-8
                for call in (lambda body: drained(stream(body)), unary):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(body)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert "Decode" not in caught.value.details()

    run(story)


# What a status weighs.


def hostile(character: str) -> CallError:
    fields = tuple(FieldViolation(f"{character * 500}[{i}]", character * 5000) for i in range(64))
    return errors.InvalidField(
        character * 100_000,
        hint=character * 1000,
        fields=fields,
        metadata={f"key{i}": character * 5000 for i in range(50)},
        resource=("kvfork.v1.Snapshot", character * 5000),
        retry_after=1.0,
    )


@pytest.mark.parametrize("character", ["a", "%", "\n", "é", "漢", "😀"])
def test_a_status_of_any_size_arrives_whole(character):
    error = hostile(character)

    async def story():
        async with serving(ScriptedCore(failing={"fork": error})) as s:
            for _ in range(20):  # beyond the soft limit a peer drops trailers at random
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await s.inference.Fork(pb.ForkRequest(parent="snapshots/a", branches=[pb.ForkBranch()]))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                rich = rpc_status.from_call(caught.value)
                assert rich is not None
                assert rich.ByteSize() <= 4096
                assert decoded(rich)["ErrorInfo"].reason == "INVALID_FIELD"

    run(story)


def test_what_was_cut_is_counted():
    fields = tuple(FieldViolation(f"field_{i}", "x" * 200) for i in range(64))
    rich = rich_of(status.status_of(errors.InvalidField("many", fields=fields)))
    listed = decoded(rich)["BadRequest"].field_violations
    kept = [violation.field for violation in listed[:-1]]
    assert kept == [f"field_{i}" for i in range(len(kept))]
    assert (listed[-1].field, listed[-1].description) == ("", f"and {64 - len(kept)} more fields that are wrong")
    assert len(kept) > 8


def test_a_short_status_is_not_cut():
    fields = tuple(FieldViolation(f"field_{i}", "is wrong") for i in range(20))
    rich = rich_of(status.status_of(errors.InvalidField("t" * 1000, hint="h" * 100, fields=fields)))
    assert rich.message == f"{'t' * 1000} ({'h' * 100})"
    assert len(decoded(rich)["BadRequest"].field_violations) == 20
