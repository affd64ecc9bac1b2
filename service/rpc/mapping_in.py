"""Requests of InferenceService into calls. Total and pure; owns their static validation, nothing that needs a lookup.

Every reader gathers all that is wrong and raises one `InvalidField`. What depends on the model, the store or the clock
is checked by the core.
"""

from __future__ import annotations

from kvfork.v1 import inference_service_pb2 as inference_pb

from service.events import LimitsView
from service.request import (
    Branch,
    CountTokensCall,
    CreateSnapshotCall,
    ForkCall,
    GenerateCall,
    Input,
    Landmark,
    PlanOptions,
    Release,
    RollbackCall,
    Rounding,
)
from service.rpc.fields import Fields
from service.rpc.mapping_generation import read_constraint, read_output, read_sampling, read_stopping
from service.rpc.mapping_input import read_input
from service.rpc.mapping_save import distinct_ids, read_marks, read_save

_ROUNDINGS = {
    inference_pb.ROUNDING_UNSPECIFIED: Rounding.EXACT,
    inference_pb.ROUNDING_EXACT: Rounding.EXACT,
    inference_pb.ROUNDING_DOWN: Rounding.DOWN,
}
_RELEASES = {
    inference_pb.RELEASE_UNSPECIFIED: Release.NONE,
    inference_pb.RELEASE_NONE: Release.NONE,
    inference_pb.RELEASE_SOURCE: Release.SOURCE,
    inference_pb.RELEASE_ABANDONED: Release.ABANDONED,
}


def read_generate(request: inference_pb.GenerateRequest, limits: LimitsView, *, deadline: float | None) -> GenerateCall:
    """The call that `request` asks for; `deadline` is what is left of its time, in seconds."""
    fields = Fields(max_images=limits.max_images)
    given = _read_source(request, fields)
    save = read_save(request.save, "save", fields, limits) if request.HasField("save") else None
    marks = read_marks(request.marks, given, fields, limits)
    if request.save_on_cancel and (save is None or not save.snapshot_id):
        fields.wrong("save_on_cancel", "needs save.snapshot_id: the reply that would tell a name is lost")
    distinct_ids([("save", save)] + [(f"marks[{i}].options", mark.options) for i, mark in enumerate(marks)], fields)
    call = GenerateCall(
        model=fields.name("model", request.model, "models"),
        parent=request.parent,
        input=given,
        sampling=read_sampling(request.sampling, "sampling", fields),
        stopping=read_stopping(request.stopping, "stopping", fields),
        output=read_output(request.output, "output", fields),
        save=save,
        save_on_cancel=request.save_on_cancel,
        max_recompute_tokens=request.max_recompute_tokens if request.HasField("max_recompute_tokens") else None,
        marks=marks,
        constraint=read_constraint(request.constraint, fields) if request.HasField("constraint") else None,
        priority=request.priority,
        request_id=fields.request_id("request_id", request.request_id),
        deadline=deadline,
    )
    fields.check()
    return call


def read_create_snapshot(request: inference_pb.CreateSnapshotRequest, limits: LimitsView) -> CreateSnapshotCall:
    """The call that `request` asks for."""
    fields = Fields(max_images=limits.max_images)
    given = _read_source(request, fields)
    options = read_save(request.options, "options", fields, limits)
    marks = read_marks(request.marks, given, fields, limits)
    for index, mark in enumerate(marks):
        if mark.landmark in (Landmark.REASONING_START, Landmark.REASONING_END):
            fields.wrong(f"marks[{index}].landmark", "lies after the prompt's end, where nothing is generated here")
    named = [("options", options)] + [(f"marks[{i}].options", mark.options) for i, mark in enumerate(marks)]
    distinct_ids(named, fields)
    call = CreateSnapshotCall(
        model=fields.name("model", request.model, "models"),
        parent=request.parent,
        input=given,
        options=options,
        marks=marks,
        request_id=fields.request_id("request_id", request.request_id),
    )
    fields.check()
    return call


def read_fork(request: inference_pb.ForkRequest, limits: LimitsView) -> ForkCall:
    """The call that `request` asks for."""
    fields = Fields(max_images=limits.max_images)
    if not 1 <= len(request.branches) <= limits.max_fork_branches:
        fields.wrong("branches", f"must be 1 to {limits.max_fork_branches}, are {len(request.branches)}")
    branches = []
    for index, branch in enumerate(request.branches[: limits.max_fork_branches]):
        at = f"branches[{index}]"
        append = None
        if branch.HasField("append"):
            append = read_input(branch.append, f"{at}.append", fields, has_parent=True)
        branches.append(Branch(append=append, options=read_save(branch.options, f"{at}.options", fields, limits)))
    distinct_ids([(f"branches[{i}].options", branch.options) for i, branch in enumerate(branches)], fields)
    call = ForkCall(
        parent=fields.name("parent", request.parent, "snapshots", required=True),
        branches=tuple(branches),
        request_id=fields.request_id("request_id", request.request_id),
    )
    fields.check()
    return call


def read_rollback(request: inference_pb.RollbackRequest, limits: LimitsView) -> RollbackCall:
    """The call that `request` asks for."""
    fields = Fields()
    target = request.WhichOneof("target")
    if target is None:
        fields.wrong("target", "one of token_count, drop_tokens and ancestor must be set")
    if target == "token_count" and request.token_count == 0:
        fields.wrong("token_count", "nothing would be left: generate without a parent instead")
    ancestor = None
    if target == "ancestor":
        ancestor = fields.name("ancestor", request.ancestor, "snapshots", required=True)
    if request.rounding not in _ROUNDINGS:
        fields.wrong("rounding", f"must be ROUNDING_EXACT or ROUNDING_DOWN, is {int(request.rounding)}")
    if request.release not in _RELEASES:
        fields.wrong("release", f"must be RELEASE_NONE, _SOURCE or _ABANDONED, is {int(request.release)}")
    call = RollbackCall(
        source=fields.name("source", request.source, "snapshots", required=True),
        token_count=request.token_count if target == "token_count" else None,
        drop_tokens=request.drop_tokens if target == "drop_tokens" else None,
        ancestor=ancestor,
        rounding=_ROUNDINGS.get(request.rounding, Rounding.EXACT),
        release=_RELEASES.get(request.release, Release.NONE),
        options=read_save(request.options, "options", fields, limits),
        max_recompute_tokens=request.max_recompute_tokens if request.HasField("max_recompute_tokens") else None,
        request_id=fields.request_id("request_id", request.request_id),
    )
    fields.check()
    return call


def read_count_tokens(request: inference_pb.CountTokensRequest, limits: LimitsView) -> CountTokensCall:
    """The call that `request` asks for."""
    fields = Fields(max_images=limits.max_images)
    plan = None
    if request.HasField("plan"):
        branches = request.plan.branches or 1
        if branches > limits.max_fork_branches:
            most = limits.max_fork_branches
            fields.wrong("plan.branches", f"at most {most} (limits.max_fork_branches), are {branches}")
        if request.plan.HasField("max_tokens") and not request.plan.max_tokens:
            fields.wrong("plan.max_tokens", "must be at least 1")
        plan = PlanOptions(
            branches=branches, max_tokens=request.plan.max_tokens if request.plan.HasField("max_tokens") else None
        )
    call = CountTokensCall(
        input=_read_source(request, fields),
        model=fields.name("model", request.model, "models"),
        parent=request.parent,
        include_rendered=request.include_rendered,
        plan=plan,
    )
    fields.check()
    return call


def read_stop_generation(request: inference_pb.StopGenerationRequest) -> str:
    """The generation's name."""
    fields = Fields()
    name = fields.name("generation", request.generation, "generations", required=True)
    fields.check()
    return name


def _read_source(
    request: inference_pb.GenerateRequest | inference_pb.CreateSnapshotRequest | inference_pb.CountTokensRequest,
    fields: Fields,
) -> Input | None:
    """Checks `parent` and reads `input`: at least one of them says what the context is."""
    fields.name("parent", request.parent, "snapshots")
    if request.HasField("input"):
        return read_input(request.input, "input", fields, has_parent=bool(request.parent))
    if not request.parent:
        fields.wrong("input", "must be set without a parent")
    return None
