"""`kvfork top` as pictures: two looks in, lines out."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from contract_peer import Peer
from kvfork.v1 import types_pb2 as types
from kvfork_client import CacheStats, Limits, ModelInfo, ModelState, Phase, Residency, Row, ServerInfo, SnapshotInfo

from service.cli import top
from service.cli.top import Look, picture
from tests.e2e.live import ROOT


def info(name: str, parent: str = "", **more: object) -> SnapshotInfo:
    plain = {"name": f"snapshots/{name}", "parent": f"snapshots/{parent}" if parent else "", "token_count": 300}
    return SnapshotInfo(**{**plain, "residency": Residency.MEMORY, **more})  # type: ignore[arg-type]


CACHE = CacheStats(
    active_sequences=3, queued_calls=1, prefilling_rows=1, decoding_rows=2, memory_snapshots=5, prompt_tokens=1000,
    cached_tokens=750, recomputed_tokens=20, completion_tokens=400, memory_bytes=512 << 20, memory_limit_bytes=1 << 30,
    disk_bytes=0, disk_limit_bytes=4 << 30, pending_bytes=1 << 20, active_bytes=3 << 20, active_limit_bytes=1 << 30,
    checkpoints_skipped={"queue_full": 7}, write_errors=2, last_write_error="OSError: no space",
    rows=(
        Row(generation="generations/0123456789abcdef", phase=Phase.DECODE, parent="snapshots/root", prompt_tokens=300,
            done_tokens=300, completion_tokens=12, age=2.5),
        Row(phase=Phase.PREFILL, prompt_tokens=2000, done_tokens=512, age=0.75),
    ),
)  # fmt: skip
TREE = [
    info("root", pinned=True),
    info("left", "root", durable=True, labels={"k": "v\x1b[2J"}),
    info("leaf", "left", active_uses=2),
    info("right", "root", residency=Residency.TOKENS),
    info("orphan", "gone-before"),
]


def look(at: float = 1.0, cache: CacheStats = CACHE, **server: object) -> Look:
    facts = {"instance": "kvfork-1", "boot_id": "b", "version": "0.1.0", "uptime": 200.0}
    limits = Limits(max_batch=8, max_queue=64)
    return Look(
        at=at,
        server=ServerInfo(limits=limits, **{**facts, **server}),  # type: ignore[arg-type]
        models=[ModelInfo(name="models/tiny", state=ModelState.READY)],
        cache=cache,
        snapshots=TREE,
        more=False,
    )


def test_a_look_is_drawn_whole() -> None:
    assert picture(look(), None, lines=20) == [
        "kvfork 0.1.0  tiny ready  kvfork-1  up 3 min",
        "",
        "running  3 of 8 rows: 1 prefill, 2 decode;  1 of 64 waiting",
        "active   [....................] 3.0 MiB of 1.0 GiB",
        "memory   [##########..........] 512.0 MiB of 1.0 GiB",
        "disk     [....................] 0 B of 4.0 GiB  1.0 MiB on its way",
        "prompts  1,000 tokens: 75% restored, 20 recomputed;  400 generated",
        "skipped  7 queue full",
        "errors   2 writes failed: OSError: no space",
        "",
        "ROW           PHASE    PROMPT     NEW  AGE    FROM",
        "0123456789ab  decode   300/300     12  2.5 s  root",
        "snapshot      prefill  512/2,000    0  0.8 s  -",
        "",
        "snapshots  5 in memory, 0 on disk, 0 as tokens only",
        "root  300 memory pinned",
        "├─ left  300 memory durable k=v?[2J",
        "│  └─ leaf  300 memory used by 2",
        "└─ right  300 tokens",
        "orphan  300 memory",
    ]


def test_two_looks_give_a_rate_unless_the_server_is_another() -> None:
    later = CacheStats(**{**{f: getattr(CACHE, f) for f in CACHE.__dataclass_fields__}, "completion_tokens": 450})
    assert picture(look(3.0, later), look(1.0), lines=0)[2].endswith(";  25.0 new tokens/s")
    assert "tokens/s" not in picture(look(3.0, later), look(1.0, boot_id="another"), lines=0)[2]


def test_what_does_not_fit_is_counted() -> None:
    assert picture(look(), None, lines=2)[-1] == "and 3 more"
    assert "DRAINING" in picture(look(draining=True), None, lines=0)[0]


def test_a_chain_as_long_as_a_conversation_is_drawn() -> None:
    chain = [info(f"turn-{i}", f"turn-{i - 1}" if i else "") for i in range(3_000)]
    drawn = picture(
        Look(at=0.0, server=look().server, models=[], cache=CacheStats(), snapshots=chain, more=False),
        None,
        lines=5_000,
    )
    assert sum("turn-" in line for line in drawn) == 3_000


def test_into_a_pipe_it_is_said_once(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    from test_cli_talk import parse

    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    args = parse("top", "--address", peer.address)
    assert args.run(args) == 0
    out = capsys.readouterr().out
    assert "plan-0001  3 memory" in out and "\x1b" not in out
    args = parse("top", "--address", peer.address, "--json")
    assert args.run(args) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["snapshots"][0]["name"] == "snapshots/plan-0001" and "rows" in shown["cache"]


@pytest.mark.parametrize("how", ["q", "Q", "x", "Ctrl-C"])
def test_on_a_terminal_it_draws_until_it_is_ended_and_leaves_it_as_it_was(peer: Peer, how: str) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    mother, child = pty.openpty()
    before = termios.tcgetattr(child)
    every = "0.05" if how in ("x", "Ctrl-C") else "3600"  # a key is not waited for until the next look
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "top", "--address", peer.address, "--every", every],
        stdin=child, stdout=child, stderr=child, cwd=ROOT, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    seen = io.BytesIO()

    def drawn(times: int) -> None:
        give_up = time.monotonic() + 60
        while seen.getvalue().count(top.ENDS.encode()) < times:
            assert time.monotonic() < give_up, seen.getvalue()
            if select.select([mother], [], [], 1.0)[0]:
                seen.write(os.read(mother, 65536))

    try:
        drawn(1)
        if how == "x":  # means nothing
            os.write(mother, b"x\x1b[A")
            drawn(3)
        if how in ("q", "Q"):
            os.write(mother, how.encode())
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert termios.tcgetattr(child) == before
        os.close(child)
        while select.select([mother], [], [], 0.2)[0]:
            try:
                seen.write(os.read(mother, 65536))
            except OSError:  # the other end is closed
                break
    finally:
        os.close(mother)
        process.kill()
        process.wait()
    screen = seen.getvalue().decode()
    assert re.search(r"plan-0001  3 memory", screen)
    assert screen.startswith(top.HIDE) and screen.endswith(top.SHOW)
    assert f"\r\n\r\n{top.ENDS}" in screen
