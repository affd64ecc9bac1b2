"""The chat: turns as snapshots, branches, and the way back; at a pipe and at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from contract_peer import Peer, refuse
from kvfork.v1 import inference_service_pb2 as inf
from kvfork.v1 import types_pb2 as types
from kvfork_client import Client, Image, QueueFull, Sampling
from test_cli_talk import parse, until_said

from service.cli.conversation import Conversation, NothingSaid, Turn


def say(conversation: Conversation, text: str) -> str:
    reply = conversation.say(text)
    for _ in reply.events:
        pass
    turn = conversation.finish(reply)
    assert turn is not None
    return turn.answer


def chat(peer: Peer, monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    args = parse("chat", "--address", peer.address, *flags)
    return int(args.run(args))


def test_each_turn_goes_on_from_the_last_ones_snapshot(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client, system="be brief")
        assert [say(conversation, "one"), say(conversation, "two")] == ["ok", "ok"]
        first, second = peer.requests("Generate")
        assert (first.parent, second.parent) == ("", conversation.branch.turns[0].after.name)
        assert peer.contents[conversation.branch.turns[1].after.name] == (
            "<system>be brief<user>one<assistant>ok<user>two<assistant>ok"
        )


def test_back_rolls_back_to_before_the_last_turn_and_frees_it(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client)
        say(conversation, "one")
        say(conversation, "two")
        abandoned = conversation.branch.turns[1].after.name
        result = conversation.back()
        assert result is not None
        assert result == conversation.branch.here
        assert peer.contents[result.name] == "<user>one<assistant>ok"
        assert abandoned not in peer.snapshots
        say(conversation, "three")
        assert peer.contents[conversation.branch.turns[1].after.name].endswith("ok<user>three<assistant>ok")
        assert conversation.back() is not None
        assert conversation.back() is None
        with pytest.raises(NothingSaid):
            conversation.back()


def again(conversation: Conversation, count: int) -> list[Turn]:
    """Every answer read to its end, in order."""
    turns = []
    for reply in conversation.again(count):
        for _ in reply.events:
            pass
        turn = conversation.finish(reply)
        assert turn is not None
        turns.append(turn)
    return turns


def contents(peer: Peer, conversation: Conversation) -> list[str]:
    return [peer.contents[branch.turns[-1].after.name] for branch in conversation.branches]


def test_the_last_turn_is_answered_again_in_branches_that_do_not_see_each_other(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client, sampling=Sampling(seed=7))
        with pytest.raises(NothingSaid):
            conversation.again(2)
        say(conversation, "one")
        say(conversation, "two")
        peer.answer = "no"
        assert [turn.answer for turn in again(conversation, 2)] == ["no", "no"]
        first = "<user>one<assistant>ok"
        assert conversation.current == 0
        assert contents(peer, conversation) == [f"{first}<user>two<assistant>{answer}" for answer in ("ok", "no", "no")]
        asked = peer.requests("Generate")[2:]
        assert [request.parent for request in asked] == [conversation.branches[0].turns[0].after.name] * 2
        assert len({request.sampling.seed for request in asked}) == 2  # one seed would give one answer twice
        for number, text in ((1, "left"), (2, "middle"), (3, "right")):
            conversation.use(number)
            say(conversation, text)
        assert contents(peer, conversation) == [
            f"{first}<user>two<assistant>{answer}<user>{text}<assistant>no"
            for answer, text in (("ok", "left"), ("no", "middle"), ("no", "right"))
        ]
        with pytest.raises(IndexError):
            conversation.use(4)
        with pytest.raises(IndexError):
            conversation.use(0)


def test_what_was_taken_back_is_answered_again_in_place_of_what_it_was(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client)
        say(conversation, "one")
        conversation.back()
        assert len(again(conversation, 3)) == 3
        assert contents(peer, conversation) == ["<user>one<assistant>ok"] * 3
        assert len({branch.turns[-1].after.name for branch in conversation.branches}) == 3
        say(conversation, "two")
        conversation.back()
        say(conversation, "three")  # what was taken back is no longer the last that was said
        again(conversation, 1)
        assert contents(peer, conversation)[-1] == "<user>one<assistant>ok<user>three<assistant>ok"


def test_where_one_of_several_answers_cannot_begin_none_goes_on(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client)
        say(conversation, "one")
        peer.hold, asked = threading.Event(), len(peer.requests("Generate"))

        def script(request: Any, context: Any) -> Any:
            if len(peer.requests("Generate")) == asked + 2:
                refuse(context, "RESOURCE_EXHAUSTED", "QUEUE_FULL", "too many")
            yield from peer.Generate(request, context)

        peer.scripts["Generate"] = script
        peer.ended_one = threading.Semaphore(0)
        with pytest.raises(QueueFull):
            conversation.again(2)
        assert peer.wait_ended() == "cancelled"
        assert len(conversation.branches) == 1


def test_going_back_in_one_branch_leaves_the_others_alone(peer: Peer) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        conversation = Conversation(client)
        for text in ("one", "two"):
            say(conversation, text)
        again(conversation, 1)
        kept = [turn.after.name for turn in conversation.branch.turns]
        conversation.use(2)
        while conversation.branch.turns:
            conversation.back()
        assert all(name in peer.snapshots for name in kept)
        conversation.use(1)
        assert say(conversation, "still here") == "ok"


def test_release_leaves_nothing_behind(peer: Peer) -> None:
    with Client(peer.address) as client:
        conversation = Conversation(client)
        say(conversation, "one")
        again(conversation, 3)
        say(conversation, "two")
        conversation.back()
        conversation.release()
        assert peer.snapshots == {}


def test_a_turn_that_broke_off_is_closed_and_nothing_is_sent_again(peer: Peer) -> None:
    def script(request: Any, context: Any) -> Any:
        is_open = request.parent and not peer.contents[request.parent].endswith("ok")
        if is_open and request.input.chat.messages[0].role != types.ROLE_ASSISTANT:
            refuse(context, "FAILED_PRECONDITION", "TURN_OPEN", "the last turn has no end")
        yield from peer.Generate(request, context)

    peer.scripts["Generate"] = script
    with Client(peer.address) as client:
        conversation = Conversation(client, system="s")
        peer.answer = "cut sho"  # as if stopped before its end
        say(conversation, "one")
        peer.answer = "ok"
        say(conversation, "two")
        first, second = conversation.branch.turns
        assert second.after.info.parent == first.after.name
        assert peer.contents[second.after.name] == (
            "<system>s<user>one<assistant>cut sho<assistant><user>two<assistant>ok"
        )
        say(conversation, "three")
        assert [len(request.input.chat.messages) for request in peer.requests("Generate")] == [2, 1, 2, 1]


def test_a_template_that_cannot_append_gets_the_whole_chat(peer: Peer) -> None:
    def script(request: Any, context: Any) -> Any:
        if request.parent:
            refuse(context, "FAILED_PRECONDITION", "TEMPLATE_NOT_APPENDABLE", "rewrites what came before")
        yield from peer.Generate(request, context)

    peer.answer = "ok"
    peer.scripts["Generate"] = script
    with Client(peer.address) as client:
        conversation = Conversation(client, system="s")
        say(conversation, "one")
        say(conversation, "two")
        first, second = conversation.branch.turns
        assert peer.contents[second.after.name] == "<system>s<user>one<assistant>ok<user>two<assistant>ok"
        # The second state does not descend from the first: to go back is to stand on the first again.
        assert conversation.back() == first.after
        assert second.after.name not in peer.snapshots


def test_a_state_that_could_not_be_kept_leaves_the_chat_where_it_was(peer: Peer) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started(generation="generations/g"))
        yield inf.GenerateResponse(finished=inf.Finished(save_error_reason="STORE_FULL"))

    with Client(peer.address) as client:
        conversation = Conversation(client)
        peer.scripts["Generate"] = script
        reply = conversation.say("one")
        assert len(list(reply.events)) == 2
        assert conversation.finish(reply) is None
        assert conversation.branch.turns == []


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_a_piped_chat_prints_the_answers_alone(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer = "ok"
    assert chat(peer, monkeypatch, "hello", "", "more") == 0
    assert capsys.readouterr().out == "ok\nok\n"
    assert peer.snapshots == {}  # released at the end


def test_the_commands_of_the_chat(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer = "ok"
    script = "/back|/fork 2|/receipt|one|/receipt|/fork x|/fork 2|/use 3|two|/snapshots|/back|/use 9|/what|/quit|never"
    assert chat(peer, monkeypatch, *script.split("|")) == 0
    # The peer numbers what it keeps; which of two answers ends first is open.
    shown = re.sub(r"auto-\d{4}", "auto-N", capsys.readouterr().out).splitlines()
    receipt = shown.pop(4)
    assert receipt.startswith("restored 0 (disk 0, memory 0) · recomputed 0 · new 20 · TTFT 0.")
    assert shown == [
        "nothing to roll back",
        "nothing to answer yet: say something first",
        "no receipt yet",
        "ok",
        "/fork takes a number: /fork 3",
        "── answer 1 of 2: branch 2 ──",
        "ok",
        "── answer 2 of 2: branch 3 ──",
        "ok",
        "you are on branch 1; /use K goes on with another",
        "branch 3 at 22 tokens",
        "ok",
        "NAME                 TOKENS  STORED  STATE   EXPIRES  KEPT  LABELS  PARENT",
        "snapshots/auto-N      22       0  memory  now      -     -       -",
        "snapshots/auto-N      22       0  memory  now      -     -       -",
        "snapshots/auto-N      22       0  memory  now      -     -       -",
        "snapshots/auto-N      44       0  memory  now      -     -       snapshots/auto-N",
        "here: snapshots/auto-N",
        "back at 22 tokens: snapshots/auto-N",
        "restored 22 (disk 0, memory 22) · recomputed 0 · new 0 · 0 B read",
        "/use takes a branch from 1 to 3",
        "no such command: /what; /help lists them",
    ]


def test_a_turn_taken_back_to_the_start_is_tried_three_ways(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer = "ok"
    assert chat(peer, monkeypatch, "one", "/back", "/fork 3", "/use 2", "two") == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok",
        "back at the start",
        "── answer 1 of 3: branch 1 ──",
        "ok",
        "── answer 2 of 3: branch 2 ──",
        "ok",
        "── answer 3 of 3: branch 3 ──",
        "ok",
        "you are on branch 1; /use K goes on with another",
        "branch 2 at 22 tokens",
        "ok",
    ]
    assert [request.input.chat.messages[-1].parts[0].text for request in peer.requests("Generate")] == [
        *["one"] * 4,
        "two",
    ]


def test_a_chat_as_json(peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peer.answer = "ok"
    lines = "one /receipt /fork 1|/snapshots|/use 2|/back|/back|/help".replace(" /", "|/").split("|")
    assert chat(peer, monkeypatch, *lines, flags=("--json", "--keep", "--system", "s")) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == [
        "turn",
        "receipt",
        "turn",
        "snapshot",
        "snapshot",
        "use",
        "back",
        "error",
        "text",
        "kept",
    ]
    assert (events[0]["text"], events[0]["branch"], events[0]["reason"]) == ("ok", 1, "eos")
    assert events[-1]["snapshot"]["name"] in peer.snapshots


def test_a_chat_goes_on_from_a_snapshot(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.answer = "ok"
    with Client(peer.address) as client:
        root = client.create_snapshot([])
    assert chat(peer, monkeypatch, "hello", flags=("--parent", root.name, "--keep")) == 0
    assert peer.requests("Generate")[0].parent == root.name
    assert "kept snapshots/auto-0003 (24 tokens)" not in capsys.readouterr().out  # a name for people: on stderr
    assert list(peer.snapshots) == [root.name, "snapshots/auto-0003"]


def test_pictures_go_before_what_is_said_next(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer.answer = "ok"
    files = [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    for file in files:
        file.write_bytes(file.name.encode())
    a, b, c = (types.Part(image=types.Image(data=file.name.encode())) for file in files)
    missing, empty = tmp_path / "none.png", tmp_path / "empty.png"
    empty.touch()
    attached = [f"/image {file}" for file in (files[1], missing, empty, files[2])]
    assert chat(peer, monkeypatch, "one", "two", *attached, "three", "four", flags=("--image", str(files[0]))) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok",
        "ok",
        f"{missing}: No such file or directory",
        f"the file is empty: '{empty}'",
        "ok",
        "ok",
    ]
    said = [list(request.input.chat.messages[-1].parts) for request in peer.requests("Generate")]
    texts = [types.Part(text=text) for text in ("one", "two", "three", "four")]
    assert said == [[a, texts[0]], [texts[1]], [b, c, texts[2]], [texts[3]]]


def test_a_chat_that_is_sent_again_whole_has_its_pictures(peer: Peer) -> None:
    def script(request: Any, context: Any) -> Any:
        if request.parent:
            refuse(context, "FAILED_PRECONDITION", "TEMPLATE_NOT_APPENDABLE", "rewrites what came before")
        yield from peer.Generate(request, context)

    picture = types.Part(image=types.Image(data=b"picture"))
    peer.answer = "ok"
    peer.scripts["Generate"] = script
    with Client(peer.address) as client:
        conversation = Conversation(client)
        for text, images in (("one", [Image(data=b"picture")]), ("two", [])):
            reply = conversation.say(text, images)
            assert list(reply.events)
            assert conversation.finish(reply) is not None
        whole = peer.requests("Generate")[-1].input.chat.messages
        assert [list(message.parts) for message in whole] == [
            [picture, types.Part(text="one")],
            [types.Part(text="ok")],
            [types.Part(text="two")],
        ]


def test_a_failed_turn_is_told_and_the_chat_goes_on(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Any, context: Any) -> Any:
        if request.input.chat.messages[-1].parts[0].text == "bad":
            refuse(context, "INVALID_ARGUMENT", "CONTEXT_OVERFLOW", "too long")
        yield from peer.Generate(request, context)

    peer.answer = "ok"
    peer.scripts["Generate"] = script
    assert chat(peer, monkeypatch, "bad", "good") == 1
    shown = capsys.readouterr()
    assert shown.out == "ok\n"
    assert shown.err.startswith("error: CONTEXT_OVERFLOW: too long\n")


def test_ctrl_c_stops_the_answer_and_keeps_its_text(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.hold = threading.Event()

    def press() -> None:
        until_said("f")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    assert chat(peer, monkeypatch, "hello", "/snapshots") == 0
    presser.join()
    shown = capsys.readouterr()
    assert shown.out.startswith("f\nNAME")
    assert "snapshots/auto-0002      23" in shown.out
    assert "(ended by: stopped)" in shown.err


def until_main_thread_waits() -> None:
    main = threading.main_thread().ident
    assert main is not None
    while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
        time.sleep(0.01)


def test_ctrl_c_in_the_queue_gives_the_turn_up_and_not_the_chat(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Any, context: Any) -> Any:
        if request.input.chat.messages[-1].parts[0].text == "wait":
            until_main_thread_waits()  # nobody presses Ctrl-C while the call is still being made
            os.kill(os.getpid(), signal.SIGINT)
            while context.is_active():
                time.sleep(0.01)
            return
        yield from peer.Generate(request, context)

    peer.answer = "ok"
    peer.scripts["Generate"] = script
    assert chat(peer, monkeypatch, "wait", "go") == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("ok\n", "(given up)\n")


def test_at_a_terminal_it_greets_and_prompts(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer.answer = "ok"
    code = f"import test_cli_talk as t; a = t.parse('chat', '--address', '{peer.address}'); exit(a.run(a))"
    ours, theirs = pty.openpty()
    folder = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": folder, "TERM": "dumb"},
        cwd=os.path.join(folder, "..", ".."),
        start_new_session=True,
    ) as child:
        os.close(theirs)
        seen = ""

        def until(text: str) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 4096).decode()
            seen = seen.partition(text)[2]

        until(f"letters at {peer.address}; /help for commands")
        until("> ")
        os.write(ours, b"hello\n")
        until("ok\r\n")
        until("> ")
        os.write(ours, b"/fork 1\n")
        until("1> ")
        os.write(ours, b"\x04")  # Ctrl-D
        assert child.wait(30) == 0
    os.close(ours)
