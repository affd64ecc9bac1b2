"""Snapshot handles: making, forking, rolling back, keeping alive, and letting go."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from typing import Any

import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from kvfork.v1 import inference_service_pb2 as inf
from kvfork.v1 import types_pb2 as types
from kvfork_client import (
    AsyncClient,
    Client,
    Durability,
    Extended,
    HealthStatus,
    Limits,
    Mark,
    Message,
    NotFound,
    Release,
    Residency,
    Rounding,
    SaveOptions,
    ServerInfo,
    SnapshotInfo,
    SnapshotInUse,
    SnapshotNotFound,
    TokenCount,
    Usage,
    tokens,
)


def test_create_names_the_state_and_its_marks(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    made = flavour.do(
        client.create_snapshot,
        "hello",
        marks=[Mark.at(2), Mark.at(4)],
        options=SaveOptions(snapshot_id="greeting-1", ttl=90, labels={"a": "b"}, durability=Durability.DISK),
    )
    assert made.info == SnapshotInfo(
        name="snapshots/greeting-1",
        model="models/letters",
        token_count=5,
        prefix_hash=b"hello",
        residency=Residency.MEMORY,
        expire_time=dt.datetime(2023, 11, 14, 22, 14, 53, tzinfo=dt.UTC),
        labels={"a": "b"},
        create_time=dt.datetime(2023, 11, 14, 22, 13, 23, tzinfo=dt.UTC),
        exclusive_bytes=80,
        instance="peer",
    )
    assert made.usage == Usage(prompt_tokens=5, new_tokens=5)
    assert {index: mark.token_count for index, mark in made.marks.items()} == {0: 2, 1: 4}
    (request,) = peer.requests("CreateSnapshot")
    assert request.options.durability == types.DURABILITY_DISK
    assert uuid.UUID(request.request_id).version == 4


def test_a_chosen_request_id_is_sent_as_it_is(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    flavour.do(client.create_snapshot, "x", request_id="mine")
    assert peer.requests("CreateSnapshot")[0].request_id == "mine"


def test_fork_by_number_makes_copies(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    parent = flavour.do(client.create_snapshot, "abc")
    children = flavour.do(parent.fork, 3, options=SaveOptions(pinned=True))
    assert [(child.parent, child.token_count, child.pinned) for child in children] == [(parent.name, 3, True)] * 3
    assert len({child.name for child in children}) == 3
    assert children.usage == Usage(prompt_tokens=3, cached_tokens=3, memory_tokens=3)


def test_fork_by_appends_makes_one_child_each(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    parent = flavour.do(client.create_snapshot, "abc")
    keeps = [SaveOptions(snapshot_id="left-child"), None, SaveOptions(snapshot_id="right-child")]
    children = flavour.do(parent.fork, ["d", None, [Message.user("e")]], options=keeps)
    assert [peer.contents[child.name] for child in children] == ["abcd", "abc", "abc<user>e<assistant>"]
    assert [children[0].name, children[2].name] == ["snapshots/left-child", "snapshots/right-child"]


def test_fork_refuses_what_would_be_split_by_letters(peer: Peer, flavour: Flavour) -> None:
    snapshot = flavour.client(peer.address).snapshot("snapshots/x")
    with pytest.raises(TypeError, match="a list of inputs"):
        flavour.do(snapshot.fork, "abc")
    with pytest.raises(ValueError, match="2 options for 3 branches"):
        flavour.do(snapshot.fork, 3, options=[None, None])
    assert peer.seen == []


def test_rollback_cuts_and_tells_what_was_let_go(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    source = flavour.do(client.create_snapshot, "abcdef")
    cut = flavour.do(source.rollback, drop_tokens=2, release=Release.SOURCE, rounding=Rounding.DOWN)
    assert (peer.contents[cut.name], cut.released) == ("abcd", (source.name,))
    assert cut.usage == Usage(prompt_tokens=4, cached_tokens=4, memory_tokens=4)
    (request,) = peer.requests("Rollback")
    assert (request.release, request.rounding) == (inf.RELEASE_SOURCE, inf.ROUNDING_DOWN)


def test_rollback_takes_each_of_the_three_targets(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    root = flavour.do(client.create_snapshot, "ab")
    leaf = flavour.do(client.create_snapshot, "cd", root)
    cuts = [
        flavour.do(leaf.rollback, token_count=3),
        flavour.do(leaf.rollback, drop_tokens=3),
        flavour.do(leaf.rollback, ancestor=root),
    ]
    assert [peer.contents[cut.name] for cut in cuts] == ["abc", "a", "ab"]


@pytest.mark.parametrize("targets", [{}, {"token_count": 1, "drop_tokens": 1}])
def test_rollback_needs_exactly_one_target(peer: Peer, flavour: Flavour, targets: dict[str, Any]) -> None:
    snapshot = flavour.client(peer.address).snapshot("snapshots/x")
    with pytest.raises(ValueError, match="exactly one"):
        flavour.do(snapshot.rollback, **targets)
    assert peer.seen == []


def test_handles_read_change_and_prolong_themselves(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    made = flavour.do(client.create_snapshot, "hey", options=SaveOptions(labels={"a": "1"}))
    by_name = client.snapshot(made.name)
    assert by_name.token_count == 0  # nothing was asked yet
    assert flavour.do(by_name.refresh).info == made.info
    assert flavour.do(by_name.tokens) == (104, 101, 121)
    assert flavour.do(by_name.update, labels={}, pinned=True).labels == {}
    assert flavour.do(flavour.do(client.get_snapshot, made.name).refresh).pinned
    before = by_name.info.expire_time
    assert flavour.do(by_name.extend, 30).info.expire_time == before + dt.timedelta(seconds=30)
    assert by_name == made


def test_update_sends_only_what_is_given(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    made = flavour.do(client.create_snapshot, "x")
    flavour.do(made.update, ttl=dt.timedelta(minutes=2))
    (request,) = peer.requests("UpdateSnapshot")
    assert list(request.update_mask.paths) == ["ttl"]
    assert request.snapshot == types.Snapshot(name=made.name, ttl=request.snapshot.ttl)
    assert request.snapshot.ttl.seconds == 120
    flavour.do(made.update, expire_time=dt.datetime(2030, 1, 1, tzinfo=dt.UTC))
    (_, request) = peer.requests("UpdateSnapshot")
    assert list(request.update_mask.paths) == ["expire_time"]
    assert request.snapshot.expire_time.ToDatetime(dt.UTC) == dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    with pytest.raises(ValueError, match="either a ttl or an expire_time"):
        flavour.do(made.update, ttl=1, expire_time=dt.datetime(2030, 1, 1, tzinfo=dt.UTC))
    with pytest.raises(ValueError, match="nothing to change"):
        flavour.do(made.update)


def test_extending_what_is_gone_raises_on_a_handle_and_is_told_on_the_client(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    here = flavour.do(client.create_snapshot, "x")
    lost = client.snapshot("snapshots/lost-one")
    with pytest.raises(SnapshotNotFound):
        flavour.do(lost.extend)
    assert lost.gone is not None
    extended = flavour.do(client.extend_snapshots, [here, "snapshots/lost-one"])
    assert [info.name for info in extended.snapshots] == [here.name]
    assert extended.missing == ("snapshots/lost-one",)


def test_extending_thousands_is_cut_into_calls(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    names = [f"snapshots/none-{number:05}" for number in range(2345)]
    assert flavour.do(client.extend_snapshots, names) == Extended(snapshots=(), missing=tuple(names))
    assert [len(request.names) for request in peer.requests("ExtendSnapshots")] == [1000, 1000, 345]


def test_listing_goes_through_all_pages(peer: Peer, flavour: Flavour) -> None:
    for number in range(2500):
        peer.keep("x" * (number % 7 + 1), types.SnapshotOptions(labels={"even": str(number % 2 == 0)}))
    client = flavour.client(peer.address)
    everything = flavour.all(client.list_snapshots, page_size=1000)
    assert [snapshot.name for snapshot in everything] == list(peer.snapshots)
    assert len(peer.requests("ListSnapshots")) == 3
    even = flavour.all(client.list_snapshots, labels={"even": "True"})
    assert len(even) == 1250
    assert {request.page_size for request in peer.requests("ListSnapshots")[3:]} == {0}
    assert all(dict(request.labels) == {"even": "True"} for request in peer.requests("ListSnapshots")[3:])


def test_listing_asks_only_for_the_pages_that_are_used(peer: Peer) -> None:
    for _ in range(300):
        peer.keep("x", types.SnapshotOptions())
    with Client(peer.address) as client:
        assert next(client.list_snapshots()).name == "snapshots/auto-0001"
    assert len(peer.requests("ListSnapshots")) == 1


def test_children_are_listed_by_their_parent(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    parent = flavour.do(client.create_snapshot, "x")
    children = flavour.do(parent.fork, 2)
    assert flavour.all(client.list_snapshots, parent=parent) == list(children)


def test_release_is_no_error_twice_and_delete_is(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    made = flavour.do(client.create_snapshot, "x")
    child = flavour.do(client.create_snapshot, "y", made)
    assert flavour.do(made.release, descendants=True) == (made.name, child.name)
    assert flavour.do(made.release) == ()
    with pytest.raises(SnapshotNotFound):
        flavour.do(client.delete_snapshot, made)
    assert flavour.do(client.delete_snapshot, made, allow_missing=True) == ()


def test_a_block_releases_its_snapshot(peer: Peer) -> None:
    with Client(peer.address) as client:
        with client.create_snapshot("x") as snapshot:
            assert snapshot.name in peer.snapshots
        assert peer.snapshots == {}


def test_an_async_block_releases_its_snapshot(peer: Peer, runner: asyncio.Runner) -> None:
    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            async with await client.create_snapshot("x") as snapshot:
                assert snapshot.name in peer.snapshots
            assert peer.snapshots == {}

    runner.run(story())


def test_a_failing_release_does_not_hide_the_error_of_the_block(peer: Peer) -> None:
    peer.scripts["DeleteSnapshot"] = lambda _, context: refuse(context, "FAILED_PRECONDITION", "SNAPSHOT_IN_USE")
    with Client(peer.address) as client:
        with pytest.raises(ZeroDivisionError), client.create_snapshot("x"):
            raise ZeroDivisionError
        with pytest.raises(SnapshotInUse), client.create_snapshot("x"):
            pass


def test_count_tokens_with_and_without_the_rendered_form(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    parent = flavour.do(client.create_snapshot, "abc")
    assert flavour.do(client.count_tokens, "de", parent) == TokenCount(total_tokens=5, remaining_tokens=4091)
    assert flavour.do(client.count_tokens, tokens([100, 101]), parent, rendered=True) == TokenCount(
        total_tokens=5, remaining_tokens=4091, token_ids=(100, 101), text="de"
    )


def test_the_server_describes_itself(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    assert flavour.do(client.server_info) == ServerInfo(
        instance="peer", boot_id="b1", version="0.1.0", features=("marks",), limits=Limits(max_fork_branches=8)
    )
    assert [model.name for model in flavour.do(client.models)] == ["models/letters", "models/other"]
    model = flavour.do(client.model)
    assert (model.name, model.eos_token_ids, model.default_sampling.temperature) == ("models/letters", (0,), 0.0)
    assert model.default_sampling.top_p is None  # the server does not say
    assert flavour.do(client.cache_stats).checkpoint_interval == 256


def test_a_trim_says_which_tier_and_leaves_the_other_alone(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    assert flavour.do(client.trim_cache, memory_bytes=0).memory_bytes == 0
    assert flavour.do(client.trim_cache, disk_bytes=5).disk_bytes == 5
    assert [(r.HasField("memory_bytes"), r.HasField("disk_bytes")) for r in peer.requests("TrimCache")] == [
        (True, False),
        (False, True),
    ]


def test_health_by_service(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    assert flavour.do(client.health) is HealthStatus.SERVING
    assert flavour.do(client.health, "InferenceService") is HealthStatus.NOT_SERVING
    with pytest.raises(NotFound):
        flavour.do(client.health, "NoSuchService")


def test_stop_by_name(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    assert flavour.do(client.stop, "generations/none") is False
