"""Names of states: how long they live, what ends them, what they share, and what a failed call leaves of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, field_mask_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, LiveServer, answer_of, generate, greedy, prompt_of, raw, refused, until

ENDLESS = 20_000


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """Room for 40 snapshots, 3 of them pinned."""
    with LiveServer("tiny-gemma3", "--max-snapshots", "40", "--max-pinned", "3") as server:
        yield server


@pytest.fixture
def empty(small: LiveServer) -> Iterator[LiveServer]:
    """The small server without a snapshot, before and after."""
    yield small
    for name in names(small):
        small.snapshots.DeleteSnapshot(
            snapshot_pb.DeleteSnapshotRequest(name=name, stop_active=True, allow_missing=True)
        )
    small.idle()


def ttl(seconds: float) -> duration_pb2.Duration:
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))


def create(
    server: LiveServer, length: int, seed: int, *, parent: str = "", marks: Any = (), **options: Any
) -> inference_pb.CreateSnapshotResponse:
    """A snapshot of that many tokens, behind the parent."""
    request = inference_pb.CreateSnapshotRequest(
        parent=parent, input=raw(prompt_of(length, seed)), marks=marks, options=pb.SnapshotOptions(**options)
    )
    return server.inference.CreateSnapshot(request, timeout=PATIENCE)


def get(server: LiveServer, name: str) -> pb.Snapshot:
    return server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name)).snapshot


def names(server: LiveServer, **filters: Any) -> list[str]:
    """Names in order, by pages of 7."""
    found: list[str] = []
    token = ""
    while True:
        request = snapshot_pb.ListSnapshotsRequest(page_size=7, page_token=token, **filters)
        page = server.snapshots.ListSnapshots(request)
        assert len(page.snapshots) <= 7
        found += [snapshot.name for snapshot in page.snapshots]
        token = page.next_page_token
        if not token:
            return found


def delete(server: LiveServer, name: str, **how: bool) -> list[str]:
    return list(server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name, **how)).deleted)


def update(server: LiveServer, name: str, *mask: str, **values: Any) -> pb.Snapshot:
    request = snapshot_pb.UpdateSnapshotRequest(
        snapshot=pb.Snapshot(name=name, **values), update_mask=field_mask_pb2.FieldMask(paths=mask)
    )
    return server.snapshots.UpdateSnapshot(request).snapshot


def expire_soon(server: LiveServer, name: str) -> None:
    """After the use that a test makes of it: however long that took, it was not too late."""
    update(server, name, "ttl", ttl=ttl(0.3))


def seconds(snapshot: pb.Snapshot) -> float:
    """From now to its end."""
    return snapshot.expire_time.seconds + snapshot.expire_time.nanos / 1e9 - time.time()


# -- time -----------------------------------------------------------------------------------------------------------


def test_an_idle_snapshot_expires_and_says_so(empty: LiveServer) -> None:
    name = create(empty, 20, 1, ttl=ttl(1000)).snapshot.name
    assert get(empty, name).name == name
    expire_soon(empty, name)
    until(lambda: name not in names(empty), what="the end of a snapshot")
    for call in (
        lambda: get(empty, name),
        lambda: empty.inference.Generate(greedy(raw("x"), parent=name)),
        lambda: empty.inference.Rollback(inference_pb.RollbackRequest(source=name, token_count=5)),
        lambda: delete(empty, name),
    ):
        answer = refused(call)
        assert (answer.code, answer.reason, answer.resource) == ("NOT_FOUND", "SNAPSHOT_EXPIRED", name)
    assert delete(empty, name, allow_missing=True) == []


def test_use_pushes_the_end_out_and_reading_does_not(empty: LiveServer) -> None:
    name = create(empty, 20, 2, ttl=ttl(1000)).snapshot.name
    before = get(empty, name)
    generate(empty, greedy(raw("x"), parent=name, tokens=2))
    used = get(empty, name)
    assert seconds(used) > seconds(before)
    assert get(empty, name).expire_time == used.expire_time


def test_a_snapshot_does_not_expire_while_it_is_used(empty: LiveServer) -> None:
    name = create(empty, 20, 3, ttl=ttl(1000)).snapshot.name
    stream = empty.inference.Generate(greedy(raw("x"), parent=name, tokens=ENDLESS), timeout=PATIENCE)
    next(stream)
    expire_soon(empty, name)
    time.sleep(0.6)
    assert get(empty, name).active_uses == 1
    stream.cancel()
    until(lambda: name not in names(empty), what="the end of a snapshot")


def test_extending_counts_from_now_and_tells_what_is_missing(empty: LiveServer) -> None:
    first, second = (create(empty, 20, 4 + i, ttl=ttl(100)).snapshot.name for i in range(2))
    request = snapshot_pb.ExtendSnapshotsRequest(names=[first, "snapshots/not-here-at-all", second], ttl=ttl(5000))
    reply = empty.snapshots.ExtendSnapshots(request)
    assert [s.name for s in reply.snapshots] == [first, second]
    assert list(reply.missing) == ["snapshots/not-here-at-all"]
    assert all(4990 < seconds(s) <= 5000 for s in reply.snapshots)


def test_a_pinned_snapshot_outlives_its_time(empty: LiveServer) -> None:
    name = create(empty, 20, 6, ttl=ttl(0.2), pinned=True).snapshot.name
    time.sleep(0.5)
    assert get(empty, name).pinned
    assert not get(empty, name).HasField("expire_time")


# -- change ---------------------------------------------------------------------------------------------------------


def test_a_mask_changes_what_it_names_and_nothing_else(empty: LiveServer) -> None:
    name = create(empty, 20, 7, labels={"a": "1", "b": "2"}, ttl=ttl(100)).snapshot.name
    changed = update(empty, name, "labels", labels={"c": "3"}, pinned=True)
    assert (dict(changed.labels), changed.pinned) == ({"c": "3"}, False)
    changed = update(empty, name, "pinned", pinned=True, labels={"d": "4"})
    assert (dict(changed.labels), changed.pinned) == ({"c": "3"}, True)
    changed = update(empty, name, "pinned", "ttl", "labels", ttl=ttl(3000))
    assert (dict(changed.labels), changed.pinned) == ({}, False)
    assert 2990 < seconds(changed) <= 3000


def test_without_a_mask_what_is_set_changes(empty: LiveServer) -> None:
    made = create(empty, 20, 8, labels={"a": "1"}, ttl=ttl(100)).snapshot
    made.labels["b"] = "2"
    request = snapshot_pb.UpdateSnapshotRequest(snapshot=made)
    changed = empty.snapshots.UpdateSnapshot(request).snapshot
    assert dict(changed.labels) == {"a": "1", "b": "2"}


def test_pins_have_a_quota_that_comes_back(empty: LiveServer) -> None:
    pinned = [create(empty, 20, 10 + i, pinned=True).snapshot.name for i in range(3)]
    plain = create(empty, 20, 14).snapshot.name
    for call in (
        lambda: create(empty, 20, 15, pinned=True),
        lambda: update(empty, plain, "pinned", pinned=True),
        lambda: empty.inference.Fork(
            inference_pb.ForkRequest(
                parent=plain, branches=[inference_pb.ForkBranch(options=pb.SnapshotOptions(pinned=True))]
            )
        ),
    ):
        answer = refused(call)
        assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "PIN_QUOTA")
        assert "QuotaFailure" in answer.kinds and answer.metadata["limit"] == "3"
    assert set(names(empty)) == {*pinned, plain}
    update(empty, pinned[0], "pinned")
    assert update(empty, plain, "pinned", pinned=True).pinned
    delete(empty, pinned[1])
    create(empty, 20, 15, pinned=True)


def test_pins_keep_so_many_bytes_of_state_and_no_more() -> None:
    with LiveServer("tiny-llama", "--max-pinned-bytes", "1MiB", "--max-batch", "2") as tight:
        first = create(tight, 900, 20, pinned=True).snapshot
        plain = create(tight, 900, 21).snapshot
        shared = tight.inference.Fork(
            inference_pb.ForkRequest(
                parent=first.name, branches=[inference_pb.ForkBranch(options=pb.SnapshotOptions(pinned=True))]
            )
        ).snapshots[0]
        assert shared.pinned, "the very same state costs nothing more"
        for call in (
            lambda: create(tight, 900, 22, pinned=True),
            lambda: update(tight, plain.name, "pinned", pinned=True),
            lambda: tight.inference.Fork(
                inference_pb.ForkRequest(
                    parent=plain.name, branches=[inference_pb.ForkBranch(options=pb.SnapshotOptions(pinned=True))]
                )
            ),
        ):
            answer = refused(call)
            assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "PIN_QUOTA"), answer
            assert answer.metadata["limitBytes"] == str(2**20) and "QuotaFailure" in answer.kinds
            assert int(answer.metadata["pinnedBytes"]) + int(answer.metadata["neededBytes"]) > 2**20
        # What a generation ends with is known at its end: its text is good all the same.
        question = greedy(raw(prompt_of(900, 23)), tokens=2, save=pb.SnapshotOptions(pinned=True))
        answer = answer_of(tight.inference.Generate(question, timeout=PATIENCE))
        assert answer.ids and answer.finished.save_error_reason == "PIN_QUOTA"
        assert not answer.finished.HasField("snapshot")
        assert len(names(tight)) == 3
        delete(tight, shared.name)
        delete(tight, first.name)
        assert update(tight, plain.name, "pinned", pinned=True).pinned


# -- listing --------------------------------------------------------------------------------------------------------


def test_labels_and_parents_filter_a_listing(empty: LiveServer) -> None:
    root = create(empty, 20, 20, labels={"run": "1"}).snapshot.name
    both = create(empty, 5, 21, parent=root, labels={"run": "1", "kind": "leaf"}).snapshot.name
    other = create(empty, 5, 22, parent=root, labels={"run": "2", "kind": "leaf"}).snapshot.name
    grandchild = create(empty, 5, 23, parent=both, labels={"run": "1"}).snapshot.name
    assert names(empty) == [root, both, other, grandchild]
    assert names(empty, labels={"run": "1"}) == [root, both, grandchild]
    assert names(empty, labels={"run": "1", "kind": "leaf"}) == [both]
    assert names(empty, labels={"run": "3"}) == []
    assert names(empty, parent=root) == [both, other]


def test_a_page_token_fits_its_own_listing_alone(empty: LiveServer) -> None:
    for i in range(4):
        create(empty, 20, 30 + i, labels={"run": "1"})
    page = empty.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_size=2, labels={"run": "1"}))
    token = page.next_page_token
    for other in ({}, {"labels": {"run": "2"}}, {"labels": {"run": "1"}, "parent": page.snapshots[0].name}):
        request = snapshot_pb.ListSnapshotsRequest(page_size=2, page_token=token, **other)
        answer = refused(lambda request=request: empty.snapshots.ListSnapshots(request))
        assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "PAGE_TOKEN_INVALID")


def test_paging_while_things_change_skips_nothing_and_repeats_nothing(empty: LiveServer) -> None:
    made = [create(empty, 20, 40 + i).snapshot.name for i in range(12)]
    seen: list[str] = []
    token = ""
    for turn in range(100):
        request = snapshot_pb.ListSnapshotsRequest(page_size=3, page_token=token)
        page = empty.snapshots.ListSnapshots(request)
        seen += [s.name for s in page.snapshots]
        token = page.next_page_token
        if not token:
            break
        delete(empty, seen[-1])  # the very place that the token names
        if turn < 3:
            made.append(create(empty, 20, 60 + turn).snapshot.name)
    assert seen == made


# -- delete ---------------------------------------------------------------------------------------------------------


def test_a_rollback_that_may_not_release_is_refused_before_it_computes(empty: LiveServer) -> None:
    root = create(empty, 300, 71).snapshot.name
    stream = empty.inference.Generate(greedy(raw("x"), parent=root, tokens=ENDLESS), timeout=PATIENCE)
    next(stream)
    before = empty.stats().prompt_tokens
    release = inference_pb.RollbackRequest(source=root, token_count=290, release=inference_pb.RELEASE_SOURCE)
    answer = refused(lambda: empty.inference.Rollback(release))
    assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "SNAPSHOT_IN_USE")
    assert answer.metadata["activeUses"] == "1"
    assert empty.stats().prompt_tokens == before  # 34 tokens would have had to be computed again
    stream.cancel()
    empty.idle()
    assert list(empty.inference.Rollback(release).released) == [root]


def test_what_is_in_use_is_deleted_only_on_demand(empty: LiveServer) -> None:
    root = create(empty, 300, 70).snapshot.name
    stream = empty.inference.Generate(
        greedy(raw("x"), parent=root, tokens=ENDLESS, save=pb.SnapshotOptions()), timeout=PATIENCE
    )
    next(stream)
    answer = refused(lambda: delete(empty, root))
    assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "SNAPSHOT_IN_USE")
    assert answer.metadata["activeUses"] == "1" and "PreconditionFailure" in answer.kinds
    assert delete(empty, root, stop_active=True) == [root]
    last = list(stream)[-1]
    assert last.finished.reason == inference_pb.FINISH_REASON_STOPPED
    assert refused(lambda: get(empty, root)).reason == "SNAPSHOT_DELETED"
    saved = last.finished.snapshot
    if saved.name:
        again = generate(empty, greedy(raw([9]), parent=saved.name, tokens=3))
        assert (again.usage.cached_tokens, again.usage.recomputed_tokens) == (saved.token_count, 0)


def test_descendants_go_along_but_not_the_pinned_ones(empty: LiveServer) -> None:
    root = create(empty, 20, 71).snapshot.name
    child = create(empty, 5, 72, parent=root).snapshot.name
    pinned = create(empty, 5, 73, parent=child, pinned=True).snapshot.name
    leaf = create(empty, 5, 74, parent=pinned).snapshot.name
    stranger = create(empty, 20, 75).snapshot.name
    assert set(delete(empty, root, descendants=True)) == {root, child, leaf}
    assert set(names(empty)) == {pinned, stranger}
    assert generate(empty, greedy(raw("x"), parent=pinned, tokens=3)).usage.recomputed_tokens == 0


def test_a_name_can_be_used_again_after_its_end(empty: LiveServer) -> None:
    create(empty, 20, 76, snapshot_id="used-again-later")
    delete(empty, "snapshots/used-again-later")
    create(empty, 30, 77, snapshot_id="used-again-later")
    assert get(empty, "snapshots/used-again-later").token_count == 30


# -- retries --------------------------------------------------------------------------------------------------------


def test_a_retry_with_the_same_id_gets_the_same_snapshot(empty: LiveServer) -> None:
    once = str(uuid.uuid4())
    root = create(empty, 20, 80, snapshot_id="retried-create").snapshot
    assert create(empty, 20, 80, snapshot_id="retried-create").snapshot.create_time == root.create_time
    fork = inference_pb.ForkRequest(
        parent=root.name,
        branches=[
            inference_pb.ForkBranch(append=raw([7, i]), options=pb.SnapshotOptions(snapshot_id=f"retried-child-{i}"))
            for i in range(3)
        ],
        request_id=once,
    )
    first, second = (empty.inference.Fork(fork).snapshots for _ in range(2))
    assert [s.create_time for s in first] == [s.create_time for s in second]
    back = inference_pb.RollbackRequest(
        source=first[0].name, token_count=20, options=pb.SnapshotOptions(snapshot_id="retried-rollback")
    )
    one, two = (empty.inference.Rollback(back).snapshot for _ in range(2))
    assert one.create_time == two.create_time
    assert len(names(empty)) == 5


def test_a_retry_needs_no_room_of_its_own(empty: LiveServer) -> None:
    create(empty, 20, 81, snapshot_id="retried-when-full")
    for i in range(39):
        create(empty, 20, 100 + i)
    answer = refused(lambda: create(empty, 20, 99))
    assert (answer.code, answer.reason) == ("RESOURCE_EXHAUSTED", "SNAPSHOT_QUOTA")
    assert create(empty, 20, 81, snapshot_id="retried-when-full").snapshot.name == "snapshots/retried-when-full"


# -- what a failed call leaves --------------------------------------------------------------------------------------


def branch(ids: list[int], snapshot_id: str = "") -> inference_pb.ForkBranch:
    return inference_pb.ForkBranch(append=raw(ids), options=pb.SnapshotOptions(snapshot_id=snapshot_id))


def test_a_fork_that_fails_makes_nothing(empty: LiveServer) -> None:
    root = create(empty, 20, 82).snapshot.name
    create(empty, 30, 83, snapshot_id="taken-by-another")
    before = names(empty)
    request = inference_pb.ForkRequest(
        parent=root, branches=[branch([7]), branch([8], "a-new-child-id"), branch([9], "taken-by-another")]
    )
    assert refused(lambda: empty.inference.Fork(request)).reason == "SNAPSHOT_ID_TAKEN"
    assert names(empty) == before


def test_a_fork_that_fails_deletes_nothing(empty: LiveServer) -> None:
    root = create(empty, 20, 84).snapshot.name
    create(empty, 30, 85, snapshot_id="taken-by-another")
    empty.inference.Fork(inference_pb.ForkRequest(parent=root, branches=[branch([7], "child-of-before")]))
    before = names(empty)
    request = inference_pb.ForkRequest(
        parent=root, branches=[branch([7], "child-of-before"), branch([9], "taken-by-another")]
    )
    assert refused(lambda: empty.inference.Fork(request)).reason == "SNAPSHOT_ID_TAKEN"
    assert names(empty) == before


def test_a_creation_under_a_taken_id_leaves_no_marks(empty: LiveServer) -> None:
    create(empty, 30, 86, snapshot_id="taken-by-another")
    before = names(empty)
    answer = refused(lambda: create(empty, 40, 87, snapshot_id="taken-by-another", marks=[pb.Mark(token_count=20)]))
    assert (answer.code, answer.reason) == ("ALREADY_EXISTS", "SNAPSHOT_ID_TAKEN")
    assert names(empty) == before


def test_a_creation_with_a_mark_under_a_taken_id_says_so_and_leaves_nothing(empty: LiveServer) -> None:
    create(empty, 30, 88, snapshot_id="taken-by-another")
    before = names(empty)
    marks = [pb.Mark(token_count=20, options=pb.SnapshotOptions(snapshot_id="taken-by-another"))]
    answer = refused(lambda: create(empty, 40, 89, snapshot_id="main-of-the-mark", marks=marks))
    assert (answer.code, answer.reason) == ("ALREADY_EXISTS", "SNAPSHOT_ID_TAKEN")
    assert names(empty) == before


# -- state that is shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["release", "delete", "expire"])
def test_a_cut_keeps_its_state_when_its_source_goes(llama: LiveServer, how: str) -> None:
    seed = 90 + len(how)
    root = create(llama, 290, seed, ttl=ttl(100)).snapshot.name
    release = inference_pb.RELEASE_SOURCE if how == "release" else inference_pb.RELEASE_NONE
    cut = llama.inference.Rollback(
        inference_pb.RollbackRequest(source=root, token_count=280, release=release)
    ).snapshot.name
    if how == "delete":
        delete(llama, root)
    if how == "expire":
        expire_soon(llama, root)
    until(lambda: is_gone(llama, root), what="the source to go")
    assert get(llama, cut).residency == pb.RESIDENCY_MEMORY
    usage = generate(llama, greedy(raw([9, 9]), parent=cut, tokens=3)).usage
    assert (usage.cached_tokens, usage.recomputed_tokens, usage.new_tokens) == (280, 0, 2)


def test_a_pinned_cut_keeps_its_state_when_its_source_goes(llama: LiveServer) -> None:
    root = create(llama, 290, 99).snapshot.name
    cut = llama.inference.Rollback(
        inference_pb.RollbackRequest(source=root, token_count=280, options=pb.SnapshotOptions(pinned=True))
    ).snapshot.name
    delete(llama, root)
    usage = generate(llama, greedy(raw([9, 9]), parent=cut, tokens=3)).usage
    delete(llama, cut)
    assert (usage.cached_tokens, usage.recomputed_tokens, usage.new_tokens) == (280, 0, 2)


def test_a_receipt_of_a_rollback_agrees_with_where_the_state_is(
    server_for: Callable[[str], LiveServer],
) -> None:
    """Window records of a prefix go to disk as soon as they are made."""
    server = server_for("tiny-gemma3")
    root = create(server, 700, 101, marks=[pb.Mark(token_count=650)]).snapshot.name
    reply = None

    def on_disk() -> bool:
        nonlocal reply
        reply = server.inference.Rollback(inference_pb.RollbackRequest(source=root, token_count=650))
        return reply.snapshot.residency == pb.RESIDENCY_DISK

    until(on_disk, what="the state to be on disk")
    assert reply.usage.cached_tokens == 650
    assert (
        reply.usage.disk_tokens
        == generate(server, greedy(raw([9]), parent=reply.snapshot.name, tokens=2)).usage.disk_tokens
    )


def is_gone(server: LiveServer, name: str) -> bool:
    try:
        get(server, name)
    except grpc.RpcError:
        return True
    return False
