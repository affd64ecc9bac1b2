"""Every metric: its name, what it means, and where its value comes from. The one module that knows Prometheus.

Labels are of a few known values each: methods of the contract, codes, reasons and tiers; never owners, names or models'
texts. `dashboard.json` beside this module is a Grafana dashboard over these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.events import StatsView
from service.measures import Histogram
from service.metering import Meter
from service.totals import Totals

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics(Collector):
    """All metrics of a process. `stats` may be slow: `page` is for a thread."""

    def __init__(
        self,
        meter: Meter,
        totals: Totals,
        stats: Callable[[], StatsView],
        *,
        version: str,
        model: str,
        max_batch: int,
        alive: Callable[[], bool],
        watches: Callable[[], int],
        ended: Callable[[], Mapping[str, int]],
    ) -> None:
        """`ended`: names that ended, by reason."""
        self._meter = meter
        self._totals = totals
        self._stats = stats
        self._about = {"version": version, "model": model}
        self._max_batch = max_batch
        self._alive = alive
        self._watches = watches
        self._ended = ended
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not looked up at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything at this moment."""
        yield _gauge("kvfork_build_info", "Version and model; always 1.", {tuple(self._about.items()): 1.0})
        yield _gauge("kvfork_engine_up", "1 while the model thread makes progress or idles.", float(self._alive()))
        yield from self._calls()
        yield from self._tokens()
        yield from self._store(self._stats())

    def _calls(self) -> Iterator[Metric]:
        meter = self._meter
        yield _counter(
            "kvfork_calls",
            "Calls that ended, by method and status code.",
            {(("method", method), ("code", code)): n for (method, code), n in meter.calls.copy().items()},
        )
        yield _gauge(
            "kvfork_calls_in_progress",
            "Calls that have begun and not ended.",
            {(("method", method),): n for method, n in meter.calls_in_progress.copy().items()},
        )
        yield _counter("kvfork_call_seconds", "Seconds that calls took, in all, by method.", {
            (("method", method),): n for method, n in meter.call_seconds.copy().items()
        })  # fmt: skip
        yield _counter(
            "kvfork_sequences",
            "Sequences that ended, by kind (generation, snapshot) and how: a finish reason or an error's.",
            {(("kind", kind), ("outcome", how)): n for (kind, how), n in meter.sequences.copy().items()},
        )
        yield _counter(
            "kvfork_stream_write_seconds", "Seconds that streams waited for their readers.", meter.stream_waits
        )
        yield _counter("kvfork_stream_slow_readers", "Generations ended for a reader that stopped.", meter.slow_readers)
        yield _counter(
            "kvfork_refused",
            "Calls that ended with an error, by its reason; those that were not let in are in no other number.",
            {(("reason", reason),): n for reason, n in meter.refused.copy().items()},
        )
        yield _gauge("kvfork_watches", "Snapshot watches that are open.", self._watches())
        yield _counter(
            "kvfork_snapshots_ended",
            "Names that ended, by reason.",
            {(("reason", reason),): n for reason, n in self._ended().items()},
        )

    def _tokens(self) -> Iterator[Metric]:
        meter, totals = self._meter, self._totals
        for name, about, histogram in (
            ("kvfork_queue_seconds", "From a call's arrival to its admission.", meter.queue_seconds),
            ("kvfork_time_to_first_token_seconds", "From a call's arrival to its first token.", meter.ttft_seconds),
            ("kvfork_inter_token_seconds", "Between two tokens of a generation.", meter.gap_seconds),
            ("kvfork_restore_seconds", "Reading the stored state of a sequence.", totals.restore_seconds),
            ("kvfork_decode_batch_rows", "Sequences in a decode step.", totals.decode_rows),
        ):
            yield _histogram(name, about, histogram)
        yield _gauge("kvfork_decode_batch_rows_limit", "Most sequences in a decode step.", self._max_batch)
        yield _counter(
            "kvfork_prompt_tokens",
            "Tokens of contexts, by where their state came from: memory, disk, recomputed, new.",
            {(("source", source),): n for source, n in meter.prompt_tokens.copy().items()},
        )
        yield _counter("kvfork_completion_tokens", "Generated tokens.", meter.completion_tokens)
        yield _counter("kvfork_prefill_tokens", "Tokens that went through prefill calls.", totals.tokens_prefilled)
        yield _counter("kvfork_prefill_seconds", "Seconds in prefill calls.", totals.prefill_seconds)
        yield _counter("kvfork_decode_seconds", "Seconds in decode calls.", totals.decode_seconds)

    def _store(self, stats: StatsView) -> Iterator[Metric]:
        yield _gauge(
            "kvfork_rows",
            "Sequences by phase.",
            {
                (("phase", phase),): float(count)
                for phase, count in (
                    ("queued", stats.queued_calls),
                    ("restoring", stats.restoring_rows),
                    ("prefill", stats.prefilling_rows),
                    ("decode", stats.decoding_rows),
                    ("saving", stats.saving_rows),
                )
            },
        )
        yield _gauge("kvfork_active_bytes", "Working memory reserved by running sequences.", stats.active_bytes)
        yield _gauge("kvfork_active_limit_bytes", "Bound on it, before kept state gives way.", stats.active_limit_bytes)
        yield _gauge(
            "kvfork_snapshots",
            "Snapshots by where their state is.",
            {
                (("residency", "memory"),): float(stats.memory_snapshots),
                (("residency", "disk"),): float(stats.disk_snapshots),
                (("residency", "tokens"),): float(stats.token_snapshots),
            },
        )
        yield _gauge(
            "kvfork_store_bytes",
            "State kept, by tier.",
            {(("tier", "memory"),): float(stats.memory_bytes), (("tier", "disk"),): float(stats.disk_bytes)},
        )
        yield _gauge(
            "kvfork_store_limit_bytes",
            "Bounds on state kept, by tier.",
            {
                (("tier", "memory"),): float(stats.memory_limit_bytes),
                (("tier", "disk"),): float(stats.disk_limit_bytes),
            },
        )
        yield _gauge("kvfork_store_queue_bytes", "State accepted and on its way to disk.", stats.pending_bytes)
        yield _counter("kvfork_store_records_written", "Records written to disk.", stats.checkpoints_written)
        yield _counter("kvfork_store_records_read", "Records read, from either tier.", stats.checkpoints_read)
        today = "Bytes written to disk since the day (UTC) or the process began."
        yield _gauge("kvfork_store_written_today_bytes", today, stats.written_today_bytes)
        yield _counter(
            "kvfork_store_skipped",
            "Records not taken, or given up rather than written, by reason.",
            {(("reason", reason),): float(n) for reason, n in stats.checkpoints_skipped.items()},
        )
        yield _counter(
            "kvfork_store_waits",
            "Times that state somebody asked for waited for a full queue.",
            self._totals.store_waits,
        )
        yield _counter("kvfork_store_write_errors", "Writes that failed.", stats.write_errors)
        yield _gauge("kvfork_store_writes_paused", "1 while writing rests after failures.", float(stats.writes_paused))
        evicted: Labelled = {(("reason", f"{tier}_budget"),): float(n) for tier, n in stats.evictions_by_tier.items()}
        yield _counter(
            "kvfork_evictions",
            "Records given up, by reason: memory_budget, disk_budget, pending_budget (on its way to disk), corrupt.",
            {**evicted, (("reason", "corrupt"),): float(stats.checkpoints_corrupt)},
        )


Labelled = Mapping[tuple[tuple[str, str], ...], float]


def _counter(name: str, about: str, value: float | Labelled) -> Metric:
    return _filled(CounterMetricFamily, name, about, value)


def _gauge(name: str, about: str, value: float | Labelled) -> Metric:
    return _filled(GaugeMetricFamily, name, about, value)


def _filled(family: Callable[..., Metric], name: str, about: str, value: float | Labelled) -> Metric:
    if not isinstance(value, Mapping):
        return family(name, about, value=value)
    keys = [key for key, _ in next(iter(value), ())]
    made = family(name, about, labels=keys)
    for labels, number in value.items():
        made.add_metric([text for _, text in labels], number)  # type: ignore[attr-defined]  # both families have it
    return made


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    made = HistogramMetricFamily(name, about)
    ends = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    made.add_metric([], list(zip(ends, accumulate(histogram.counts), strict=True)), sum_value=histogram.total)
    return made
