"""Every way in which a generation can end before its time: cancel, deadline, stop, time limit, a reader that is gone.

After each of them the server must be as if the call had never been: no row in use, no file or thread more, and the
next caller gets the tokens it would have got.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import duration_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import (
    GREEDY,
    PATIENCE,
    LiveServer,
    answer_of,
    generate,
    greedy,
    prompt_of,
    raw,
    refusal_of,
    refused,
    until,
)

ENDLESS = 20_000  # tokens that no test waits for


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """Two rows and a short queue, so that tests can fill both."""
    with LiveServer("tiny-gemma3", "--max-batch", "2", "--max-queue", "4") as server:
        yield server


@pytest.fixture
def undisturbed(small: LiveServer) -> Iterator[LiveServer]:
    """The small server; afterwards it must be as it was before."""
    small.idle()
    question = greedy(raw(prompt_of(300, 1)), tokens=12)
    before = generate(small, question).ids
    files, threads = small.open_files, small.threads
    yield small
    small.idle()
    assert generate(small, question).ids == before
    until(lambda: small.open_files <= files + 2, what="files to be closed")
    assert small.threads <= threads + 2
    assert not small.complaints()


def first(stream: Iterator[inference_pb.GenerateResponse], kind: str) -> inference_pb.GenerateResponse:
    """Reads up to the first event of a kind."""
    return next(event for event in stream if event.WhichOneof("event") == kind)


def ending(stream: Iterator[inference_pb.GenerateResponse]) -> str:
    """How a stream ends: "finished" or a status; there must be exactly one end."""
    kinds = []
    try:
        for event in stream:
            assert "finished" not in kinds, "something came after the end"
            kinds.append(event.WhichOneof("event"))
    except grpc.RpcError as error:
        if kinds[-1:] != ["finished"]:  # a cancel may still come between Finished and the status
            return error.code().name
    assert kinds[-1] == "finished"
    return "finished"


def busy(server: LiveServer, count: int = 2) -> list[Iterator[inference_pb.GenerateResponse]]:
    """Takes that many rows, and returns once they decode."""
    streams = [
        server.inference.Generate(greedy(raw(prompt_of(20, 90 + i)), tokens=ENDLESS), timeout=PATIENCE)
        for i in range(count)
    ]
    for stream in streams:
        first(stream, "delta")
    return streams


# -- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_at_once(undisturbed: LiveServer) -> None:
    for i in range(20):
        undisturbed.inference.Generate(greedy(raw(prompt_of(600, i)), tokens=ENDLESS)).cancel()


def test_cancel_in_the_queue(undisturbed: LiveServer) -> None:
    running = busy(undisturbed)
    waiting = undisturbed.inference.Generate(greedy(raw("Hello"), tokens=ENDLESS))
    until(lambda: undisturbed.stats().queued_calls == 1, what="a call to wait")
    waiting.cancel()
    until(lambda: undisturbed.stats().queued_calls == 0, what="the queue to be empty")
    assert undisturbed.stats().active_sequences == 2
    for stream in running:
        stream.cancel()


def test_cancel_in_prefill(undisturbed: LiveServer) -> None:
    request = greedy(raw(prompt_of(20_000, 2)), tokens=5, output=inference_pb.OutputOptions(progress=True))
    stream = undisturbed.inference.Generate(request)
    first(stream, "progress")
    stream.cancel()


def test_cancel_in_decode(undisturbed: LiveServer) -> None:
    for stream in busy(undisturbed):
        stream.cancel()


def test_cancel_unary_calls_in_the_middle(undisturbed: LiveServer) -> None:
    inference = undisturbed.inference
    root = inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(
            input=raw(prompt_of(1000, 3)), options=pb.SnapshotOptions(snapshot_id="root-of-cancelled")
        )
    ).snapshot.name
    long = raw(prompt_of(15_000, 4))
    calls = [
        inference.CreateSnapshot.future(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(15_000, 5)))),
        inference.Fork.future(
            inference_pb.ForkRequest(parent=root, branches=[inference_pb.ForkBranch(append=long)] * 2)
        ),
        inference.Rollback.future(inference_pb.RollbackRequest(source=root, token_count=900)),
    ]
    until(lambda: undisturbed.stats().active_sequences == 2, what="calls to run")
    for call in calls:
        call.cancel()
    undisturbed.idle()
    held = undisturbed.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots
    assert [s.name for s in held if s.token_count > 1000] == []
    assert undisturbed.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=root)).snapshot.active_uses == 0
    undisturbed.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=root, descendants=True))


def test_a_cancelled_child_leaves_its_parent_untouched(undisturbed: LiveServer) -> None:
    root = undisturbed.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(input=raw(prompt_of(700, 6)))
    ).snapshot.name
    question = greedy(raw(prompt_of(20, 7)), parent=root, tokens=20)
    expected = generate(undisturbed, question).ids
    for _ in range(10):
        stream = undisturbed.inference.Generate(greedy(raw(prompt_of(20, 7)), parent=root, tokens=ENDLESS))
        first(stream, "delta")
        stream.cancel()
        again = generate(undisturbed, question)
        assert again.ids == expected
        assert (again.usage.cached_tokens, again.usage.recomputed_tokens) == (700, 0)
    undisturbed.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=root))


def test_a_cancelled_prefill_is_not_lost(undisturbed: LiveServer) -> None:
    request = greedy(raw(prompt_of(6000, 8)), tokens=5, output=inference_pb.OutputOptions(progress=True))
    stream = undisturbed.inference.Generate(request)
    done = 0
    for event in stream:
        done = event.progress.done_tokens
        if done >= 3000:
            stream.cancel()
            break
    undisturbed.idle()
    assert generate(undisturbed, request).usage.cached_tokens >= done - done % 256


def test_50_abandoned_streams(undisturbed: LiveServer) -> None:
    for i in range(50):
        stream = undisturbed.inference.Generate(greedy(raw(prompt_of(40, 100 + i)), tokens=ENDLESS))
        if i % 2:
            first(stream, "started")
        del stream  # the client library cancels what nobody holds
        if i % 4 == 3:
            undisturbed.idle()


def test_200_races_between_cancel_and_the_end(undisturbed: LiveServer) -> None:
    picked = random.Random(4)
    question = greedy(raw(prompt_of(20, 9)), tokens=8)
    expected = generate(undisturbed, question).ids
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        list(pool.map(lambda _: generate(undisturbed, question), range(12)))
        usual = (time.monotonic() - began) / 3

    def race(_: int) -> str:
        stream = undisturbed.inference.Generate(question, timeout=PATIENCE)
        timer = threading.Timer(picked.uniform(0, 2 * usual), stream.cancel)
        timer.start()
        ids: list[int] = []
        try:
            for event in stream:
                ids += event.delta.token_ids
        except grpc.RpcError as error:
            assert ids == expected[: len(ids)]
            refusal = refusal_of(error)
            return refusal.code if refusal.reason != "QUEUE_FULL" else "QUEUE_FULL"
        finally:
            timer.cancel()
        assert ids == expected
        return "finished"

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(race, range(200)))
    assert set(ends) <= {"finished", "CANCELLED"} and len(set(ends)) == 2, {e: ends.count(e) for e in ends}


# -- deadlines ------------------------------------------------------------------------------------------------------


def test_100_deadlines_of_1_to_200_ms(undisturbed: LiveServer) -> None:
    picked = random.Random(5)
    requests = [
        greedy(raw(prompt_of(picked.choice([5, 300, 3000]), i)), tokens=picked.choice([1, 8, ENDLESS]))
        for i in range(100)
    ]

    def limited(request: inference_pb.GenerateRequest) -> str:
        return ending(undisturbed.inference.Generate(request, timeout=picked.uniform(0.001, 0.2)))

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(limited, requests))
    assert set(ends) <= {"finished", "DEADLINE_EXCEEDED"}, {e: ends.count(e) for e in ends}


def test_a_deadline_in_the_queue(undisturbed: LiveServer) -> None:
    running = busy(undisturbed)
    answer = refused(lambda: undisturbed.inference.Generate(greedy(raw("Hello")), timeout=0.3))
    assert answer.code == "DEADLINE_EXCEEDED"
    until(lambda: undisturbed.stats().queued_calls == 0, what="the queue to be empty")
    for stream in running:
        stream.cancel()


# -- a full server --------------------------------------------------------------------------------------------------


def test_beyond_the_queue_a_call_is_refused_at_once(undisturbed: LiveServer) -> None:
    running = busy(undisturbed)
    waiting = [undisturbed.inference.Generate(greedy(raw("Hello"), tokens=3)) for _ in range(4)]
    until(lambda: undisturbed.stats().queued_calls == 4, what="four calls to wait")
    answer = refused(lambda: undisturbed.inference.Generate(greedy(raw("Hello")), timeout=PATIENCE))
    assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert (answer.metadata["queued"], answer.metadata["limit"]) == ("4", "4")
    assert answer.kinds >= {"ErrorInfo", "QuotaFailure", "RetryInfo"}
    for stream in running:
        stream.cancel()
    assert [len(answer_of(stream).deltas) > 0 for stream in waiting] == [True] * 4


def test_free_rows_are_no_queue(undisturbed: LiveServer) -> None:
    """Two rows and four places in the queue: six calls at once all fit, every time."""
    for _ in range(10):
        streams = [undisturbed.inference.Generate(greedy(raw("Hello"), tokens=2), timeout=PATIENCE) for _ in range(6)]
        assert [ending(stream) for stream in streams] == ["finished"] * 6


def test_a_server_without_a_queue_serves_and_what_it_refuses_leaves_nothing() -> None:
    with LiveServer("tiny-llama", "--max-batch", "2", "--max-queue", "0", inside=True) as server:
        assert len(generate(server, greedy(raw("Hello"), tokens=3)).ids) == 3
        running = busy(server)
        answer = refused(lambda: server.inference.Generate(saving(18, "never-began", 5), timeout=PATIENCE))
        assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        until(lambda: server.report()["saving"] == 0, what="nobody to wait for its state")
        for stream in running:
            stream.cancel()


def test_higher_priority_goes_first(undisturbed: LiveServer) -> None:
    running = busy(undisturbed)
    order: list[int] = []
    waiting = []
    for priority in (0, 5, -5):
        stream = undisturbed.inference.Generate(greedy(raw("Hello"), tokens=2, priority=priority), timeout=PATIENCE)
        waiting.append((priority, stream))
        until(lambda: undisturbed.stats().queued_calls == len(waiting), what="the calls to wait")
    running[0].cancel()

    def note(entry: tuple[int, Iterator[inference_pb.GenerateResponse]]) -> None:
        first(entry[1], "started")
        order.append(entry[0])
        ending(entry[1])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(note, waiting))
    for stream in running[1:]:
        stream.cancel()
    assert order == [5, 0, -5]


# -- stop -----------------------------------------------------------------------------------------------------------


def stop(server: LiveServer, generation: str) -> bool:
    return server.inference.StopGeneration(inference_pb.StopGenerationRequest(generation=generation)).was_running


def test_stop_in_decode_keeps_text_receipt_and_state(undisturbed: LiveServer) -> None:
    request = greedy(raw(prompt_of(300, 10)), tokens=ENDLESS, save=pb.SnapshotOptions())
    stream = undisturbed.inference.Generate(request, timeout=PATIENCE)
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 20:
            assert stop(undisturbed, events[0].started.generation)
    answer = answer_of(events)
    assert answer.finished.reason == inference_pb.FINISH_REASON_STOPPED
    saved = answer.finished.snapshot
    assert saved.token_count == 300 + answer.usage.completion_tokens
    # It goes on as if nobody had stopped it.
    whole = generate(undisturbed, greedy(raw(prompt_of(300, 10)), tokens=len(answer.ids) + 20)).ids
    rest = generate(undisturbed, greedy(None, parent=saved.name, tokens=20))
    assert answer.ids + rest.ids == whole
    assert rest.usage.cached_tokens == saved.token_count
    assert not stop(undisturbed, answer.started.generation)


def test_stop_in_prefill_keeps_the_blocks_done(undisturbed: LiveServer) -> None:
    request = greedy(
        raw(prompt_of(20_000, 11)),
        tokens=5,
        save=pb.SnapshotOptions(),
        output=inference_pb.OutputOptions(progress=True),
    )
    stream = undisturbed.inference.Generate(request, timeout=PATIENCE)
    started = first(stream, "started").started
    done = first(stream, "progress").progress.done_tokens
    assert stop(undisturbed, started.generation)
    events = list(stream)
    finished = events[-1].finished
    assert finished.reason == inference_pb.FINISH_REASON_STOPPED
    assert not any(event.HasField("delta") for event in events)
    assert done <= finished.snapshot.token_count < 20_000 and finished.snapshot.token_count % 256 == 0
    again = generate(undisturbed, greedy(raw([9]), parent=finished.snapshot.name, tokens=2))
    assert again.usage.cached_tokens == finished.snapshot.token_count


def test_a_receipt_of_a_stopped_prefill_counts_what_was_computed(undisturbed: LiveServer) -> None:
    request = greedy(raw(prompt_of(20_000, 12)), tokens=5, output=inference_pb.OutputOptions(progress=True))
    stream = undisturbed.inference.Generate(request, timeout=PATIENCE)
    started = first(stream, "started").started
    first(stream, "progress")
    assert stop(undisturbed, started.generation)
    done, usage = 0, None
    for event in stream:
        done = event.progress.done_tokens or done
        usage = event.finished.usage if event.HasField("finished") else usage
    assert usage is not None and usage.cached_tokens + usage.new_tokens <= done + 512 < 20_000


def test_stop_at_every_moment(undisturbed: LiveServer) -> None:
    picked = random.Random(6)

    def stopped(i: int) -> str:
        request = greedy(raw(prompt_of(picked.choice([5, 600, 4000]), 200 + i)), tokens=30)
        stream = undisturbed.inference.Generate(request, timeout=PATIENCE)
        generation = first(stream, "started").started.generation
        time.sleep(picked.uniform(0, 0.1))
        stop(undisturbed, generation)
        return ending(stream)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(stopped, range(40))) == {"finished"}


def test_stop_of_what_is_not_there_is_no_error(undisturbed: LiveServer) -> None:
    assert not stop(undisturbed, "generations/0123456789abcdef01234567")


def test_a_time_limit_ends_cleanly(undisturbed: LiveServer) -> None:
    request = greedy(
        raw(prompt_of(300, 13)),
        stopping=pb.Stopping(max_tokens=ENDLESS, ignore_eos=True, time_limit=duration_pb2.Duration(nanos=400_000_000)),
        save=pb.SnapshotOptions(),
    )
    answer = generate(undisturbed, request)
    assert answer.finished.reason == inference_pb.FINISH_REASON_TIME_LIMIT
    assert 0 < answer.usage.completion_tokens < ENDLESS
    assert answer.finished.snapshot.token_count == 300 + answer.usage.completion_tokens


def test_a_time_limit_holds_in_prefill(undisturbed: LiveServer) -> None:
    request = greedy(
        raw(prompt_of(25_000, 14)),
        stopping=pb.Stopping(max_tokens=5, time_limit=duration_pb2.Duration(nanos=50_000_000)),
    )
    answer = generate(undisturbed, request)
    assert answer.finished.reason == inference_pb.FINISH_REASON_TIME_LIMIT
    assert answer.usage.completion_tokens == 0


# -- saved when cancelled -------------------------------------------------------------------------------------------


def found(server: LiveServer, snapshot_id: str) -> pb.Snapshot | None:
    try:
        return server.snapshots.GetSnapshot(
            snapshot_pb.GetSnapshotRequest(name=f"snapshots/{snapshot_id}"), timeout=PATIENCE
        ).snapshot
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise


def saving(seed: int, snapshot_id: str, tokens: int) -> inference_pb.GenerateRequest:
    return greedy(
        raw(prompt_of(300, seed)),
        tokens=tokens,
        save=pb.SnapshotOptions(snapshot_id=snapshot_id),
        save_on_cancel=True,
    )


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_what_a_cancelled_call_did_is_found_under_its_id(undisturbed: LiveServer, how: str) -> None:
    snapshot_id = f"saved-on-{how}"
    stream = undisturbed.inference.Generate(
        saving(15, snapshot_id, ENDLESS), timeout=1.5 if how == "deadline" else PATIENCE
    )
    seen: list[int] = []
    with contextlib.suppress(grpc.RpcError):
        for event in stream:
            seen += event.delta.token_ids
            if how == "cancel" and len(seen) >= 10:
                stream.cancel()
    assert stream.code().name == {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED"}[how]
    saved = found(undisturbed, snapshot_id)  # at once: the look waits for the name
    assert saved is not None and saved.token_count >= 300 + len(seen)
    # Exactly what an undisturbed run says, now and further on.
    whole = generate(undisturbed, greedy(raw(prompt_of(300, 15)), tokens=saved.token_count - 300 + 15)).ids
    rest = generate(undisturbed, greedy(None, parent=saved.name, tokens=15))
    assert rest.ids == whole[-15:] and seen == whole[: len(seen)]
    assert rest.usage.cached_tokens == saved.token_count
    undisturbed.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=saved.name))


def test_state_is_kept_however_close_the_cancel_is_to_the_end(undisturbed: LiveServer) -> None:
    """Cancelled at the first token or at the last one, before Finished is seen: the work was done, and asked for."""
    for i in range(60):
        snapshot_id = f"close-to-the-end-{i}"
        stream = undisturbed.inference.Generate(saving(16, snapshot_id, 6), timeout=PATIENCE)
        count = 0
        for event in stream:
            count += event.delta.token_count
            if count >= (6 if i % 3 else 1):
                stream.cancel()
                break
        undisturbed.idle()
        # Idle says that the row is free; the name follows on the server's event loop.
        until(lambda name=snapshot_id: found(undisturbed, name) is not None, what=f"state of cancel {i}")


@pytest.mark.parametrize("behind", [0, 300])
def test_a_cancel_in_prefill_keeps_the_blocks_done(undisturbed: LiveServer, behind: int) -> None:
    prompt, snapshot_id, parent = prompt_of(20_000, 17 + behind), f"cancelled-in-prefill-{behind}", ""
    if behind:
        create = inference_pb.CreateSnapshotRequest(input=raw(prompt[:behind]))
        parent = undisturbed.inference.CreateSnapshot(create, timeout=PATIENCE).snapshot.name
    request = greedy(
        raw(prompt[behind:]),
        parent=parent,
        tokens=5,
        save=pb.SnapshotOptions(snapshot_id=snapshot_id),
        save_on_cancel=True,
        output=inference_pb.OutputOptions(progress=True),
    )
    stream = undisturbed.inference.Generate(request)
    first(stream, "progress")
    stream.cancel()
    until(lambda: found(undisturbed, snapshot_id), what="the snapshot")
    saved = found(undisturbed, snapshot_id)
    assert saved is not None and behind < saved.token_count < 20_000 and saved.token_count % 256 == 0
    # Sent again, it computes nothing again, whether it names what was kept or not.
    again = generate(undisturbed, greedy(raw(prompt[behind : saved.token_count + 9]), parent=parent, tokens=5))
    assert (again.usage.cached_tokens, again.usage.recomputed_tokens) == (saved.token_count, 0)


def test_a_reader_that_reads_late_gets_everything(undisturbed: LiveServer) -> None:
    stream = undisturbed.inference.Generate(greedy(raw(prompt_of(40, 18)), tokens=400), timeout=PATIENCE)
    until(lambda: undisturbed.stats().active_sequences == 1, what="the start")
    undisturbed.idle()  # the server is done, and nobody has read a word
    answer = answer_of(stream)
    assert len(answer.ids) == 400
    assert answer.ids == generate(undisturbed, greedy(raw(prompt_of(40, 18)), tokens=400)).ids


def test_sampling_continues_from_the_call_not_from_the_server(undisturbed: LiveServer) -> None:
    """A cancelled call with the same seed leaves no trace in the next one's draws."""
    sampling = pb.Sampling(temperature=1.0, seed=42)
    expected = generate(undisturbed, greedy(raw("Hello"), tokens=20, sampling=sampling)).ids
    cut = undisturbed.inference.Generate(greedy(raw("Hello"), tokens=ENDLESS, sampling=sampling))
    first(cut, "delta")
    cut.cancel()
    assert generate(undisturbed, greedy(raw("Hello"), tokens=20, sampling=sampling)).ids == expected
    assert expected != generate(undisturbed, greedy(raw("Hello"), tokens=20, sampling=GREEDY)).ids
