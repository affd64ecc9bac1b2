"""Ways in which services of this kind have failed elsewhere, and that no other test here would notice.

The others are spread over the suite: cancels and races in `test_life_cycles` and `test_races`, stops in `test_shutdown`
and `test_end_under_load`, health in `test_engine_failures`, message sizes in tests/rpc.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1.snapshot_service_pb2_grpc import SnapshotServiceStub

from service.auth.tokens import new_token
from tests.e2e.live import (
    PATIENCE,
    ROOT,
    LiveServer,
    answer_of,
    generate,
    greedy,
    prompt_of,
    raw,
    refused,
    until,
    with_token,
)

pytestmark = [pytest.mark.mlx]

ENDLESS = 20_000


def in_a_process(program: str, *arguments: str, quiet: bool = False) -> str:
    """What a program of its own prints; it must end well, and in time. `quiet`: without a word on stderr."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, cwd=ROOT)
    assert done.returncode == 0 and not (quiet and done.stderr), done.stderr[-2_000:]
    return done.stdout.strip()


def test_a_collector_that_runs_at_any_moment_locks_nobody_out(server: LiveServer) -> None:
    """Call objects end in the collector, on whatever thread; a log that is in use there was a deadlock once."""
    told = in_a_process(
        """
        import asyncio, gc, logging, sys, threading
        from kvfork_client import AsyncClient, Stopping

        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
        over = threading.Event()

        def write():
            while not over.is_set():
                logging.getLogger("x").debug("busy")

        async def main():
            async with AsyncClient(sys.argv[1]) as client:
                for i in range(30):
                    generation = client.generate(f"number {i}", stopping=Stopping(max_tokens=40, ignore_eos=True))
                    async for _ in generation:
                        if i % 2:
                            break

        thread = threading.Thread(target=write)
        thread.start()
        gc.set_threshold(1)
        asyncio.run(main())
        over.set()
        thread.join()
        print("ended")
        """,
        server.address,
    )
    assert told == "ended"
    server.idle()


def test_connections_that_are_closed_in_the_middle_leave_no_descriptor(server: LiveServer) -> None:
    open_before = server.open_files
    told = in_a_process(
        """
        import asyncio, os, sys
        from kvfork_client import AsyncClient, Stopping

        def open_now():
            return len(os.listdir("/proc/self/fd"))

        async def once(i):
            async with AsyncClient(sys.argv[1]) as client:
                generation = client.generate(f"number {i}", stopping=Stopping(max_tokens=20_000, ignore_eos=True))
                reading = asyncio.ensure_future(generation.result())
                await asyncio.sleep(0.002 * (i % 10))
                reading.cancel()

        async def main():
            counts = []
            for i in range(200):
                await once(i)
                if i == 49:
                    await asyncio.sleep(0.2)
                    before = open_now()
            for _ in range(300):  # closing takes a moment
                if open_now() <= before + 4:
                    break
                await asyncio.sleep(0.1)
            print(open_now() - before)

        asyncio.run(main())
        """,
        server.address,
    )
    assert int(told) <= 4, "descriptors that 150 connections left"
    server.idle()
    until(lambda: server.open_files <= open_before + 4, what="the server's descriptors to be closed")


def test_a_status_with_details_survives_every_time(server: LiveServer) -> None:
    request = greedy(raw("x"), parent="snapshots/never-was-here")
    get = snapshot_pb.GetSnapshotRequest(name="snapshots/never-was-here")
    for _ in range(100):
        for call in (lambda: server.inference.Generate(request), lambda: server.snapshots.GetSnapshot(get)):
            answer = refused(call)
            assert (answer.code, answer.reason) == ("NOT_FOUND", "SNAPSHOT_NOT_FOUND")
            assert answer.resource == "snapshots/never-was-here"


@pytest.mark.slow
def test_the_server_has_one_event_loop_whatever_it_serves_and_clients_may_have_several() -> None:
    """Two loops in one process fight over one queue of the transport, and each prints that it was beaten to it."""
    with LiveServer("tiny-llama", "--metrics", ":0", "--inspector", ":0", inside=True) as server:
        program = """
            import asyncio, sys, threading
            from kvfork_client import AsyncClient, Client, Stopping

            more = Stopping(max_tokens=60, ignore_eos=True)

            async def talk(count):
                async with AsyncClient(sys.argv[1]) as client:
                    asked = [client.generate(f"n {i}", stopping=more).result() for i in range(count)]
                    return sum(r.usage.completion_tokens for r in await asyncio.gather(*asked))

            told = [asyncio.run(talk(3)) for _ in range(3)]  # one loop after the other
            with Client(sys.argv[1]) as client:  # and beside a client without one
                told.append(client.generate("x", stopping=more).result().usage.completion_tokens)
                told.append(asyncio.run(talk(2)))
            print(told)
            """
        assert in_a_process(program, server.address, quiet=True) == "[180, 180, 180, 60, 120]"
        running = server.inference.Generate(greedy(raw("Hello"), tokens=ENDLESS), timeout=PATIENCE)
        next(running)
        assert server.report()["loops"] == 1
        running.cancel()
        server.idle()
        assert "BlockingIOError" not in server.log.read_text()


@pytest.mark.slow
def test_programs_are_started_under_load_without_a_fork_of_the_transports_threads(tmp_path: Path) -> None:
    """A process that is copied with the transport's threads in it hangs. The token command is the only one we start."""
    token, line = new_token("ops", admin=True)
    told, count = tmp_path / "told", tmp_path / "count"
    told.write_text(f"{line}\n")
    command = f"sh -c 'echo x >> {count}; cat {told}'"
    with LiveServer("tiny-llama", "--token-command", command, "--token-refresh", "0.1s", token=token) as server:
        streams = [server.inference.Generate(greedy(raw(f"Hello {i}"), tokens=400), timeout=PATIENCE) for i in range(8)]
        second, line = new_token("alice")
        told.write_text(f"{told.read_text()}{line}\n")
        alice = SnapshotServiceStub(with_token(grpc.insecure_channel(server.address), second))
        until(lambda: known(alice), what="the new token")
        assert [len(answer_of(stream).ids) for stream in streams] == [400] * 8
        assert len(count.read_text().split()) >= 3, "it was run again and again meanwhile"
        log = server.log.read_text()
        assert "fork_posix" not in log and "Traceback" not in log, "what the transport says when it is forked"


def known(stub: SnapshotServiceStub) -> bool:
    try:
        stub.ListSnapshots(snapshot_pb.ListSnapshotsRequest(), timeout=PATIENCE)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True


def test_nothing_of_the_server_copies_its_process() -> None:
    """`subprocess` begins a program in place of the copy; what goes on in the copy is what hangs.

    What compiles forms is such a program, of one thread, and may copy itself.
    """
    wrong = []
    for package in ("service", "kvcache"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "form_worker.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                    wrong += [(path, name) for name in names if name.partition(".")[0] == "multiprocessing"]
                    wrong += [(path, name) for name in names & {"ProcessPoolExecutor"}]
                elif isinstance(node, ast.keyword):
                    wrong += [(path, "preexec_fn")] if node.arg == "preexec_fn" else []
                elif isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
                    owner = node.value
                    wrong += [(path, node.attr)] if isinstance(owner, ast.Name) and owner.id in ("os", "pty") else []
    assert wrong == []


@pytest.mark.slow
def test_one_thread_has_the_model_whatever_calls_come_while_it_decodes() -> None:
    """A model's arrays belong to the thread that made them: used from a second one, it fails or gives nonsense."""
    with LiveServer("tiny-gemma3", inside=True) as server:
        stub = server.inference
        root = stub.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(600, 1)))).snapshot
        question = greedy(raw(prompt_of(9, 2)), parent=root.name, tokens=40)
        alone = generate(server, question).ids
        running = [stub.Generate(greedy(raw(prompt_of(8, i)), tokens=ENDLESS), timeout=PATIENCE) for i in range(3)]
        for stream in running:
            next(stream)

        def one(i: int) -> list[int]:
            kind = i % 5
            if kind == 0:
                return ids_of(stub.Generate(question, timeout=PATIENCE))
            if kind == 1:
                stub.Fork(
                    inference_pb.ForkRequest(parent=root.name, branches=[inference_pb.ForkBranch(append=raw("a"))] * 2)
                )
            elif kind == 2:
                stub.Rollback(inference_pb.RollbackRequest(source=root.name, token_count=100 + i))
            elif kind == 3:
                stub.CountTokens(
                    inference_pb.CountTokensRequest(parent=root.name, plan=inference_pb.PlanOptions(branches=2))
                )
                server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0))
            else:
                server.stats()
                names = server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest()).snapshots
                server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=names[0].name, include_tokens=True))
            return alone

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(40))) == [alone] * 40
        for stream in running:
            stream.cancel()
        server.idle()
        used = server.report()
        assert {name: used[f"{name}_threads"] for name in ("model", "engine", "evaluation")} == {
            "model": 1, "engine": 1, "evaluation": 1,
        }  # fmt: skip


def ids_of(stream: Iterable[inference_pb.GenerateResponse]) -> list[int]:
    return [token for event in stream for token in event.delta.token_ids]


def test_stubs_live_beside_files_of_the_same_names() -> None:
    """Other packages have a types.proto of their own in the one pool of a process."""
    told = in_a_process(
        """
        from google.protobuf import descriptor_pb2, descriptor_pool
        for name in ("types.proto", "common.proto", "inference_service.proto", "v1/types.proto"):
            file = descriptor_pb2.FileDescriptorProto(name=name, package="somebody.else", syntax="proto3")
            file.message_type.add(name="Message" + name.replace("/", "").split(".")[0])
            descriptor_pool.Default().Add(file) if hasattr(descriptor_pool.Default(), "Add") else (
                descriptor_pool.Default().AddSerializedFile(file.SerializeToString()))
        import grpc_health.v1.health_pb2
        from kvfork.v1 import inference_service_pb2, server_service_pb2, snapshot_service_pb2, types_pb2
        print(types_pb2.Snapshot(name="x").name)
        """
    )
    assert told == "x"


@pytest.mark.slow
def test_2000_cancelled_streams_leave_no_memory_behind() -> None:
    with LiveServer("tiny-gemma3") as server:

        def cancel_some(count: int) -> int:
            for i in range(count):
                stream = server.inference.Generate(greedy(raw(prompt_of(5, i)), tokens=ENDLESS), timeout=PATIENCE)
                next(stream)
                stream.cancel()
            server.idle()
            return server.resident_bytes

        first = cancel_some(500)
        assert cancel_some(2_000) - first < 48 * 2**20


@pytest.mark.slow
def test_others_are_answered_while_two_mib_of_text_are_read(server: LiveServer) -> None:
    """How long they wait is `make bench-health`'s to say. Counting so many tokens may take longer than the call has."""
    from grpc_health.v1 import health_pb2
    from grpc_health.v1.health_pb2_grpc import HealthStub

    large = inference_pb.CountTokensRequest(input=raw("word " * 400_000))
    pending = server.inference.CountTokens.future(large, timeout=PATIENCE)
    health = HealthStub(server.channel)
    meanwhile = 0  # checks that were answered while the text was still being read
    while not pending.done():
        health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        meanwhile += not pending.done()
        time.sleep(0.05)
    assert meanwhile >= 1
    failed = pending.exception()
    assert failed is None or failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED, failed
    server.idle()
