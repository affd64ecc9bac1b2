"""Values into messages: events, snapshots, receipts, models, numbers. Total and pure."""

from __future__ import annotations

import math

from google.protobuf import duration_pb2, timestamp_pb2
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from kvcache.receipt import MissReason, Usage
from service.events import (
    Admission,
    Bookmark,
    CallForm,
    CallSyntax,
    Changed,
    Counted,
    Created,
    Delta,
    Event,
    Finished,
    FinishReason,
    Forked,
    Gone,
    LimitsView,
    Marked,
    ModelState,
    ModelView,
    PlanView,
    Progress,
    Residency,
    RolledBack,
    RowView,
    ServerView,
    SnapshotView,
    Started,
    StatsView,
    Synced,
    TextChannel,
    Timing,
    TokenLogprob,
    Watched,
    WhyGone,
)

_RESIDENCIES = {
    Residency.MEMORY: pb.RESIDENCY_MEMORY,
    Residency.DISK: pb.RESIDENCY_DISK,
    Residency.TOKENS: pb.RESIDENCY_TOKENS,
}
_MISS_REASONS = {
    MissReason.NONE: pb.MISS_REASON_UNSPECIFIED,
    MissReason.BETWEEN_CHECKPOINTS: pb.MISS_REASON_BETWEEN_CHECKPOINTS,
    MissReason.EVICTED: pb.MISS_REASON_EVICTED,
    MissReason.NOT_WRITTEN: pb.MISS_REASON_NOT_WRITTEN,
    MissReason.CORRUPT: pb.MISS_REASON_CORRUPT,
    MissReason.CHEAPER_TO_COMPUTE: pb.MISS_REASON_CHEAPER_TO_COMPUTE,
    MissReason.PROVENANCE: pb.MISS_REASON_PROVENANCE,
    MissReason.THINNED: pb.MISS_REASON_THINNED,
}
_FINISH_REASONS = {
    FinishReason.EOS: inference_pb.FINISH_REASON_EOS,
    FinishReason.STOP: inference_pb.FINISH_REASON_STOP,
    FinishReason.MAX_TOKENS: inference_pb.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: inference_pb.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: inference_pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.STOPPED: inference_pb.FINISH_REASON_STOPPED,
}
_MODEL_STATES = {
    ModelState.LOADING: server_pb.Model.STATE_LOADING,
    ModelState.READY: server_pb.Model.STATE_READY,
    ModelState.FAILED: server_pb.Model.STATE_FAILED,
}

_SYNTAXES = {
    CallSyntax.JSON: server_pb.ToolCallForm.SYNTAX_JSON,
    CallSyntax.TAGS: server_pb.ToolCallForm.SYNTAX_TAGS,
}

_ADMISSIONS = {
    Admission.NOW: inference_pb.ADMISSION_NOW,
    Admission.QUEUED: inference_pb.ADMISSION_QUEUED,
    Admission.REFUSED: inference_pb.ADMISSION_REFUSED,
}
_PHASES = {
    "queued": server_pb.Row.PHASE_QUEUED,
    "restoring": server_pb.Row.PHASE_RESTORING,
    "prefill": server_pb.Row.PHASE_PREFILL,
    "decode": server_pb.Row.PHASE_DECODE,
    "saving": server_pb.Row.PHASE_SAVING,
}
_WHY_GONE = {
    WhyGone.DELETED: snapshot_pb.GONE_REASON_DELETED,
    WhyGone.ROLLED_BACK: snapshot_pb.GONE_REASON_ROLLED_BACK,
    WhyGone.EXPIRED: snapshot_pb.GONE_REASON_EXPIRED,
    WhyGone.UNLISTED: snapshot_pb.GONE_REASON_UNLISTED,
}

_CHANNELS = {
    TextChannel.ANSWER: inference_pb.CHANNEL_UNSPECIFIED,
    TextChannel.REASONING: inference_pb.CHANNEL_REASONING,
    TextChannel.TOOL_CALL: inference_pb.CHANNEL_TOOL_CALL,
}


def write_event(event: Event) -> inference_pb.GenerateResponse:
    """One message of a Generate stream."""
    match event:
        case Delta():  # first, since nearly all are
            return inference_pb.GenerateResponse(delta=_delta(event))
        case Started():
            return inference_pb.GenerateResponse(
                started=inference_pb.Started(
                    generation=event.generation,
                    instance=event.instance,
                    prompt_tokens=event.prompt_tokens,
                    seed=event.seed,
                    queue_time=duration(event.queue_seconds),
                )
            )
        case Progress():
            progress = inference_pb.Progress(done_tokens=event.done_tokens, total_tokens=event.total_tokens)
            return inference_pb.GenerateResponse(progress=progress)
        case Marked():
            marked = inference_pb.Marked(
                mark=event.mark,
                snapshot=None if event.snapshot is None else write_snapshot(event.snapshot),
                save_error_reason=event.save_error_reason,
            )
            return inference_pb.GenerateResponse(marked=marked)
        case Finished():
            return inference_pb.GenerateResponse(finished=_finished(event))


def _delta(event: Delta) -> inference_pb.Delta:
    return inference_pb.Delta(
        text=event.text,
        first_position=event.first_position,
        token_count=event.token_count,
        token_ids=event.token_ids,
        logprobs=[_logprob(logprob) for logprob in event.logprobs],
        channel=_CHANNELS[event.channel],
    )


def _logprob(logprob: TokenLogprob) -> inference_pb.TokenLogprob:
    return inference_pb.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        token_bytes=logprob.token_bytes,
        top=[
            inference_pb.TopLogprob(token_id=top.token_id, logprob=top.logprob, token_bytes=top.token_bytes)
            for top in logprob.top
        ],
    )


def _finished(event: Finished) -> inference_pb.Finished:
    return inference_pb.Finished(
        reason=_FINISH_REASONS[event.reason],
        stop=event.stop,
        stop_token_id=event.stop_token_id,
        snapshot=None if event.snapshot is None else write_snapshot(event.snapshot),
        usage=write_usage(event.usage),
        timing=_timing(event.timing),
        save_error_reason=event.save_error_reason,
    )


def _timing(timing: Timing) -> inference_pb.Timing:
    return inference_pb.Timing(
        queue=duration(timing.queue),
        load=duration(timing.load),
        prefill=duration(timing.prefill),
        decode=duration(timing.decode),
    )


def write_usage(usage: Usage) -> pb.Usage:
    """A receipt. `diverged_at` has presence: 0 is a position."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        new_tokens=usage.new_tokens,
        image_tokens=usage.image_tokens,
        completion_tokens=usage.completion_tokens,
        memory_tokens=usage.memory_tokens,
        disk_tokens=usage.disk_tokens,
        disk_bytes_read=usage.disk_bytes_read,
        diverged_at=usage.diverged_at,
        miss_reason=_MISS_REASONS[usage.miss_reason],
        grid_tokens=usage.grid_tokens,
        state_remade=usage.remade,
    )


def write_snapshot(view: SnapshotView) -> pb.Snapshot:
    """A snapshot; `expire_time` is unset while it is pinned."""
    return pb.Snapshot(
        name=view.name,
        parent=view.parent,
        model=view.model,
        model_fingerprint=view.model_fingerprint,
        token_count=view.token_count,
        checkpointed_tokens=view.checkpointed_tokens,
        prefix_hash=view.prefix_hash,
        image_spans=[pb.TokenSpan(start=start, end=end) for start, end in view.image_spans],
        residency=_RESIDENCIES[view.residency],
        durable=view.durable,
        expire_time=None if view.expire_time is None else timestamp(view.expire_time),
        pinned=view.pinned,
        labels=dict(view.labels),
        create_time=timestamp(view.create_time),
        last_use_time=timestamp(view.last_use_time),
        exclusive_bytes=view.exclusive_bytes,
        instance=view.instance,
        active_uses=view.active_uses,
        state_revision=view.state_revision,
    )


def write_watched(watched: Watched) -> snapshot_pb.WatchSnapshotsResponse:
    """One message of a WatchSnapshots stream."""
    message = snapshot_pb.WatchSnapshotsResponse(resume_token=watched.resume_token)
    match watched.event:
        case Changed(snapshot):
            message.changed.CopyFrom(write_snapshot(snapshot))
        case Gone(name, reason):
            message.gone.CopyFrom(snapshot_pb.Gone(name=name, reason=_WHY_GONE[reason]))
        case Synced():
            message.synced.SetInParent()
        case Bookmark():
            message.bookmark.SetInParent()
    return message


def write_created(created: Created) -> inference_pb.CreateSnapshotResponse:
    """The reply to CreateSnapshot."""
    return inference_pb.CreateSnapshotResponse(
        snapshot=write_snapshot(created.snapshot),
        usage=write_usage(created.usage),
        marked=[write_snapshot(view) for view in created.marked],
    )


def write_forked(forked: Forked) -> inference_pb.ForkResponse:
    """The reply to Fork."""
    return inference_pb.ForkResponse(
        snapshots=[write_snapshot(view) for view in forked.snapshots], usage=write_usage(forked.usage)
    )


def write_rolled_back(rolled_back: RolledBack) -> inference_pb.RollbackResponse:
    """The reply to Rollback."""
    return inference_pb.RollbackResponse(
        snapshot=write_snapshot(rolled_back.snapshot),
        released=rolled_back.released,
        usage=write_usage(rolled_back.usage),
    )


def write_counted(counted: Counted) -> inference_pb.CountTokensResponse:
    """The reply to CountTokens."""
    return inference_pb.CountTokensResponse(
        total_tokens=counted.total_tokens,
        image_tokens=counted.image_tokens,
        cached_tokens=counted.cached_tokens,
        remaining_tokens=counted.remaining_tokens,
        token_ids=counted.token_ids,
        text=counted.text,
        plan=None if counted.plan is None else _plan(counted.plan),
    )


def _plan(plan: PlanView) -> inference_pb.Plan:
    def measured(seconds: float | None) -> duration_pb2.Duration | None:
        return None if seconds is None else duration(seconds)

    return inference_pb.Plan(
        memory_tokens=plan.memory_tokens,
        disk_tokens=plan.disk_tokens,
        recomputed_tokens=plan.recomputed_tokens,
        new_tokens=plan.new_tokens,
        miss_reason=_MISS_REASONS[plan.miss_reason],
        disk_bytes=plan.disk_bytes,
        memory_bytes=plan.memory_bytes,
        predicted_load=measured(plan.load_seconds),
        predicted_prefill=measured(plan.prefill_seconds),
        predicted_ttft=measured(plan.ttft_seconds),
        admission=_ADMISSIONS[plan.forecast.admission],
        reason=plan.forecast.reason,
        need_bytes=plan.forecast.need_bytes,
        free_bytes=plan.forecast.free_bytes,
    )


def write_model(view: ModelView) -> server_pb.Model:
    """A model; what it does not know yet is unset."""
    ready = view.state is ModelState.READY
    defaults = pb.Sampling(temperature=view.default_temperature, top_p=view.default_top_p, top_k=view.default_top_k)
    return server_pb.Model(
        name=view.name,
        fingerprint=view.fingerprint,
        state=_MODEL_STATES[view.state],
        context_tokens=view.context_tokens,
        vocab_size=view.vocab_size,
        eos_token_ids=view.eos_token_ids,
        vision=view.vision,
        trimmable=view.trimmable,
        tells_reasoning=view.tells_reasoning,
        tells_tool_calls=view.tells_tool_calls,
        tool_call_form=None if view.call_form is None else _call_form(view.call_form),
        bytes_per_token=view.bytes_per_token,
        default_sampling=defaults if ready else None,
    )


def _call_form(form: CallForm) -> server_pb.ToolCallForm:
    return server_pb.ToolCallForm(opening=form.opening, closing=form.closing, syntax=_SYNTAXES[form.syntax])


def write_server(view: ServerView) -> server_pb.GetServerInfoResponse:
    """The process."""
    return server_pb.GetServerInfoResponse(
        instance=view.instance,
        boot_id=view.boot_id,
        version=view.version,
        features=view.features,
        limits=_limits(view.limits),
        uptime=duration(view.uptime),
        draining=view.draining,
    )


def _limits(limits: LimitsView) -> server_pb.Limits:
    return server_pb.Limits(
        max_request_bytes=limits.max_request_bytes,
        max_image_bytes=limits.max_image_bytes,
        max_images=limits.max_images,
        max_image_pixels=limits.max_image_pixels,
        max_fork_branches=limits.max_fork_branches,
        max_queue=limits.max_queue,
        max_batch=limits.max_batch,
        max_snapshots=limits.max_snapshots,
        max_pinned=limits.max_pinned,
        max_ttl=duration(limits.max_ttl),
        max_watches=limits.max_watches,
    )


_ERROR_CHARS = 300  # what the system said, not its essay


def write_stats(view: StatsView) -> server_pb.CacheStats:
    """Scheduler, memory and store in numbers."""
    return server_pb.CacheStats(
        checkpoint_interval=view.checkpoint_interval,
        active_sequences=view.active_sequences,
        queued_calls=view.queued_calls,
        memory_snapshots=view.memory_snapshots,
        disk_snapshots=view.disk_snapshots,
        token_snapshots=view.token_snapshots,
        memory_bytes=view.memory_bytes,
        memory_limit_bytes=view.memory_limit_bytes,
        disk_bytes=view.disk_bytes,
        disk_limit_bytes=view.disk_limit_bytes,
        prompt_tokens=view.prompt_tokens,
        cached_tokens=view.cached_tokens,
        recomputed_tokens=view.recomputed_tokens,
        checkpoints_written=view.checkpoints_written,
        checkpoints_read=view.checkpoints_read,
        checkpoints_corrupt=view.checkpoints_corrupt,
        evictions=view.evictions,
        checkpoint_policy=view.checkpoint_policy,
        checkpoints_skipped=view.checkpoints_skipped,
        pending_bytes=view.pending_bytes,
        written_today_bytes=view.written_today_bytes,
        daily_write_limit_bytes=view.daily_write_limit_bytes,
        write_errors=view.write_errors,
        writes_paused=view.writes_paused,
        last_write_error=view.last_write_error[:_ERROR_CHARS],
        restoring_rows=view.restoring_rows,
        prefilling_rows=view.prefilling_rows,
        decoding_rows=view.decoding_rows,
        saving_rows=view.saving_rows,
        completion_tokens=view.completion_tokens,
        active_bytes=view.active_bytes,
        active_limit_bytes=view.active_limit_bytes,
        evictions_by_tier=view.evictions_by_tier,
        images_encoded=view.images_encoded,
        image_bytes=view.image_bytes,
        image_limit_bytes=view.image_limit_bytes,
    )


def write_row(view: RowView) -> server_pb.Row:
    """A sequence under way."""
    return server_pb.Row(
        generation=view.generation,
        phase=_PHASES[view.phase],
        parent=view.parent,
        prompt_tokens=view.prompt_tokens,
        done_tokens=view.done_tokens,
        completion_tokens=view.completion_tokens,
        age=duration(max(0.0, view.age)),
        priority=view.priority,
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Non-negative seconds, to the microsecond."""
    micros = round(seconds * 1e6)
    return duration_pb2.Duration(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)


def timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    """Unix seconds, cut to microseconds: an expiry is never told later than it is."""
    micros = math.floor(seconds * 1e6)
    return timestamp_pb2.Timestamp(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1000)
