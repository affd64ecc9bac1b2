"""Protobuf replies as plain values. Pure and total: any message a server can send has a value here."""

from __future__ import annotations

import datetime as dt

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message as ProtoMessage
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as types_pb

from .values import (
    Admission,
    CacheStats,
    CallSyntax,
    Channel,
    Created,
    Delta,
    Extended,
    Finished,
    FinishReason,
    Forked,
    Limits,
    Marked,
    MissReason,
    ModelInfo,
    ModelState,
    Phase,
    Plan,
    Progress,
    Residency,
    RolledBack,
    Row,
    SamplingDefaults,
    ServerInfo,
    SnapshotInfo,
    Started,
    Timing,
    TokenCount,
    TokenLogprob,
    ToolCallForm,
    TopLogprob,
    Usage,
)

WireEvent = Started | Progress | Marked[SnapshotInfo] | Delta | Finished[SnapshotInfo]


def seconds(value: duration_pb2.Duration) -> float:
    return float(value.seconds) + float(value.nanos) / 1e9


def moment(value: timestamp_pb2.Timestamp) -> dt.datetime:
    return dt.datetime.fromtimestamp(value.seconds, dt.UTC).replace(microsecond=value.nanos // 1000)


def _set(message: ProtoMessage, field: str) -> bool:
    return message.HasField(field)


def snapshot(message: types_pb.Snapshot) -> SnapshotInfo:
    return SnapshotInfo(
        name=message.name,
        parent=message.parent,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        token_count=message.token_count,
        checkpointed_tokens=message.checkpointed_tokens,
        prefix_hash=message.prefix_hash,
        image_spans=tuple((span.start, span.end) for span in message.image_spans),
        residency=Residency(int(message.residency)),
        durable=message.durable,
        expire_time=moment(message.expire_time) if _set(message, "expire_time") else None,
        pinned=message.pinned,
        labels=dict(message.labels),
        create_time=moment(message.create_time) if _set(message, "create_time") else None,
        last_use_time=moment(message.last_use_time) if _set(message, "last_use_time") else None,
        exclusive_bytes=message.exclusive_bytes,
        instance=message.instance,
        active_uses=message.active_uses,
        state_revision=message.state_revision,
    )


def usage(message: types_pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        recomputed_tokens=message.recomputed_tokens,
        new_tokens=message.new_tokens,
        image_tokens=message.image_tokens,
        completion_tokens=message.completion_tokens,
        memory_tokens=message.memory_tokens,
        disk_tokens=message.disk_tokens,
        disk_bytes_read=message.disk_bytes_read,
        diverged_at=message.diverged_at if _set(message, "diverged_at") else None,
        miss_reason=MissReason(int(message.miss_reason)),
        grid_tokens=message.grid_tokens,
        state_remade=message.state_remade,
    )


def timing(message: inference_pb.Timing) -> Timing:
    return Timing(
        queue=seconds(message.queue),
        load=seconds(message.load),
        prefill=seconds(message.prefill),
        decode=seconds(message.decode),
    )


def _logprob(message: inference_pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        token_bytes=message.token_bytes,
        top=tuple(
            TopLogprob(token_id=top.token_id, logprob=top.logprob, token_bytes=top.token_bytes) for top in message.top
        ),
    )


def delta(message: inference_pb.Delta) -> Delta:
    return Delta(
        text=message.text,
        first_position=message.first_position,
        token_count=message.token_count,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_logprob(logprob) for logprob in message.logprobs),
        channel=Channel(int(message.channel)),
    )


def finished(message: inference_pb.Finished) -> Finished[SnapshotInfo]:
    return Finished(
        reason=FinishReason(int(message.reason)),
        stop=message.stop if _set(message, "stop") else None,
        stop_token_id=message.stop_token_id if _set(message, "stop_token_id") else None,
        snapshot=snapshot(message.snapshot) if _set(message, "snapshot") else None,
        usage=usage(message.usage),
        timing=timing(message.timing),
        save_error_reason=message.save_error_reason,
    )


def event(message: inference_pb.GenerateResponse) -> WireEvent | None:
    """One event; None for a kind that this client does not know yet, which is to be skipped."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                generation=started.generation,
                instance=started.instance,
                prompt_tokens=started.prompt_tokens,
                seed=started.seed,
                queue_time=seconds(started.queue_time),
            )
        case "progress":
            return Progress(done_tokens=message.progress.done_tokens, total_tokens=message.progress.total_tokens)
        case "delta":
            return delta(message.delta)
        case "finished":
            return finished(message.finished)
        case "marked":
            marked = message.marked
            return Marked(
                mark=marked.mark,
                snapshot=snapshot(marked.snapshot) if _set(marked, "snapshot") else None,
                save_error_reason=marked.save_error_reason,
            )
        case _:
            return None


def created(message: inference_pb.CreateSnapshotResponse) -> Created:
    return Created(
        snapshot=snapshot(message.snapshot),
        usage=usage(message.usage),
        marked=tuple(snapshot(marked) for marked in message.marked),
    )


def forked(message: inference_pb.ForkResponse) -> Forked:
    return Forked(snapshots=tuple(snapshot(child) for child in message.snapshots), usage=usage(message.usage))


def rolled_back(message: inference_pb.RollbackResponse) -> RolledBack:
    return RolledBack(snapshot=snapshot(message.snapshot), usage=usage(message.usage), released=tuple(message.released))


def extended(message: snapshot_pb.ExtendSnapshotsResponse) -> Extended:
    return Extended(snapshots=tuple(snapshot(one) for one in message.snapshots), missing=tuple(message.missing))


def token_count(message: inference_pb.CountTokensResponse) -> TokenCount:
    return TokenCount(
        total_tokens=message.total_tokens,
        image_tokens=message.image_tokens,
        cached_tokens=message.cached_tokens,
        remaining_tokens=message.remaining_tokens,
        token_ids=tuple(message.token_ids),
        text=message.text,
    )


def plan(message: inference_pb.CountTokensResponse) -> Plan:
    planned = message.plan

    def predicted(field: str) -> float | None:
        return seconds(getattr(planned, field)) if _set(planned, field) else None

    return Plan(
        total_tokens=message.total_tokens,
        cached_tokens=message.cached_tokens,
        memory_tokens=planned.memory_tokens,
        disk_tokens=planned.disk_tokens,
        recomputed_tokens=planned.recomputed_tokens,
        new_tokens=planned.new_tokens,
        miss_reason=MissReason(int(planned.miss_reason)),
        memory_bytes=planned.memory_bytes,
        disk_bytes=planned.disk_bytes,
        load=predicted("predicted_load"),
        prefill=predicted("predicted_prefill"),
        ttft=predicted("predicted_ttft"),
        admission=Admission(int(planned.admission)),
        reason=planned.reason,
        need_bytes=planned.need_bytes,
        free_bytes=planned.free_bytes,
    )


def _sampling_defaults(message: types_pb.Sampling) -> SamplingDefaults:
    return SamplingDefaults(
        temperature=message.temperature if _set(message, "temperature") else None,
        top_p=message.top_p if _set(message, "top_p") else None,
        top_k=message.top_k if _set(message, "top_k") else None,
        min_p=message.min_p if _set(message, "min_p") else None,
        repetition_penalty=message.repetition_penalty if _set(message, "repetition_penalty") else None,
        frequency_penalty=message.frequency_penalty if _set(message, "frequency_penalty") else None,
        presence_penalty=message.presence_penalty if _set(message, "presence_penalty") else None,
    )


def model(message: server_pb.Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        state=ModelState(int(message.state)),
        context_tokens=message.context_tokens,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        vision=message.vision,
        trimmable=message.trimmable,
        tells_reasoning=message.tells_reasoning,
        tells_tool_calls=message.tells_tool_calls,
        tool_call_form=_tool_call_form(message.tool_call_form) if _set(message, "tool_call_form") else None,
        bytes_per_token=message.bytes_per_token,
        default_sampling=_sampling_defaults(message.default_sampling),
    )


def _tool_call_form(message: server_pb.ToolCallForm) -> ToolCallForm:
    return ToolCallForm(opening=message.opening, closing=message.closing, syntax=CallSyntax(int(message.syntax)))


def server_info(message: server_pb.GetServerInfoResponse) -> ServerInfo:
    limits = message.limits
    return ServerInfo(
        instance=message.instance,
        boot_id=message.boot_id,
        version=message.version,
        features=tuple(message.features),
        limits=Limits(
            max_request_bytes=limits.max_request_bytes,
            max_image_bytes=limits.max_image_bytes,
            max_images=limits.max_images,
            max_image_pixels=limits.max_image_pixels,
            max_fork_branches=limits.max_fork_branches,
            max_queue=limits.max_queue,
            max_batch=limits.max_batch,
            max_snapshots=limits.max_snapshots,
            max_pinned=limits.max_pinned,
            max_ttl=seconds(limits.max_ttl),
            max_watches=limits.max_watches,
        ),
        uptime=seconds(message.uptime),
        draining=message.draining,
    )


def row(message: server_pb.Row) -> Row:
    return Row(
        generation=message.generation,
        phase=Phase(int(message.phase)),
        parent=message.parent,
        prompt_tokens=message.prompt_tokens,
        done_tokens=message.done_tokens,
        completion_tokens=message.completion_tokens,
        age=seconds(message.age),
        priority=message.priority,
    )


def cache_stats(reply: server_pb.GetCacheStatsResponse) -> CacheStats:
    message = reply.stats
    return CacheStats(
        checkpoint_interval=message.checkpoint_interval,
        active_sequences=message.active_sequences,
        queued_calls=message.queued_calls,
        memory_snapshots=message.memory_snapshots,
        disk_snapshots=message.disk_snapshots,
        token_snapshots=message.token_snapshots,
        memory_bytes=message.memory_bytes,
        memory_limit_bytes=message.memory_limit_bytes,
        disk_bytes=message.disk_bytes,
        disk_limit_bytes=message.disk_limit_bytes,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        recomputed_tokens=message.recomputed_tokens,
        checkpoints_written=message.checkpoints_written,
        checkpoints_read=message.checkpoints_read,
        checkpoints_corrupt=message.checkpoints_corrupt,
        evictions=message.evictions,
        checkpoint_policy=message.checkpoint_policy,
        checkpoints_skipped=dict(message.checkpoints_skipped),
        pending_bytes=message.pending_bytes,
        written_today_bytes=message.written_today_bytes,
        daily_write_limit_bytes=(message.daily_write_limit_bytes if _set(message, "daily_write_limit_bytes") else None),
        write_errors=message.write_errors,
        writes_paused=message.writes_paused,
        last_write_error=message.last_write_error,
        restoring_rows=message.restoring_rows,
        prefilling_rows=message.prefilling_rows,
        decoding_rows=message.decoding_rows,
        saving_rows=message.saving_rows,
        completion_tokens=message.completion_tokens,
        active_bytes=message.active_bytes,
        active_limit_bytes=message.active_limit_bytes,
        evictions_by_tier=dict(message.evictions_by_tier),
        rows=tuple(row(one) for one in reply.rows),
        owner=reply.owner,
        images_encoded=message.images_encoded,
        image_bytes=message.image_bytes,
        image_limit_bytes=message.image_limit_bytes,
    )
