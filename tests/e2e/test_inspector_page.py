"""The inspector's page in a real browser: what is seen, and what its forms do. Needs a Chromium on the machine.

They take the one that TESTS_CHROMIUM names, else one of the usual names on the path. Without one, or without
playwright, they are skipped and say so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.auth.tokens import new_token
from tests.e2e.live import PATIENCE, LiveServer, greedy, raw, until
from tests.e2e.test_inspector import page_of

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

playwright = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TEST: playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# In a container there is no sandbox to be had, and nothing but this machine's own page is looked at.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ENDLESS = 20_000
MILLISECONDS = PATIENCE * 1000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = os.environ.get("TESTS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("NO BROWSER TEST: there is no Chromium on this machine; TESTS_CHROMIUM may name one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """One open tab, which complains about nothing: no script error, nothing that its policy forbids."""

    def __init__(self, browser: Any, url: str) -> None:
        self._context = browser.new_context()
        self.page = self._context.new_page()
        self.page.set_default_timeout(MILLISECONDS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = url
        self.page.goto(url)

    def _heard(self, message: Any) -> None:
        # Refusals are shown on the page; the browser notes them here as well.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def see(self, script: str, *arguments: Any) -> Any:
        """Waits until a condition in the page holds."""
        return self.page.wait_for_function(script, arg=list(arguments) if arguments else None)

    def outcome(self, begins: str) -> str:
        self.see("([begins]) => document.getElementById('outcome').textContent.startsWith(begins)", begins)
        return str(self.page.inner_text("#outcome"))

    def lines(self) -> list[list[str]]:
        """The tree as it is drawn: depth and text of each line."""
        return self.page.eval_on_selector_all(
            "#tree tbody tr", "rows => rows.map(r => [r.cells[0].style.getPropertyValue('--depth'), r.dataset.name])"
        )

    def choose(self, name: str) -> None:
        if self.page.inner_text("#chosen-title") == name:
            return  # once more would let go of it
        self.page.click(f"#tree tr[data-name='snapshots/{name}'] button")
        self.see("([name]) => document.getElementById('chosen-title').textContent === name", name)

    def close(self) -> None:
        assert self.complaints == []
        assert all(request.startswith(self.url) for request in self.requests), "nothing comes from elsewhere"
        assert self._context.cookies() == []
        self._context.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("tiny-llama", "--inspector", ":0") as opened:
        yield opened


@pytest.fixture
def tab(chromium: Any, server: LiveServer) -> Iterator[Tab]:
    opened = Tab(chromium, page_of(server).url)
    yield opened
    opened.close()


def create(server: LiveServer, text: str, name: str, parent: str = "", **options: Any) -> pb.Snapshot:
    kept = pb.SnapshotOptions(snapshot_id=name, **options)
    parent = f"snapshots/{parent}" if parent else ""
    request = inference_pb.CreateSnapshotRequest(input=raw(text), parent=parent, options=kept)
    return server.inference.CreateSnapshot(request, timeout=PATIENCE).snapshot


def test_the_tree_is_shown_and_follows_what_others_do(server: LiveServer, tab: Tab) -> None:
    create(server, "Once upon", "a-root-of-all", pinned=True, labels={"task": "<img src=x onerror=alert(1)>"})
    create(server, " a time <b>there</b> was", "a-child-of-it", "a-root-of-all")
    create(server, " midnight", "another-child", "a-root-of-all")
    create(server, ".", "a-grandchild", "a-child-of-it")
    tab.see("() => document.querySelectorAll('#tree tbody tr').length === 4")
    assert tab.lines() == [
        ["0", "snapshots/a-root-of-all"], ["1", "snapshots/a-child-of-it"], ["2", "snapshots/a-grandchild"],
        ["1", "snapshots/another-child"],
    ]  # fmt: skip
    # Text is text: what callers wrote is no markup.
    tab.see("() => [...document.querySelectorAll('.own')].some(e => e.textContent.includes('<b>there</b>'))")
    first = tab.page.inner_text("#tree tbody tr")
    assert (
        "pinned" in first and "task=<img src=x onerror=alert(1)>" in first and "2 derived" in first and "never" in first
    )
    assert tab.page.query_selector("#tree img, #tree b") is None
    tab.choose("a-child-of-it")
    tab.see("() => document.getElementById('text').textContent === ' a time <b>there</b> was'")
    tab.see("() => /tokens restored/.test(document.getElementById('facts').textContent)")
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name="snapshots/a-child-of-it"))
    tab.see("() => document.getElementById('chosen-title').textContent === 'From scratch'")
    tab.see("() => document.querySelectorAll('#tree tbody tr').length === 3")
    assert ["0", "snapshots/a-grandchild"] in tab.lines(), "what has lost its parent is a root"
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name="snapshots/a-root-of-all", descendants=True))
    tab.see("() => document.querySelectorAll('#tree tbody tr').length === 0")


def test_generate_fork_roll_back_and_delete_from_the_page(server: LiveServer, tab: Tab) -> None:
    page = tab.page
    page.select_option("#form", "raw")
    page.fill("#prompt", "Once upon a time")
    page.fill("#max-tokens", "20")
    page.fill("#temperature", "0")
    page.click("#go")
    made = tab.outcome("kept as ").removeprefix("kept as ")
    answer = page.evaluate("document.getElementById('stream').textContent")
    receipt = page.inner_text("#receipt")
    assert answer and "20 new tokens" in receipt and "0 recomputed" in receipt
    tab.see("([name]) => document.getElementById('text').textContent.startsWith(name)", "Once upon a time")
    page.fill("#branches", " Well.\n\n Or <i>not</i>.")
    page.click("#fork button")
    assert len(tab.outcome("made ").split(", ")) == 3
    tab.see("() => document.querySelectorAll('#tree tbody tr').length === 4")
    whole = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=f"snapshots/{made}")).snapshot.token_count
    tab.choose(made)
    page.fill("#cut", str(whole - 5))
    page.click("#rollback button")
    shorter = tab.outcome("made ").removeprefix("made ").partition(";")[0]
    found = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=f"snapshots/{shorter}")).snapshot
    assert (found.token_count, found.parent) == (whole - 5, f"snapshots/{made}")
    page.fill("#cut", "100000")
    page.click("#rollback button")
    assert "ROLLBACK_BEYOND_END" in tab.outcome("ROLLBACK"), "a refusal is the contract's"
    # What is in use goes only with what reads from it.
    stream = server.inference.Generate(
        greedy(raw(" and"), parent=f"snapshots/{made}", tokens=ENDLESS), timeout=PATIENCE
    )
    next(stream)
    tab.choose(made)
    page.click("#delete button")
    tab.outcome("SNAPSHOT_IN_USE")
    page.check("#stop-active")
    page.check("#descendants")
    page.click("#delete button")
    tab.outcome("deleted ")
    assert list(stream)[-1].finished.reason == inference_pb.FINISH_REASON_STOPPED
    tab.see("() => document.querySelectorAll('#tree tbody tr').length === 0")
    server.idle()


def test_a_long_answer_comes_as_it_is_made_and_can_be_stopped(server: LiveServer, tab: Tab) -> None:
    page = tab.page
    page.select_option("#form", "raw")
    page.fill("#prompt", "Go on")
    page.fill("#max-tokens", str(ENDLESS))
    page.uncheck("#save")
    page.click("#go")
    tab.see("() => document.getElementById('stream').textContent.length > 20")
    tab.see("() => document.querySelectorAll('#rows tbody tr').length === 1")
    assert "decode" in page.inner_text("#rows tbody")
    before = page.evaluate("document.getElementById('stream').textContent.length")
    tab.see("([before]) => document.getElementById('stream').textContent.length > before", before)
    page.click("#stop")
    tab.outcome("done")
    assert page.inner_text("#receipt").startswith(("stopped", "the model ended it"))
    server.idle()
    # A tab that is closed in the middle leaves nothing behind either.
    page.click("#go")
    tab.see("() => document.querySelectorAll('#rows tbody tr').length === 1")
    page.goto("about:blank")
    server.idle()


def test_the_token_is_asked_for_once_and_stays_in_the_tab(chromium: Any, tmp_path: Path) -> None:
    token, line = new_token("alice")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{line}\n")
    tokens.chmod(0o600)
    with LiveServer("tiny-llama", "--tokens", str(tokens), "--inspector", ":0", token=token) as server:
        url = page_of(server).url
        tab = Tab(chromium, url)
        page = tab.page
        page.wait_for_selector("#door:visible")
        page.fill("#token", "kvf_wrong")
        page.click("#door button")
        tab.see("() => document.getElementById('trouble').textContent.includes('not one of this server')")
        assert page.is_visible("#door") and not page.is_visible("#inside")
        assert page.evaluate("sessionStorage.length") == 0
        page.fill("#token", token)
        page.click("#door button")
        page.wait_for_selector("#inside:visible")
        tab.see("() => document.getElementById('about').textContent.includes('as alice')")
        create(server, "Hers", "hers-alone-0")
        tab.see("() => document.querySelectorAll('#tree tbody tr').length === 1")
        kept = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [[token], 0, ""]
        page.reload()
        page.wait_for_selector("#inside:visible")
        assert not page.is_visible("#door"), "asked for once"
        other = Tab(chromium, url)
        other.page.wait_for_selector("#door:visible")
        other.close()
        page.click("#forget")
        page.wait_for_selector("#door:visible")
        assert page.evaluate("sessionStorage.length") == 0
        tab.see("() => document.querySelectorAll('#tree tbody tr').length === 0")
        tab.close()


def test_another_page_of_the_same_browser_gets_nothing(chromium: Any, server: LiveServer) -> None:
    """A foreign page may send what a browser lets it send; nothing of it is done, and nothing is read."""
    name = create(server, "Mine", "not-for-others").name
    url = page_of(server).url
    context = chromium.new_context()
    page = context.new_page()
    page.route("http://evil.example/**", lambda route: route.fulfill(body="<!doctype html><title>x</title>"))
    page.goto("http://evil.example/")
    tried = page.evaluate(
        """async ([url, name]) => {
            const body = JSON.stringify({name});
            const api = url + "api/DeleteSnapshot";
            const json = {"content-type": "application/json"};
            const tries = [
                fetch(api, {method: "POST", body}),
                fetch(api, {method: "POST", body, mode: "no-cors"}),
                fetch(api, {method: "POST", body, headers: json}),
                fetch(url + "main.js"),
                navigator.sendBeacon(api, new Blob([body], {type: "text/plain"})),
            ];
            const told = (reply) => String(reply && (reply.type || reply));
            return Promise.all(tries.map((t) => Promise.resolve(t).then(told, () => "refused")));
        }""",
        [url, name],
    )
    # Of an opaque reply nothing can be read, and a beacon only says that it is on its way.
    assert tried[0] == tried[2] == tried[3] == "refused" and tried[1] in ("opaque", "refused")
    until(lambda: server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name)), what="it to be there")
    context.close()
    server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name))
