"""What TLS, tokens and metrics cost together: chats on a server that has none of them, and on one that has all.

The model is small and the chats are eight, so that a token's own way out weighs as much as it ever does; what the
server does for a call is the same with a large model. Metrics are read once a second, more often than any collector.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from service.auth.tokens import new_token
from tests.bench.ours import Server, raw
from tests.bench.report import Bystanders, Figure, Options, Quiet, emit, median, note, spread
from tests.bench.texts import prose
from tests.certificates import Authority

CHATS = 8
SCRAPE_SECONDS = 1.0


def run(options: Options) -> None:
    model = options.model or ("tiny-llama" if options.quick else "smollm2")
    words, answer = (20, 8) if options.quick else (50, 128)
    rounds = options.runs or (1 if options.quick else 9)
    speeds: dict[str, list[float]] = {"open": [], "guarded": []}
    with (
        tempfile.TemporaryDirectory(prefix="kvfork-bench-") as folder,
        _guarded(model, Path(folder)) as guarded,
        Server(model) as plain,
    ):
        servers = {"open": plain, "guarded": guarded}
        pids = [server.pid for server in servers.values()]
        quiet, others = Quiet(pids, patience=2 if options.quick else 40), Bystanders(pids)
        for server in servers.values():
            server.generate(raw("Warm up."), 4)
        for number in range(rounds):
            prompts = [prose(words, 7000 + 100 * number + row) for row in range(CHATS)]
            for name in list(servers)[:: 1 if number % 2 else -1]:
                quiet.wait()
                speeds[name].append(_speed(servers[name], prompts, answer))
            told = ", ".join(f"{name} {speed[-1]:.1f} tok/s" for name, speed in speeds.items())
            note(f"  round {number + 1} of {rounds}: {told}")
        busy = others.cores()
    ratios = [a / b for a, b in zip(speeds["guarded"], speeds["open"], strict=True)]
    emit(
        Figure(
            metric="guarded.tokens_over_open",
            value=median(ratios),
            unit="ratio",
            ours=median(speeds["guarded"]),
            against=median(speeds["open"]),
            peer="the same server without TLS, tokens and metrics",
            model=model,
            n=rounds,
            extra={"spread": spread(ratios), "chats": CHATS, "sides_unit": "tok/s"},
        ),
        others=busy,
    )


@contextmanager
def _guarded(model: str, folder: Path) -> Iterator[Server]:
    """A server with all of it, its metrics being read meanwhile."""
    authority = Authority()
    certificate, key = authority.server().write(folder, "server")
    token, line = new_token("bench")
    tokens = folder / "tokens"
    tokens.write_text(f"{line}\n")
    tokens.chmod(0o600)
    secure = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(authority.pem), grpc.access_token_call_credentials(token)
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--tls-cert", str(certificate), "--tls-key", str(key), "--tokens", str(tokens), "--metrics", f":{port}"]
    flags += ["--max-owner-running", "0"]  # one caller plays all chats; else some rows are kept for others
    with Server(model, *flags, credentials=secure) as server:
        page, over = f"http://127.0.0.1:{port}/metrics", threading.Event()
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(_scrape, page, over)
            try:
                yield server
            finally:
                over.set()
                reader.result()


def _scrape(page: str, over: threading.Event) -> None:
    while not over.wait(SCRAPE_SECONDS):
        with urllib.request.urlopen(page, timeout=10) as answer:
            answer.read()


def _speed(server: Server, prompts: list[str], answer: int) -> float:
    """Tokens per second of all chats together, from the first one's sending to the last one's end."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: server.generate(raw(prompt), answer), prompts))
    assert all(len(reply.times) == answer for reply in replies)
    return len(prompts) * answer / (max(r.done for r in replies) - min(r.sent for r in replies))
