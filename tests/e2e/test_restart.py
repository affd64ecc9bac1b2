"""A durable store over real restarts: what was acknowledged is there, bit for bit, and nothing is computed again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, ROOT, LiveServer, ServerDidNotStart, generate, greedy, prompt_of, raw, refused

pytestmark = [pytest.mark.mlx]

PROMPT = prompt_of(600)
MORE = prompt_of(3, seed=1)
NAME = "snapshots/kept-for-good"
DISK = pb.SnapshotOptions(snapshot_id="kept-for-good", durability=pb.DURABILITY_DISK, labels={"a": "b"})


def serve(model: str, store: Path, *flags: str) -> LiveServer:
    return LiveServer(model, "--store-dir", str(store), *flags)


def create(server: LiveServer, options: pb.SnapshotOptions | None = None) -> pb.Snapshot:
    request = inference_pb.CreateSnapshotRequest(input=raw(PROMPT), options=options)
    return server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot


def get(server: LiveServer, name: str) -> snapshot_pb.GetSnapshotResponse:
    return server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True))


def names(server: LiveServer) -> list[str]:
    return sorted(s.name for s in server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots)


def info(server: LiveServer) -> server_pb.GetServerInfoResponse:
    return server.server.GetServerInfo(server_pb.GetServerInfoRequest())


def go_on(server: LiveServer, name: str) -> tuple[list[int], list[float], int, int]:
    """Greedy tokens behind the snapshot, log-probabilities; tokens computed again, and tokens restored."""
    output = inference_pb.OutputOptions(token_ids=True, top_logprobs=3)
    answer = generate(server, greedy(raw(MORE), parent=name, tokens=12, output=output))
    values = [value for entry in answer.logprobs for value in (entry.logprob, *(top.logprob for top in entry.top))]
    assert len(values) == 12 * 4
    return answer.ids, values, answer.usage.recomputed_tokens, answer.usage.cached_tokens


def end(server: LiveServer, how: signal.Signals) -> None:
    if how is signal.SIGKILL:
        server.kill()
    else:
        assert server.terminate() == 0


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("tiny-gemma3", signal.SIGKILL),
        pytest.param("tiny-gemma3", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3_5", signal.SIGKILL, marks=pytest.mark.slow),
        ("tiny-qwen3_5", signal.SIGTERM),
    ],
)
def test_a_durable_snapshot_goes_on_bit_equal_after_its_server_ended(
    model: str, how: signal.Signals, tmp_path: Path
) -> None:
    with serve(model, tmp_path / "s") as server:
        made = create(server, DISK)
        end(server, how)  # at once after the answer
    assert made.durable
    with serve(model, tmp_path / "s") as server:
        found = get(server, NAME)
        there = found.snapshot
        assert (there.durable, there.token_count, dict(there.labels)) == (True, len(PROMPT), {"a": "b"})
        assert (there.prefix_hash, list(found.token_ids)) == (made.prefix_hash, PROMPT)
        again = go_on(server, NAME)
        assert again[2:] == (0, len(PROMPT))
    with serve(model, tmp_path / "other") as fresh:
        create(fresh, pb.SnapshotOptions(snapshot_id="kept-for-good"))
        assert go_on(fresh, NAME)[:2] == again[:2]


def test_what_was_not_durable_says_so_and_what_was_changed_stays_changed(tmp_path: Path) -> None:
    with serve("tiny-gemma3", tmp_path / "s") as server:
        before = info(server)
        memory = create(server)
        assert not memory.durable
        create(server, DISK)
        fork = inference_pb.ForkRequest(
            parent=NAME,
            branches=[
                inference_pb.ForkBranch(options=pb.SnapshotOptions(durability=pb.DURABILITY_DISK, pinned=True)),
                inference_pb.ForkBranch(
                    append=raw(MORE),
                    options=pb.SnapshotOptions(snapshot_id="deleted-later", durability=pb.DURABILITY_DISK),
                ),
            ],
        )
        pinned, deleted = server.inference.Fork(fork, timeout=PATIENCE).snapshots
        back = server.inference.Rollback(
            inference_pb.RollbackRequest(source=deleted.name, token_count=512, options=DISK_BACK), timeout=PATIENCE
        ).snapshot
        saved = generate(
            server,
            greedy(raw(MORE), parent=NAME, save=pb.SnapshotOptions(durability=pb.DURABILITY_DISK)),
        ).finished.snapshot
        assert pinned.durable and deleted.durable and back.durable and saved.durable
        server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=deleted.name))
        server.kill()
    with serve("tiny-gemma3", tmp_path / "s") as server:
        assert names(server) == sorted([NAME, pinned.name, back.name, saved.name])
        assert get(server, pinned.name).snapshot.pinned
        assert get(server, saved.name).snapshot.token_count == len(PROMPT) + len(MORE) + 16
        assert get(server, pinned.name).snapshot.parent == NAME
        after = info(server)
        assert (after.instance, list(after.features)) == (before.instance, ["durable"])
        assert after.boot_id != before.boot_id
        lost = refused(lambda: get(server, memory.name))
        assert (lost.code, lost.reason) == ("NOT_FOUND", "SNAPSHOT_NOT_DURABLE")
        assert lost.metadata == {"bootId": before.boot_id}
        assert refused(lambda: get(server, deleted.name)).reason == "SNAPSHOT_NOT_FOUND"


DISK_BACK = pb.SnapshotOptions(snapshot_id="rolled-back", durability=pb.DURABILITY_DISK)


@pytest.mark.slow
def test_another_model_sees_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    with serve("tiny-gemma3", tmp_path / "s") as server:
        create(server, DISK)
    with serve("tiny-llama", tmp_path / "s") as server:
        assert names(server) == []
        assert refused(lambda: get(server, NAME)).reason == "SNAPSHOT_NOT_FOUND"
        assert create(server, DISK).durable
    for model in ("tiny-gemma3", "tiny-llama"):
        with serve(model, tmp_path / "s") as server:
            assert names(server) == [NAME]
            assert go_on(server, NAME)[2:] == (0, len(PROMPT))


def test_a_lost_file_is_told_by_name_and_brings_the_snapshot_back(tmp_path: Path) -> None:
    with serve("tiny-gemma3", tmp_path / "s") as server:
        create(server, DISK)
        before = go_on(server, NAME)
    (segment,) = (tmp_path / "s" / "segments").iterdir()
    away = segment.rename(tmp_path / "away")
    with serve("tiny-gemma3", tmp_path / "s") as server:
        lost = refused(lambda: get(server, NAME))
        assert (lost.code, lost.reason, lost.metadata) == ("NOT_FOUND", "SNAPSHOT_LOST", {"snapshot": NAME})
        assert refused(lambda: go_on(server, NAME)).reason == "SNAPSHOT_LOST"
        told = server.log.read_text()
        assert f"{segment.name} is missing" in told and "1 durable snapshots are lost: kept-for-good of local" in told
    away.rename(segment)
    with serve("tiny-gemma3", tmp_path / "s") as server:
        assert go_on(server, NAME) == before
        assert "lost" not in server.log.read_text()


@pytest.mark.slow
def test_another_setting_keeps_what_is_pinned_and_carries_over_what_it_is_asked_to(tmp_path: Path) -> None:
    pinned = pb.SnapshotOptions(snapshot_id="kept-for-good", durability=pb.DURABILITY_DISK, pinned=True)
    other = {"MLX_DISABLE_COMPILE": "1"}
    with serve("tiny-gemma3", tmp_path / "s") as server:
        create(server, pinned)
        before = go_on(server, NAME)
    with LiveServer("tiny-gemma3", "--store-dir", str(tmp_path / "s"), env=other) as server:
        assert names(server) == []
        told = server.log.read_text()
        assert "1 durable snapshots, 1 of them pinned, belong to fingerprint" in told
        assert "MLX compilation was compile True, is compile False" in told and "--carry-over 1" in told
    flags = ("--store-dir", str(tmp_path / "s"), "--carry-over", "1")
    with LiveServer("tiny-gemma3", *flags, env=other) as server:
        there = get(server, NAME)
        assert (list(there.token_ids), there.snapshot.pinned) == (PROMPT, True)
        assert (there.snapshot.residency, there.snapshot.durable) == (pb.RESIDENCY_TOKENS, False)  # no state yet
        carried = go_on(server, NAME)
        assert carried[2:] == (len(PROMPT), 0)
    with LiveServer("tiny-gemma3", "--store-dir", str(tmp_path / "fresh"), env=other) as fresh:
        create(fresh, pinned)
        assert go_on(fresh, NAME)[:2] == carried[:2]
    with serve("tiny-gemma3", tmp_path / "s") as server:
        assert go_on(server, NAME) == before


def test_two_servers_cannot_share_a_store_and_the_second_says_why(tmp_path: Path) -> None:
    with serve("tiny-gemma3", tmp_path / "s") as server:
        with pytest.raises(ServerDidNotStart) as caught:
            serve("tiny-gemma3", tmp_path / "s")
        assert caught.value.code == 1
        assert f"is in use by process {server.process.pid}" in caught.value.log


def kvfork(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "service", *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_keys_are_rotated_and_shredded_from_the_command_line(tmp_path: Path) -> None:
    store, old, new = str(tmp_path / "s"), tmp_path / "old.key", tmp_path / "new.key"
    for file, byte in ((old, b"1"), (new, b"2")):
        file.touch(mode=0o600)
        file.write_bytes(byte * 32)
    with serve("tiny-gemma3", tmp_path / "s", "--key-file", str(old)) as server:
        create(server, DISK)
        busy = kvfork("store", "owners", "--store-dir", store, "--key-file", str(old))
        assert (busy.returncode, "in use by process" in busy.stderr) == (1, True)
    rotated = kvfork(
        "store", "rotate-key", "--store-dir", store, "--key-file", str(old), "--new-key-command", f"cat '{new}'"
    )
    assert rotated.returncode == 0, rotated.stderr
    with pytest.raises(ServerDidNotStart, match="does not open this store"):
        serve("tiny-gemma3", tmp_path / "s", "--key-file", str(old))
    with pytest.raises(ServerDidNotStart, match="master key that was not given"):
        serve("tiny-gemma3", tmp_path / "s")
    with serve("tiny-gemma3", tmp_path / "s", "--key-file", str(new)) as server:
        assert go_on(server, NAME)[2:] == (0, len(PROMPT))
    key = ("--store-dir", store, "--key-file", str(new))
    assert kvfork("store", "owners", *key).stdout == "local\n"
    assert kvfork("store", "shred", *key, "--owner", "nobody").returncode == 1
    assert kvfork("store", "shred", *key, "--owner", "local").returncode == 0
    with serve("tiny-gemma3", tmp_path / "s", "--key-file", str(new)) as server:
        assert names(server) == []
        assert create(server, DISK).durable
