"""What callers send stays out of the log: marked prompts, tokens, labels and unknown names in calls that work and calls
that fail, at debug level, and then a search of all that the process has said. Names of snapshots that there are belong
there: without them nobody could tell from a log what happened to which."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from service.auth.tokens import new_token
from tests.e2e.inside import DIES
from tests.e2e.live import PATIENCE, LiveServer, chat, greedy, prompt_of, raw, until, with_token

MARK = "Planted" + uuid.uuid4().hex  # a marked word in each place that holds a caller's own


def marked(place: str) -> str:
    return f"{MARK}-{place}"


class Planted:
    """A server at debug level, and every secret that it and its callers have."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder = folder
        self.token, line = new_token("alice")
        self.spare, spare = new_token("alice")
        self.wrong = new_token("alice")[0]
        self.lines = f"{line}\n{spare}\n"
        self.tokens = folder / "print-tokens.py"
        self.tokens.write_text(f"import sys\nassert {marked('argument')!r} in sys.argv\nprint({self.lines!r})\n")
        self.master = uuid.uuid4().hex * 2
        self.key_file = folder / "master"
        self.key_file.write_text(self.master)
        self.key_file.chmod(0o600)
        self.server = LiveServer(
            "tiny-llama",
            *("--log-level", "debug", "--log-format", form),
            *("--token-command", f"{sys.executable} {self.tokens} {marked('argument')}", "--token-refresh", "1s"),
            *("--store-dir", str(folder / "store"), "--key-file", str(self.key_file)),
            inside=True,
            token=self.token,
            env={"GRPC_VERBOSITY": "DEBUG"},
        )

    @property
    def secrets(self) -> dict[str, str]:
        return {
            "what a caller sent": MARK,
            "a token": self.token,
            "a token that was not used": self.spare,
            "a token that was refused": self.wrong,
            "the master key": self.master,
        }


@pytest.fixture(params=["text", "json"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Planted]:
    made = Planted(tmp_path, request.param)
    try:
        yield made
    finally:
        made.server.close()


def attempt(call: Any) -> str:
    """Makes a call and reads it to its end; how it ended."""
    try:
        reply = call()
        if isinstance(reply, grpc.RpcContext):
            list(reply)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def calls(server: LiveServer) -> dict[str, Any]:
    """Calls with a marked word in every place that takes one; by name."""
    inference, snapshots = server.inference, server.snapshots
    options = pb.SnapshotOptions(
        snapshot_id=f"named-{uuid.uuid4().hex}", labels={f"{MARK}-key": marked("value")}, durability=pb.DURABILITY_DISK
    )
    text = raw(marked("prompt") + " " + marked("more"))
    name = f"snapshots/{options.snapshot_id}"
    form = inference_pb.Constraint(regex=f"({MARK}-regex")  # one that does not compile
    return {
        "create": lambda: inference.CreateSnapshot(
            inference_pb.CreateSnapshotRequest(input=text, options=options, request_id=str(uuid.uuid4()))
        ),
        "generate": lambda: inference.Generate(
            greedy(text, tokens=4, stopping=pb.Stopping(max_tokens=4, stop=[marked("stop")])), timeout=PATIENCE
        ),
        "chat": lambda: inference.Generate(greedy(chat(("user", marked("chat"))), tokens=4), timeout=PATIENCE),
        "form": lambda: inference.Generate(greedy(text, tokens=4, constraint=form), timeout=PATIENCE),
        "fork": lambda: inference.Fork(
            inference_pb.ForkRequest(
                parent=name, branches=[inference_pb.ForkBranch(append=raw(marked("branch")), options=options)]
            )
        ),
        "count": lambda: inference.CountTokens(inference_pb.CountTokensRequest(input=text, include_rendered=True)),
        "wrong fields": lambda: inference.Generate(
            inference_pb.GenerateRequest(
                parent=marked("no name"), model=marked("model"), request_id=marked("request"), sampling={"top_p": 7}
            )
        ),
        "no such model": lambda: inference.Generate(greedy(text, model=f"models/{MARK}")),
        "no such snapshot": lambda: snapshots.GetSnapshot(
            snapshot_pb.GetSnapshotRequest(name=f"snapshots/{MARK}-none")
        ),
        "bad labels": lambda: inference.CreateSnapshot(
            inference_pb.CreateSnapshotRequest(input=text, options={"labels": {f"{MARK} key": marked("v") * 50}})
        ),
        "bad page": lambda: snapshots.ListSnapshots(
            snapshot_pb.ListSnapshotsRequest(page_token=marked("page"), labels={MARK: MARK})
        ),
        "list": lambda: snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(labels={MARK: MARK})),
        "get": lambda: snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name, include_tokens=True)),
        "too many tokens": lambda: inference.Generate(greedy(raw(marked("long") * 20_000)), timeout=PATIENCE),
        "delete": lambda: snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=name)),
        "gone": lambda: snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=name)),
        "unreadable": lambda: server.channel.unary_unary("/kvfork.v1.InferenceService/Fork")(
            MARK.encode(), timeout=PATIENCE
        ),
        "no such method": lambda: server.channel.unary_unary(f"/kvfork.v1.InferenceService/{MARK}")(
            MARK.encode(), timeout=PATIENCE
        ),
    }


def test_nothing_that_callers_send_is_in_the_log(planted: Planted):
    server = planted.server
    ends = {name: attempt(call) for name, call in calls(server).items()}
    well = {name for name, end in ends.items() if end == "OK"}
    assert {"create", "generate", "count", "list", "get", "delete"} <= well, ends
    assert len(set(ends.values())) >= 4, ends  # they fail in many ways
    with grpc.insecure_channel(server.address) as channel:
        stranger = with_token(channel, planted.wrong)
        shown = stranger.unary_unary("/kvfork.v1.InferenceService/CreateSnapshot")
        assert attempt(lambda: shown(MARK.encode(), metadata=(("x-note", marked("metadata")),))) == "UNAUTHENTICATED"
        assert attempt(lambda: channel.unary_unary("/x")(b"", metadata=(("authorization", planted.token),))) != "OK"
    # The engine fails under a marked prompt, and the log gets an incident with the exception.
    died = raw(marked("died"), [DIES, *prompt_of(20)])
    assert attempt(lambda: server.inference.Generate(greedy(died), timeout=PATIENCE)) == "UNAVAILABLE"
    # The tokens turn bad, and are complained of.
    planted.tokens.write_text(f"print('alice {planted.spare}')\n")
    until(lambda: "what was in use stays in use" in server.log.read_text(), what="the complaint")
    server.terminate()
    log = server.log.read_text()
    assert "DEBUG" in log or '"level": "debug"' in log
    assert "Traceback" in log or "as planned" in log or "incident" in log  # there was something to say
    found = {what for what, secret in planted.secrets.items() if secret.lower() in log.lower()}
    assert not found, [
        line for line in log.splitlines() if any(s.lower() in line.lower() for s in planted.secrets.values())
    ][:5]
