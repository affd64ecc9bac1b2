"""How long a health check takes while the server is as full as it gets: every row decoding, prompts arriving, the queue
full, a large request being read, snapshots watched and metrics scraped."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from tests.bench.ours import Server, raw
from tests.bench.report import Figure, Options, emit, note
from tests.bench.texts import some_tokens

BATCH, QUEUE = 8, 16
SERVICE = "kvfork.v1.InferenceService"


def run(options: Options) -> None:
    model = options.model or ("tiny-llama" if options.quick else "smollm2")
    checks = options.runs or (100 if options.quick else 2_000)
    with Server(model, "--max-batch", str(BATCH), "--max-queue", str(QUEUE)) as server:
        vocab = server.get_model().vocab_size
        idle = _checks(server, checks // 4)
        over = threading.Event()
        with ThreadPoolExecutor(BATCH + QUEUE + 2) as pool:
            callers = [pool.submit(_call, server, some_tokens(300, n, vocab), over) for n in range(BATCH + QUEUE)]
            callers += [pool.submit(_large, server, over), pool.submit(_watch, server, over)]
            try:
                _until_full(server)
                busy = _checks(server, checks)
                stats = server.stats()
            finally:
                over.set()
            for caller in callers:
                caller.result()
    note(f"  {stats.active_sequences} rows, {stats.queued_calls} waiting")
    emit(
        Figure(
            metric="health.check_p99_ms",
            value=_percentile(busy, 99),
            unit="ms",
            ours=statistics.median(busy),
            against=_percentile(idle, 99),
            peer="the same server idle, p99; ours is the median under load",
            model=model,
            n=checks,
            extra={"max": max(busy), "rows": stats.active_sequences, "waiting": stats.queued_calls},
        )
    )


def _checks(server: Server, count: int) -> list[float]:
    """Milliseconds of so many checks, one after the other on a connection of their own."""
    took = []
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub, request = HealthStub(channel), health_pb2.HealthCheckRequest(service=SERVICE)
        while stub.Check(request, wait_for_ready=True).status != health_pb2.HealthCheckResponse.SERVING:
            time.sleep(0.05)  # the model is loaded a moment before health has heard of it
        for _ in range(count):
            began = time.perf_counter()
            status = stub.Check(request, timeout=60).status
            took.append(1e3 * (time.perf_counter() - began))
            assert status == health_pb2.HealthCheckResponse.SERVING
            time.sleep(0.005)
    return took


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _call(server: Server, prompt: list[int], over: threading.Event) -> None:
    """Generates again and again; refused for a full queue, it tries again."""
    while not over.is_set():
        request = inference_pb.GenerateRequest(input=raw(tokens=prompt))
        request.stopping.max_tokens, request.stopping.ignore_eos = 400, True
        stream = server.inference.Generate(request)
        try:
            for _ in stream:
                if over.is_set():
                    stream.cancel()
                    return
        except grpc.RpcError:
            time.sleep(0.05)


def _large(server: Server, over: threading.Event) -> None:
    """A request of 16 MiB, again and again."""
    request = inference_pb.CountTokensRequest(input=raw(tokens=[5] * 2**22))
    while not over.is_set():
        try:
            server.inference.CountTokens(request, timeout=60)
        except grpc.RpcError:
            time.sleep(0.05)
        time.sleep(0.2)


def _watch(server: Server, over: threading.Event) -> None:
    watch = server.snapshots.WatchSnapshots(snapshot_pb.WatchSnapshotsRequest())
    over.wait()
    watch.cancel()


def _until_full(server: Server) -> None:
    give_up = time.monotonic() + 120
    while (stats := server.stats()).queued_calls < QUEUE - 2 or stats.decoding_rows < BATCH // 2:
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"the server did not fill up: {stats.active_sequences} rows, {stats.queued_calls} waiting"
            )
        time.sleep(0.05)
