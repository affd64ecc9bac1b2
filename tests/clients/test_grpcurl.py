"""kvfork for people with grpcurl: the guide's commands run as they stand, and what holds for every tool of its kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from guide import Outcome, in_place, read_blocks, run, untrue_part
from json_tools import BufCurl, Grpcurl, Reply, in_camel_case
from toolchains import GRPCURL, buf, go_tool

from tests.e2e.live import ROOT, LiveServer, until
from tests.images.pictures import png

GUIDE = ROOT / "clients" / "grpcurl" / "README.md"
CLONE = {"/path/to/kvfork": str(ROOT)}

# What differs from run to run or from machine to machine: names that the server chooses, times, sizes, texts.
VOLATILE = (
    {"generation", "instance", "seed", "queue_time", "queue", "load", "prefill", "decode"}
    | {"expire_time", "create_time", "last_use_time", "fingerprint", "model_fingerprint", "prefix_hash"}
    | {"residency", "exclusive_bytes", "memory_snapshots", "memory_bytes", "memory_limit_bytes"}
    | {"disk_bytes", "disk_limit_bytes", "text", "rome-how-old", "rome-the-way", "rome-nearby"}
    | {"resume_token"}
)

PATIENCE = 240.0  # seconds before a session is given up; never how long it should take


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A server with both kinds of address."""

    server: LiveServer
    socket: Path

    def env(self, *tools: Path) -> dict[str, str]:
        """What a shell needs to follow the guide with these tools."""
        folders = [*(str(tool.parent) for tool in tools), str(Path(sys.executable).parent), os.environ["PATH"]]
        told = {"KVFORK": self.server.address, "KVFORK_UNIX_SOCKET": str(self.socket)}
        return {**os.environ, **told, "PATH": os.pathsep.join(folders)}


def listening(model: str) -> Iterator[Listening]:
    # Not under pytest's own temporary directory: a socket's path may have no more than a hundred characters.
    with tempfile.TemporaryDirectory(prefix="kvfork-") as folder:
        socket = Path(folder) / "socket"
        with LiveServer(model, "--unix-socket", str(socket)) as server:
            health = HealthStub(server.channel)
            asked = health_pb2.HealthCheckRequest(service="kvfork.v1.InferenceService")
            until(
                lambda: health.Check(asked).status == health_pb2.HealthCheckResponse.SERVING,
                what="the service to serve",
            )
            yield Listening(server=server, socket=socket)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Listening]:
    yield from listening("tiny-gemma3")


@pytest.fixture(scope="module")
def seeing() -> Iterator[Listening]:
    """The model that the outputs about images are from."""
    pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")
    yield from listening("tiny-qwen3_5-vl")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pictures") / "it's one.png"
    file.write_bytes(png(1))
    return file


@pytest.fixture(scope="module")
def default() -> Iterator[Listening]:
    """The model that the guide's outputs are from."""
    yield from listening("smollm2")


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    return go_tool(GRPCURL)


# The first of these tests builds grpcurl, if nobody has.
builds = pytest.mark.timeout(1800)


@pytest.mark.slow
@builds
class TestGuide:
    def test_every_command_does_what_the_guide_shows(self, default: Listening, grpcurl: Path, tmp_path: Path) -> None:
        blocks = in_place(read_blocks(GUIDE), CLONE)
        outcomes = run(blocks, env=default.env(grpcurl), folder=tmp_path, patience=PATIENCE)

        assert len(outcomes) == len(blocks) > 20
        assert [problem for outcome in outcomes if (problem := problem_of(outcome))] == []
        for usage in receipts(outcomes):
            parts = (usage.get(f"{kind}_tokens", 0) for kind in ("cached", "recomputed", "new"))
            assert sum(parts) == usage["prompt_tokens"], usage
        default.server.idle()

    def test_it_can_be_pasted_once_more(self, default: Listening, grpcurl: Path, tmp_path: Path) -> None:
        """The first commands keep snapshots under chosen ids and the last ones delete them: no trace is in the way."""
        blocks = in_place(read_blocks(GUIDE), CLONE)
        for _ in range(2):
            outcomes = run(blocks, env=default.env(grpcurl), folder=tmp_path, patience=PATIENCE)
            assert len(outcomes) == len(blocks)
            assert [o.block.line for o in outcomes if o.exit_code or unexpected_error(o)] == []
            assert not any("save_error_reason" in o.output for o in outcomes)

    def test_images_are_seen_as_the_guide_shows(
        self, seeing: Listening, grpcurl: Path, picture: Path, tmp_path: Path
    ) -> None:
        blocks = in_place(read_blocks(GUIDE, "bash image"), CLONE)
        outcomes = run(blocks, env={**seeing.env(grpcurl), "PICTURE": str(picture)}, folder=tmp_path, patience=PATIENCE)

        assert len(outcomes) == len(blocks) == 6
        assert [problem for outcome in outcomes if (problem := problem_of(outcome))] == []

    def test_buf_curl_does_what_the_guide_shows(self, default: Listening, tmp_path: Path) -> None:
        blocks = read_blocks(GUIDE, "bash buf")
        outcomes = run(blocks, env=default.env(buf()), folder=tmp_path, patience=PATIENCE)

        assert len(outcomes) == len(blocks) == 3
        assert [problem for outcome in outcomes if (problem := problem_of(outcome))] == []


def problem_of(outcome: Outcome) -> str | None:
    """What is wrong with a block, for a reader of the guide; None if nothing is."""
    where = f"line {outcome.block.line}"
    if outcome.exit_code != 0:
        return f"{where}: exit code {outcome.exit_code}\n{outcome.output}"
    if unexpected_error(outcome):
        return f"{where}: an error that is not shown\n{outcome.output}"
    if (part := untrue_part(outcome, volatile=VOLATILE)) is not None:
        return f"{where}: shown but not printed there:\n{part}\n--- printed:\n{outcome.output}"
    return None


def unexpected_error(outcome: Outcome) -> bool:
    failed = re.compile(r"^(ERROR:|Error invoking|Failed to|Failure:|Traceback)", re.MULTILINE)
    return bool(failed.search(outcome.output)) and not failed.search(outcome.block.shown)


def receipts(outcomes: Sequence[Outcome]) -> list[dict[str, int]]:
    """Every `usage` that was printed whole."""
    found = [text for o in outcomes for text in re.findall(r'"usage": (\{[^}]*\})', o.output)]
    assert found
    return [{key: value for key, value in json.loads(text).items() if isinstance(value, int)} for text in found]


TOOLS = ["buf-v1", "buf-v1alpha", pytest.param("grpcurl", marks=[pytest.mark.slow, builds])]


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest, tiny: Listening) -> Grpcurl | BufCurl:
    if request.param == "grpcurl":
        return Grpcurl(request.getfixturevalue("grpcurl"), tiny.server.address, tiny.socket)
    return BufCurl(buf(), tiny.server.address, tiny.socket, reflection=request.param.replace("buf", "grpc"))


PROMPT = {"raw": {"parts": [{"text": "All roads lead to"}]}}


def test_a_call_by_the_socket_is_a_call_by_the_address(tool: Grpcurl | BufCurl) -> None:
    request = {"input": PROMPT, "include_rendered": True}
    by_socket = tool.call("InferenceService/CountTokens", request, by_socket=True)
    assert by_socket == tool.call("InferenceService/CountTokens", request)
    assert by_socket.exit_code == 0 and by_socket.messages[0]["text"] == "All roads lead to"


def test_a_field_has_two_spellings(tool: Grpcurl | BufCurl) -> None:
    """Also inside of messages, and in a oneof; the answers are the same but for what the server chooses anew."""
    made = tool.call("InferenceService/CreateSnapshot", {"input": PROMPT}).messages[0]["snapshot"]
    request = {
        "source": made["name"],
        "drop_tokens": 1,
        "max_recompute_tokens": 100,
        "options": {"ttl": "90s", "snapshot_id": "two-spellings"},
    }
    snake = tool.call("InferenceService/Rollback", request)
    # The same id for the same content is the same snapshot, so the second spelling must find the first one's.
    camel = tool.call("InferenceService/Rollback", in_camel_case(request))
    tool.call("SnapshotService/DeleteSnapshot", {"name": made["name"], "descendants": True})

    assert snake.exit_code == camel.exit_code == 0
    assert snake.messages[0]["snapshot"]["token_count"] == made["token_count"] - 1
    lasting = ("name", "parent", "token_count", "prefix_hash", "create_time")
    assert [snake.messages[0]["snapshot"][key] for key in lasting] == [
        camel.messages[0]["snapshot"][key] for key in lasting
    ]


def test_a_generation_forks_and_rolls_back(tool: Grpcurl | BufCurl) -> None:
    generated = tool.call(
        "InferenceService/Generate",
        {
            "input": PROMPT,
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": 6, "ignore_eos": True},
            "marks": [{"landmark": "LANDMARK_PROMPT_END"}],
            "save": {},
        },
    )
    *events, last = generated.messages
    prompt = next(event["marked"]["snapshot"] for event in events if "marked" in event)
    answer = last["finished"]["snapshot"]
    forked = tool.call("InferenceService/Fork", {"parent": answer["name"], "branches": [{}, {"append": PROMPT}]})
    rolled = tool.call("InferenceService/Rollback", {"source": answer["name"], "ancestor": prompt["name"]})
    deleted = [
        tool.call("SnapshotService/DeleteSnapshot", {"name": s["name"], "descendants": True}) for s in (answer, prompt)
    ]

    assert [sorted(event) for event in generated.messages[:2]] == [["started"], ["marked"]]
    assert answer["token_count"] == prompt["token_count"] + 6
    children = forked.messages[0]["snapshots"]
    grown = answer["token_count"] + forked.messages[0]["usage"]["new_tokens"]
    assert [child["token_count"] for child in children] == [answer["token_count"], grown]
    assert rolled.messages[0]["snapshot"]["token_count"] == prompt["token_count"]
    assert "recomputed_tokens" not in rolled.messages[0]["usage"]
    names = [snapshot["name"] for snapshot in (answer, *children, rolled.messages[0]["snapshot"])]
    assert [reply.messages for reply in deleted] == [({"deleted": names},), ({"deleted": [prompt["name"]]},)]


NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("method", "request_", "status", "reason", "kinds"),
    [
        (
            "SnapshotService/GetSnapshot",
            {"name": "snapshots/never-was"},
            NOT_FOUND,
            "SNAPSHOT_NOT_FOUND",
            {"ResourceInfo"},
        ),
        ("InferenceService/Rollback", {"source": "snapshots/never-was"}, INVALID, "INVALID_FIELD", {"BadRequest"}),
        (
            "InferenceService/Generate",
            {"input": PROMPT, "sampling": {"top_p": 2}},
            INVALID,
            "INVALID_FIELD",
            {"BadRequest"},
        ),
        (
            "InferenceService/Generate",
            {"input": PROMPT, "model": "models/none"},
            NOT_FOUND,
            "MODEL_NOT_FOUND",
            {"ResourceInfo"},
        ),
    ],
    ids=["unknown snapshot", "no target", "out of range", "unknown model"],
)
def test_a_wrong_call_tells_code_reason_and_details(
    tool: Grpcurl | BufCurl,
    method: str,
    request_: dict[str, Any],
    status: grpc.StatusCode,
    reason: str,
    kinds: set[str],
) -> None:
    reply = tool.call(method, request_)
    assert reply == Reply(
        exit_code=tool.exit_code(status), messages=(), reason=reason, kinds=frozenset({"ErrorInfo"} | kinds)
    )


def test_a_request_may_be_larger_than_an_argument_or_a_default_message(tool: Grpcurl | BufCurl) -> None:
    """5 MiB: Linux takes 128 KiB as an argument, and gRPC 4 MiB as a message if not told otherwise."""
    reply = tool.call("SnapshotService/ListSnapshots", {"labels": {"long": "x" * (5 * 2**20)}})
    # The service read it and has its own opinion of it; what is too long for gRPC gets no reason.
    assert (reply.exit_code, reply.reason) == (tool.exit_code(INVALID), "INVALID_FIELD")


@pytest.mark.slow
@builds
class TestScripts:
    def test_branches_leaves_no_snapshot_behind(self, tiny: Listening, grpcurl: Path) -> None:
        calls = Grpcurl(grpcurl, tiny.server.address, tiny.socket)
        turns = [("ROLE_USER", "Name a building."), ("ROLE_ASSISTANT", "The Colosseum.")]
        messages = [{"role": role, "parts": [{"text": text}]} for role, text in turns]
        chat = {"chat": {"messages": messages, "add_generation_prompt": False}}
        calls.call("InferenceService/CreateSnapshot", {"input": chat, "options": {"snapshot_id": "a-building"}})
        branched = self.script(tiny, grpcurl, "branches.sh", "a-building", "How old is it?", "Who's the builder?")
        left = calls.call("SnapshotService/ListSnapshots", {})
        calls.call("SnapshotService/DeleteSnapshot", {"name": "snapshots/a-building"})

        assert branched.returncode == 0, branched.stderr
        assert re.fullmatch(r"How old is it\?\n  .+\nWho's the builder\?\n  .+\n", branched.stdout, re.DOTALL)
        assert [snapshot["name"] for snapshot in left.messages[0]["snapshots"]] == ["snapshots/a-building"]

    def test_any_text_can_be_said(self, tiny: Listening, grpcurl: Path) -> None:
        text = "a \"b\" \\n $(c) `d` – 🎉\n'e'"
        said = self.script(tiny, grpcurl, "say.sh", text, "", "any-text")
        calls = Grpcurl(grpcurl, tiny.server.address, tiny.socket)
        turn = {"chat": {"messages": [{"role": "ROLE_USER", "parts": [{"text": text}]}]}}
        prompt = calls.call("InferenceService/CountTokens", {"input": turn, "include_rendered": True}).messages[0]
        kept = calls.call(
            "SnapshotService/GetSnapshot", {"name": "snapshots/any-text", "include_tokens": True}
        ).messages[0]
        calls.call("SnapshotService/DeleteSnapshot", {"name": "snapshots/any-text"})

        assert said.returncode == 0
        assert said.stderr == f"prompt tokens: 0 cached, 0 recomputed, {prompt['total_tokens']} new\n"
        assert kept["token_ids"][: prompt["total_tokens"]] == prompt["token_ids"]

    def test_pictures_are_sent_before_the_text(self, seeing: Listening, grpcurl: Path, picture: Path) -> None:
        said = self.script(
            seeing, grpcurl, "say.sh", "-i", str(picture), "-i", str(picture), "Same?", "", "two-pictures"
        )
        calls = Grpcurl(grpcurl, seeing.server.address, seeing.socket)
        kept = calls.call("SnapshotService/GetSnapshot", {"name": "snapshots/two-pictures"}).messages[0]
        calls.call("SnapshotService/DeleteSnapshot", {"name": "snapshots/two-pictures"})

        assert said.returncode == 0, said.stderr
        spans = [span["end"] - span["start"] for span in kept["snapshot"]["image_spans"]]
        assert spans == [80, 80]

    @pytest.mark.parametrize("words", [("say.sh", "Hi", "never-was"), ("branches.sh", "never-was", "Hi")])
    def test_a_script_fails_as_grpcurl_does(self, tiny: Listening, grpcurl: Path, words: tuple[str, ...]) -> None:
        done = self.script(tiny, grpcurl, *words)
        assert done.returncode == Grpcurl.exit_code(NOT_FOUND)
        assert "SNAPSHOT_NOT_FOUND" in done.stderr and "Traceback" not in done.stderr

    @pytest.mark.parametrize("script", ["say.sh", "branches.sh"])
    def test_a_script_without_arguments_tells_its_use(self, tiny: Listening, grpcurl: Path, script: str) -> None:
        done = self.script(tiny, grpcurl, script)
        assert done.returncode == 2
        assert done.stderr.count(f"  {script} ") == 1

    @staticmethod
    def script(at: Listening, grpcurl: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(GUIDE.parent / name), *words]
        return subprocess.run(command, env=at.env(grpcurl), capture_output=True, text=True, timeout=PATIENCE)
