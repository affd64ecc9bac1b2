"""Spans of calls: which there are, when they begin and end, whose children they are, and where they are sent."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvcache.receipt import Usage
from service.errors import QueueFull
from service.events import FinishReason, Timing
from service.plan import Picked
from service.request import Sampling, Stopping
from service.tracing import NoTracer, OtelTracer, TracesUnavailable, otlp_tracer
from service.work import Admitted, Ended, Failed, Generation, Tokens, Work

GENERATION: Any = Generation(
    sampling=Sampling(), stopping=Stopping(), top_logprobs=None, text=None, save=True, save_on_cancel=False  # type: ignore[arg-type]
)  # fmt: skip
WORK = Work(owner="a", tokens=[1], base=None, keep=frozenset(), generation=GENERATION)
USAGE = Usage(prompt_tokens=9, cached_tokens=5, memory_tokens=2, disk_tokens=3, disk_bytes_read=7, new_tokens=4)


class Scene:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = OtelTracer(provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        found = self.exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.tracer.close()


@contextmanager
def call(scene: Scene, metadata: Any = ()) -> Iterator[Any]:
    with scene.tracer.call("kvfork.v1.InferenceService/Generate", metadata) as span:
        yield span


def test_a_generation_has_a_span_for_each_phase_in_order(scene: Scene) -> None:
    heard: list[object] = []
    with call(scene) as span:
        emit = scene.tracer.following(WORK, heard.append)
        events = [
            Admitted(0.0),
            Tokens("a", 9, [Picked(token=1)]),
            Tokens("b", 10, [Picked(token=2)]),
            Ended(usage=USAGE, timing=Timing(load=0.001), reason=FinishReason.EOS),
        ]
        for event in events:
            time.sleep(0.003)
            emit(event)
        span.end("OK", {"call": "c1", "generation": "generations/g1"})
    assert heard == events
    spans = scene.spans
    assert list(spans) == ["queue", "restore", "prefill", "decode", "save", "kvfork.v1.InferenceService/Generate"]
    root = spans["kvfork.v1.InferenceService/Generate"]
    phases = [spans[name] for name in ("queue", "restore", "prefill", "decode", "save")]
    for phase in phases:
        assert phase.parent is not None and root.context is not None
        assert phase.parent.span_id == root.context.span_id
        assert phase.start_time <= phase.end_time  # type: ignore[operator]
    for before, after in itertools.pairwise(phases):
        assert before.end_time == after.start_time, "there is no gap between two phases"
    assert spans["restore"].attributes == {"memory_tokens": 2, "disk_tokens": 3, "disk_bytes": 7}
    assert spans["prefill"].attributes == {"new_tokens": 4, "recomputed_tokens": 0}
    assert root.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "kvfork.v1.InferenceService",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": "OK",
        "kvfork.call": "c1",
        "kvfork.generation": "generations/g1",
    }
    assert root.status.is_unset


def test_a_call_goes_on_from_its_caller_s_trace(scene: Scene) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = (("traceparent", f"00-{trace}-{parent}-01"), ("x-bin", b"\x00"))
    with call(scene, metadata) as span:
        span.end("NOT_FOUND", {})
    (root,) = scene.spans.values()
    assert root.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == trace and f"{root.parent.span_id:016x}" == parent
    assert not root.status.is_ok and root.status.description == "NOT_FOUND"


@pytest.mark.parametrize(
    ("events", "names"),
    [
        ([Failed(QueueFull("full"))], ["queue"]),
        ([Admitted(0.0), Failed(QueueFull("x"))], ["queue", "prefill"]),
        ([Admitted(0.0), Tokens("a", 9, [Picked(token=1)]), Failed(QueueFull("x"))], ["queue", "decode"]),
        ([Admitted(0.0), Ended(usage=Usage(prompt_tokens=0), timing=Timing(), reason=None)], ["queue", "prefill"]),
    ],
)
def test_a_call_that_ends_early_has_spans_for_what_there_was(scene: Scene, events: list[Any], names: list[str]) -> None:
    with call(scene) as span:
        emit = scene.tracer.following(WORK, lambda event: None)
        for event in events:
            emit(event)
        span.end("OK", {})
    assert list(scene.spans)[:-1] == names


def test_works_of_one_call_are_children_of_the_same(scene: Scene) -> None:
    with call(scene) as span:
        emits = [scene.tracer.following(WORK, lambda event: None) for _ in range(2)]
        for emit in emits:
            emit(Admitted(0.0))
        span.end("OK", {})
    found = scene.exporter.get_finished_spans()
    assert [s.name for s in found] == ["queue", "queue", "kvfork.v1.InferenceService/Generate"]
    assert len({s.parent.span_id for s in found[:2] if s.parent is not None}) == 1


def test_without_traces_events_pass_untouched() -> None:
    def emit(event: object) -> None:
        """Nothing."""

    tracer = NoTracer()
    with tracer.call("x/y", ()) as span:
        assert tracer.following(WORK, emit) is emit
        span.end("OK", {})
    tracer.close()


def test_traces_without_what_makes_them_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(TracesUnavailable, match=r"pip install -e '\.\[otel\]' in a clone of kvfork"):
        otlp_tracer()
