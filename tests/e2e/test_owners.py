"""Two owners and a hostile third on a real server: nothing of the others seen, nothing lost, their calls go on.

docs/security.md has these tests as a table.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import field_mask_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.server_service_pb2_grpc import ServerServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

from service.auth.tokens import new_token
from tests.e2e.live import (
    OPTIONS,
    PATIENCE,
    LiveServer,
    Refusal,
    answer_of,
    greedy,
    prompt_of,
    raw,
    refusal_of,
    refused,
    until,
    with_token,
)
from tests.rpc.wire import DATA, END_HEADERS, HEADERS, PING, Wire, call_headers, frame, message_head

OK = grpc.StatusCode.OK
QUOTA = 10_000  # snapshots of one owner


@dataclass
class Owner:
    """One owner's view of the server, on a connection of its own."""

    name: str
    token: str
    channel: grpc.Channel

    @property
    def inference(self) -> InferenceServiceStub:
        return InferenceServiceStub(self.channel)

    @property
    def snapshots(self) -> SnapshotServiceStub:
        return SnapshotServiceStub(self.channel)

    @property
    def server(self) -> ServerServiceStub:
        return ServerServiceStub(self.channel)

    def create(self, tokens: list[int], **options: Any) -> inference_pb.CreateSnapshotResponse:
        request = inference_pb.CreateSnapshotRequest(input=raw(tokens), options=pb.SnapshotOptions(**options))
        return self.inference.CreateSnapshot(request, timeout=PATIENCE)

    def names(self) -> list[str]:
        found, token = [], ""
        while True:
            page = self.snapshots.ListSnapshots(
                snapshot_pb.ListSnapshotsRequest(page_size=1000, page_token=token), timeout=PATIENCE
            )
            found += [snapshot.name for snapshot in page.snapshots]
            token = page.next_page_token
            if not token:
                return found

    def get(self, name: str) -> tuple[pb.Snapshot, list[int]]:
        reply = self.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True))
        return reply.snapshot, list(reply.token_ids)

    def stats(self) -> server_pb.GetCacheStatsResponse:
        return self.server.GetCacheStats(server_pb.GetCacheStatsRequest(), timeout=PATIENCE)


@dataclass
class House:
    """A server with its owners."""

    server: LiveServer
    tokens: dict[str, str]

    def owner(self, name: str) -> Owner:
        """On a new connection."""
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(self.server.address, options=options)
        return Owner(name, self.tokens[name], with_token(channel, self.tokens[name]))


@contextmanager
def house_of(folder: Path, *flags: str, model: str = "tiny-llama") -> Iterator[House]:
    made = {name: new_token(name, admin=name == "ops") for name in ("alice", "bob", "mallory", "ops")}
    tokens = folder / "tokens"
    tokens.write_text("".join(f"{line}\n" for _, line in made.values()))
    with LiveServer(model, "--tokens", str(tokens), *flags, token=made["ops"][0]) as server:
        yield House(server, {name: token for name, (token, _) in made.items()})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house_of(tmp_path_factory.mktemp("house"), "--max-batch", "4") as opened:
        yield opened


@pytest.fixture
def alice(house: House) -> Owner:
    return house.owner("alice")


@pytest.fixture
def mallory(house: House) -> Owner:
    return house.owner("mallory")


SECRET = prompt_of(700, seed=4711)


def same_but_for_the_name(found: Refusal, unknown: Refusal, name: str, none: str) -> None:
    """A stranger's snapshot and one that never was are told apart by nothing but the name that was asked for."""
    assert repr(found).replace(name, none) == repr(unknown)


NAMING: dict[str, Callable[[Owner, str], Any]] = {
    "GetSnapshot": lambda o, n: o.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=n, include_tokens=True)),
    "UpdateSnapshot": lambda o, n: o.snapshots.UpdateSnapshot(
        snapshot_pb.UpdateSnapshotRequest(
            snapshot=pb.Snapshot(name=n, labels={"mine": "now"}), update_mask=field_mask_pb2.FieldMask(paths=["labels"])
        )
    ),
    "DeleteSnapshot": lambda o, n: o.snapshots.DeleteSnapshot(
        snapshot_pb.DeleteSnapshotRequest(name=n, descendants=True, stop_active=True)
    ),
    "Generate": lambda o, n: o.inference.Generate(greedy(None, parent=n)),
    "CreateSnapshot": lambda o, n: o.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(parent=n, input=raw([9]))
    ),
    "Fork": lambda o, n: o.inference.Fork(inference_pb.ForkRequest(parent=n, branches=[inference_pb.ForkBranch()])),
    "Rollback": lambda o, n: o.inference.Rollback(inference_pb.RollbackRequest(source=n, token_count=1)),
    "CountTokens": lambda o, n: o.inference.CountTokens(inference_pb.CountTokensRequest(parent=n, input=raw([9]))),
}


@pytest.mark.parametrize("method", NAMING)
def test_anothers_name_is_as_unknown_as_one_that_never_was(method: str, alice: Owner, mallory: Owner):
    name = alice.create(SECRET, labels={"k": "v"}).snapshot.name
    none = f"snapshots/{uuid.uuid4().hex[:26]}"
    before = alice.get(name)
    found = refused(lambda: NAMING[method](mallory, name))
    unknown = refused(lambda: NAMING[method](mallory, none))
    assert (found.code, found.reason) == ("NOT_FOUND", "SNAPSHOT_NOT_FOUND")
    same_but_for_the_name(found, unknown, name, none)
    after = alice.get(name)
    assert (after[0].labels, after[1]) == (before[0].labels, SECRET)
    # Nor is it told when it was there once, which its owner is.
    alice.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name))
    same_but_for_the_name(refused(lambda: NAMING[method](mallory, name)), unknown, name, none)
    assert refused(lambda: NAMING[method](alice, name)).reason == "SNAPSHOT_DELETED"


def test_a_rollback_to_anothers_snapshot_is_one_to_an_unknown_one(alice: Owner, mallory: Owner):
    theirs = alice.create(SECRET[:300]).snapshot.name
    mine = mallory.create(SECRET).snapshot.name
    none = f"snapshots/{uuid.uuid4().hex[:26]}"

    def back_to(ancestor: str) -> Refusal:
        request = inference_pb.RollbackRequest(source=mine, ancestor=ancestor)
        return refused(lambda: mallory.inference.Rollback(request))

    same_but_for_the_name(back_to(theirs), back_to(none), theirs, none)


def test_lists_and_bulk_calls_reach_the_callers_own_alone(house: House, alice: Owner):
    mallory = house.owner("mallory")
    names = {alice.create(SECRET[: 300 + n], labels={"team": "red"}).snapshot.name for n in range(3)}
    assert names <= set(alice.names())
    assert not names & set(mallory.names())
    by_label = mallory.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(labels={"team": "red"}))
    by_parent = mallory.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(parent=min(names)))
    assert not by_label.snapshots and not by_parent.snapshots
    extended = mallory.snapshots.ExtendSnapshots(snapshot_pb.ExtendSnapshotsRequest(names=sorted(names)))
    assert (list(extended.snapshots), list(extended.missing)) == ([], sorted(names))
    gone = mallory.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=min(names), allow_missing=True))
    assert list(gone.deleted) == []
    assert names <= set(alice.names())


def test_a_page_token_fits_its_owner_alone(alice: Owner, mallory: Owner):
    for n in range(3):
        alice.create(SECRET[: 400 + n])
        mallory.create(SECRET[: 400 + n])
    token = alice.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_size=1)).next_page_token
    assert token
    request = snapshot_pb.ListSnapshotsRequest(page_size=1, page_token=token)
    assert refused(lambda: mallory.snapshots.ListSnapshots(request)).reason == "PAGE_TOKEN_INVALID"
    assert alice.snapshots.ListSnapshots(request).snapshots


def test_the_same_id_is_another_snapshot_for_another_owner(alice: Owner, mallory: Owner):
    chosen = f"plan-{uuid.uuid4().hex[:12]}"
    mine = alice.create(SECRET[:300], snapshot_id=chosen).snapshot
    theirs = mallory.create(SECRET[:301], snapshot_id=chosen).snapshot
    assert mine.name == theirs.name == f"snapshots/{chosen}"
    assert (alice.get(mine.name)[1], mallory.get(mine.name)[1]) == (SECRET[:300], SECRET[:301])
    mallory.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=mine.name))
    assert alice.get(mine.name)[1] == SECRET[:300]


def test_a_request_id_of_another_gives_neither_its_reply_nor_a_refusal(alice: Owner, mallory: Owner):
    tokens = prompt_of(300, seed=12)
    request = inference_pb.CreateSnapshotRequest(input=raw(tokens), request_id=str(uuid.uuid4()))
    first = alice.inference.CreateSnapshot(request)
    assert alice.inference.CreateSnapshot(request) == first  # replayed
    theirs = mallory.inference.CreateSnapshot(request)
    assert theirs.snapshot.name != first.snapshot.name
    assert (theirs.usage.cached_tokens, theirs.usage.new_tokens) == (0, 300)
    other = inference_pb.CreateSnapshotRequest(input=raw(tokens[:9]), request_id=request.request_id)
    assert refused(lambda: alice.inference.CreateSnapshot(other)).reason == "REQUEST_ID_REUSED"
    assert refused(lambda: mallory.inference.CreateSnapshot(other)).reason == "REQUEST_ID_REUSED"  # its own, by now


def test_what_another_has_sent_saves_nothing_and_hashes_to_nothing_known(alice: Owner, mallory: Owner):
    """The probe: a guessed prompt that is cached elsewhere must look like one that nobody has sent."""
    tokens = prompt_of(700, seed=99)
    made = alice.create(tokens)
    again = alice.create(tokens)
    assert (again.usage.cached_tokens, again.usage.new_tokens) == (700, 0)
    counted = mallory.inference.CountTokens(inference_pb.CountTokensRequest(input=raw(tokens)))
    assert counted.cached_tokens == 0
    probe = mallory.create(tokens)
    nobody = mallory.create(prompt_of(700, seed=100))
    facts = [(u.cached_tokens, u.recomputed_tokens, u.new_tokens, u.miss_reason) for u in (probe.usage, nobody.usage)]
    assert facts == [(0, 0, 700, 0)] * 2
    assert probe.snapshot.prefix_hash != made.snapshot.prefix_hash  # the same tokens, told apart
    assert alice.create(tokens[:512]).snapshot.prefix_hash == alice.create(tokens[:512]).snapshot.prefix_hash


def test_a_watch_hears_of_its_owners_alone_and_its_places_are_its_owners(alice: Owner, mallory: Owner):
    def watch(owner: Owner, token: str = "") -> Any:
        request = snapshot_pb.WatchSnapshotsRequest(labels={"w": "1"}, resume_token=token)
        return owner.snapshots.WatchSnapshots(request, timeout=PATIENCE)

    def synced(stream: Any) -> str:
        """The place after the first listing; and that nothing was listed."""
        message = next(stream)
        assert message.WhichOneof("event") == "synced"
        return str(message.resume_token)

    theirs, own = watch(mallory), watch(alice)
    place, mine = synced(theirs), synced(own)
    name = alice.create(SECRET[:300], labels={"w": "1"}).snapshot.name
    told = next(own)
    assert told.changed.name == name
    alice.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name))
    made = mallory.create(SECRET[:301], labels={"w": "1"}).snapshot.name
    first = next(theirs)  # the first that it hears of is its own
    assert (first.changed.name, first.resume_token != place) == (made, True)
    for stolen in (mine, told.resume_token):
        found = refused(lambda stolen=stolen: next(watch(mallory, stolen)))
        assert (found.code, found.reason, found.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", ("resume_token",))
    own.cancel()
    theirs.cancel()


def test_anothers_image_is_as_unknown_by_its_digest_as_one_that_nobody_sent(tmp_path: Path):
    pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")
    from tests.e2e.test_images import image, known, plain, png  # they need what the vision extra brings

    with house_of(tmp_path, model="tiny-qwen3_5-vl") as house:
        alice, mallory = house.owner("alice"), house.owner("mallory")

        def create(owner: Owner, part: pb.Part) -> inference_pb.CreateSnapshotResponse:
            request = inference_pb.CreateSnapshotRequest(input=plain("see ", part, " there"))
            return owner.inference.CreateSnapshot(request, timeout=PATIENCE)

        made = create(alice, image(png(1)))
        assert create(alice, known(png(1))).snapshot.prefix_hash == made.snapshot.prefix_hash
        held = refused(lambda: create(mallory, known(png(1))))
        never = refused(lambda: create(mallory, known(png(2))))
        assert (held.code, held.reason) == ("FAILED_PRECONDITION", "IMAGE_NOT_HELD")
        same_but_for_the_name(held, never, held.metadata["sha256"], never.metadata["sha256"])
        # Who has the file itself gains nothing by its having been seen.
        again = create(mallory, image(png(1)))
        assert (again.usage.cached_tokens, again.snapshot.prefix_hash != made.snapshot.prefix_hash) == (0, True)


def test_a_running_generation_is_its_owners_to_stop(alice: Owner, mallory: Owner):
    undisturbed = answer_of(alice.inference.Generate(greedy(raw(SECRET), tokens=60))).ids
    stream = alice.inference.Generate(greedy(raw(SECRET), tokens=60), timeout=PATIENCE)
    started = next(stream)
    stop = inference_pb.StopGenerationRequest(generation=started.started.generation)
    assert not mallory.inference.StopGeneration(stop).was_running
    rest = list(stream)
    ids = [token for event in rest for token in event.delta.token_ids]
    assert (ids, rest[-1].finished.reason) == (undisturbed, inference_pb.FINISH_REASON_MAX_TOKENS)


def test_numbers_of_the_whole_server_are_for_admins(house: House, alice: Owner):
    mallory, ops = house.owner("mallory"), house.owner("ops")
    before = mallory.stats()
    assert before.owner == "mallory"
    alice.create(prompt_of(300, seed=5))
    assert mallory.stats() == before  # nothing in it moves with what others do
    whole = ops.stats()
    assert whole.owner == "" and whole.stats.prompt_tokens > 0 and whole.stats.memory_bytes > 0
    for limit in ({"memory_bytes": 0}, {"disk_bytes": 0}, {}):
        refusal = refused(lambda limit=limit: mallory.server.TrimCache(server_pb.TrimCacheRequest(**limit)))
        assert (refusal.code, refusal.reason) == ("PERMISSION_DENIED", "ADMIN_REQUIRED")


def test_a_watch_shows_the_callers_own_and_its_token_fits_no_other(alice: Owner, mallory: Owner):
    mine = {"watch": uuid.uuid4().hex[:8]}

    def watch(owner: Owner, token: str = "") -> Any:
        request = snapshot_pb.WatchSnapshotsRequest(labels=mine, resume_token=token)
        return owner.snapshots.WatchSnapshots(request, timeout=PATIENCE)

    hers, theirs = watch(alice), watch(mallory)
    token, _ = next(hers).resume_token, next(theirs)
    made = alice.create(SECRET[:450], labels=mine).snapshot
    own = mallory.create(SECRET[:450], labels=mine).snapshot
    assert next(hers).changed.name == made.name
    assert next(theirs).changed.name == own.name  # the first thing that it hears
    refusal = refused(lambda: watch(mallory, token))
    assert (refusal.code, refusal.reason, refusal.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", ("resume_token",))
    for stream in (hers, theirs):
        stream.cancel()


def test_rows_are_the_callers_own_and_plans_do_not_measure_others(house: House, alice: Owner):
    mallory, ops = house.owner("mallory"), house.owner("ops")
    stream = alice.inference.Generate(greedy(raw(SECRET), tokens=20_000), timeout=PATIENCE)
    generation = next(stream).started.generation
    assert [row.generation for row in alice.stats().rows] == [generation]
    assert not mallory.stats().rows and not ops.stats().rows
    request = inference_pb.CountTokensRequest(input=raw([5, 6]), plan=inference_pb.PlanOptions(max_tokens=5))
    plans = {owner.name: owner.inference.CountTokens(request).plan for owner in (mallory, ops)}
    assert plans["mallory"].free_bytes == 0 < plans["ops"].free_bytes
    assert plans["mallory"].need_bytes == plans["ops"].need_bytes
    stream.cancel()


# Others' calls go on


class Bystanders:
    """Owners who do their work over and over, and compare it with what it was before anything began."""

    def __init__(self, *owners: Owner) -> None:
        self._owners = owners
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(owners))
        self.rounds = dict.fromkeys((owner.name for owner in owners), 0)
        self._kept = {owner.name: owner.create(self._prompt(owner)).snapshot.name for owner in owners}
        self._expected = {owner.name: self._work(owner) for owner in owners}
        self._futures: list[Any] = []

    def __enter__(self) -> Bystanders:
        self._futures = [self._pool.submit(self._loop, owner) for owner in self._owners]
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        for future in self._futures:
            future.result(PATIENCE)
        self._pool.shutdown()
        for owner in self._owners:  # nothing is lost
            assert owner.get(self._kept[owner.name])[1] == self._prompt(owner)

    @staticmethod
    def _prompt(owner: Owner) -> list[int]:
        return prompt_of(300, seed=sum(owner.name.encode()))

    def _work(self, owner: Owner) -> tuple[list[int], list[int]]:
        kept = self._kept[owner.name]
        answer = answer_of(owner.inference.Generate(greedy(raw([7]), parent=kept, tokens=8), timeout=PATIENCE))
        return answer.ids, owner.get(kept)[1]

    def _loop(self, owner: Owner) -> None:
        while not self._stop.is_set():
            assert self._work(owner) == self._expected[owner.name]
            self.rounds[owner.name] += 1

    def wait_for(self, more: int) -> None:
        """Until each has done so many more rounds; PATIENCE is the bound."""
        goal = {name: done + more for name, done in self.rounds.items()}

        def reached() -> bool:
            for future in self._futures:
                if future.done():
                    future.result()
            return all(self.rounds[name] >= goal[name] for name in goal)

        until(reached, what="the bystanders' calls")


@pytest.fixture
def bystanders(house: House) -> Iterator[Bystanders]:
    with Bystanders(house.owner("alice"), house.owner("bob")) as both:
        yield both


@pytest.mark.slow
def test_ten_thousand_handles_end_at_the_quota_of_who_makes_them(house: House, bystanders: Bystanders):
    mallory = house.owner("mallory")
    for name in mallory.names():
        mallory.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name, allow_missing=True))
    parent = mallory.create(prompt_of(300, seed=31)).snapshot.name
    bomb = {f"k{n:02}": "v" * 60 for n in range(64)}  # 4,032 bytes
    branch = inference_pb.ForkBranch(options=pb.SnapshotOptions(labels=bomb))
    made = 1
    while made + 64 <= QUOTA:
        reply = mallory.inference.Fork(inference_pb.ForkRequest(parent=parent, branches=[branch] * 64))
        made += len(reply.snapshots)
    refusal = refused(lambda: mallory.inference.Fork(inference_pb.ForkRequest(parent=parent, branches=[branch] * 64)))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "SNAPSHOT_QUOTA")
    assert len(mallory.names()) == made > QUOTA - 64
    bystanders.wait_for(3)
    mallory.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=parent, descendants=True))
    assert mallory.names() == []


@pytest.mark.parametrize(
    "labels",
    [
        {f"k{n}": "" for n in range(65)},
        {"k": "v" * 256},
        {"k" * 64: "v"},
        {f"k{n:02}": "v" * 62 for n in range(64)},
        {"k": "ü" * 255, **{f"k{n}": "ü" * 255 for n in range(9)}},
    ],
    ids=["many", "long", "long key", "much in all", "many bytes"],
)
def test_labels_have_a_limit_of_each_kind(mallory: Owner, labels: dict[str, str]):
    refusal = refused(lambda: mallory.create([1, 2, 3], labels=labels))
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_pins_have_a_quota_of_their_own_and_leave_others_theirs(tmp_path: Path):
    with house_of(tmp_path, "--max-pinned", "5", "--max-snapshots", "20") as house:
        mallory, alice = house.owner("mallory"), house.owner("alice")
        for n in range(5):
            mallory.create(prompt_of(300, seed=n), pinned=True)
        assert refused(lambda: mallory.create(prompt_of(300, seed=6), pinned=True)).reason == "PIN_QUOTA"
        for n in range(15):
            mallory.create([n + 1, n + 2])
        assert refused(lambda: mallory.create([50, 51])).reason == "SNAPSHOT_QUOTA"
        assert alice.create(prompt_of(300, seed=1), pinned=True).snapshot.pinned


def test_one_owners_backlog_is_in_front_of_nobody_else(house: House, bystanders: Bystanders):
    """190 long generations for 4 rows: 3 of them run, the others wait in their own line."""
    mallory, looking, ops = house.owner("mallory"), house.owner("mallory"), house.owner("ops")
    request = greedy(raw(prompt_of(40, seed=3)), tokens=4_000)
    streams = [mallory.inference.Generate(request) for _ in range(190)]
    try:
        until(lambda: looking.stats().stats.queued_calls == 187, what="the backlog")
        bystanders.wait_for(10)
        numbers = looking.stats().stats
        assert numbers.active_sequences == 3 and numbers.queued_calls > 150  # others were served in front of it
        assert ops.stats().stats.queued_calls <= 3  # the queue that all share
        more = house.owner("mallory")
        streams += [more.inference.Generate(request) for _ in range(100)]  # beyond 256 of the owner, wherever from

        def refusals() -> list[Refusal]:
            return [refusal_of(stream) for stream in streams if stream.done() and stream.code() is not OK]

        until(refusals, what="the limit of calls")
        assert {(each.code, each.reason) for each in refusals()} == {("RESOURCE_EXHAUSTED", "CALL_QUOTA")}
        bystanders.wait_for(2)
    finally:
        for stream in streams:
            stream.cancel()
    until(lambda: ops.stats().stats.active_sequences <= 2, what="the rows to be free")


def test_floods_from_the_wire_reach_nobody_else(house: House, bystanders: Bystanders):
    token = (("authorization", f"Bearer {house.tokens['mallory']}"),)
    path = "/kvfork.v1.InferenceService/Generate"

    async def flood() -> None:
        address = house.server.address
        silent = [await Wire.to(address, greet=False) for _ in range(100)]
        slow = [await Wire.to(address) for _ in range(20)]
        for wire in slow:
            for stream in range(1, 41, 2):
                await wire.send(frame(HEADERS, call_headers(path, token), flags=END_HEADERS, stream=stream))
                await wire.send(frame(DATA, message_head(60 * 2**20) + b"\x00" * 1000, stream=stream))
        ping = [await Wire.to(address) for _ in range(20)]
        for wire in ping:
            try:
                for _ in range(50):
                    await wire.send(frame(PING, b"\x00" * 8))
            except ConnectionError:
                continue
        reset = await Wire.to(address)
        try:
            for stream in range(1, 4001, 2):
                await reset.send(
                    frame(HEADERS, call_headers(path, token), flags=END_HEADERS, stream=stream)
                    + frame(3, (8).to_bytes(4, "big"), stream=stream)
                )
        except ConnectionError:
            pass
        await asyncio.to_thread(bystanders.wait_for, 10)
        for wire in (*silent, *slow, *ping, reset):
            await wire.close()

    asyncio.run(flood())
    bystanders.wait_for(2)
    # And who did it is served again, as soon as what it left open is gone.

    mallory = house.owner("mallory")

    def served() -> bool:
        with suppress(grpc.RpcError):
            return bool(mallory.create([1, 2, 3]).snapshot.name)
        return False

    until(served, what="the server to be through with it")


def test_metadata_of_any_size_and_any_token_ends_with_a_status(house: House, bystanders: Bystanders):
    channel = grpc.insecure_channel(house.server.address)
    call = channel.unary_unary("/kvfork.v1.ServerService/GetServerInfo")
    codes = set()
    for size in (1, 100, 1_000, 10_000, 100_000, 1_000_000):
        for key in ("authorization", "x-big", "x-big-bin"):
            value: Any = b"a" * size if key.endswith("-bin") else "Bearer " + "a" * size
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", metadata=((key, value),), timeout=PATIENCE)
            codes.add(caught.value.code())
    assert codes == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    bystanders.wait_for(1)
    channel.close()
