"""Requests as JSON, and what the service is called with for them."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb

from service.request import (
    CountTokensCall,
    CreateSnapshotCall,
    ForkCall,
    GenerateCall,
    RollbackCall,
    SnapshotChange,
)
from service.rpc import mapping_in, mapping_snapshots

from .conftest import LIMITS

NOW = 1_700_000_000.0
UUID = "123e4567-e89b-12d3-a456-426614174000"
TEXT = {"raw": {"parts": [{"text": "Hi"}]}}
CHAT = {"chat": {"messages": [{"role": "ROLE_USER", "parts": [{"text": "Hi"}]}]}}


def generate(request: dict[str, Any]) -> GenerateCall:
    message = json_format.ParseDict(request, inference_pb.GenerateRequest())
    return mapping_in.read_generate(message, LIMITS, deadline=None)


def create(request: dict[str, Any]) -> CreateSnapshotCall:
    message = json_format.ParseDict(request, inference_pb.CreateSnapshotRequest())
    return mapping_in.read_create_snapshot(message, LIMITS)


def fork(request: dict[str, Any]) -> ForkCall:
    return mapping_in.read_fork(json_format.ParseDict(request, inference_pb.ForkRequest()), LIMITS)


def rollback(request: dict[str, Any]) -> RollbackCall:
    return mapping_in.read_rollback(json_format.ParseDict(request, inference_pb.RollbackRequest()), LIMITS)


def count(request: dict[str, Any]) -> CountTokensCall:
    return mapping_in.read_count_tokens(json_format.ParseDict(request, inference_pb.CountTokensRequest()), LIMITS)


def stop(request: dict[str, Any]) -> str:
    return mapping_in.read_stop_generation(json_format.ParseDict(request, inference_pb.StopGenerationRequest()))


def update(request: dict[str, Any]) -> SnapshotChange:
    message = json_format.ParseDict(request, snapshot_pb.UpdateSnapshotRequest())
    return mapping_snapshots.read_update(message, LIMITS, now=NOW)


def extend(request: dict[str, Any]) -> tuple[tuple[str, ...], float | None]:
    message = json_format.ParseDict(request, snapshot_pb.ExtendSnapshotsRequest())
    return mapping_snapshots.read_extend(message, LIMITS)


def listed(request: dict[str, Any], owner: str = "local") -> mapping_snapshots.Page:
    message = json_format.ParseDict(request, snapshot_pb.ListSnapshotsRequest())
    return mapping_snapshots.read_list_snapshots(message, owner)
