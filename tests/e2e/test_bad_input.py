"""What a server says to requests that it cannot serve: one row per mistake, with code, reason and facts.

The point of the last test: after all of them the server is as it was.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2, field_mask_pb2, timestamp_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import PATIENCE, LiveServer, chat, generate, greedy, prompt_of, raw, refused

CONTEXT = 32768  # tiny-gemma3's
VOCABULARY = 512
NAN, INFINITY = math.nan, math.inf
LONG = duration_pb2.Duration(seconds=10 * 24 * 3600)

ROOT = "bad-input-root"
"""A snapshot of 300 raw tokens; nothing is kept between 256 and 300."""

CHILD = "bad-input-child"
OPEN_TURN = "bad-input-open-turn"


@dataclass(frozen=True)
class Row:
    """A wrong request and the answer to it. `fields`: paths of which each must be named."""

    name: str
    call: Callable[[LiveServer], Any]
    code: str
    reason: str
    fields: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()


TABLE: list[Row] = []


def row(name: str, code: str, reason: str, *fields: str, kinds: str = "", **metadata: object) -> Callable[..., None]:
    """Adds a row for the call that follows."""

    def add(call: Callable[[LiveServer], Any]) -> None:
        facts = {key: str(value) for key, value in metadata.items()}
        TABLE.append(Row(name, call, code, reason, fields, facts, frozenset(kinds.split())))

    return add


def generate_row(name: str, code: str, reason: str, *fields: str, kinds: str = "", **request: Any) -> None:
    """A row for Generate with a good prompt, and with one thing wrong."""
    metadata = request.pop("metadata", {})
    given = {"input": raw("Hello"), **request}
    made = inference_pb.GenerateRequest(**given)
    row(name, code, reason, *fields, kinds=kinds, **metadata)(lambda s: s.inference.Generate(made, timeout=PATIENCE))


def invalid(name: str, *fields: str, reason: str = "INVALID_FIELD", **request: Any) -> None:
    """A row for Generate with a wrong field."""
    generate_row(name, "INVALID_ARGUMENT", reason, *fields, kinds="BadRequest", **request)


def unary(name: str, method: str, request: Any, code: str, reason: str, *fields: str, **more: Any) -> None:
    """A row for any other method."""

    def call(server: LiveServer) -> Any:
        for stub in (server.inference, server.snapshots, server.server):
            if hasattr(stub, method):
                return getattr(stub, method)(request, timeout=PATIENCE)
        raise AssertionError(method)

    row(f"{method}: {name}", code, reason, *fields, kinds=more.pop("kinds", ""), **more)(call)


def part(**kind: Any) -> pb.Input:
    return pb.Input(raw=pb.RawInput(parts=[pb.Part(**kind)]))


# -- names ----------------------------------------------------------------------------------------------------------

for given in ("models/", "tiny-gemma3", "snapshots/tiny-gemma3", "models/a b", "models/../x", "models/" + "x" * 300):
    invalid(f"model name {given[:30]!r}", "model", model=given)
generate_row("model that is not here", "NOT_FOUND", "MODEL_NOT_FOUND", model="models/gpt-99", kinds="ResourceInfo")
for given in ("x", "snapshots/", "models/abcdefgh", "snapshots/a/b", "snapshots/a\nb", "/snapshots/a"):
    invalid(f"parent name {given!r}", "parent", parent=given)
for given in ("snapshots/never-was-here", "snapshots/s00000000000000000000000000", "snapshots/ABC", "snapshots/x"):
    generate_row(f"parent {given}", "NOT_FOUND", "SNAPSHOT_NOT_FOUND", parent=given, kinds="ResourceInfo")

NOWHERE = "snapshots/never-was-here"
for method, request in (
    ("CreateSnapshot", inference_pb.CreateSnapshotRequest(parent=NOWHERE, input=raw("x"))),
    ("Fork", inference_pb.ForkRequest(parent=NOWHERE, branches=[inference_pb.ForkBranch()])),
    ("Rollback", inference_pb.RollbackRequest(source=NOWHERE, token_count=1)),
    ("CountTokens", inference_pb.CountTokensRequest(parent=NOWHERE, input=raw("x"))),
    ("GetSnapshot", snapshot_pb.GetSnapshotRequest(name=NOWHERE)),
    ("UpdateSnapshot", snapshot_pb.UpdateSnapshotRequest(snapshot=pb.Snapshot(name=NOWHERE, pinned=True))),
    ("DeleteSnapshot", snapshot_pb.DeleteSnapshotRequest(name=NOWHERE)),
):
    unary("unknown name", method, request, "NOT_FOUND", "SNAPSHOT_NOT_FOUND", kinds="ResourceInfo")
unary(
    "unknown ancestor",
    "Rollback",
    inference_pb.RollbackRequest(source=f"snapshots/{ROOT}", ancestor=NOWHERE),
    "NOT_FOUND",
    "SNAPSHOT_NOT_FOUND",
    kinds="ResourceInfo",
)
for method, request, where in (
    ("GetSnapshot", snapshot_pb.GetSnapshotRequest(), "name"),
    ("GetSnapshot", snapshot_pb.GetSnapshotRequest(name="models/x"), "name"),
    ("DeleteSnapshot", snapshot_pb.DeleteSnapshotRequest(name="x", allow_missing=True), "name"),
    ("UpdateSnapshot", snapshot_pb.UpdateSnapshotRequest(), "snapshot.name"),
    ("ListSnapshots", snapshot_pb.ListSnapshotsRequest(parent="models/x"), "parent"),
    ("ExtendSnapshots", snapshot_pb.ExtendSnapshotsRequest(names=["snapshots/ok-name-1", "x"]), "names[1]"),
    ("ExtendSnapshots", snapshot_pb.ExtendSnapshotsRequest(), "names"),
    ("StopGeneration", inference_pb.StopGenerationRequest(generation="snapshots/x"), "generation"),
    ("StopGeneration", inference_pb.StopGenerationRequest(), "generation"),
    ("GetModel", server_pb.GetModelRequest(name="x"), "name"),
    ("Rollback", inference_pb.RollbackRequest(token_count=1), "source"),
    ("Fork", inference_pb.ForkRequest(branches=[inference_pb.ForkBranch()]), "parent"),
):
    unary(f"bad {where}", method, request, "INVALID_ARGUMENT", "INVALID_FIELD", where, kinds="BadRequest")
unary("not here", "GetModel", server_pb.GetModelRequest(name="models/x"), "NOT_FOUND", "MODEL_NOT_FOUND")

# -- inputs ---------------------------------------------------------------------------------------------------------

row("no input at all", "INVALID_ARGUMENT", "INVALID_FIELD", "input")(
    lambda s: s.inference.Generate(inference_pb.GenerateRequest(), timeout=PATIENCE)
)
invalid("input without a form", "input", input=pb.Input())
invalid("raw input without parts", "input.raw.parts", input=pb.Input(raw=pb.RawInput()))
invalid("part without a kind", "input.raw.parts[0]", input=part())
invalid("text that is empty", "input", input=raw(""))
invalid("no token ids", "input", input=raw([]))
invalid("chat without messages", "input.chat.messages", input=pb.Input(chat=pb.ChatInput()))
invalid(
    "turn without a role and without parts",
    "input.chat.messages[0].role",
    "input.chat.messages[0].parts",
    input=pb.Input(chat=pb.ChatInput(messages=[pb.Message()])),
)
invalid(
    "turn of an unknown role",
    "input.chat.messages[0].role",
    input=pb.Input(chat=pb.ChatInput(messages=[pb.Message(role=99, parts=[pb.Part(text="x")])])),
)
for text in ("[1]", "{", '{"a": NaN}', '{"messages": []}', '{"chat_template": "x"}', "[" * 5000):
    invalid(
        f"template variables {text[:20]}",
        "input.chat.template_vars_json",
        input=pb.Input(chat=pb.ChatInput(messages=chat(("user", "x")).chat.messages, template_vars_json=text)),
    )
invalid("token id at the vocabulary's size", "input.raw.parts[0].tokens.ids[2]", input=raw([1, 2, VOCABULARY]))
invalid("token id beyond 31 bits", "input.raw.parts[0].tokens.ids[0]", input=raw([2**32 - 1]))
invalid(
    "special tokens in the middle of a context",
    "input.raw.add_special_tokens",
    parent=f"snapshots/{ROOT}",
    input=pb.Input(raw=pb.RawInput(parts=[pb.Part(text="x")], add_special_tokens=True)),
)
for image in (pb.Image(data=b"\x89PNG"), pb.Image(sha256=bytes(32))):
    invalid(
        f"image by {image.WhichOneof('source')}",
        "input.raw.parts[0].image",
        reason="IMAGE_UNSUPPORTED",
        input=part(image=image),
    )
invalid("image without a source", "input.raw.parts[0].image", input=part(image=pb.Image()))
invalid("digest of another length", "input.raw.parts[0].image.sha256", input=part(image=pb.Image(sha256=bytes(31))))
invalid(
    "image of a kind that is not taken",
    "input.raw.parts[0].image.mime_type",
    reason="IMAGE_UNSUPPORTED",
    input=part(image=pb.Image(data=b"GIF89a", mime_type="image/gif")),
)
OVERFLOW = {"promptTokens": str(CONTEXT), "contextTokens": str(CONTEXT)}
generate_row(
    "prompt that leaves no room",
    "INVALID_ARGUMENT",
    "CONTEXT_OVERFLOW",
    "input",
    kinds="BadRequest",
    input=raw([7] * CONTEXT),
    metadata=OVERFLOW,
)
generate_row(
    "5 MiB of text",
    "INVALID_ARGUMENT",
    "CONTEXT_OVERFLOW",
    "input",
    kinds="BadRequest",
    input=raw("word " * 2**20),
)
generate_row(
    "too much behind a parent",
    "INVALID_ARGUMENT",
    "CONTEXT_OVERFLOW",
    "input",
    parent=f"snapshots/{ROOT}",
    input=raw([7] * (CONTEXT - 300)),
    metadata=OVERFLOW,
)
unary(
    "one token too many",
    "CreateSnapshot",
    inference_pb.CreateSnapshotRequest(input=raw([7] * (CONTEXT + 1))),
    "INVALID_ARGUMENT",
    "CONTEXT_OVERFLOW",
    "input",
    promptTokens=CONTEXT + 1,
)
unary(
    "one branch too long",
    "Fork",
    inference_pb.ForkRequest(
        parent=f"snapshots/{ROOT}",
        branches=[inference_pb.ForkBranch(), inference_pb.ForkBranch(append=raw([7] * (CONTEXT - 299)))],
    ),
    "INVALID_ARGUMENT",
    "CONTEXT_OVERFLOW",
    "branches[1].append",
)
row("64 MiB and more", "RESOURCE_EXHAUSTED", "")(
    lambda s: s.inference.Generate(inference_pb.GenerateRequest(input=raw("x" * (64 * 2**20 + 1))), timeout=PATIENCE)
)
generate_row(
    "a turn after an open one",
    "FAILED_PRECONDITION",
    "TURN_OPEN",
    kinds="PreconditionFailure",
    parent=f"snapshots/{OPEN_TURN}",
    input=chat(("user", "Another question")),
)

# -- sampling and stopping ------------------------------------------------------------------------------------------

for knob, wrong in {
    "temperature": (-0.5, NAN, INFINITY, -INFINITY, 1e9),
    "top_p": (0.0, -0.1, 1.5, NAN, INFINITY),
    "min_p": (-0.1, 1.0, NAN),
    "repetition_penalty": (0.0, -1.0, NAN, INFINITY, 1e9),
    "frequency_penalty": (NAN, INFINITY, -1e9),
    "presence_penalty": (NAN, -INFINITY, 1e9),
}.items():
    for value in wrong:
        invalid(f"{knob} {value}", f"sampling.{knob}", sampling=pb.Sampling(**{knob: value}))
for value in (NAN, INFINITY, -INFINITY, 101.0):
    invalid(f"logit bias {value}", "sampling.logit_bias[7]", sampling=pb.Sampling(logit_bias={7: value}))
invalid("logit bias outside the vocabulary", "sampling.logit_bias", sampling=pb.Sampling(logit_bias={VOCABULARY: 1.0}))
invalid("no new tokens", "stopping.max_tokens", stopping=pb.Stopping(max_tokens=0))
invalid("least above most", "stopping.min_tokens", stopping=pb.Stopping(max_tokens=3, min_tokens=4))
invalid("empty stop string", "stopping.stop[1]", stopping=pb.Stopping(stop=["ok", ""]))
invalid("too many stop strings", "stopping.stop", stopping=pb.Stopping(stop=["x"] * 1000))
invalid("stop string of 100 kB", "stopping.stop[0]", stopping=pb.Stopping(stop=["x" * 100_000]))
for seconds in (0, -1):
    limit = duration_pb2.Duration(seconds=seconds)
    invalid(f"time limit {seconds}", "stopping.time_limit", stopping=pb.Stopping(time_limit=limit))
invalid(
    "time limit of mixed signs",
    "stopping.time_limit",
    stopping=pb.Stopping(time_limit=duration_pb2.Duration(seconds=1, nanos=-1)),
)
invalid("too many alternatives", "output.top_logprobs", output=inference_pb.OutputOptions(top_logprobs=21))
invalid("request id that is no UUID", "request_id", request_id="once more")

# -- what is kept ---------------------------------------------------------------------------------------------------

for wrong_id in (
    "short",
    "Upper-case-id",
    "-starts-with-dash",
    "under_scored_id",
    "x" * 64,
    "späte-rose",
    "a b c d e f",
):
    save = pb.SnapshotOptions(snapshot_id=wrong_id)
    invalid(f"snapshot id {wrong_id[:20]!r}", "save.snapshot_id", save=save)
for ttl in (duration_pb2.Duration(), duration_pb2.Duration(seconds=-5), LONG, duration_pb2.Duration(nanos=2**31 - 1)):
    invalid(f"ttl of {ttl.seconds} s {ttl.nanos} ns", "save.ttl", save=pb.SnapshotOptions(ttl=ttl))
invalid("too many labels", "save.labels", save=pb.SnapshotOptions(labels={f"label-{i}": "x" for i in range(65)}))
invalid("label key with a space", "save.labels['a b']", save=pb.SnapshotOptions(labels={"a b": "x"}))
invalid("label value of 1 kB", "save.labels['a']", save=pb.SnapshotOptions(labels={"a": "x" * 1024}))
invalid("durability that is no such", "save.durability", save=pb.SnapshotOptions(durability=9))
invalid("save on cancel without save", "save_on_cancel", save_on_cancel=True)
invalid("save on cancel without a name", "save_on_cancel", save_on_cancel=True, save=pb.SnapshotOptions())
invalid("mark without a place", "marks[0]", marks=[pb.Mark()])
invalid("mark at 0", "marks[0].token_count", marks=[pb.Mark(token_count=0)])
invalid("mark beyond the prompt", "marks[0].token_count", marks=[pb.Mark(token_count=4)], input=raw([7, 8, 9]))
invalid("mark after a message of no chat", "marks[0].message_count", marks=[pb.Mark(message_count=1)])
invalid(
    "mark after a message that is not there",
    "marks[1].message_count",
    marks=[pb.Mark(message_count=1), pb.Mark(message_count=2)],
    input=chat(("user", "x")),
)
invalid("landmark that is none", "marks[0].landmark", marks=[pb.Mark(landmark=pb.LANDMARK_UNSPECIFIED)])
invalid(
    "one id for two snapshots",
    "marks[0].options.snapshot_id",
    save=pb.SnapshotOptions(snapshot_id="twice-the-same"),
    marks=[pb.Mark(token_count=1, options=pb.SnapshotOptions(snapshot_id="twice-the-same"))],
)
for number, schema in enumerate(
    (
        "{",
        "[]",
        "true",
        '{"type": "nothing"}',
        '{"type": "string", "pattern": "("}',
        '{"$ref": "#/nowhere"}',
        '{"$ref": "http://127.0.0.1:1/schema.json"}',  # nothing is ever fetched
        '{"enum": []}',
        '{"type": "integer", "minimum": 5, "maximum": 2}',
        '{"not": {}}',
        "[" * 60_000,
        '{"a":' * 10_000,
    )
):
    constraint = inference_pb.Constraint(json_schema=schema)
    invalid(f"schema {number}", "constraint.json_schema", constraint=constraint)
for regex in ("(", "[", "a{2,1}", r"(a)\1", "(?=a)b", r"a\b", "(" * 2000):
    invalid(f"regex {regex[:9]}", "constraint.regex", constraint=inference_pb.Constraint(regex=regex))
for lark in ("", "start", "start: nowhere", "start: start", 'begin: "a"', 'start: %json {"type": 1}', "start: /(/"):
    invalid(f"grammar {lark!r}", "constraint.lark", constraint=inference_pb.Constraint(lark=lark))
invalid("no kind of constraint", "constraint", constraint=inference_pb.Constraint(after_reasoning=True))
invalid("no choice", "constraint.choice.options", constraint=inference_pb.Constraint(choice=inference_pb.Choice()))
generate_row(
    "durable snapshot",
    "UNIMPLEMENTED",
    "DURABILITY_UNSUPPORTED",
    save=pb.SnapshotOptions(durability=pb.DURABILITY_DISK),
)
for token in ("x", "....", base64.urlsafe_b64encode(bytes(24)).decode(), "é", "A" * 10_000):
    unary(
        f"resume token {token[:8]!r}",
        "WatchSnapshots",
        snapshot_pb.WatchSnapshotsRequest(resume_token=token),
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        "resume_token",
        kinds="BadRequest",
    )
unary(
    "bad label",
    "WatchSnapshots",
    snapshot_pb.WatchSnapshotsRequest(labels={"-": "x"}),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "labels['-']",
    kinds="BadRequest",
)

# -- fork, rollback -------------------------------------------------------------------------------------------------


def rollback_row(name: str, code: str, reason: str, *fields: str, kinds: str = "", **request: Any) -> None:
    given = inference_pb.RollbackRequest(**{"source": f"snapshots/{ROOT}", **request})
    unary(name, "Rollback", given, code, reason, *fields, kinds=kinds)


rollback_row("no target", "INVALID_ARGUMENT", "INVALID_FIELD", "target", kinds="BadRequest")
rollback_row("to 0", "INVALID_ARGUMENT", "INVALID_FIELD", "token_count", token_count=0, kinds="BadRequest")
rollback_row("dropping all", "INVALID_ARGUMENT", "INVALID_FIELD", "drop_tokens", drop_tokens=300, kinds="BadRequest")
rollback_row("dropping more", "OUT_OF_RANGE", "ROLLBACK_BEYOND_END", drop_tokens=301)
rollback_row("past the end", "OUT_OF_RANGE", "ROLLBACK_BEYOND_END", token_count=301)
rollback_row("far past the end", "OUT_OF_RANGE", "ROLLBACK_BEYOND_END", token_count=2**32 - 1)
rollback_row(
    "to a descendant",
    "FAILED_PRECONDITION",
    "NOT_AN_ANCESTOR",
    ancestor=f"snapshots/{CHILD}",
    kinds="PreconditionFailure",
)
rollback_row("ancestor without a name", "INVALID_ARGUMENT", "INVALID_FIELD", "ancestor", ancestor="")
rollback_row("odd rounding", "INVALID_ARGUMENT", "INVALID_FIELD", "rounding", token_count=9, rounding=7)
rollback_row("odd release", "INVALID_ARGUMENT", "INVALID_FIELD", "release", token_count=9, release=7)
rollback_row("dearer than allowed", "FAILED_PRECONDITION", "RECOMPUTE_LIMIT", token_count=290, max_recompute_tokens=5)
rollback_row(
    "down to nothing", "FAILED_PRECONDITION", "RECOMPUTE_LIMIT", token_count=9, rounding=inference_pb.ROUNDING_DOWN
)
rollback_row(
    "under a taken id",
    "ALREADY_EXISTS",
    "SNAPSHOT_ID_TAKEN",
    token_count=256,
    options=pb.SnapshotOptions(snapshot_id=CHILD),
    kinds="ResourceInfo",
)
unary(
    "no branches",
    "Fork",
    inference_pb.ForkRequest(parent=f"snapshots/{ROOT}"),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "branches",
)
unary(
    "too many branches",
    "Fork",
    inference_pb.ForkRequest(parent=f"snapshots/{ROOT}", branches=[inference_pb.ForkBranch()] * 65),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "branches",
)
unary(
    "one id for two children",
    "Fork",
    inference_pb.ForkRequest(
        parent=f"snapshots/{ROOT}",
        branches=[inference_pb.ForkBranch(options=pb.SnapshotOptions(snapshot_id="the-same-twice"))] * 2,
    ),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "branches[1].options.snapshot_id",
)
unary(
    "under a taken id",
    "Fork",
    inference_pb.ForkRequest(
        parent=f"snapshots/{ROOT}",
        branches=[inference_pb.ForkBranch(append=raw([9]), options=pb.SnapshotOptions(snapshot_id=CHILD))],
    ),
    "ALREADY_EXISTS",
    "SNAPSHOT_ID_TAKEN",
    kinds="ResourceInfo",
)
unary(
    "under a taken id",
    "CreateSnapshot",
    inference_pb.CreateSnapshotRequest(input=raw([9, 8, 7]), options=pb.SnapshotOptions(snapshot_id=CHILD)),
    "ALREADY_EXISTS",
    "SNAPSHOT_ID_TAKEN",
    kinds="ResourceInfo",
)
unary(
    "mark after the end",
    "CreateSnapshot",
    inference_pb.CreateSnapshotRequest(input=raw("x"), marks=[pb.Mark(landmark=pb.LANDMARK_REASONING_START)]),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "marks[0].landmark",
)

# -- snapshots ------------------------------------------------------------------------------------------------------


def update_row(name: str, reason: str, *fields: str, mask: tuple[str, ...] = (), **snapshot: Any) -> None:
    given = snapshot_pb.UpdateSnapshotRequest(
        snapshot=pb.Snapshot(name=f"snapshots/{ROOT}", **snapshot), update_mask=field_mask_pb2.FieldMask(paths=mask)
    )
    unary(name, "UpdateSnapshot", given, "INVALID_ARGUMENT", reason, *fields, kinds="BadRequest")


update_row("nothing to change", "INVALID_FIELD", "update_mask")
for path in ("name", "parent", "token_count", "nonsense", "*", "", "labels.a", "expiration"):
    update_row(f"mask {path!r}", "IMMUTABLE_FIELD", "update_mask.paths", mask=(path,))
update_row("ttl in the mask alone", "INVALID_FIELD", "snapshot.ttl", mask=("ttl",))
update_row("both ends", "INVALID_FIELD", "update_mask", mask=("ttl", "expire_time"))
update_row("ttl beyond the limit", "INVALID_FIELD", "snapshot.ttl", ttl=LONG)
update_row(
    "an end in the past", "INVALID_FIELD", "snapshot.expire_time", expire_time=timestamp_pb2.Timestamp(seconds=1)
)
update_row(
    "an end in year 9999",
    "INVALID_FIELD",
    "snapshot.expire_time",
    expire_time=timestamp_pb2.Timestamp(seconds=253402300799),
)
unary(
    "too many names",
    "ExtendSnapshots",
    snapshot_pb.ExtendSnapshotsRequest(names=["snapshots/a-name-of-mine"] * 1001),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "names",
)
unary(
    "negative page",
    "ListSnapshots",
    snapshot_pb.ListSnapshotsRequest(page_size=-1),
    "INVALID_ARGUMENT",
    "INVALID_FIELD",
    "page_size",
)
for token in ("x", "....", base64.urlsafe_b64encode(bytes(40)).decode(), "é", "A" * 10_000):
    for method, request in (
        ("ListSnapshots", snapshot_pb.ListSnapshotsRequest(page_token=token)),
        ("ListModels", server_pb.ListModelsRequest(page_token=token)),
    ):
        unary(f"page token {token[:8]!r}", method, request, "INVALID_ARGUMENT", "PAGE_TOKEN_INVALID", "page_token")


# -- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(server_for: Callable[[str], LiveServer]) -> Iterator[LiveServer]:
    """A server that holds what the table's rows name."""
    server = server_for("tiny-gemma3")
    create = server.inference.CreateSnapshot
    create(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(300)), options=pb.SnapshotOptions(snapshot_id=ROOT)))
    create(
        inference_pb.CreateSnapshotRequest(
            parent=f"snapshots/{ROOT}", input=raw(prompt_of(40, 1)), options=pb.SnapshotOptions(snapshot_id=CHILD)
        )
    )
    create(
        inference_pb.CreateSnapshotRequest(
            input=chat(("user", "A question")), options=pb.SnapshotOptions(snapshot_id=OPEN_TURN)
        )
    )
    yield server
    for name in (ROOT, CHILD, OPEN_TURN):
        server.snapshots.DeleteSnapshot(snapshot_pb.DeleteSnapshotRequest(name=f"snapshots/{name}"))


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_a_wrong_request_gets_its_code_reason_and_facts(target: LiveServer, wrong: Row) -> None:
    answer = refused(lambda: wrong.call(target))
    assert (answer.code, answer.reason) == (wrong.code, wrong.reason), answer
    assert set(wrong.fields) <= set(answer.fields), answer
    assert wrong.kinds <= answer.kinds, answer
    assert {key: answer.metadata.get(key) for key in wrong.metadata} == wrong.metadata
    if answer.code != "RESOURCE_EXHAUSTED":
        assert "ErrorInfo" in answer.kinds and answer.text


def test_the_whole_table_leaves_the_server_as_it_was(target: LiveServer) -> None:
    question = greedy(raw(prompt_of(400, 5)), tokens=24)
    before = generate(target, question)
    names = all_names(target)
    files, threads = target.open_files, target.threads
    for wrong in TABLE:
        refused(lambda call=wrong.call: call(target))
    target.idle()
    assert generate(target, question).ids == before.ids
    assert all_names(target) == names
    assert (target.open_files, target.threads) <= (files + 2, threads + 2)
    assert not target.complaints()


def test_wrong_requests_beside_a_generation_do_not_disturb_it(target: LiveServer) -> None:
    question = greedy(raw(prompt_of(400, 6)), tokens=200)
    alone = generate(target, question).ids
    stream = target.inference.Generate(question, timeout=PATIENCE)
    ids = []
    rows = iter(TABLE * 2)
    for event in stream:
        ids += event.delta.token_ids
        if event.WhichOneof("event") == "delta":
            refused(lambda: next(rows).call(target))
    assert ids == alone


def test_a_taken_id_is_given_back_for_the_same_prefix(target: LiveServer) -> None:
    request = inference_pb.CreateSnapshotRequest(
        input=raw(prompt_of(20, 7)), options=pb.SnapshotOptions(snapshot_id="the-same-prefix")
    )
    first = target.inference.CreateSnapshot(request)
    second = target.inference.CreateSnapshot(request)
    assert second.snapshot.create_time == first.snapshot.create_time
    copy = target.inference.Fork(
        inference_pb.ForkRequest(
            parent="snapshots/the-same-prefix",
            branches=[inference_pb.ForkBranch(options=pb.SnapshotOptions(snapshot_id="the-same-prefix"))],
        )
    )
    assert [s.create_time for s in copy.snapshots] == [first.snapshot.create_time]


def test_a_message_of_5_mib_is_read(target: LiveServer) -> None:
    text = "word " * 2**18
    counted = target.inference.CountTokens(inference_pb.CountTokensRequest(input=raw(text)), timeout=PATIENCE)
    assert counted.total_tokens > CONTEXT and counted.remaining_tokens == 0


def test_no_rpc_takes_more_text_than_the_server_does_at_a_time(target: LiveServer) -> None:
    """A tokenizer cannot be interrupted: what is only counted is bounded like what is generated from."""
    answer = refused(
        lambda: target.inference.CountTokens(inference_pb.CountTokensRequest(input=raw("a" * (2 * 2**20 + 1))))
    )
    assert (answer.code, answer.reason, answer.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", ("input",))
    assert answer.text == "input: has 2,097,153 bytes of text; the server takes 2,097,152 at a time"


def test_marks_at_the_ends_of_many_messages_are_bounded_together(target: LiveServer) -> None:
    many = pb.Input()
    for _ in range(1025):
        many.chat.messages.add(role=pb.ROLE_USER).parts.add(text="")
    marks = [pb.Mark(message_count=count + 1) for count in range(64)]
    answer = refused(lambda: generate(target, greedy(many, tokens=1, marks=marks)))
    assert (answer.code, answer.reason, answer.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", ("marks",))
    assert "times 1025 messages, are more than 65536" in answer.text


def test_a_large_text_holds_up_nobody(target: LiveServer) -> None:
    """One caller's 2 MB take seconds to tokenize; the others, and the server's own word on its health, do not wait."""
    large = inference_pb.CountTokensRequest(input=raw("word " * 400_000))
    pending = target.inference.CountTokens.future(large, timeout=PATIENCE)
    for _ in range(5):
        target.stats()
        generate(target, greedy(raw("Hello"), tokens=3))
    assert not pending.done()
    pending.cancel()


def test_request_ids_and_their_absence_do_not_mix_answers(target: LiveServer) -> None:
    ids = ["", "", str(uuid.uuid4()), str(uuid.uuid4())]
    requests = [greedy(raw(prompt_of(30, 50 + i)), tokens=20, request_id=given) for i, given in enumerate(ids)]
    expected = [generate(target, greedy(raw(prompt_of(30, 50 + i)), tokens=20)).ids for i in range(len(ids))]
    streams = [target.inference.Generate(request, timeout=PATIENCE) for request in requests]
    answers = [[token for event in stream for token in event.delta.token_ids] for stream in streams]
    assert answers == expected


def test_a_request_that_is_no_message_is_refused_as_the_callers_mistake(target: LiveServer) -> None:
    method = target.channel.unary_stream("/kvfork.v1.InferenceService/Generate")
    answer = refused(lambda: method(b"\xff\xff\xff", timeout=PATIENCE))
    assert (answer.code, answer.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_a_method_that_is_not_there_is_unimplemented(target: LiveServer) -> None:
    method = target.channel.unary_unary("/kvfork.v1.InferenceService/Train")
    with pytest.raises(grpc.RpcError) as caught:
        method(b"", timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def all_names(server: LiveServer) -> set[str]:
    """Every snapshot."""
    names: set[str] = set()
    token = ""
    while True:
        page = server.snapshots.ListSnapshots(snapshot_pb.ListSnapshotsRequest(page_token=token))
        names |= {snapshot.name for snapshot in page.snapshots}
        token = page.next_page_token
        if not token:
            return names
