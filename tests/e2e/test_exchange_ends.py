"""Exports and imports that end otherwise than well, and what they leave; owners, limits, names, and the client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub
from kvfork_client import (
    AsyncClient,
    Client,
    ExportDamaged,
    Residency,
    SaveOptions,
    SnapshotIdTaken,
    SnapshotNotFound,
)

from service.auth.tokens import new_token
from tests.e2e.exports import key_file
from tests.e2e.live import (
    OPTIONS,
    PATIENCE,
    ROOT,
    LiveServer,
    ServerDidNotStart,
    answer_of,
    generate,
    greedy,
    prompt_of,
    refusal_of,
    refused,
    until,
    with_token,
)
from tests.e2e.live import raw as raw_input
from tests.e2e.test_exchange import (
    MORE,
    PROMPT,
    Pair,
    answer,
    check,
    copy,
    create,
    export,
    forget,
    in_pieces,
    question,
    take_in,
    values,
)

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

LONG = prompt_of(6_000, seed=5)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("keys") / "exchange.key", "6c" * 32)


@pytest.fixture(scope="module")
def pair(key: Path) -> Iterator[Pair]:
    flags = ("--exchange-key", str(key), "--request-seconds", "5", "--write-stall-seconds", "3")
    with (
        LiveServer("tiny-llama", *flags, inside=True) as here,
        LiveServer("tiny-llama", *flags, inside=True) as there,
    ):
        yield Pair(here, there)


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Pair) -> Iterator[None]:
    """After every story, and without its names: no hold, no use, no pin."""
    yield
    for server in (pair.here, pair.there):
        forget(server)
        until(lambda server=server: not held(server), what="holds to be given back")


EVERYTHING = server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0)


def held(server: LiveServer) -> int:
    report = server.report()
    return report["held"] + report["uses"] + report["pinned"]


def names(server: LiveServer) -> list[str]:
    listed = server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots
    return sorted(snapshot.name for snapshot in listed)


def test_an_import_that_breaks_off_goes_on_where_it_was(pair: Pair) -> None:
    made = create(pair.here, LONG)
    data = export(pair.here, made.name)
    arrived, over = threading.Event(), threading.Event()

    def half() -> Iterator[snapshot_pb.ImportSnapshotRequest]:
        yield from in_pieces(data[: len(data) // 2])
        arrived.set()
        over.wait(PATIENCE)

    call = pair.there.snapshots.ImportSnapshot.future(half(), timeout=PATIENCE)
    assert arrived.wait(PATIENCE)
    until(lambda: len(check(pair.there, data).held) >= 10, what="half of the records")
    call.cancel()
    over.set()
    until(lambda: not held(pair.there), what="the import to be given up")
    rest = copy(pair.here, pair.there, made.name)
    assert rest.held_records >= 10 and rest.received_bytes < len(data) * 0.6
    ours, theirs = (answer(server, raw_input(MORE), made.name) for server in (pair.here, pair.there))
    assert values(ours) == values(theirs)


def test_a_deadline_ends_an_import_and_names_nothing(pair: Pair) -> None:
    data = export(pair.here, create(pair.here, PROMPT).name)

    def slowly() -> Iterator[snapshot_pb.ImportSnapshotRequest]:
        yield from in_pieces(data[:1000])
        time.sleep(2.0)

    failed = refused(lambda: pair.there.snapshots.ImportSnapshot(slowly(), timeout=0.5))
    assert failed.code == "DEADLINE_EXCEEDED" and names(pair.there) == []


def test_a_sender_that_stops_is_refused(pair: Pair) -> None:
    data = export(pair.here, create(pair.here, PROMPT).name)
    done = threading.Event()

    def stops() -> Iterator[snapshot_pb.ImportSnapshotRequest]:
        yield from in_pieces(data[: len(data) // 2])
        done.wait(PATIENCE)

    failed = refused(lambda: pair.there.snapshots.ImportSnapshot(stops(), timeout=PATIENCE))
    done.set()
    assert (failed.code, failed.reason) == ("RESOURCE_EXHAUSTED", "SLOW_SENDER") and names(pair.there) == []


def test_what_is_exported_stays_until_its_reader_is_done(pair: Pair) -> None:
    made = create(pair.here, LONG)
    call = pair.here.snapshots.ExportSnapshot(snapshot_pb.ExportSnapshotRequest(name=made.name), timeout=PATIENCE)
    first = next(call)
    busy = refused(lambda: pair.here.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=made.name)))
    assert busy.reason == "SNAPSHOT_IN_USE"
    pair.here.server.TrimCache(EVERYTHING)
    data = first.data + b"".join(part.data for part in call)
    assert len(data) == first.summary.bytes and first.summary.state_tokens == 6_000
    assert take_in(pair.there, data).snapshot.residency == pb.RESIDENCY_MEMORY


def test_an_export_whose_reader_leaves_lets_go(pair: Pair) -> None:
    made = create(pair.here, LONG)
    call = pair.here.snapshots.ExportSnapshot(snapshot_pb.ExportSnapshotRequest(name=made.name), timeout=PATIENCE)
    next(call)
    call.cancel()
    until(lambda: not held(pair.here), what="the export to let go")
    pair.here.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=made.name))


def test_a_name_that_is_taken_is_refused_before_any_state_comes(pair: Pair) -> None:
    made = create(pair.here, PROMPT, snapshot_id="same-name")
    create(pair.there, prompt_of(50, seed=8), snapshot_id="same-name")
    data = export(pair.here, made.name)
    failed = refused(lambda: take_in(pair.there, data))
    assert (failed.code, failed.reason, failed.resource) == ("ALREADY_EXISTS", "SNAPSHOT_ID_TAKEN", made.name)
    assert check(pair.there, data).held == []
    assert take_in(pair.there, data, snapshot_id="other-name").snapshot.name == "snapshots/other-name"


def test_two_imports_of_one_snapshot_at_once_give_one(pair: Pair) -> None:
    data = export(pair.here, create(pair.here, LONG).name)
    with ThreadPoolExecutor(4) as threads:
        taken = [each.result() for each in [threads.submit(take_in, pair.there, data) for _ in range(4)]]
    assert {one.snapshot.name for one in taken} == set(names(pair.there)) and len(names(pair.there)) == 1
    assert sum(one.received_records for one in taken) == len(check(pair.there, data).held)


def test_too_many_at_once_are_told_to_wait(pair: Pair) -> None:
    ended = threading.Event()

    def wait() -> Iterator[snapshot_pb.ImportSnapshotRequest]:
        yield snapshot_pb.ImportSnapshotRequest()
        ended.wait(PATIENCE)

    calls = [pair.here.snapshots.ImportSnapshot.future(wait(), timeout=PATIENCE) for _ in range(5)]
    until(lambda: any(call.done() for call in calls), what="the fifth to be refused")
    (failed,) = [refusal_of(call.exception()) for call in calls if call.done()]
    assert (failed.code, failed.reason) == ("RESOURCE_EXHAUSTED", "EXCHANGE_QUOTA")
    assert failed.metadata == {"limit": "4"} and failed.retry_seconds == 1.0 and "QuotaFailure" in failed.kinds
    made = create(pair.here, PROMPT)
    request = snapshot_pb.ExportSnapshotRequest(name=made.name)
    assert refused(lambda: pair.here.snapshots.ExportSnapshot(request)).reason == "EXCHANGE_QUOTA"
    for call in calls:
        call.cancel()
    ended.set()

    def exports() -> bool:
        try:
            return bool(export(pair.here, made.name))
        except grpc.RpcError:
            return False

    until(exports, what="places that were given back")


def test_what_was_evicted_travels_as_tokens_and_is_computed_there(pair: Pair) -> None:
    made = create(pair.here, PROMPT)
    before = values(answer(pair.here, raw_input(MORE), made.name))
    pair.here.server.TrimCache(EVERYTHING)
    messages = list(pair.here.snapshots.ExportSnapshot(snapshot_pb.ExportSnapshotRequest(name=made.name)))
    assert messages[0].summary.state_tokens == 0 and messages[0].summary.records == 0
    taken = take_in(pair.there, b"".join(message.data for message in messages))
    assert taken.received_records == 0 and taken.snapshot.residency == pb.RESIDENCY_TOKENS
    gone_on = answer(pair.there, raw_input(MORE), made.name)
    assert gone_on.usage.recomputed_tokens == 700 and values(gone_on) == before


def test_an_import_onto_the_handle_brings_its_state_back(pair: Pair) -> None:
    """The name is there and its state is not: what comes is what it stands on from then on."""
    made = create(pair.here, PROMPT)
    copy(pair.here, pair.there, made.name)
    pair.there.server.TrimCache(EVERYTHING)
    again = copy(pair.here, pair.there, made.name)
    assert again.received_bytes > 0 and again.snapshot.residency == pb.RESIDENCY_MEMORY
    assert answer(pair.there, raw_input(MORE), made.name).usage.recomputed_tokens == 0


def test_a_server_without_room_says_so_and_keeps_nothing(pair: Pair, key: Path) -> None:
    data = export(pair.here, create(pair.here, LONG).name)
    flags = ("--exchange-key", str(key), "--memory-bytes", "300KiB", "--disk-bytes", "300KiB", "--snapshot-wait", "1")
    with LiveServer("tiny-llama", *flags) as small:
        failed = refused(lambda: take_in(small, data))
        assert (failed.code, failed.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
        assert names(small) == [] and check(small, data).held == []
        assert len(generate(small, greedy(raw_input(prompt_of(40)), tokens=4)).ids) == 4


def test_a_snapshot_larger_than_the_memory_tier_passes_through_it(pair: Pair, key: Path) -> None:
    made = create(pair.here, LONG)
    data = export(pair.here, made.name)
    flags = ("--exchange-key", str(key), "--memory-bytes", "1MiB", "--active-bytes", "64MiB")
    with LiveServer("tiny-llama", *flags) as small:
        assert len(data) > 5 << 20
        assert take_in(small, data).snapshot.residency == pb.RESIDENCY_DISK
        theirs = answer(small, raw_input(MORE), made.name)
        assert theirs.usage.recomputed_tokens == 0 and theirs.usage.disk_tokens > 4_000
        assert values(theirs) == values(answer(pair.here, raw_input(MORE), made.name))


def test_quotas_of_names_and_pins_hold_for_what_comes(pair: Pair, key: Path) -> None:
    data = export(pair.here, create(pair.here, PROMPT).name)
    flags = ("--exchange-key", str(key), "--max-snapshots", "1", "--max-pinned", "0")
    with LiveServer("tiny-llama", *flags) as small:
        assert refused(lambda: take_in(small, data, pinned=True)).reason == "PIN_QUOTA"
        create(small, prompt_of(20))
        assert refused(lambda: take_in(small, data)).reason == "SNAPSHOT_QUOTA"
        assert check(small, data).held == []


def test_what_came_is_as_durable_as_any(pair: Pair, key: Path, tmp_path: Path) -> None:
    made = create(pair.here, PROMPT)
    data = export(pair.here, made.name)
    flags = ("--exchange-key", str(key), "--store-dir", str(tmp_path / "store"))
    with LiveServer("tiny-llama", *flags) as server:
        assert take_in(server, data, durability=pb.DURABILITY_DISK).snapshot.durable
        server.kill()
    with LiveServer("tiny-llama", *flags) as server:
        gone_on = answer(server, raw_input(MORE), made.name)
        assert gone_on.usage.recomputed_tokens == 0 and gone_on.usage.disk_tokens == 700
        assert values(gone_on) == values(answer(pair.here, raw_input(MORE), made.name))
        assert server.terminate() == 0


def test_lineage_and_labels_come_along_and_what_is_asked_for_goes_before(pair: Pair) -> None:
    first = create(pair.here, PROMPT, snapshot_id="first-of-two")
    kept = {"snapshot_id": "second-of-two", "labels": {"a": "b"}, "ttl": {"seconds": 77}}
    second = create(pair.here, MORE, parent=first.name, **kept)
    copy(pair.here, pair.there, first.name)
    taken = copy(pair.here, pair.there, second.name).snapshot
    assert (taken.parent, dict(taken.labels)) == (first.name, {"a": "b"})
    left = taken.expire_time.seconds - taken.last_use_time.seconds
    assert 76 <= left <= 78
    other = copy(pair.here, pair.there, second.name, snapshot_id="with-others", labels={"c": "d"}, pinned=True).snapshot
    assert (dict(other.labels), other.pinned) == ({"c": "d"}, True)
    gone = pair.there.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=first.name, descendants=True))
    assert sorted(gone.deleted) == [first.name, second.name]  # the pinned one stays
    pair.there.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=other.name))


def test_a_fork_after_the_import_is_isolated_and_rolls_back(pair: Pair) -> None:
    made = create(pair.here, PROMPT)
    copy(pair.here, pair.there, made.name)
    request = inference_pb.RollbackRequest(source=made.name, token_count=300)
    rolled = [server.inference.Rollback(request, timeout=PATIENCE).snapshot for server in (pair.here, pair.there)]
    assert rolled[0].prefix_hash == rolled[1].prefix_hash
    ours, theirs = (
        answer(server, raw_input(MORE), short.name)
        for server, short in zip((pair.here, pair.there), rolled, strict=True)
    )
    assert values(ours) == values(theirs) and theirs.usage.recomputed_tokens == 0
    # A piece of a block reads from the whole one, and both travel.
    short = copy(pair.here, pair.there, rolled[0].name, snapshot_id="a-cut-piece")
    assert short.snapshot.token_count == 300
    assert values(answer(pair.there, raw_input(MORE), "snapshots/a-cut-piece")) == values(ours)


def test_owners_export_their_own_alone_and_import_for_themselves(pair: Pair, key: Path, tmp_path: Path) -> None:
    made = {name: new_token(name) for name in ("alice", "bob")}
    file = tmp_path / "tokens"
    file.write_text("".join(f"{line}\n" for _, line in made.values()))
    file.chmod(0o600)
    with LiveServer("tiny-llama", "--exchange-key", str(key), "--tokens", str(file), token=made["alice"][0]) as server:
        mine = create(server, PROMPT)
        with Client(server.address, token=made["bob"][0]) as bob:
            with pytest.raises(SnapshotNotFound):
                bob.export_snapshot(mine.name).read()
            data = export(server, mine.name)
            assert bob.check_import(data).held == ()  # what alice has tells bob nothing
            taken = bob.import_snapshot([data])
            assert (taken.held_records, taken.snapshot.info.token_count) == (0, 700)
            assert taken.snapshot.name == mine.name and taken.snapshot.info.prefix_hash != mine.prefix_hash
            name = taken.snapshot.name
        with grpc.insecure_channel(server.address, options=OPTIONS) as channel:
            stub = InferenceServiceStub(with_token(channel, made["bob"][0]))
            theirs = answer_of(stub.Generate(question(raw_input(MORE), name), timeout=PATIENCE))
        assert values(theirs) == values(answer(server, raw_input(MORE), mine.name))
        assert theirs.usage.recomputed_tokens == 0
        assert take_in(pair.there, data).snapshot.token_count == 700


def test_the_client_copies_in_both_flavours(pair: Pair) -> None:
    made = create(pair.here, PROMPT)
    with pair.here.client() as here, pair.there.client() as there:
        copied = here.copy_snapshot(made.name, to=there)
        assert copied.snapshot.info.residency is Residency.MEMORY and copied.received_bytes > 0
        exported = here.export_snapshot(made.name)
        data = exported.read()
        assert exported.summary is not None and exported.summary.bytes == len(data)
        assert exported.summary.state_tokens == 700
        broken = bytearray(data)
        broken[-1] ^= 1
        there.delete_snapshot(made.name)
        with pytest.raises(ExportDamaged):
            there.import_snapshot([bytes(broken)])
        with pytest.raises(ZeroDivisionError):
            there.import_snapshot(1 // 0 for _ in data)
        with pytest.raises(SnapshotNotFound):
            here.copy_snapshot("snapshots/never-was", to=there)
        create(pair.there, MORE, snapshot_id="taken-there")
        with pytest.raises(SnapshotIdTaken):
            here.copy_snapshot(made.name, to=there, options=SaveOptions(snapshot_id="taken-there"))

    async def story() -> None:
        async with AsyncClient(pair.here.address) as here, AsyncClient(pair.there.address) as there:
            copied = await here.copy_snapshot(made.name, to=there, options=SaveOptions(snapshot_id="async-copy"))
            assert copied.snapshot.name == "snapshots/async-copy"
            assert (await there.import_snapshot([data])).received_bytes == 0
            with pytest.raises(ExportDamaged):
                await there.import_snapshot([bytes(broken)])
            with pytest.raises(ZeroDivisionError):
                await there.import_snapshot(1 // 0 for _ in data)
            with pytest.raises(SnapshotNotFound):
                await here.copy_snapshot("snapshots/never-was", to=there)
            async with asyncio.timeout(PATIENCE):
                begun = asyncio.Event()
                task = asyncio.ensure_future(there.import_snapshot(never(begun)))
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    async def never(begun: asyncio.Event) -> object:
        yield data[:100]
        begun.set()  # it was sent: more is asked for
        await asyncio.Event().wait()

    asyncio.run(story())


def test_the_command_line_writes_files_and_copies(pair: Pair, tmp_path: Path) -> None:
    create(pair.here, PROMPT, snapshot_id="on-the-move", labels={"k": "v"})
    file = tmp_path / "moved.kvx"

    def kvfork(server: LiveServer, *words: str, fails: bool = False) -> str:
        command = [sys.executable, "-m", "service", "snapshots", *words, "--address", server.address]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    assert "700 tokens" in kvfork(pair.here, "export", "on-the-move", str(file))
    assert file.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [file]
    assert file.read_bytes()[:4] == b"KVEX"
    told = json.loads(kvfork(pair.there, "import", str(file), "--label", "x=y", "--json"))
    assert told["snapshot"]["labels"] == {"x": "y"} and told["held_records"] == 0
    assert "0 records came" in kvfork(pair.here, "copy", "on-the-move", "--to", pair.there.address)
    told = kvfork(pair.here, "copy", "on-the-move", "--to", pair.there.address, "--save", "second-name")
    assert "second-name" in told and "there already" in told
    assert sorted(names(pair.there)) == ["snapshots/on-the-move", "snapshots/second-name"]
    kvfork(pair.here, "export", "never-was-here", str(tmp_path / "none"), fails=True)
    assert list(tmp_path.iterdir()) == [file]
    pipe = tmp_path / "pipe"  # as a device, it takes what is written and is not replaced
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        piped = pool.submit(pipe.read_bytes)
        assert "700 tokens" in kvfork(pair.here, "export", "on-the-move", str(pipe))
        assert piped.result(PATIENCE)[:4] == b"KVEX" and pipe.is_fifo()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "linked.kvx")
    for _ in range(2):  # what it points to is there at the second time
        kvfork(pair.here, "export", "on-the-move", str(link))
        assert link.is_symlink() and link.read_bytes()[:4] == b"KVEX"
    file.write_bytes(b"no export")
    assert "export" in kvfork(pair.there, "import", str(file), fails=True)


@pytest.mark.parametrize(("words", "said"), [("export some -", ">&-"), ("import -", "<&-")])
def test_a_closed_standard_stream_is_named(words: str, said: str) -> None:
    shell = f"{sys.executable} -m service snapshots {words} --address 127.0.0.1:1 {said}"
    done = subprocess.run(["bash", "-c", shell], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode and "is closed" in done.stderr and "Traceback" not in done.stderr


def test_a_server_that_goes_ends_its_exports_and_imports(key: Path) -> None:
    with LiveServer("tiny-llama", "--exchange-key", str(key), "--drain-seconds", "1", inside=True) as server:
        made = create(server, LONG)
        data = export(server, made.name)
        release = threading.Event()

        def wait() -> Iterator[snapshot_pb.ImportSnapshotRequest]:
            yield from in_pieces(data[: len(data) // 2], snapshot_id="half-of-it")
            release.wait(PATIENCE)

        coming = server.snapshots.ImportSnapshot.future(wait(), timeout=PATIENCE)
        until(lambda: server.report()["held"], what="the import to hold what comes")
        # A reader that takes little at a time, so that what is written for it cannot all be on its way.
        with grpc.insecure_channel(server.address, options=[("grpc.http2.bdp_probe", 0)]) as slow:
            request = snapshot_pb.ExportSnapshotRequest(name=made.name)
            going = SnapshotServiceStub(slow).ExportSnapshot(request, timeout=PATIENCE)
            assert next(going).summary.records == 25
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
            release.set()
            for ended in (refusal_of(coming.exception()), refused(lambda: list(going))):
                assert ended.code == "UNAVAILABLE"


def test_a_key_that_others_can_read_is_refused_at_the_start(tmp_path: Path) -> None:
    path = key_file(tmp_path / "open.key", "6c" * 32)
    path.chmod(0o644)
    with pytest.raises(ServerDidNotStart) as failed:
        LiveServer("tiny-llama", "--exchange-key", str(path), wait=False)
    assert "can be read by others" in failed.value.log
