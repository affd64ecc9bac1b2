"""The end of a server: what a signal does to those who are connected, and what is left of their prompts."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.inside import STUCK
from tests.e2e.live import PATIENCE, LiveServer, answer_of, generate, greedy, prompt_of, raw, refusal_of, refused, until

ENDLESS = 20_000
SECRET = "The admiral's password is seven grey herons. "


def fill(server: LiveServer) -> list[int]:
    """Prompts whose state lies in memory and on disk; the ids of the longest."""
    count = server.inference.CountTokens(inference_pb.CountTokensRequest(input=raw(SECRET * 40), include_rendered=True))
    for i in range(3):
        generate(server, greedy(raw(SECRET * (20 + 10 * i)), tokens=5, save=pb.SnapshotOptions()))
    until(lambda: server.stats().disk_bytes > 100_000, what="state to be written")
    return list(count.token_ids)


def files_of(process: int) -> list[str]:
    """What the process has open, by the names that the kernel knows."""
    found = []
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def holds(path: Path, needles: list[bytes]) -> bool:
    data = path.read_bytes()
    return any(needle in data for needle in needles)


def test_state_on_disk_has_no_name_and_is_unreadable_while_the_server_runs() -> None:
    with LiveServer("tiny-gemma3", "--memory-bytes", "4MiB") as server:
        ids = fill(server)
        segments = [name for name in files_of(server.process.pid) if name.startswith(str(server.store))]
        assert segments and all(name.endswith("(deleted)") for name in segments)
        assert [name for name in server.left_behind() if Path(name).is_file()] == []
        needles = [SECRET.encode()[:24], b"".join(i.to_bytes(4, "little") for i in ids[:16])]
        for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
            if os.readlink(entry).startswith(str(server.store)):
                assert not holds(entry, needles)


def test_nothing_readable_is_left_after_a_kill() -> None:
    with LiveServer("tiny-gemma3", "--memory-bytes", "4MiB", "--log-level", "debug") as server:
        ids = fill(server)
        held = server.inference.Generate(greedy(raw(SECRET * 20), tokens=ENDLESS))
        next(held)
        server.kill()
        needles = [SECRET.encode()[:24], b"".join(i.to_bytes(4, "little") for i in ids[:16])]
        files = [Path(name) for name in server.left_behind() if Path(name).is_file()]
        assert files == []
        assert not holds(server.log, needles)


def test_nothing_is_left_after_a_stop() -> None:
    with LiveServer("tiny-gemma3", "--memory-bytes", "4MiB", "--log-level", "debug") as server:
        fill(server)
        assert server.terminate() == 0
        assert server.left_behind() == []
        assert not holds(server.log, [SECRET.encode()[:24]])


def test_streams_under_way_are_finished_by_a_stop() -> None:
    """Five that decode, one in a long prefill that holds no row yet, one that waits for a row."""
    with LiveServer("tiny-gemma3", "--max-batch", "5") as server:
        streams = []
        for lengths in ((40, 40, 40, 40, 20_000), (40, 40)):  # the long one is let in while there is a row
            for length in lengths:
                request = greedy(raw(prompt_of(length, len(streams))), tokens=ENDLESS, save=pb.SnapshotOptions())
                streams.append(server.inference.Generate(request, timeout=PATIENCE))
            until(lambda: server.stats().active_sequences >= 5, what="the first five")
        until(lambda: (s := server.stats()).active_sequences == 6 and s.queued_calls == 1, what="a full server")
        with ThreadPoolExecutor(7) as pool:
            answers = [pool.submit(answer_of, stream) for stream in streams]
            assert server.terminate() == 0
            reasons = {answer.result(PATIENCE).finished.reason for answer in answers}
        assert reasons == {inference_pb.FINISH_REASON_STOPPED}
        assert not server.complaints()


def test_a_draining_server_refuses_new_work_and_still_answers() -> None:
    with LiveServer("tiny-gemma3", "--drain-seconds", "20") as server:
        name = server.inference.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw("Hello"))).snapshot.name
        server.process.terminate()
        until(lambda: server.server.GetServerInfo(server_pb.GetServerInfoRequest()).draining, what="the drain to begin")
        answer = refused(lambda: server.inference.Generate(greedy(raw("Hello"))))
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "SERVER_DRAINING") and answer.retry_seconds
        bound = refused(lambda: server.inference.Generate(greedy(raw("Hello"), parent=name)))
        assert (bound.code, bound.reason, bound.retry_seconds) == ("UNAVAILABLE", "SERVER_DRAINING", None)
        assert server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name)).snapshot.name == name
        assert server.process.wait(PATIENCE) == 0


def test_work_on_text_that_hangs_keeps_no_process() -> None:
    with LiveServer("tiny-gemma3", "--drain-seconds", "1", inside=True) as server:
        call = server.inference.CountTokens.future(inference_pb.CountTokensRequest(input=raw(STUCK)))

        def is_stuck() -> bool:
            server.process.send_signal(signal.SIGUSR2)
            return " in stuck" in server.log.read_text()

        until(is_stuck, what="the text to be worked on")
        assert server.terminate() == 0
        assert call.exception() is not None
        assert "text_0" in server.log.read_text(), "the log does not say what was left behind"


def test_calls_that_arrive_during_a_stop_get_an_end() -> None:
    with LiveServer("tiny-gemma3") as server:

        def keep_calling(i: int) -> set[str]:
            ends = set()
            for turn in range(200):
                try:
                    list(server.inference.Generate(greedy(raw(prompt_of(30 * i, turn)), tokens=8), timeout=PATIENCE))
                    ends.add("finished")
                except grpc.RpcError as error:
                    ends.add(refusal_of(error).code)
                    return ends
            return ends

        with ThreadPoolExecutor(6) as pool:
            callers = [pool.submit(keep_calling, i) for i in range(1, 7)]
            time.sleep(0.5)
            assert server.terminate() == 0
            ends = set().union(*(caller.result(PATIENCE) for caller in callers))
        assert ends <= {"finished", "UNAVAILABLE"}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_signal_ends_at_once(signals: int) -> None:
    """A reader that does not read would hold the first one up for as long as it may."""
    with LiveServer("tiny-llama", "--drain-seconds", "3", "--write-stall-seconds", "2") as server:
        stream = server.inference.Generate(greedy(raw("Hello"), tokens=ENDLESS))
        next(stream)
        for _ in range(signals):
            server.process.terminate()
            time.sleep(0.2)
        assert server.process.wait(PATIENCE) == (0 if signals == 1 else 128 + 15)
        assert server.left_behind() == ([] if signals == 1 else [str(server.store)])
