"""Metrics as a scraper sees them: names, values, and the dashboard that is drawn from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from service.events import StatsView
from service.metering import Meter
from service.metrics.collector import CONTENT_TYPE, Metrics
from service.metrics.http import MetricsServer
from service.plan import Decode, RowId, StepPlan, StepResult
from service.totals import Totals

DASHBOARD = Path(__file__).parents[2] / "service" / "metrics" / "dashboard.json"

STATS = StatsView(
    **{name: number for number, name in enumerate(StatsView.__dataclass_fields__, start=1)}
    | {"checkpoints_skipped": {"queue_full": 5}, "evictions_by_tier": {"memory": 6, "disk": 7}}
    | {"last_write_error": "OSError: /secret/path", "writes_paused": True}
)  # fmt: skip


def metrics(meter: Meter | None = None, totals: Totals | None = None) -> Metrics:
    return Metrics(
        meter or busy(),
        totals or measured(),
        lambda: STATS,
        version="0.1.0",
        model="tiny",
        max_batch=8,
        alive=lambda: True,
        watches=lambda: 2,
        ended=lambda: {"expired": 3},
    )


def busy() -> Meter:
    meter = Meter()
    meter.call_began("Generate")
    meter.call_ended("Generate", "OK", 1.5)
    meter.queue_seconds.add(0.02)
    meter.ttft_seconds.add(0.3)
    meter.gap_seconds.add(99.0)
    meter.prompt_tokens["disk"] = 512
    meter.sequences["generation", "eos"] = 1
    meter.completion_tokens = 7
    meter.refused["TOKEN_MISSING"] = 4
    return meter


def measured() -> Totals:
    totals = Totals()
    decode = Decode(rows=(RowId(1), RowId(2), RowId(3)), shared=(), captures={})
    totals.stepped(StepPlan(decode=decode), StepResult(prefill_tokens=256, prefill_seconds=0.5, decode_seconds=0.1))
    return totals


def families(page: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def samples(page: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families(page).values()
        for sample in family.samples
    }


def test_a_scrape_has_the_numbers() -> None:
    got = samples(metrics().page())
    assert {
        "kvfork_build_info|model=tiny|version=0.1.0": 1.0,
        "kvfork_engine_up": 1.0,
        "kvfork_calls_total|code=OK|method=Generate": 1.0,
        "kvfork_calls_in_progress|method=Generate": 0.0,
        "kvfork_call_seconds_total|method=Generate": 1.5,
        "kvfork_sequences_total|kind=generation|outcome=eos": 1.0,
        "kvfork_queue_seconds_bucket|le=0.005": 0.0,
        "kvfork_queue_seconds_bucket|le=0.02": 1.0,
        "kvfork_queue_seconds_bucket|le=+Inf": 1.0,
        "kvfork_queue_seconds_count": 1.0,
        "kvfork_queue_seconds_sum": 0.02,
        "kvfork_inter_token_seconds_bucket|le=10": 0.0,
        "kvfork_inter_token_seconds_bucket|le=+Inf": 1.0,
        "kvfork_decode_batch_rows_sum": 3.0,
        "kvfork_decode_batch_rows_limit": 8.0,
        "kvfork_prompt_tokens_total|source=disk": 512.0,
        "kvfork_completion_tokens_total": 7.0,
        "kvfork_refused_total|reason=TOKEN_MISSING": 4.0,
        "kvfork_prefill_tokens_total": 256.0,
        "kvfork_rows|phase=queued": float(STATS.queued_calls),
        "kvfork_store_bytes|tier=disk": float(STATS.disk_bytes),
        "kvfork_store_skipped_total|reason=queue_full": 5.0,
        "kvfork_store_writes_paused": 1.0,
        "kvfork_evictions_total|reason=memory_budget": 6.0,
        "kvfork_evictions_total|reason=corrupt": float(STATS.checkpoints_corrupt),
        "kvfork_snapshots_ended_total|reason=expired": 3.0,
        "kvfork_watches": 2.0,
    }.items() <= got.items()


def test_a_fresh_process_can_be_scraped() -> None:
    assert samples(metrics(Meter(), Totals()).page())["kvfork_completion_tokens_total"] == 0.0


def test_names_follow_the_conventions_and_labels_are_few() -> None:
    page = metrics().page()
    assert b"/secret/path" not in page
    for family in families(page).values():
        assert re.fullmatch(r"kvfork(_[a-z]+)+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{family.name}_total"
            assert set(sample.labels) <= {
                "method", "code", "kind", "outcome", "source", "phase", "residency", "tier", "reason", "le", "version",
                "model",
            }  # fmt: skip
        if any(word in family.name for word in ("seconds", "bytes")):
            assert re.search(r"_(seconds|bytes)$", family.name), f"{family.name}: the unit comes last"


def expressions(panel: object) -> list[str]:
    if isinstance(panel, dict):
        own = [panel["expr"]] if isinstance(panel.get("expr"), str) else []
        return own + [expr for value in panel.values() for expr in expressions(value)]
    if isinstance(panel, list):
        return [expr for value in panel for expr in expressions(value)]
    return []


def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    found = expressions(dashboard)
    assert len(found) >= 15
    there = {sample.name for family in families(metrics().page()).values() for sample in family.samples}
    for expr in found:
        named = set(re.findall(r"kvfork_[a-z_]+", expr))
        assert named and named <= there, expr
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}"), expr
    # Whatever a family is for, somebody looks at it.
    shown = {name for expr in found for name in re.findall(r"kvfork_[a-z_]+", expr)}
    for word in ("calls", "queue_seconds", "time_to_first", "inter_token", "prompt_tokens", "store_bytes", "skipped"):
        assert any(word in name for name in shown), word
    for word in ("evictions", "batch_rows", "write_seconds", "rows"):
        assert any(word in name for name in shown), word


def test_the_dashboard_asks_for_labels_that_are_there() -> None:
    """A label or value that no sample has makes a panel empty, and nobody hears of it."""
    labels: dict[str, dict[str, set[str]]] = {}  # metric -> label -> values; the job is the scraper's
    for family in families(metrics(everything()).page()).values():
        for sample in family.samples:
            known = labels.setdefault(sample.name, {"job": {"$job"}})
            for label, value in sample.labels.items():
                known.setdefault(label, set()).add(value)
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            asked = re.findall(r"(kvfork_[a-z_]+)(\{[^}]*\})?", expr)
            for name, selector in asked:
                matchers = re.findall(r'([a-z]+)(=~|!~|!=|=)"([^"]*)"', selector)
                assert ("job", "=", "$job") in matchers, f"{panel['title']}: {name} of every job"
                for label, sign, value in matchers:
                    assert label in labels[name], f"{panel['title']}: {name} has no {label}"
                    values = value.split("|") if "~" in sign else [value]
                    assert set(values) <= labels[name][label], f"{panel['title']}: {name} has no {label} {value}"
            kept = {label for inner in re.findall(r"by \(([^)]*)\)", expr) for label in inner.split(", ")}
            assert all(kept <= set(labels[name]) for name, _ in asked), f"{panel['title']}: {kept}"
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown == kept - {"le"}, f"{panel['title']}: the legend tells {shown} of {kept}"


def everything() -> Meter:
    """A meter that has met each of what the dashboard asks for by value."""
    meter = busy()
    for code in ("OK", "CANCELLED"):
        meter.call_began("Generate")
        meter.call_ended("Generate", code, 0.1)
    for source in ("memory", "disk", "recomputed", "new"):
        meter.prompt_tokens[source] = 1
    return meter


def test_a_number_says_what_is_good() -> None:
    """Left out, Grafana's own thresholds hold: red from 80 on whatever is counted, and green for a thread at 0."""
    numbers = {panel["title"]: panel for panel in panels() if panel["type"] == "stat"}
    assert len(numbers) == 6
    colours = {
        title: [step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        for title, panel in numbers.items()
    }
    assert colours.pop("Model thread") == ["red", "green"]
    assert colours.pop("Waiting now") == colours.pop("Calls that failed") == ["green", "orange"]
    assert all(colour == ["blue"] for colour in colours.values())


def test_what_reads_grafanas_files_finds_what_grafana_writes() -> None:
    """Grafana fills in what a legend lacks; importers of its files need not."""
    for panel in panels():
        if panel["type"] == "timeseries":
            legend = set(panel["options"]["legend"])
            assert {"showLegend", "displayMode", "placement", "calcs"} <= legend, panel["title"]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    return found


def test_panels_have_places_and_titles_of_their_own() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not covered & cells, panel["title"]
        cells |= covered
    assert len(cells) == 24 * (1 + max(y for _, y in cells)), "a hole"


async def answer(address: str, request: bytes) -> bytes:
    """What comes back; nothing if the other side cut it off."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(request)
        if not request.endswith(b"\r\n\r\n"):
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def serve(request: bytes, page: bytes = b"kvfork_up 1\n") -> bytes:
    async def story() -> bytes:
        server = MetricsServer(lambda: page, CONTENT_TYPE)
        address = await server.start("127.0.0.1", 0)
        async with asyncio.timeout(30):
            got = await answer(address, request)
        await server.close()
        await asyncio.sleep(0.01)  # for the other ends of the connections
        return got

    return asyncio.run(story())


def test_the_listener_answers_a_scrape() -> None:
    head, _, body = serve(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").partition(b"\r\n\r\n")
    assert body == b"kvfork_up 1\n"
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert f"Content-Type: {CONTENT_TYPE}" in lines and f"Content-Length: {len(body)}" in lines


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9090\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHOST:[::1]:9090\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"rubbish\r\n\r\n", b"400"),
    ],
)
def test_the_listener_refuses_what_it_does_not_serve(request_: bytes, status: bytes) -> None:
    got = serve(request_)
    assert got.split(b" ")[1] == status
    if request_.startswith(b"HEAD"):
        assert got.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("request_", [b"GET /metrics HTTP/1.1\r\n" + b"x" * 20_000 + b"\r\n\r\n", b"GET", b""])
def test_what_is_no_request_gets_no_answer_and_no_memory(request_: bytes) -> None:
    assert serve(request_) == b""


def test_a_page_that_cannot_be_made_is_an_error_and_the_listener_goes_on() -> None:
    async def story() -> list[bytes]:
        pages = iter([RuntimeError("secret"), b"kvfork_up 1\n"])

        def page() -> bytes:
            made = next(pages)
            if isinstance(made, Exception):
                raise made
            return made

        server = MetricsServer(page, CONTENT_TYPE)
        address = await server.start("127.0.0.1", 0)
        got = [await answer(address, b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(2)]
        await server.close()
        return got

    broken, whole = asyncio.run(story())
    assert broken.split(b" ")[1] == b"500" and b"secret" not in broken
    assert whole.split(b" ")[1] == b"200"


def test_clients_that_only_connect_are_few_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.metrics.http.CONNECTIONS", 2)
    monkeypatch.setattr("service.metrics.http.REQUEST_SECONDS", 1.0)

    async def story() -> tuple[bytes, list[bytes], bytes]:
        server = MetricsServer(lambda: b"x 1\n", CONTENT_TYPE)
        address = await server.start("127.0.0.1", 0)
        host, _, port = address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await answer(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        ended = [await reader.read() for reader, _ in idle]
        served = await answer(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        for _, writer in idle:
            writer.close()
        await server.close()
        return refused, ended, served

    refused, ended, served = asyncio.run(story())
    assert refused == b""
    assert ended == [b"", b""]
    assert served.split(b" ")[1] == b"200"
