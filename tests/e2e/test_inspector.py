"""The inspector of a real server, as its page uses it: texts, streams, refusals, and owners who see their own alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.auth.tokens import new_token
from tests.e2e.live import PATIENCE, LiveServer, chat, greedy, prompt_of, raw, until
from tests.inspector.browser import Page, Refused

pytestmark = [pytest.mark.mlx]

ENDLESS = 20_000


def page_of(server: LiveServer, token: str = "") -> Page:
    found = re.search(r"inspector at (\S+)", server.log.read_text())
    assert found is not None
    return Page(found[1], token)


class House:
    """A server with an inspector and owners; the tests' own calls are an admin's."""

    def __init__(self, folder: Path) -> None:
        made = {name: new_token(name, admin=name == "ops") for name in ("alice", "bob", "ops")}
        tokens = folder / "tokens"
        tokens.write_text("".join(f"{line}\n" for _, line in made.values()))
        tokens.chmod(0o600)
        ops = made["ops"][0]
        self.server = LiveServer("tiny-llama", "--tokens", str(tokens), "--inspector", ":0", token=ops)
        self.pages = {name: page_of(self.server, token) for name, (token, _) in made.items()}

    def create(self, who: str, text: str, **options: object) -> str:
        request = {"input": {"raw": {"parts": [{"text": text}]}}, "options": options}
        reply = self.pages[who].call("CreateSnapshot", request)
        assert reply.status == 200, reply.body
        return str(reply.json["snapshot"]["name"])


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    opened = House(tmp_path_factory.mktemp("house"))
    with opened.server:
        yield opened


def test_each_owner_sees_and_touches_its_own_alone(house: House) -> None:
    alice, bob = house.pages["alice"], house.pages["bob"]
    name = house.create("alice", "A secret of alice's.", snapshotId="alice-the-first")
    other = house.create("bob", "Nothing.", snapshotId="alice-the-first")
    assert name == other == "snapshots/alice-the-first", "each has a name space of its own"
    assert alice.call("text", {"name": name}).json["text"] == "A secret of alice's."
    assert bob.call("text", {"name": name}).json["text"] == "Nothing."
    mine = house.create("alice", "More of it.", snapshotId="alice-the-second")
    missing = bob.call("GetSnapshot", {"name": "snapshots/nobody-has-it"}).reason
    question = {"parent": mine, "stopping": {"maxTokens": 2}}
    for call, message in (
        ("GetSnapshot", {"name": mine}),
        ("text", {"name": mine}),
        ("Generate", question),
        ("Fork", {"parent": mine, "branches": [{}]}),
        ("Rollback", {"source": mine, "tokenCount": 1}),
        ("DeleteSnapshot", {"name": mine}),
        ("CountTokens", {"parent": mine, "plan": {}}),
    ):
        assert bob.call(call, message).reason == missing == (404, "NOT_FOUND", "SNAPSHOT_NOT_FOUND"), call
    seen = []
    for event in bob.stream("WatchSnapshots"):
        if "synced" in event:
            break
        seen.append(event["changed"]["name"])
    assert seen == [other]
    stats = {who: page.call("GetCacheStats").json for who, page in house.pages.items()}
    assert [stats[who]["owner"] for who in ("alice", "bob", "ops")] == ["alice", "bob", ""]
    for page in (Page(alice.url), Page(alice.url, "kvf_guessed")):
        for call, message in (
            ("Generate", question),
            ("WatchSnapshots", {}),
            ("GetServerInfo", {}),
            ("text", {"name": mine}),
        ):
            assert page.call(call, message).reason[:2] == (401, "UNAUTHENTICATED"), call


def test_a_stream_is_told_as_it_comes_and_whoever_leaves_frees_its_row(house: House) -> None:
    alice = house.pages["alice"]
    question = {"input": {"raw": {"parts": [{"text": "Go"}]}}, "stopping": {"maxTokens": ENDLESS, "ignoreEos": True}}
    lines = alice.stream("Generate", question)
    started = next(lines)["started"]
    assert "delta" in next(lines)
    [row] = alice.call("GetCacheStats").json["rows"]
    assert (row["generation"], row["phase"]) == (started["generation"], "PHASE_DECODE")
    assert house.pages["bob"].call("GetCacheStats").json["rows"] == []
    assert house.pages["bob"].call("StopGeneration", {"generation": started["generation"]}).json == {
        "wasRunning": False
    }
    lines.close()
    house.server.idle()
    # Stopped cleanly, it ends with its last message.
    lines = alice.stream("Generate", question | {"save": {"snapshotId": "stopped-cleanly"}})
    generation = next(lines)["started"]["generation"]
    assert alice.call("StopGeneration", {"generation": generation}).json == {"wasRunning": True}
    finished = list(lines)[-1]["finished"]
    assert finished["reason"] == "FINISH_REASON_STOPPED" and finished["snapshot"]["name"] == "snapshots/stopped-cleanly"


def test_what_is_in_use_is_not_deleted_unless_its_calls_are_stopped(house: House) -> None:
    alice = house.pages["alice"]
    name = house.create("alice", "In use.")
    question = {"parent": name, "stopping": {"maxTokens": ENDLESS, "ignoreEos": True}}
    lines = alice.stream("Generate", question)
    next(lines)
    busy = alice.call("DeleteSnapshot", {"name": name})
    assert busy.reason == (409, "FAILED_PRECONDITION", "SNAPSHOT_IN_USE")
    assert busy.json["error"]["facts"]["activeUses"] == "1"
    assert alice.call("DeleteSnapshot", {"name": name, "stopActive": True}).json == {"deleted": [name]}
    assert list(lines)[-1]["finished"]["reason"] == "FINISH_REASON_STOPPED"
    assert alice.call("GetSnapshot", {"name": name}).reason == (404, "NOT_FOUND", "SNAPSHOT_DELETED")


def test_limits_and_wrong_requests_are_the_contracts(house: House) -> None:
    alice = house.pages["alice"]
    assert alice.call("Generate", {"input": {}}).reason == (400, "INVALID_ARGUMENT", "INVALID_FIELD")
    too_many = alice.call("Fork", {"parent": house.create("alice", "Fork me."), "branches": [{}] * 65})
    assert too_many.reason == (400, "INVALID_ARGUMENT", "INVALID_FIELD")
    large = alice.ask("POST", "/api/Generate", b'{"parent":"' + b"x" * (1 << 20) + b'"}', {})
    assert large.status == 413
    watches = [alice.stream("WatchSnapshots") for _ in range(16)]
    for watch in watches:
        next(watch)
    assert alice.call("WatchSnapshots").reason == (429, "RESOURCE_EXHAUSTED", "WATCH_QUOTA")
    for watch in watches:
        watch.close()
    until(lambda: watches_again(alice), what="a watch to be free again")


def watches_again(page: Page) -> bool:
    """Whether a watch is begun, or refused because of others that are not over yet."""
    watch = page.stream("WatchSnapshots")
    try:
        next(watch)
    except Refused as refused:
        if refused.reply.reason != (429, "RESOURCE_EXHAUSTED", "WATCH_QUOTA"):
            raise
        return False
    watch.close()
    return True


def test_text_is_that_of_a_snapshots_own_part(house: House) -> None:
    alice, server = house.pages["ops"], house.server
    create, fork = server.inference.CreateSnapshot, server.inference.Fork
    root = create(inference_pb.CreateSnapshotRequest(input=raw("Once upon a time"))).snapshot
    branches = [inference_pb.ForkBranch(append=raw(text)) for text in (" there was.", " nobody knew.")] + [
        inference_pb.ForkBranch()
    ]
    children = fork(inference_pb.ForkRequest(parent=root.name, branches=branches)).snapshots
    shorter = server.inference.Rollback(inference_pb.RollbackRequest(source=children[0].name, token_count=5)).snapshot

    def text_of(name: str, **more: object) -> tuple[int, str]:
        told = alice.call("text", {"name": name, **more}).json
        return told["start"], told["text"]

    whole = "Once upon a time"
    assert text_of(root.name) == (0, whole)
    assert [text_of(child.name) for child in children] == [
        (root.token_count, " there was."), (root.token_count, " nobody knew."), (root.token_count, ""),
    ]  # fmt: skip
    assert text_of(shorter.name) == (5, ""), "a rollback adds nothing"
    long = create(inference_pb.CreateSnapshotRequest(input=raw("ab" * 100))).snapshot
    cut = alice.call("text", {"name": long.name, "most": 10}).json
    assert cut["omitted"] == long.token_count - 10 and f"[… {cut['omitted']:,} tokens …]" in cut["text"]
    # A parent that is gone leaves all of it to show; bytes that are no character are shown as such.
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=root.name))
    assert text_of(children[0].name) == (0, f"{whole} there was.")
    bytes_alone = create(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(40)))).snapshot
    assert text_of(bytes_alone.name)[0] == 0


def test_what_the_page_asks_for_counts_and_is_logged_as_any_call_is(house: House) -> None:
    alice = house.pages["alice"]
    secret = "a prompt that nobody else is to read"
    alice.call("CountTokens", {"input": {"raw": {"parts": [{"text": secret}]}}})
    alice.call("Nope", {"input": secret})
    alice.call("Generate", {"nope": secret})
    log = house.server.log.read_text()
    assert "CountTokens" in log and secret not in log and alice.token not in log


@pytest.mark.slow
def test_the_folder_of_the_door_is_gone_with_the_server_and_shut_while_it_is_there() -> None:
    with LiveServer("tiny-llama", "--inspector", ":0") as server:
        [folder] = [path for path in server.temp.iterdir() if path.name.startswith("kvfork-")]
        assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "door").stat().st_mode & 0o777 == 0o600
        page = page_of(server)
        made = page.call("CreateSnapshot", {"input": {"raw": {"parts": [{"text": "Hi"}]}}}).json["snapshot"]
        assert server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=made["name"])).snapshot.token_count
        watch = page.stream("WatchSnapshots")
        next(watch)
        running = server.inference.Generate(
            greedy(chat(("user", "Hi")), tokens=ENDLESS, save=pb.SnapshotOptions()), timeout=PATIENCE
        )
        next(running)
        lines = page.stream(
            "Generate",
            {"input": {"raw": {"parts": [{"text": "Hi"}]}}, "stopping": {"maxTokens": ENDLESS, "ignoreEos": True}},
        )
        next(lines)
        assert server.terminate() == 0
        assert list(lines)[-1]["finished"]["reason"] == "FINISH_REASON_STOPPED", "a drain delivers here too"
        assert list(watch)[-1]["error"]["reason"] == "SERVER_DRAINING"
        assert server.left_behind() == []
