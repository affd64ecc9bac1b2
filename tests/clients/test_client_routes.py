"""Where calls ask to go: a handle's own instance by itself, and another one or a session on request."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from kvfork.v1 import types_pb2 as types
from kvfork_client import FailedPrecondition, Internal, SnapshotInfo, SnapshotNotFound, Unavailable, WrongInstance
from kvfork_client.status import from_status

INSTANCE, SESSION = "x-kvfork-instance", "x-kvfork-session"


def asked(peer: Peer, since: int = 0) -> list[tuple[str, str | None]]:
    """Method and instance of the calls that arrived."""
    names = [name for name, _ in peer.seen]
    return [(name, said.get(INSTANCE)) for name, said in zip(names[since:], peer.metadata[since:], strict=True)]


def test_every_call_about_a_handle_names_the_instance_that_holds_it(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    handle = flavour.do(client.create_snapshot, "abc")
    assert asked(peer) == [("CreateSnapshot", None)]
    info = handle.info
    flavour.do(handle.fork, 1)
    flavour.do(handle.rollback, token_count=1)
    flavour.do(flavour.do(handle.generate, "x").result)
    flavour.do(flavour.do(client.generate, "x", info).result)
    flavour.do(client.create_snapshot, "d", handle)
    flavour.do(client.count_tokens, "d", handle)
    flavour.do(client.plan, "d", handle)
    flavour.do(handle.refresh)
    flavour.do(handle.tokens)
    flavour.do(handle.extend, 30)
    flavour.do(handle.update, pinned=True)
    flavour.all(client.list_snapshots, parent=handle)
    flavour.do(handle.release)
    assert [instance for _, instance in asked(peer, 1)] == ["peer"] * 13
    assert {name for name, _ in asked(peer, 1)} == {
        "Fork", "Rollback", "Generate", "CreateSnapshot", "CountTokens", "GetSnapshot", "ExtendSnapshots",
        "UpdateSnapshot", "ListSnapshots", "DeleteSnapshot",
    }  # fmt: skip


def test_a_running_generation_is_stopped_where_it_runs(peer: Peer, flavour: Flavour) -> None:
    peer.hold = threading.Event()
    generation = flavour.do(flavour.client(peer.address).generate, "x")
    flavour.do(generation.__anext__ if flavour.runner else generation.__next__)
    flavour.do(generation.stop)
    flavour.do(generation.result)
    assert asked(peer) == [("Generate", None), ("StopGeneration", "peer")]


def test_a_bare_name_goes_where_its_client_is_routed_and_a_handle_home_all_the_same(
    peer: Peer, flavour: Flavour
) -> None:
    client = flavour.client(peer.address, token="secret")
    handle = flavour.do(client.create_snapshot, "abc")
    there = client.routed(instance="b", session="task 7")
    flavour.do(there.get_snapshot, handle.name)
    by_name = there.snapshot(handle.name)
    assert by_name.instance == ""
    flavour.do(by_name.refresh)
    flavour.do(by_name.refresh)  # now it has been told whose it is
    flavour.do(there.get_snapshot, handle)
    flavour.do(there.server_info)
    flavour.do(there.with_token("other").server_info)
    flavour.do(there.routed(instance="").server_info)
    flavour.do(client.server_info)
    assert [instance for _, instance in asked(peer, 1)] == ["b", "b", "peer", "peer", "b", "b", None, None]
    assert [said.get(SESSION) for said in peer.metadata[1:]] == ["task 7"] * 7 + [None]
    assert {said["authorization"] for said in peer.metadata} == {"Bearer secret", "Bearer other"}
    flavour.do(there.close)  # the connection is the first one's
    flavour.do(client.server_info)


def test_handles_of_several_instances_are_extended_each_at_home(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    handle = flavour.do(client.create_snapshot, "abc")
    extended = flavour.do(client.extend_snapshots, ["snapshots/lost-one", handle, "snapshots/lost-two", handle.info])
    assert asked(peer, 1) == [("ExtendSnapshots", None), ("ExtendSnapshots", "peer")]
    assert extended.missing == ("snapshots/lost-one", "snapshots/lost-two")
    assert [info.name for info in extended.snapshots] == [handle.name] * 2


def test_an_instance_that_is_away_lets_no_handle_of_another_one_expire(peer: Peer, flavour: Flavour) -> None:
    """Handles of three: one is down, one has begun anew, and the last one in the list is there."""
    kept = peer.keep("abc", types.SnapshotOptions(snapshot_id="kept-0001"))
    answer = peer.ExtendSnapshots

    def extend(request: Any, context: Any) -> Any:
        match dict(context.invocation_metadata())[INSTANCE]:
            case "down":
                refuse(context, "UNAVAILABLE", text="no healthy upstream")
            case "old":
                wrong_instance(request, context)
        return answer(request, context)

    peer.scripts["ExtendSnapshots"] = extend
    client = flavour.client(peer.address, retry=False)
    refs = [SnapshotInfo(name=f"snapshots/{where}-0001", instance=where) for where in ("down", "old", "peer")]
    refs[2] = flavour.do(client.get_snapshot, kept.name).info
    told = flavour.do(client.extend_snapshots, refs[1:])
    assert told.missing == ("snapshots/old-0001",)
    assert [info.name for info in told.snapshots] == ["snapshots/kept-0001"]
    before = kept.expire_time.seconds
    with pytest.raises(Unavailable):
        flavour.do(client.extend_snapshots, refs, 50)
    assert kept.expire_time.seconds == before + 50


def test_a_handle_that_went_with_its_server_cannot_be_extended(peer: Peer, flavour: Flavour) -> None:
    handle = flavour.do(flavour.client(peer.address).create_snapshot, "abc")
    peer.scripts["ExtendSnapshots"] = wrong_instance
    with pytest.raises(SnapshotNotFound) as caught:
        flavour.do(handle.extend, 30)
    assert handle.gone is caught.value


def wrong_instance(request: Any, context: Any) -> None:
    refuse(context, "FAILED_PRECONDITION", "WRONG_INSTANCE", "this is another one", instance="new")


def test_what_went_with_its_server_is_let_go_of_as_what_is_gone_already(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    handle = flavour.do(client.create_snapshot, "abc")
    peer.scripts |= {"DeleteSnapshot": wrong_instance, "ListSnapshots": wrong_instance}
    flavour.do(handle.__aexit__ if flavour.runner else handle.__exit__, None, None, None)
    assert flavour.do(handle.release) == ()
    assert flavour.do(client.delete_snapshot, handle, allow_missing=True) == ()
    assert flavour.all(client.list_snapshots, parent=handle) == []
    with pytest.raises(WrongInstance):
        flavour.do(client.delete_snapshot, handle)


def test_a_release_by_a_wrong_route_is_told_as_nothing_was_released(peer: Peer, flavour: Flavour) -> None:
    peer.scripts |= {"DeleteSnapshot": wrong_instance, "ListSnapshots": wrong_instance}
    there = flavour.client(peer.address, instance="b")
    by_name = there.snapshot("snapshots/plan-0001")
    leave = by_name.__aexit__ if flavour.runner else by_name.__exit__
    for call in (
        lambda: flavour.do(by_name.release),
        lambda: flavour.do(leave, None, None, None),
        lambda: flavour.do(there.delete_snapshot, by_name.name, allow_missing=True),
        lambda: flavour.all(there.list_snapshots, parent=by_name.name),
    ):
        with pytest.raises(WrongInstance):
            call()


def test_a_handle_whose_server_began_anew_is_made_again_by_who_catches_what_is_not_found(
    peer: Peer, flavour: Flavour
) -> None:
    client = flavour.client(peer.address)
    handle = flavour.do(client.create_snapshot, "abc")

    def stream(request: Any, context: Any) -> Any:
        wrong_instance(request, context)
        yield

    peer.scripts |= {"GetSnapshot": wrong_instance, "Fork": wrong_instance, "Generate": stream}
    for call in (
        lambda: flavour.do(handle.refresh),
        lambda: flavour.do(handle.fork, 2),
        lambda: flavour.do(flavour.do(handle.generate, "x").result),
    ):
        handle.gone = None
        with pytest.raises(SnapshotNotFound) as caught:
            call()
        assert handle.gone is caught.value and isinstance(caught.value, FailedPrecondition)
        assert caught.value.metadata == {"instance": "new"}


def test_a_wrong_route_says_nothing_about_a_snapshot_of_a_bare_name(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["GetSnapshot"] = wrong_instance
    handle = flavour.client(peer.address, instance="b").snapshot("snapshots/plan-0001")
    with pytest.raises(WrongInstance):
        flavour.do(handle.refresh)
    assert handle.gone is None


@pytest.mark.parametrize("route", [{"instance": "a\n"}, {"instance": " a"}, {"session": "päss"}])
def test_a_route_that_no_header_can_carry_is_refused(peer: Peer, flavour: Flavour, route: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        flavour.client(peer.address).routed(**route)


def test_a_stream_that_a_proxy_resets_is_unavailable_and_the_servers_own_failure_is_not() -> None:
    def error(text: str, **more: Any) -> Any:
        return from_status(grpc.StatusCode.INTERNAL, text, **more)

    assert type(error("Stream removed (RST_STREAM (Received RST_STREAM with error code 2))")) is Unavailable
    assert type(error("the server failed")) is Internal
