"""Spans of a call: queue, restore, prefill, decode and save under the call's own. Owns which spans there are and when.

Without `--traces` nothing is made and nothing imported. With it the `otel` extra does the rest: where spans go is told
by its own variables, OTEL_EXPORTER_OTLP_ENDPOINT and its kin. Times are taken where events are made, on the engine
thread, so that a busy event loop does not look like a slow model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from service.extras import install
from service.facts import Fact
from service.work import Admitted, Ended, Failed, Tokens, Work, WorkEvent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class Span(Protocol):
    """The span of one call."""

    def end(self, code: str, facts: Mapping[str, Fact]) -> None: ...


class Tracer(Protocol):
    """Makes spans, or does not."""

    def call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> AbstractContextManager[Span]:
        """A context manager around one call, whose value is its span."""
        ...

    def following(self, work: Work, emit: Callable[[WorkEvent], None]) -> Callable[[WorkEvent], None]:
        """`emit`, with spans for what a work of the current call goes through."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


class _NoSpan:
    def end(self, code: str, facts: Mapping[str, Fact]) -> None:
        pass


class NoTracer:
    """Makes no spans."""

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> Iterator[Span]:
        yield _NoSpan()

    def following(self, work: Work, emit: Callable[[WorkEvent], None]) -> Callable[[WorkEvent], None]:
        return emit

    def close(self) -> None:
        """Nothing was made."""


class TracesUnavailable(Exception):
    """Traces were asked for, and what makes them is not installed."""


def otlp_tracer() -> OtelTracer:
    """Spans to wherever the OTEL_ variables say. Raises TracesUnavailable."""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise TracesUnavailable(f"{error.name} is not installed: {install('otel')}") from None
    # OTEL_SERVICE_NAME wins over ours.
    provider = TracerProvider(resource=Resource.create({"service.name": "kvfork"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider)


class OtelTracer:
    """Spans through an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvfork")
        self._trace, self._context = trace, context
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, Any]]) -> Iterator[Span]:
        """Goes on from the caller's `traceparent`, if there is one."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        service, _, name = method.rpartition("/")
        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        )
        token = self._context.attach(self._trace.set_span_in_context(span))
        try:
            yield _OtelSpan(span, self._trace)
        finally:
            self._context.detach(token)
            span.end()

    def following(self, work: Work, emit: Callable[[WorkEvent], None]) -> Callable[[WorkEvent], None]:
        parent = self._context.get_current()
        came = time.time_ns()
        admitted = first = last = 0

        def span(name: str, start: int, end: int, **attributes: Fact) -> None:
            made = self._tracer.start_span(name, context=parent, start_time=start, attributes=attributes)
            made.end(end)

        def seen(event: WorkEvent) -> None:
            nonlocal admitted, first, last
            match event:
                case Admitted():
                    admitted = time.time_ns()
                    span("queue", came, admitted)
                case Tokens() if event.picked:
                    last = time.time_ns()
                    first = first or last
                case Ended():
                    now = time.time_ns()
                    usage, restored = event.usage, admitted + round(event.timing.load * 1e9)
                    if usage.cached_tokens:
                        tiers: dict[str, Fact] = {
                            "memory_tokens": usage.memory_tokens,
                            "disk_tokens": usage.disk_tokens,
                        }
                        span("restore", admitted, restored, **tiers, disk_bytes=usage.disk_bytes_read)
                    computed = {"new_tokens": usage.new_tokens, "recomputed_tokens": usage.recomputed_tokens}
                    span("prefill", restored, max(restored, first or now), **computed)
                    if first:
                        span("decode", first, last, completion_tokens=usage.completion_tokens)
                        if work.generation is not None and work.generation.save:
                            span("save", last, now)
                case Failed():
                    now = time.time_ns()
                    if not admitted:
                        span("queue", came, now)
                    elif not first:
                        span("prefill", admitted, now)
                    else:
                        span("decode", first, now)
            emit(event)

        return seen

    def close(self) -> None:
        self._provider.shutdown()


class _OtelSpan:
    def __init__(self, span: Any, trace: Any) -> None:
        self._span = span
        self._trace = trace

    def end(self, code: str, facts: Mapping[str, Fact]) -> None:
        """Names and numbers become attributes; a code other than OK the span's status."""
        self._span.set_attributes({f"kvfork.{name}": value for name, value in facts.items()})
        self._span.set_attribute("rpc.grpc.status_code", code)
        if code != "OK":
            self._span.set_status(self._trace.StatusCode.ERROR, code)
