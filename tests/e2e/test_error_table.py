"""Rows of the error table that no other test makes happen: by the server's state, by a call before, by a template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.models import resolve
from tests.e2e.live import PATIENCE, LiveServer, answer_of, chat, generate, greedy, prompt_of, raw, refusal_of, refused
from tests.e2e.templates import with_template

pytestmark = [pytest.mark.mlx]

NAME = "snapshots/of-the-table"
ENDLESS = 20_000


def inference_calls(server: LiveServer, **more: Any) -> list[Callable[[], Any]]:
    """Every call that needs the model; those that can, without a snapshot."""
    stub = server.inference
    fork = inference_pb.ForkRequest(parent=NAME, branches=[inference_pb.ForkBranch()])
    return [
        lambda: stub.Generate(greedy(raw("Hello"), tokens=2), timeout=PATIENCE, **more),
        lambda: stub.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw("Hello")), timeout=PATIENCE, **more),
        lambda: stub.CountTokens(inference_pb.CountTokensRequest(input=raw("Hello")), timeout=PATIENCE, **more),
        lambda: stub.Fork(fork, timeout=PATIENCE, **more),
        lambda: stub.Rollback(inference_pb.RollbackRequest(source=NAME, token_count=1), timeout=PATIENCE, **more),
    ]


def other_calls(server: LiveServer, **more: Any) -> list[Callable[[], Any]]:
    return [
        lambda: server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(), **more),
        lambda: server.server.GetServerInfo(server_pb.GetServerInfoRequest(), **more),
        lambda: server.server.ListModels(server_pb.ListModelsRequest(), **more),
        lambda: server.server.GetCacheStats(server_pb.GetCacheStatsRequest(), **more),
        lambda: server.inference.StopGeneration(
            inference_pb.StopGenerationRequest(generation="generations/none"), **more
        ),
    ]


def test_while_the_model_loads_calls_are_told_when_to_come_again() -> None:
    with LiveServer("tiny-gemma3", wait=False) as server:
        answers = [refused(call) for call in inference_calls(server)]
        for call in other_calls(server):
            call()
        state = server.model().state
    assert state == server_pb.Model.STATE_LOADING, "it was loaded before it was asked"
    for answer in answers:
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "MODEL_LOADING"), answer
        assert answer.metadata == {"model": "models/tiny-gemma3"} and answer.retry_seconds


def test_while_a_durable_store_is_not_read_yet_its_snapshots_are_not_said_to_be_gone(tmp_path: Path) -> None:
    with LiveServer("tiny-gemma3", "--store-dir", str(tmp_path / "s"), wait=False) as server:
        get, every = snapshot_pb.GetSnapshotRequest(name=NAME), snapshot_pb.ListSnapshotsRequest()
        extend = snapshot_pb.ExtendSnapshotsRequest(names=[NAME])
        delete = snapshot_pb.DeleteSnapshotRequest(name=NAME, allow_missing=True)
        update = snapshot_pb.UpdateSnapshotRequest(
            snapshot=pb.Snapshot(name=NAME, pinned=True), update_mask={"paths": ["pinned"]}
        )
        answers = [
            refused(lambda: server.snapshots.GetSnapshot(get)),
            refused(lambda: server.snapshots.ListSnapshots(every)),
            refused(lambda: server.snapshots.ExtendSnapshots(extend)),
            refused(lambda: server.snapshots.DeleteSnapshot(delete)),
            refused(lambda: server.snapshots.UpdateSnapshot(update)),
        ]
        state = server.model().state
    assert state == server_pb.Model.STATE_LOADING, "it was loaded before it was asked"
    for answer in answers:
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "MODEL_LOADING"), answer
        assert answer.retry_seconds


def test_a_call_for_another_instance_is_refused_by_every_method(server: LiveServer) -> None:
    mine = server.server.GetServerInfo(server_pb.GetServerInfoRequest()).instance
    elsewhere = {"metadata": (("x-kvfork-instance", "kvfork-of-somebody-else"),)}
    for call in (*inference_calls(server, **elsewhere), *other_calls(server, **elsewhere)):
        answer = refused(call)
        assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "WRONG_INSTANCE")
        assert answer.metadata == {"instance": mine} and "PreconditionFailure" in answer.kinds
    for call in other_calls(server, metadata=(("x-kvfork-instance", mine),)):
        call()


def test_what_a_rollback_let_go_of_says_so(server: LiveServer) -> None:
    made = server.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(
            input=raw(prompt_of(20)), options=pb.SnapshotOptions(snapshot_id="let-go-of")
        )
    ).snapshot
    shorter = server.inference.Rollback(
        inference_pb.RollbackRequest(source=made.name, token_count=5, release=inference_pb.RELEASE_SOURCE),
        timeout=PATIENCE,
    ).snapshot
    answer = refused(lambda: server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=made.name)))
    assert (answer.code, answer.reason, answer.resource) == ("NOT_FOUND", "SNAPSHOT_ROLLED_BACK", made.name)
    assert answer.metadata.keys() == {"snapshot", "goneTime"}
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=shorter.name))


def test_a_prompt_that_cannot_be_computed_in_time_is_not_begun(llama: LiveServer) -> None:
    seconds = generate(llama, greedy(raw(prompt_of(4_096, 71)), tokens=1)).finished.timing.prefill
    took = seconds.seconds + seconds.nanos / 1e9
    before = llama.stats().prompt_tokens
    # Some eight times as long, on a server that is no faster than it has been.
    request = greedy(raw(prompt_of(32_000, 72)), tokens=1)
    answer = refused(lambda: llama.inference.Generate(request, timeout=max(2.0 * took, 0.5)))
    assert answer.code == "DEADLINE_EXCEEDED"
    if answer.reason:  # else the client's own clock was first, as on a machine that stands still for a while
        assert answer.reason == "DEADLINE_UNMET" and answer.metadata.keys() == {"neededSeconds", "leftSeconds"}
        assert float(answer.metadata["neededSeconds"]) > float(answer.metadata["leftSeconds"])
    llama.idle()
    assert llama.stats().prompt_tokens == before


def test_a_generation_that_ends_before_anything_stands_says_that_there_is_nothing_to_save(server: LiveServer) -> None:
    at_once = pb.Stopping(max_tokens=5, ignore_eos=True, time_limit=duration_pb2.Duration(nanos=1_000))
    before = len(server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots)
    for length in (5, 600):
        question = greedy(raw(prompt_of(length, 91)), stopping=at_once, save=pb.SnapshotOptions())
        answer = answer_of(server.inference.Generate(question, timeout=PATIENCE))
        assert answer.finished.reason == inference_pb.FINISH_REASON_TIME_LIMIT
        assert answer.finished.save_error_reason == "NOTHING_TO_SAVE" and not answer.finished.HasField("snapshot")
        assert (answer.text, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("", 0, 0)
        question.ClearField("save")
        assert not answer_of(server.inference.Generate(question, timeout=PATIENCE)).finished.save_error_reason
    server.idle()
    assert len(server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots) == before


# -- request ids ----------------------------------------------------------------------------------------------------


def test_a_request_id_in_use_is_told_and_one_of_another_request_refused(server: LiveServer) -> None:
    request = greedy(raw("Once"), tokens=ENDLESS, request_id=str(uuid.uuid4()))
    stream = server.inference.Generate(request, timeout=PATIENCE)
    next(stream)
    again = refused(lambda: server.inference.Generate(request))
    assert (again.code, again.reason) == ("ABORTED", "REQUEST_IN_PROGRESS")
    other = greedy(raw("Twice"), tokens=ENDLESS, request_id=request.request_id)
    wrong = refused(lambda: server.inference.Generate(other))
    assert (wrong.code, wrong.reason, wrong.fields) == ("INVALID_ARGUMENT", "REQUEST_ID_REUSED", ("request_id",))
    # It is the caller's and the method's own: another method may have the same.
    made = server.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(input=raw("Once"), request_id=request.request_id)
    )
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=made.snapshot.name))
    stream.cancel()
    server.idle()


def test_a_request_id_seen_before_gets_the_reply_it_got(server: LiveServer) -> None:
    stub = server.inference
    root = stub.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(input=raw(prompt_of(30, 81)), request_id=str(uuid.uuid4()))
    ).snapshot
    requests: list[tuple[Any, Any]] = [
        (stub.CreateSnapshot, inference_pb.CreateSnapshotRequest(input=raw(prompt_of(30, 82)))),
        (stub.Fork, inference_pb.ForkRequest(parent=root.name, branches=[inference_pb.ForkBranch()] * 2)),
        (stub.Rollback, inference_pb.RollbackRequest(source=root.name, token_count=20)),
    ]
    made = [root.name]
    for call, request in requests:
        request.request_id = str(uuid.uuid4())
        first, second = call(request), call(request)
        assert first == second, "the very same names, and not a second set"
        made += [s.name for s in (first.snapshots if hasattr(first, "snapshots") else [first.snapshot])]
        request.request_id = request.request_id.upper()
        assert call(request) == first, "a UUID has no case"
        changed = type(request)()
        changed.CopyFrom(request)
        if isinstance(changed, inference_pb.RollbackRequest):
            changed.token_count = 19
        elif isinstance(changed, inference_pb.ForkRequest):
            changed.branches.add()
        else:
            changed.input.raw.parts[0].text = "other"
        wrong = refused(lambda call=call, changed=changed: call(changed))
        assert (wrong.code, wrong.reason) == ("INVALID_ARGUMENT", "REQUEST_ID_REUSED")
    question = greedy(raw("Once"), tokens=6, request_id=str(uuid.uuid4()), save=pb.SnapshotOptions())
    first, second = (answer_of(stub.Generate(question, timeout=PATIENCE)) for _ in range(2))
    assert (first.started, first.finished, first.ids, first.text) == (
        second.started, second.finished, second.ids, second.text,
    )  # fmt: skip
    assert len(second.deltas) == 1
    for name in (*made, first.finished.snapshot.name):
        server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name))


def test_a_request_that_failed_or_was_cancelled_may_be_made_again(server: LiveServer) -> None:
    missing = inference_pb.RollbackRequest(source=NAME, token_count=1, request_id=str(uuid.uuid4()))
    for _ in range(2):
        assert refused(lambda: server.inference.Rollback(missing)).reason == "SNAPSHOT_NOT_FOUND"
    request = greedy(raw("Once"), tokens=ENDLESS, request_id=str(uuid.uuid4()))
    for _ in range(2):
        stream = begun(server, request)
        stream.cancel()
        server.idle()


def begun(server: LiveServer, request: inference_pb.GenerateRequest) -> grpc.Call:
    """A stream that has begun, as soon as the server has heard of the end of the one before it."""
    give_up = time.monotonic() + PATIENCE
    while True:
        stream = server.inference.Generate(request, timeout=PATIENCE)
        try:
            next(stream)
            return stream
        except grpc.RpcError as error:
            if refusal_of(error).reason != "REQUEST_IN_PROGRESS" or time.monotonic() > give_up:
                raise
        time.sleep(0.01)


# -- templates ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its template says at the top how many messages there are: no rendering is the beginning of a longer one."""
    template = (
        "[{{ messages | length }}]"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with LiveServer(
        with_template(resolve("tiny-llama"), tmp_path_factory.mktemp("counting") / "model", template)
    ) as server:
        yield server


def test_a_template_that_is_not_append_only_is_refused_for_appending_alone(counting: LiveServer) -> None:
    first = generate(
        counting, greedy(chat(("user", "Hi")), tokens=4, save=pb.SnapshotOptions(snapshot_id="a-first-turn"))
    )
    assert first.finished.snapshot.name == "snapshots/a-first-turn"
    request = greedy(chat(("user", "And now?")), parent="snapshots/a-first-turn", tokens=2)
    answer = refused(lambda: counting.inference.Generate(request))
    assert answer.code == "FAILED_PRECONDITION" and answer.reason in ("TEMPLATE_NOT_APPENDABLE", "TURN_OPEN"), answer
    closed = chat(("user", "Hi"), ("assistant", "Hello."), open_turn=False)
    made = counting.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(input=closed), timeout=PATIENCE
    ).snapshot
    answer = refused(
        lambda: counting.inference.Generate(greedy(chat(("user", "And now?")), parent=made.name, tokens=2))
    )
    assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "TEMPLATE_NOT_APPENDABLE")
    assert "PreconditionFailure" in answer.kinds
    assert generate(counting, greedy(raw(" And now?"), parent=made.name, tokens=2)).usage.cached_tokens


def test_without_a_template_chat_is_refused_and_raw_is_not(tmp_path: Path) -> None:
    with LiveServer(with_template(resolve("tiny-llama"), tmp_path / "model", None)) as server:
        answer = refused(lambda: server.inference.Generate(greedy(chat(("user", "Hi")), tokens=2)))
        assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "TEMPLATE_MISSING")
        assert "PreconditionFailure" in answer.kinds
        assert generate(server, greedy(raw("Hi"), tokens=2)).ids


def test_a_stub_of_a_service_that_is_not_there_is_unimplemented(server: LiveServer) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.channel.unary_unary("/kvfork.v1.NoService/Method")(b"", timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
