"""Following snapshots of a real server: every kind of change, resuming, a reader that stops, a restart, and the end."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, field_mask_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb
from kvfork_client import Changed, Gone, GoneReason, SaveOptions, Synced

from tests.e2e.live import PATIENCE, LiveServer, generate, greedy, prompt_of, raw, refused, until

pytestmark = [pytest.mark.mlx]

COUNT = itertools.count()


def watch(server: LiveServer, token: str = "", **labels: str) -> Any:
    return server.snapshots.WatchSnapshots(
        snapshot_pb.WatchSnapshotsRequest(labels=labels, resume_token=token), timeout=PATIENCE
    )


def told(stream: Any) -> tuple[str, str, Any]:
    """The next message: its kind, the name it is about, and itself."""
    message = next(stream)
    kind = message.WhichOneof("event")
    return kind, getattr(message, kind).name if kind in ("changed", "gone") else "", message


def create(server: LiveServer, snapshot_id: str, tokens: int = 300, **options: Any) -> pb.Snapshot:
    request = inference_pb.CreateSnapshotRequest(
        input=raw(prompt_of(tokens, next(COUNT))), options=pb.SnapshotOptions(snapshot_id=snapshot_id, **options)
    )
    return server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot


def delete(server: LiveServer, name: str, **how: bool) -> None:
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name, **how))


def test_every_kind_of_change_is_told_in_order(server: LiveServer) -> None:
    mine = {"watch": "kinds"}
    there = create(server, "watched-before", labels=mine)
    stream = watch(server, **mine)
    kind, name, first = told(stream)
    assert (kind, name, first.resume_token) == ("changed", there.name, "")
    kind, _, synced = told(stream)
    assert kind == "synced" and synced.resume_token

    create(server, "not-watched-1")
    saved = generate(
        server, greedy(raw(prompt_of(5, 9)), parent=there.name, save=pb.SnapshotOptions(labels=mine), tokens=4)
    ).finished.snapshot
    kind, name, message = told(stream)
    assert (kind, name, message.changed.parent) == ("changed", saved.name, there.name)
    assert message.changed.token_count == saved.token_count

    update = snapshot_pb.UpdateSnapshotRequest(
        snapshot=pb.Snapshot(name=there.name, pinned=True), update_mask=field_mask_pb2.FieldMask(paths=["pinned"])
    )
    server.snapshots.UpdateSnapshot(update)
    kind, name, message = told(stream)
    assert (kind, name, message.changed.pinned) == ("changed", there.name, True)

    server.snapshots.ExtendSnapshots(
        snapshot_pb.ExtendSnapshotsRequest(names=[saved.name], ttl=duration_pb2.Duration(seconds=9_000))
    )
    kind, name, message = told(stream)
    assert (kind, name) == ("changed", saved.name)
    assert message.changed.expire_time.seconds > saved.expire_time.seconds

    branch = inference_pb.ForkBranch(options=pb.SnapshotOptions(snapshot_id="watched-child", labels=mine))
    server.inference.Fork(inference_pb.ForkRequest(parent=saved.name, branches=[branch]))
    assert told(stream)[:2] == ("changed", "snapshots/watched-child")
    back = inference_pb.RollbackRequest(
        source="snapshots/watched-child", drop_tokens=2, release=inference_pb.RELEASE_SOURCE
    )
    back.options.labels.update(mine)
    shorter = server.inference.Rollback(back, timeout=PATIENCE).snapshot
    kind, name, message = told(stream)
    assert (kind, name) == ("changed", shorter.name)
    kind, name, message = told(stream)
    assert (kind, name) == ("gone", "snapshots/watched-child")
    assert message.gone.reason == snapshot_pb.GONE_REASON_ROLLED_BACK

    update = snapshot_pb.UpdateSnapshotRequest(
        snapshot=pb.Snapshot(name=saved.name, labels={"watch": "other"}),
        update_mask=field_mask_pb2.FieldMask(paths=["labels"]),
    )
    server.snapshots.UpdateSnapshot(update)
    kind, name, message = told(stream)
    assert (kind, name, message.gone.reason) == ("gone", saved.name, snapshot_pb.GONE_REASON_UNLISTED)

    short = create(server, "watched-short", labels=mine, ttl=duration_pb2.Duration(nanos=200_000_000))
    assert told(stream)[:2] == ("changed", short.name)
    kind, name, message = told(stream)
    assert (kind, name, message.gone.reason) == ("gone", short.name, snapshot_pb.GONE_REASON_EXPIRED)

    # What was told last is where a second watch goes on, with the one thing that came after it.
    delete(server, there.name)
    kind, name, gone = told(stream)
    assert (kind, name, gone.gone.reason) == ("gone", there.name, snapshot_pb.GONE_REASON_DELETED)
    again = watch(server, message.resume_token, **mine)
    assert [told(again)[:2] for _ in range(2)] == [("synced", ""), ("gone", there.name)]
    for call in (stream, again):
        call.cancel()
    for name in (saved.name, shorter.name, "snapshots/not-watched-1"):
        delete(server, name)


def test_where_the_state_is_now_is_told(server: LiveServer) -> None:
    mine = {"watch": "residency"}
    made = create(server, "watched-state", labels=mine)
    stream = watch(server, **mine)
    assert [told(stream)[0] for _ in range(2)] == ["changed", "synced"]
    # Whatever moves: the writer behind the call, then a trim.
    until(lambda: server.stats().pending_bytes == 0, what="the writer")
    server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
    while True:
        kind, name, message = told(stream)
        assert (kind, name) == ("changed", made.name)
        if message.changed.residency == pb.RESIDENCY_TOKENS:
            break
    stream.cancel()
    delete(server, made.name)


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    """Room for 8 snapshots, so that 16 changes are kept; 3 watches."""
    with LiveServer("tiny-gemma3", "--max-snapshots", "8", "--max-watches", "3") as server:
        yield server


def test_a_reader_that_stops_is_told_that_it_missed_something(narrow: LiveServer) -> None:
    """Its window is filled with real messages; meanwhile the others are served, and nobody holds what it missed."""
    kept = create(narrow, "flooded-1", labels={f"key-{i}": "x" * 255 for i in range(15)})
    channel = grpc.insecure_channel(narrow.address, options=[("grpc.use_local_subchannel_pool", 1)])
    slow = channel.unary_stream(
        "/kvfork.v1.SnapshotService/WatchSnapshots",
        request_serializer=snapshot_pb.WatchSnapshotsRequest.SerializeToString,
        response_deserializer=snapshot_pb.WatchSnapshotsResponse.FromString,
    )(snapshot_pb.WatchSnapshotsRequest(), timeout=PATIENCE)
    assert [told(slow)[0] for _ in range(2)] == ["changed", "synced"]
    extend = snapshot_pb.ExtendSnapshotsRequest(names=[kept.name])
    token = narrow.snapshots.WatchSnapshots(snapshot_pb.WatchSnapshotsRequest())
    last = [told(token) for _ in range(2)][-1][2].resume_token
    token.cancel()
    for _ in range(6000):  # of 4 kB: several times what a window takes
        narrow.snapshots.ExtendSnapshots(extend)
    answer = refused(lambda: slow)
    assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "WATCH_OVERFLOW")
    channel.close()
    old = refused(lambda: watch(narrow, last))
    assert (old.code, old.reason) == ("OUT_OF_RANGE", "RESUME_TOKEN_EXPIRED")
    delete(narrow, kept.name)


def test_watches_are_counted_and_given_back(narrow: LiveServer) -> None:
    def open_one() -> Any:
        stream = watch(narrow)
        assert told(stream)[0] == "synced"
        return stream

    streams = [open_one() for _ in range(3)]
    answer = refused(lambda: watch(narrow))
    assert (answer.code, answer.reason, answer.metadata) == ("RESOURCE_EXHAUSTED", "WATCH_QUOTA", {"limit": "3"})
    assert "QuotaFailure" in answer.kinds
    streams.pop().cancel()
    found: list[Any] = []

    def there_is_room() -> bool:
        try:
            found.append(open_one())
        except grpc.RpcError:
            return False
        return True

    until(there_is_room, what="a watch to be given back")
    for stream in (*streams, *found):
        stream.cancel()
    narrow.idle()


def test_the_clients_watch_says_the_same(narrow: LiveServer) -> None:
    def next_of(events: queue.Queue[Any]) -> Any:
        return events.get(timeout=PATIENCE)

    with narrow.client() as client:
        client.create_snapshot("one", options=SaveOptions(snapshot_id="client-one"))
        events: queue.Queue[Any] = queue.Queue()
        following = client.watch()

        def follow() -> None:
            for event in following:
                events.put(event)
            events.put(None)

        thread = threading.Thread(target=follow)
        thread.start()
        first = next_of(events)
        assert isinstance(first, Changed) and first.snapshot.name == "snapshots/client-one"
        assert next_of(events) == Synced()
        token = following.resume_token
        first.snapshot.release()
        assert next_of(events) == Gone("snapshots/client-one", GoneReason.DELETED)
        following.cancel()
        assert next_of(events) is None
        thread.join(PATIENCE)
        with client.watch(resume_token=token) as again:
            assert [next(again), next(again)] == [Synced(), Gone("snapshots/client-one", GoneReason.DELETED)]


def test_a_restart_ends_a_watch_and_its_token_but_not_what_was_durable(tmp_path: Path) -> None:
    durable = {"durability": pb.DURABILITY_DISK}
    with LiveServer("tiny-gemma3", "--store-dir", str(tmp_path / "s")) as server:
        stream = watch(server)
        token = told(stream)[2].resume_token
        made = create(server, "watched-for-good", **durable)
        seen = []
        while not seen or not seen[-1].changed.durable:
            seen.append(told(stream)[2])
            assert seen[-1].changed.name == made.name
        assert server.terminate() == 0
        answer = refused(lambda: stream)
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "SERVER_DRAINING")
    with LiveServer("tiny-gemma3", "--store-dir", str(tmp_path / "s"), wait=False) as server:
        stream = watch(server)  # before the model is there: it waits
        kind, name, message = told(stream)
        assert (kind, name, message.changed.durable) == ("changed", made.name, True)
        assert told(stream)[0] == "synced"
        stream.cancel()
        old = refused(lambda: watch(server, token))
        assert (old.code, old.reason) == ("OUT_OF_RANGE", "RESUME_TOKEN_EXPIRED")


def test_a_crowd_of_names_is_listed_beside_changes(server: LiveServer) -> None:
    """More names than a page of the listing, and deletions meanwhile: the replica is the listing in the end."""
    mine = {"watch": "crowd"}
    root = create(server, "crowd-root", labels=mine)
    branches = [inference_pb.ForkBranch(options=pb.SnapshotOptions(labels=mine))] * 60
    fork = inference_pb.ForkRequest(parent=root.name, branches=branches)
    made = [s.name for _ in range(5) for s in server.inference.Fork(fork).snapshots]
    stream = watch(server, **mine)
    replica = {told(stream)[1] for _ in range(50)}
    for name in made[::3]:
        delete(server, name)
    last = create(server, "crowd-end", labels=mine)
    synced = False
    while not synced or last.name not in replica:
        kind, name, _ = told(stream)
        if kind == "changed":
            replica.add(name)
        elif kind == "gone":
            replica.discard(name)
        synced = synced or kind == "synced"
    # All the deletions came before the last name, and so have been told.
    assert replica == {root.name, last.name, *made} - set(made[::3])
    stream.cancel()
    delete(server, root.name, descendants=True)
    delete(server, last.name)
