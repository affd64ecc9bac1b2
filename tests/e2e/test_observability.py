"""What a running server shows of itself: metrics, log lines, traces, plans and rows, held against what calls heard."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb
from kvfork_client import Admission, Phase
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.live import (
    PATIENCE,
    ROOT,
    Answer,
    LiveServer,
    answer_of,
    generate,
    greedy,
    prompt_of,
    raw,
    refused,
    until,
)

pytestmark = [pytest.mark.mlx]

SECRET = "Seven grey herons know the admiral's password."


@pytest.fixture(scope="module")
def shown() -> Iterator[LiveServer]:
    flags = ("--metrics", ":0", "--log-format", "json", "--log-level", "debug", "--max-batch", "2", "--max-queue", "3")
    with LiveServer("tiny-gemma3", *flags) as server:
        yield server


def scrape(server: LiveServer) -> dict[str, float]:
    found = re.search(r"metrics at (http://[^\"\s]+)", server.log.read_text())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=PATIENCE) as reply:
        page = reply.read().decode()
    assert SECRET not in page
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_are_the_sum_of_what_calls_were_told(shown: LiveServer) -> None:
    before = scrape(shown)
    long = raw(SECRET, prompt_of(600))
    answers = [
        generate(shown, greedy(long, tokens=5, save=pb.SnapshotOptions(snapshot_id="shown-first"))),
        generate(shown, greedy(long, tokens=5)),
        generate(shown, greedy(raw("More"), parent="snapshots/shown-first", tokens=7)),
    ]
    refused(lambda: shown.inference.Generate(greedy(raw("x"), parent="snapshots/no-such-one")))
    shown.idle()
    after = scrape(shown)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def told(field: str) -> int:
        return sum(getattr(answer.usage, field) for answer in answers)

    for source, name in (("memory", "memory_tokens"), ("disk", "disk_tokens"), ("recomputed", "recomputed_tokens")):
        assert grown(f"kvfork_prompt_tokens_total|source={source}") == told(name), source
    assert grown("kvfork_prompt_tokens_total|source=new") == told("new_tokens")
    assert told("memory_tokens") + told("disk_tokens") > 0
    assert grown("kvfork_completion_tokens_total") == told("completion_tokens") == 17
    assert grown("kvfork_time_to_first_token_seconds_count") == 3
    assert grown("kvfork_inter_token_seconds_count") == 17 - 3
    assert grown("kvfork_queue_seconds_count") == 3
    assert grown("kvfork_decode_batch_rows_count") == grown("kvfork_decode_batch_rows_sum") > 0
    assert grown("kvfork_calls_total|code=OK|method=Generate") == 3
    assert grown("kvfork_calls_total|code=NOT_FOUND|method=Generate") == 1
    assert grown("kvfork_sequences_total|kind=generation|outcome=max_tokens") == 3
    assert after["kvfork_engine_up"] == 1.0 and after["kvfork_decode_batch_rows_limit"] == 2.0
    stats = shown.stats()
    assert after["kvfork_snapshots|residency=memory"] + after["kvfork_snapshots|residency=disk"] == 1.0
    assert stats.completion_tokens >= 17


def test_every_line_is_json_and_names_call_and_snapshot_but_no_words(shown: LiveServer) -> None:
    answer = generate(
        shown,
        greedy(raw(SECRET), tokens=3, save=pb.SnapshotOptions(snapshot_id="logged-one", labels={"note": SECRET[:20]})),
    )
    shown.inference.Fork(inference_pb.ForkRequest(parent="snapshots/logged-one", branches=[inference_pb.ForkBranch()]))
    refused(lambda: shown.inference.Generate(greedy(raw(SECRET), parent="snapshots/no-such-one")))
    refused(lambda: shown.inference.Generate(inference_pb.GenerateRequest(input=pb.Input(raw=pb.RawInput()))))
    lines: list[dict[str, Any]] = []

    def all_there() -> bool:
        lines[:] = [json.loads(line) for line in shown.log.read_text().splitlines()]
        return sum(line.get("method") == "Fork" for line in lines) > 0

    until(all_there, what="the log")
    (line,) = [line for line in lines if line.get("generation") == answer.started.generation]
    assert {key: line[key] for key in ("method", "code", "snapshot", "finish", "prompt_tokens", "new_tokens")} == {
        "method": "Generate",
        "code": "OK",
        "snapshot": "snapshots/logged-one",
        "finish": "MAX_TOKENS",
        "prompt_tokens": answer.usage.prompt_tokens,
        "new_tokens": answer.usage.new_tokens,
    }
    forks = [line for line in lines if line.get("method") == "Fork"]
    assert forks[-1]["parent"] == "snapshots/logged-one" and forks[-1]["snapshot"].startswith("snapshots/")
    text = shown.log.read_text()
    assert SECRET[:20] not in text and answer.text.strip()[:8] not in text
    assert len({line["call"] for line in lines if "method" in line}) == sum("method" in line for line in lines)


# -- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-gemma3", "tiny-llama"])
def test_a_plan_is_what_the_call_then_costs(server_for: Callable[[str], LiveServer], model: str) -> None:
    server = server_for(model)
    context = prompt_of(700, 31)
    with server.client() as client:
        cold = client.plan("never seen " * 30)
        assert (cold.cached_tokens, cold.recomputed_tokens, cold.new_tokens) == (0, 0, cold.total_tokens)
        generate(server, greedy(raw(context), tokens=3, save=pb.SnapshotOptions(snapshot_id="planned-one")))
        for parent, given in (("", raw(context, [5, 6])), ("snapshots/planned-one", raw([9] * 20))):
            request = inference_pb.CountTokensRequest(
                parent=parent, input=given, plan=inference_pb.PlanOptions(max_tokens=4)
            )
            counted = server.inference.CountTokens(request)
            usage = generate(server, greedy(given, parent=parent, tokens=4)).usage
            plan = counted.plan
            for field in ("memory_tokens", "disk_tokens", "recomputed_tokens", "new_tokens", "miss_reason"):
                assert getattr(plan, field) == getattr(usage, field), field
            assert counted.cached_tokens == usage.cached_tokens
            assert plan.disk_bytes == usage.disk_bytes_read
            assert (plan.admission, plan.reason) == (inference_pb.ADMISSION_NOW, "")
            assert plan.need_bytes and plan.HasField("predicted_prefill")
        warm = client.plan(parent="snapshots/planned-one", max_tokens=4)
        assert warm.new_tokens == 0 and warm.cached_tokens == warm.total_tokens
        client.snapshot("snapshots/planned-one").release()


def test_a_plan_says_what_is_not_measured_yet_and_what_would_be_refused() -> None:
    flags = ("--max-batch", "2", "--max-queue", "3", "--max-snapshots", "6", "--active-bytes", "64MiB")
    with LiveServer("tiny-gemma3", *flags) as server, server.client() as client:
        first = client.plan("hello")
        assert (first.load, first.prefill, first.ttft) == (0.0, None, None)
        client.generate("hello " * 300, save=True).result()
        later = client.plan("another text of some length")
        assert later.prefill is not None and later.ttft == later.prefill > 0
        name = next(client.list_snapshots()).name
        asked = [client.plan(parent=name, branches=n, max_tokens=8) for n in (2, 5)]
        assert [(p.admission, p.reason) for p in asked] == [(Admission.NOW, ""), (Admission.QUEUED, "ROWS_BUSY")]
        six = client.plan(parent=name, branches=6, max_tokens=8)
        assert (six.admission, six.reason) == (Admission.REFUSED, "SNAPSHOT_QUOTA")
        full = client.plan("hello", branches=6, max_tokens=8)
        assert full.admission is Admission.REFUSED
        long = server.inference.CountTokens(
            inference_pb.CountTokensRequest(input=raw([5] * 32_768), plan=inference_pb.PlanOptions())
        )
        assert (long.plan.admission, long.plan.reason) == (inference_pb.ADMISSION_REFUSED, "CONTEXT_OVERFLOW")
        before = server.stats()
        assert (before.active_sequences, before.active_bytes) == (0, 0), "a plan reserves nothing"
        held = [server.inference.Generate(greedy(raw([5, 6, i]), tokens=20_000)) for i in range(2)]
        for stream in held:
            next(stream)
        busy = client.plan("hello", max_tokens=8)
        assert (busy.admission, busy.reason) == (Admission.QUEUED, "ROWS_BUSY")
        for stream in held:
            stream.cancel()
        server.idle()
        bad = inference_pb.CountTokensRequest(input=raw("x"), plan=inference_pb.PlanOptions(branches=65, max_tokens=0))
        answer = refused(lambda: server.inference.CountTokens(bad))
        assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", ("plan.branches", "plan.max_tokens"))


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows_and_top_show_what_runs_and_what_waits(shown: LiveServer) -> None:
    made = shown.inference.CreateSnapshot(
        inference_pb.CreateSnapshotRequest(input=raw("Roots"), options=pb.SnapshotOptions(snapshot_id="top-root"))
    ).snapshot
    branch = inference_pb.ForkBranch(append=raw(" grow"), options=pb.SnapshotOptions(snapshot_id="top-child"))
    shown.inference.Fork(inference_pb.ForkRequest(parent=made.name, branches=[branch]))
    streams = [shown.inference.Generate(greedy(raw([5, i]), parent=made.name, tokens=20_000)) for i in range(2)]
    started = [next(stream).started.generation for stream in streams]
    streams.append(shown.inference.Generate(greedy(raw([5, 9]), parent=made.name, tokens=20_000, priority=3)))
    with shown.client() as client:
        until(
            lambda: (c := client.cache_stats()).decoding_rows == 2 and c.queued_calls == 1,
            what="two rows that decode and a call that waits",
        )
        cache = client.cache_stats()
        assert (cache.active_sequences, cache.queued_calls, len(cache.rows)) == (2, 1, 3)
        assert cache.active_bytes > 0
        by_name = {row.generation: row for row in cache.rows}
        for generation in started:
            row = by_name[generation]
            assert (row.phase, row.parent, row.done_tokens) == (Phase.DECODE, made.name, row.prompt_tokens)
        waiting = [row for row in cache.rows if row.phase is Phase.QUEUED]
        assert len(waiting) == 1 and (waiting[0].completion_tokens, waiting[0].priority) == (0, 3)
    top = subprocess.run(
        [sys.executable, "-m", "service", "top", "--address", shown.address],
        capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE,
    )  # fmt: skip
    assert top.returncode == 0, top.stderr
    lines = top.stdout.splitlines()
    assert any(line.startswith("running  2 of 2 rows: 2 decode;  1 of 3 waiting") for line in lines), top.stdout
    assert sum(" decode " in line and "top-root" in line for line in lines) == 2
    assert any(line.startswith("top-root  ") and "used by 3" in line for line in lines)
    assert any(re.match(r"[├└]─ top-child  ", line) for line in lines)
    for stream in streams:
        stream.cancel()
    shown.idle()
    assert shown.server.GetCacheStats(server_pb.GetCacheStatsRequest()).rows == []
    shown.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=made.name, descendants=True))


# -- traces ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP endpoint in this process, and the spans that came to it."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

    spans: list[Any] = []
    lock = threading.Lock()

    class Service(otlp_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            with lock:
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", spans
    server.stop(None).wait()


def test_spans_of_a_call_reach_the_collector_in_the_caller_s_trace() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with collector() as (endpoint, spans):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with LiveServer("tiny-gemma3", "--traces", "otlp", env=env) as server:
            context = raw(prompt_of(520), SECRET)
            generate(server, greedy(context, tokens=3))
            request = greedy(context, tokens=3, save=pb.SnapshotOptions())
            metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)
            answer: Answer = answer_of(server.inference.Generate(request, metadata=metadata, timeout=PATIENCE))
            assert server.terminate() == 0  # what is left is sent
        mine = [span for span in spans if span.trace_id.hex() == trace]
    by_name = {span.name: span for span in mine}
    root = by_name.pop("kvfork.v1.InferenceService/Generate")
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert set(by_name) == {"queue", "restore", "prefill", "decode", "save"}
    for span in by_name.values():
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    told = {pair.key: pair.value.string_value for pair in root.attributes}
    assert told["kvfork.generation"] == answer.started.generation
    assert told["kvfork.snapshot"] == answer.finished.snapshot.name
    assert SECRET not in str(spans)


def test_a_metrics_address_that_is_taken_is_said_at_the_start(shown: LiveServer, tmp_path: Path) -> None:
    found = re.search(r"metrics at http://([^/]+)/", shown.log.read_text())
    assert found is not None
    command = [sys.executable, "-m", "service", "serve", "--model", "tiny-gemma3", "--address", "127.0.0.1:0"]
    done = subprocess.run([*command, "--metrics", found[1]], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 1 and f"error: cannot listen on {found[1]} for metrics" in done.stderr
