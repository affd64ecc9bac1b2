"""grpcurl and buf curl behind one face: a call in, a reply out that can be compared.

Owns how each is told what to do and how its answer is read. Judges nothing.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2

_PATIENCE = 240.0  # seconds before a call is given up; never how long it should take


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How a tool's call went. `messages` with keys in snake_case; `reason` is the ErrorInfo's."""

    exit_code: int
    messages: tuple[Any, ...]
    reason: str
    kinds: frozenset[str]


class Grpcurl:
    """Calls by grpcurl."""

    def __init__(self, program: Path, address: str, socket: Path) -> None:
        self._command = [str(program), "-plaintext", "-format-error", "-max-time", "120", "-d", "@"]
        self._address = address
        self._socket = socket

    def call(self, method: str, request: Mapping[str, Any], *, by_socket: bool = False) -> Reply:
        target = f"unix://{self._socket}" if by_socket else self._address
        done = _ran([*self._command, target, f"kvfork.v1.{method}"], json.dumps(request))
        details = json.loads(done.stderr)["details"] if done.returncode else []
        return Reply(
            exit_code=done.returncode,
            messages=_spoken(done.stdout),
            reason=next((d["reason"] for d in details if d["@type"].endswith("/google.rpc.ErrorInfo")), ""),
            kinds=frozenset(d["@type"].rsplit(".", 1)[-1] for d in details),
        )

    @staticmethod
    def exit_code(status: grpc.StatusCode) -> int:
        return 64 + int(status.value[0])


class BufCurl:
    """Calls by buf curl, by one version of reflection."""

    def __init__(self, program: Path, address: str, socket: Path, reflection: str) -> None:
        self._command = [str(program), "curl", "--protocol", "grpc", "--reflect-protocol", reflection, "-d", "@-"]
        self._address = address
        self._socket = socket

    def call(self, method: str, request: Mapping[str, Any], *, by_socket: bool = False) -> Reply:
        host = ["--unix-socket", str(self._socket)] if by_socket else []
        address = "localhost" if by_socket else self._address
        done = _ran([*self._command, *host, f"http://{address}/kvfork.v1.{method}"], json.dumps(request))
        details = json.loads(done.stderr)["details"] if done.returncode else []
        reason = ""
        for detail in details:
            if detail["type"] == "google.rpc.ErrorInfo":
                raw = base64.b64decode(detail["value"] + "===")
                reason = error_details_pb2.ErrorInfo.FromString(raw).reason
        return Reply(
            exit_code=done.returncode,
            messages=_spoken(done.stdout),
            reason=reason,
            kinds=frozenset(d["type"].rsplit(".", 1)[-1] for d in details),
        )

    @staticmethod
    def exit_code(status: grpc.StatusCode) -> int:
        return 8 * int(status.value[0])


def _ran(command: Sequence[str], request: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=request, capture_output=True, text=True, timeout=_PATIENCE)


def _spoken(output: str) -> tuple[Any, ...]:
    """The JSON values in a tool's output, one after the other."""
    messages, decoder, rest = [], json.JSONDecoder(object_pairs_hook=_in_snake_case), output.strip()
    while rest:
        message, end = decoder.raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    return tuple(messages)


def _in_snake_case(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {re.sub(r"[A-Z]", lambda capital: "_" + capital[0].lower(), key): value for key, value in pairs}


def in_camel_case(value: Any) -> Any:
    if isinstance(value, dict):
        return {re.sub(r"_(.)", lambda m: m[1].upper(), key): in_camel_case(inner) for key, inner in value.items()}
    return [in_camel_case(inner) for inner in value] if isinstance(value, list) else value
