"""What the talking commands print, and how they end."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.capture import CaptureIO
from contract_peer import Peer, refuse
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2 as rpc
from grpc_health.v1 import health_pb2
from kvfork.v1 import inference_service_pb2 as inf
from kvfork.v1 import types_pb2 as types
from kvfork_client import Delta, MissReason, Usage

from service.cli import chat, flags, generate, output, snapshots, talk

ROOT = Path(__file__).parents[2]
Kvfork = Callable[..., int]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvfork")
    talk.add_parsers(parser.add_subparsers(required=True))
    return parser.parse_args(words)


@pytest.fixture
def kvfork(peer: Peer) -> Kvfork:
    """Runs a command against the peer; returns its exit code."""

    def run(*words: str) -> int:
        args = parse(*words, "--address", peer.address)
        return int(args.run(args))

    return run


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_watch_prints_a_line_for_each_event(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001", pinned=True, labels={"k": "v"}))
    # The server's deadline is the only end that a watch has here.
    assert kvfork("snapshots", "watch", "--timeout", "1") == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "+ snapshots/plan-0001  3 tokens memory pinned k=v",
        "= all of the above was there; what follows is news",
        "- snapshots/old-0001  expired",
    ]
    assert err.startswith("error: ")
    assert kvfork("snapshots", "watch", "--timeout", "1", "--json", "--resume", "t0", "--label", "k=v") == 1
    out, _ = capsys.readouterr()
    assert lines(out) == [
        {"synced": True, "resume_token": "t1"},
        {"gone": "snapshots/old-0001", "reason": "expired", "resume_token": "t4"},
    ]
    request = peer.requests("WatchSnapshots")[-1]
    assert (request.resume_token, dict(request.labels)) == ("t0", {"k": "v"})


def test_plan_says_what_a_call_would_cost(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Any, context: Any) -> Any:
        plan = inf.Plan(memory_tokens=256, disk_tokens=256, recomputed_tokens=40, new_tokens=60, memory_bytes=2048)
        plan.miss_reason, plan.disk_bytes, plan.need_bytes, plan.free_bytes = 2, 1024, 5 << 20, 1 << 20
        plan.predicted_prefill.FromMilliseconds(1250)
        refused = request.plan.branches > 2
        plan.admission = inf.ADMISSION_REFUSED if refused else inf.ADMISSION_QUEUED
        plan.reason = "QUEUE_FULL" if refused else "ROWS_BUSY"
        return inf.CountTokensResponse(total_tokens=612, cached_tokens=512, plan=plan)

    peer.scripts["CountTokens"] = script
    assert kvfork("plan", "hello", "--parent", "plan-0001", "--branches", "2", "--max-tokens", "9") == 0
    assert capsys.readouterr().out.splitlines() == [
        "tokens      612",
        "restored    512 (disk 256, memory 256)",
        "recomputed  40 (evicted)",
        "new         60",
        "to read     2.0 KiB from memory, 1.0 KiB from disk: not measured yet",
        "to compute  100 tokens: about 1.25 s",
        "TTFT        not measured yet, were nothing else running",
        "2 branches  queued (rows busy)",
        "memory      5.0 MiB of working state, 1.0 MiB free",
    ]
    request = peer.requests("CountTokens")[-1]
    assert (request.parent, request.plan.branches, request.plan.max_tokens) == ("snapshots/plan-0001", 2, 9)
    assert kvfork("plan", "--parent", "plan-0001", "--branches", "3", "--json") == 1, "refused is a failure for scripts"
    (line,) = lines(capsys.readouterr().out)
    assert (line["plan"]["admission"], line["plan"]["load"], line["plan"]["prefill"]) == ("refused", None, 1.25)
    assert kvfork("plan") == 2


def test_health_is_an_exit_code(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    """The peer's process serves; its InferenceService does not, as while a model loads."""
    assert kvfork("health") == 1
    assert kvfork("health", "--live") == 0
    assert kvfork("health", "InferenceService") == 1
    assert capsys.readouterr().out == "not serving\nserving\nnot serving\n"
    assert kvfork("health", "--live", "--json") == 0
    assert lines(capsys.readouterr().out) == [{"service": "", "status": "serving"}]
    assert kvfork("health", "NoSuchService") == 1
    peer.health.set("kvfork.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    assert kvfork("health") == 0


def until_said(text: str) -> None:
    """Waits until a command has printed `text`; for tests that capture with capsys."""
    assert isinstance(sys.stdout, CaptureIO)
    while text not in sys.stdout.getvalue():
        time.sleep(0.01)


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate_streams_text_to_stdout_and_the_receipt_to_stderr(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    code = kvfork(
        "generate", "hello", "--save", "plan-0001", "--mark-prompt-end", "--max-tokens", "4", "--ttl", "60", "--durable"
    )
    out, err = capsys.readouterr()
    assert (code, out) == (0, "four\n")
    receipt, mark, saved, ended = err.splitlines()
    assert receipt.startswith("restored 0 (disk 0, memory 0) · recomputed 0 · new 22 · TTFT 0.")
    assert receipt.endswith(" s · 0 B read · generated 4")
    assert mark == "prompt's end: snapshots/auto-0002 (22 tokens)"
    assert saved == "saved: snapshots/plan-0001 (26 tokens)"
    assert ended == "ended by: max tokens"
    (request,) = peer.requests("Generate")
    assert request.input.chat.messages[0] == types.Message(role=types.ROLE_USER, parts=[types.Part(text="hello")])
    assert request.save.ttl == duration_pb2.Duration(seconds=60)
    assert request.save.durability == types.DURABILITY_DISK


def test_generate_sends_pictures_before_the_text(peer: Peer, kvfork: Kvfork, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.png", "b.jpg")]
    for file in files:
        file.write_bytes(file.name.encode())
    images = [types.Part(image=types.Image(data=file.name.encode())) for file in files]
    words = ("generate", "Which?", "--image", str(files[0]), "--image", str(files[1]))
    assert kvfork(*words, "--system", "s") == 0
    assert kvfork(*words, "--raw") == 0
    chat, raw = (request.input for request in peer.requests("Generate"))
    assert [types.Role.Name(message.role) for message in chat.chat.messages] == ["ROLE_SYSTEM", "ROLE_USER"]
    assert list(chat.chat.messages[1].parts) == [*images, types.Part(text="Which?")]
    assert list(raw.raw.parts) == [*images, types.Part(text="Which?")]


def test_a_picture_that_cannot_be_read_is_a_wrong_use(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing, empty = tmp_path / "none.png", tmp_path / "empty.png"
    empty.touch()
    assert kvfork("generate", "Which?", "--image", str(missing)) == 2
    assert kvfork("generate", "Which?", "--image", str(empty)) == 2
    assert kvfork("chat", "--image", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--image: [Errno 2] No such file or directory: '{missing}'" in err
    assert f"--image: the file is empty: '{empty}'" in err
    assert "Is a directory" in err
    assert peer.requests("Generate") == []


def test_generate_passes_its_flags_on(peer: Peer, kvfork: Kvfork) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    words = "generate q --parent plan-0001 --system s --temperature 0 --top-p 0.5 --seed 7 --stop a --stop b"
    assert kvfork(*words.split(), "--model", "models/m") == 0
    (request,) = peer.requests("Generate")
    assert (request.parent, request.model) == ("snapshots/plan-0001", "models/m")
    assert request.sampling == types.Sampling(temperature=0.0, top_p=0.5, seed=7)
    assert list(request.stopping.stop) == ["a", "b"]
    assert [message.role for message in request.input.chat.messages] == [types.ROLE_SYSTEM, types.ROLE_USER]
    assert not request.HasField("save")


@pytest.mark.parametrize(
    ("words", "constraint"),
    [
        ("--regex [a-z]+ --after-reasoning", inf.Constraint(regex="[a-z]+", after_reasoning=True)),
        ("--choice yes --choice no", inf.Constraint(choice=inf.Choice(options=["yes", "no"]))),
        ("--json-schema {}", inf.Constraint(json_schema="{}")),
        ("--json-schema FILE", inf.Constraint(json_schema='{"type": "object"}')),
    ],
)
def test_generate_asks_for_a_form(
    peer: Peer, kvfork: Kvfork, tmp_path: Path, words: str, constraint: inf.Constraint
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert kvfork("generate", "q", *words.replace("FILE", str(tmp_path / "schema.json")).split()) == 0
    assert peer.requests("Generate")[0].constraint == constraint


def test_reasoning_goes_to_stderr_and_the_answer_to_stdout(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started())
        for channel, text in ((1, "Hm."), (0, "Yes."), (2, "<call/>")):
            yield inf.GenerateResponse(delta=inf.Delta(text=text, token_count=1, channel=channel))
        yield inf.GenerateResponse(finished=inf.Finished(reason=inf.FINISH_REASON_EOS))

    peer.scripts["Generate"] = script
    assert kvfork("generate", "q") == 0
    out, err = capsys.readouterr()
    assert (out, err.partition("restored")[0]) == ("Yes.<call/>\n", "Hm.")


@pytest.mark.parametrize("said", ["", "\n", " \n \n"])
@pytest.mark.parametrize("how", [(), ("-",), ("--system", "be brief"), ("-", "--parent", "plan-0001")])
def test_nothing_on_stdin_is_a_wrong_use(
    peer: Peer,
    kvfork: Kvfork,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    how: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert kvfork("generate", *how) == 2
    assert capsys.readouterr() == ("", "error: no prompt: standard input is empty\n")
    assert peer.requests("Generate") == []


def test_generate_reads_the_prompt_from_stdin(peer: Peer, kvfork: Kvfork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert kvfork("generate", "--raw") == 0
    assert peer.requests("Generate")[0].input.raw.parts[0].text == "two\nlines"


def test_generate_from_a_parent_needs_no_prompt(peer: Peer, kvfork: Kvfork) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    assert kvfork("generate", "--parent", "snapshots/plan-0001") == 0
    assert not peer.requests("Generate")[0].HasField("input")


@pytest.mark.parametrize("method", ["Generate", "Fork"])
def test_a_turn_behind_one_that_broke_off_is_let_in(peer: Peer, kvfork: Kvfork, method: str) -> None:
    peer.keep("half an ans", types.SnapshotOptions(snapshot_id="plan-0001"))
    serve = getattr(peer, method)

    def added(request: Any) -> list[types.Message]:
        return list((request.input if method == "Generate" else request.branches[0].append).chat.messages)

    def check(request: Any, context: Any) -> None:
        if added(request)[0].role != types.ROLE_ASSISTANT:
            refuse(context, "FAILED_PRECONDITION", "TURN_OPEN", "the last turn has no end")

    def stream(request: Any, context: Any) -> Any:
        check(request, context)
        yield from serve(request, context)

    def unary(request: Any, context: Any) -> Any:
        check(request, context)
        return serve(request, context)

    peer.scripts[method] = stream if method == "Generate" else unary
    words = (
        ("generate", "go on", "--parent") if method == "Generate" else ("fork", "--append", "go on", "--append", "x")
    )
    assert kvfork(*words, "plan-0001") == 0
    first, second = peer.requests(method)
    user = types.Message(role=types.ROLE_USER, parts=[types.Part(text="go on")])
    assert added(first) == [user]
    assert added(second) == [types.Message(role=types.ROLE_ASSISTANT, parts=[types.Part(text="")]), user]


def test_generate_as_json_prints_one_event_a_line(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer = "ä!"
    assert kvfork("generate", "--json", "hello", "--save") == 0
    out, err = capsys.readouterr()
    events = lines(out)
    assert err == ""
    assert [event["event"] for event in events] == ["started", "progress", "delta", "delta", "finished"]
    assert [event["text"] for event in events[2:]] == ["ä", "!", "ä!"]
    assert events[-1]["usage"]["new_tokens"] == 22
    assert events[-1]["snapshot"]["name"] == "snapshots/auto-0002"
    assert events[-1]["reason"] == "eos"


def test_ctrl_c_ends_a_generation_cleanly_and_keeps_its_text(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.hold = threading.Event()

    def press() -> None:
        until_said("f")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    code = kvfork("generate", "hello", "--save")
    presser.join()
    out, err = capsys.readouterr()
    assert (code, out) == (130, "f\n")
    assert "ended by: stopped" in err
    assert "saved: snapshots/" in err
    assert peer.wait_ended() == "finished"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_gives_up(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.hold = threading.Event()
    peer.scripts["StopGeneration"] = lambda request, context: inf.StopGenerationResponse(
        was_running=True
    )  # and goes on

    def press() -> None:
        until_said("f")
        os.kill(os.getpid(), signal.SIGINT)
        while not peer.requests("StopGeneration"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    assert kvfork("generate", "hello") == 130
    presser.join()
    assert peer.wait_ended() == "cancelled"


def test_a_reader_that_leaves_ends_the_generation(peer: Peer) -> None:
    peer.answer = "x" * 200_000  # more than a pipe holds
    code = f"import test_cli_talk as t; a = t.parse('generate', 'q', '--address', '{peer.address}'); exit(a.run(a))"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(3) == b"xxx"
        child.stdout.close()
        assert child.wait(30) == 1
        assert child.stderr is not None
        assert child.stderr.read() == b""
    assert peer.wait_ended() == "cancelled"


# -- snapshots, fork, rollback, stats ---------------------------------------------------------------------------------


def test_snapshots_list_is_a_table(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.keep("x" * 1500, types.SnapshotOptions(snapshot_id="plan-0001", pinned=True, labels={"b": "2", "a": "1"}))
    peer.keep("x", types.SnapshotOptions(), "snapshots/plan-0001")
    assert kvfork("snapshots", "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME                 TOKENS  STORED  STATE   EXPIRES  KEPT    LABELS   PARENT",
        "snapshots/plan-0001   1,500   1,280  memory  never    pinned  a=1 b=2  -",
        "snapshots/auto-0002       1       0  memory  now      -       -        snapshots/plan-0001",
    ]
    assert kvfork("snapshots", "list", "--label", "a=1", "--json") == 0
    (only,) = lines(capsys.readouterr().out)
    assert only["snapshot"]["name"] == "snapshots/plan-0001"
    assert only["snapshot"]["prefix_hash"] == "78" * 8


EVIL = "\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202eok\nplan-9999"
HARMLESS = r"\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202eok\nplan-9999"


def test_labels_reach_no_terminal_as_commands(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.keep("x", types.SnapshotOptions(snapshot_id="plan-0001", labels={"k": EVIL}))
    for words in (("list",), ("get", "plan-0001")):
        assert kvfork("snapshots", *words) == 0
        out = capsys.readouterr().out
        assert f"k={HARMLESS}" in out
        assert all(c.isprintable() or c == "\n" for c in out)
        assert kvfork("snapshots", *words, "--json") == 0
        out = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in out)
        assert json.loads(out)["snapshot"]["labels"] == {"k": EVIL}  # written otherwise, and the same


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_new_text_reaches_no_terminal_as_commands_and_a_pipe_as_it_is(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stream()
    monkeypatch.setattr(sys, "stdout", seen)
    output.print_delta(Delta(text=EVIL + "\tend", first_position=0, token_count=1))
    monkeypatch.undo()
    expected = HARMLESS.replace(r"ok\n", "ok\n") if stream is Terminal else EVIL
    assert seen.getvalue() == expected + "\tend"


def test_errors_reach_no_terminal_as_commands(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfork("snapshots", "get", "\x1b[2Jplan") == 1
    err = capsys.readouterr().err
    assert err and all(c.isprintable() or c == "\n" for c in err)


def test_an_empty_list_says_so(kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfork("snapshots", "list", "--parent", "plan-0001") == 0
    assert capsys.readouterr().out == "no snapshots\n"
    assert kvfork("snapshots", "list", "--json") == 0
    assert capsys.readouterr().out == ""


def test_snapshots_get_shows_everything(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    assert kvfork("snapshots", "get", "plan-0001", "--tokens") == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {key.strip(): value.strip() for key, value in shown.items()} == {
        "name": "snapshots/plan-0001",
        "parent": "-",
        "model": "models/letters",
        "tokens": "3 (0 in the checkpoint store)",
        "state": "memory",
        "durable": "no",
        "pinned": "no",
        "expires": "2023-11-14T22:23:21+00:00",
        "labels": "-",
        "own bytes": "48 B",
        "in use by": "0 calls",
        "prefix hash": "616263",
        "token ids": "97 98 99",
    }
    assert kvfork("snapshots", "get", "plan-0001", "--json") == 0
    (only,) = lines(capsys.readouterr().out)
    assert only.keys() == {"snapshot"}


def test_snapshots_delete_and_extend_tell_what_happened(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan-0001", "plan-0002"):
        peer.keep("x", types.SnapshotOptions(snapshot_id=name))
    assert kvfork("snapshots", "extend", "plan-0001", "lost-0001", "--ttl", "60") == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "snapshots/plan-0001       1       0  memory  now      -     -       -",
        "missing: snapshots/lost-0001",
    ]
    assert kvfork("snapshots", "delete", "plan-0001", "plan-0002") == 0
    assert capsys.readouterr().out == "deleted snapshots/plan-0001\ndeleted snapshots/plan-0002\n"
    assert kvfork("snapshots", "delete", "plan-0001", "--missing-ok", "--json") == 0
    assert capsys.readouterr().out == ""


def test_fork_appends_and_counts(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    assert kvfork("fork", "plan-0001", "--raw", "--append", " red", "--append", " blue", "--pin") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "snapshots/auto-0002       7       0  memory  never    pinned  -       snapshots/plan-0001",
        "snapshots/auto-0003       8       0  memory  never    pinned  -       snapshots/plan-0001",
        "restored 3 (disk 0, memory 3) · recomputed 0 · new 9 · 0 B read",
    ]
    assert kvfork("fork", "plan-0001", "-n", "2", "--json") == 0
    printed = lines(capsys.readouterr().out)
    assert [next(iter(line)) for line in printed] == ["snapshot", "snapshot", "usage"]


def test_rollback_prints_the_result_and_its_receipt(
    peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.keep("abcdef", types.SnapshotOptions(snapshot_id="plan-0001"))
    words = "rollback plan-0001 --drop 2 --release source --save plan-0002 --down --max-recompute 0"
    assert kvfork(*words.split()) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "snapshots/plan-0002       4       0  memory  now      -     -       snapshots/plan-0001",
        "released snapshots/plan-0001",
        "restored 4 (disk 0, memory 4) · recomputed 0 · new 0 · 0 B read",
    ]
    (request,) = peer.requests("Rollback")
    assert (request.rounding, request.release) == (inf.ROUNDING_DOWN, inf.RELEASE_SOURCE)
    assert request.HasField("max_recompute_tokens")
    assert kvfork("rollback", "plan-0002", "--to", "1", "--json") == 0
    (printed,) = lines(capsys.readouterr().out)
    assert (printed["snapshot"]["token_count"], printed["released"]) == (1, [])


def test_a_copy_asks_each_side_for_an_instance_of_its_own(
    peer: Peer, kvfork: Kvfork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFORK_INSTANCE", "here")
    instance = "x-kvfork-instance"
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    with Peer() as other:
        assert kvfork("snapshots", "copy", "plan-0001", "--to", other.address) == 0
        assert other.contents == {"snapshots/plan-0001": "abc"}
        assert {said.get(instance) for said in peer.metadata} == {"here", "peer"}  # and where it says it is
        assert {said.get(instance) for said in other.metadata} == {None, "peer"}
        since = len(other.metadata)
        assert kvfork("snapshots", "copy", "plan-0001", "--to", other.address, "--to-instance", "there") == 0
        assert {said.get(instance) for said in other.metadata[since:]} == {"there"}


@pytest.mark.parametrize("left", ["a file for all", "a link"])
def test_an_export_is_for_its_owner_alone_whatever_was_left_there(
    peer: Peer, kvfork: Kvfork, tmp_path: Path, left: str
) -> None:
    peer.keep("abc", types.SnapshotOptions(snapshot_id="plan-0001"))
    file, part, other = tmp_path / "plan.kvx", tmp_path / "plan.kvx.part", tmp_path / "other"
    other.write_text("as it was")
    if left == "a link":
        part.symlink_to(other)
    else:
        part.write_text("half of an export")
        part.chmod(0o644)
    assert kvfork("snapshots", "export", "plan-0001", str(file)) == 0
    assert (file.read_text(), file.is_symlink(), file.stat().st_mode & 0o777) == (
        "snapshots/plan-0001\nabc",
        False,
        0o600,
    )
    assert other.read_text() == "as it was" and sorted(tmp_path.iterdir()) == [other, file]


def test_stats_for_people_and_for_programs(kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfork("stats") == 0
    shown = capsys.readouterr().out
    assert "model          letters: ready, 4,096 tokens of context\n" in shown
    assert "memory         3.0 MiB of 0 B\n" in shown
    assert kvfork("stats", "--json") == 0
    (printed,) = lines(capsys.readouterr().out)
    assert printed.keys() == {"server", "models", "cache"}
    assert printed["cache"]["memory_bytes"] == 3 << 20


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_says_what_and_what_to_do(kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvfork("snapshots", "get", "plan-0009") == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: SNAPSHOT_NOT_FOUND: snapshots/plan-0009 does not exist",
        "  check the name; list what there is with `kvfork snapshots list`",
    ]


def test_the_servers_own_advice_is_not_doubled(peer: Peer, kvfork: Kvfork, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Any, context: Any) -> None:
        refuse(
            context,
            "RESOURCE_EXHAUSTED",
            "QUEUE_FULL",
            "64 calls wait (come back later)",
            rpc.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2)),
            rpc.BadRequest(field_violations=[rpc.BadRequest.FieldViolation(field="a.b", description="is wrong")]),
            rpc.RequestInfo(request_id="i-7"),
        )

    peer.scripts["GetServerInfo"] = script
    assert kvfork("stats") == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: QUEUE_FULL: 64 calls wait (come back later)",
        "  a.b: is wrong",
        "  incident i-7",
        "  worth another try in 2 s",
    ]
    assert kvfork("stats", "--json") == 1
    (printed,) = lines(capsys.readouterr().err)
    assert (printed["error"], printed["retry_after"], printed["fields"][0]["field"]) == ("QUEUE_FULL", 2.0, "a.b")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate x --raw --system y", "--system needs a chat template"),
        ("chat --raw --system y", "--system needs a chat template"),
        ("generate x --after-reasoning", "--after-reasoning needs"),
        ("generate x --json-schema /nowhere/at/all", "--json-schema: "),
        ("stats --address http://x", "is a URL"),
    ],
)
def test_wrong_usage_is_told_apart(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(*words.split())
    assert args.run(args) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "generate x --max-tokens -1",
        "generate x --seed 4294967296",
        "generate x --raw --chat",
        "generate x --regex a --choice b",
        "generate x --timeout 0",
        "generate x --label novalue",
        "fork plan-0001",
        "fork plan-0001 --count 0",
        "rollback plan-0001",
        "rollback plan-0001 --to 1 --drop 1",
        "snapshots",
    ],
)
def test_flags_that_make_no_sense_are_refused_by_the_parser(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    assert caught.value.code == 2
    assert "usage: kvfork" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "generate", "snapshots", "fork", "rollback", "stats"])
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(command, "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"examples:\n  kvfork {command}" in shown


def test_examples_in_the_help_parse() -> None:
    seen = 0
    for epilog in (
        chat.EPILOG,
        generate.EPILOG,
        snapshots.SNAPSHOTS_EPILOG,
        snapshots.FORK_EPILOG,
        snapshots.ROLLBACK_EPILOG,
        snapshots.STATS_EPILOG,
    ):
        for line in epilog.splitlines():
            if line.startswith("  kvfork "):
                command = re.split(r"   | < | \| ", line.strip())[0]  # without the remark, the file, the pipe
                parse(*shlex.split(command)[1:])
                seen += 1
    assert seen > 12


# -- printing ---------------------------------------------------------------------------------------------------------


def test_the_receipt_is_one_line() -> None:
    usage = Usage(prompt_tokens=1040, cached_tokens=1024, memory_tokens=1024, new_tokens=16, disk_bytes_read=1_258_291)
    assert output.receipt(usage, 0.214) == (
        "restored 1,024 (disk 0, memory 1,024) · recomputed 0 · new 16 · TTFT 0.21 s · 1.2 MiB read"
    )
    missed = Usage(recomputed_tokens=40, miss_reason=MissReason.BETWEEN_CHECKPOINTS)
    assert "recomputed 40 (between checkpoints) · " in output.receipt(missed)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert output.size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (-5, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_spans(seconds: float, shown: str) -> None:
    assert output.span(seconds) == shown


def test_the_default_address_is_where_serve_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.config import Config

    assert Config().address == flags.DEFAULT_ADDRESS
    assert parse("stats").address == os.environ.get("KVFORK_ADDRESS", flags.DEFAULT_ADDRESS)
    assert flags.connection_flags({"KVFORK_ADDRESS": "10.0.0.1:1"}).parse_args([]).address == "10.0.0.1:1"
    assert flags.connection_flags({"KVFORK_ADDRESS": ""}).parse_args([]).address == flags.DEFAULT_ADDRESS
