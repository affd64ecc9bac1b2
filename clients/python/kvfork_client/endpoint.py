"""Where a server is and how to talk to it: address, TLS, token, channel options. Pure; opens nothing.

The plaintext default is for loopback and unix sockets, and a token is sent in the clear only there.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

ChannelOptions = tuple[tuple[str, str | int], ...]

# Only UNAVAILABLE is safe to repeat blindly, and gRPC repeats it only while no reply has begun.
SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": f"kvfork.v1.{name}"}
                    for name in ("InferenceService", "SnapshotService", "ServerService")
                ],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "3s",
                    "backoffMultiplier": 2.5,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)
MAX_RECEIVE_BYTES = 64 * 1024 * 1024  # token lists and log-probabilities of long contexts pass gRPC's 4 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to check the server and prove who the caller is; paths to PEM files. Without `ca`: the system's roots."""

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str = ""  # if it differs from the target's host

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError if one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca), private_key=_read(self.key), certificate_chain=_read(self.certificate)
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """All a channel needs."""

    target: str
    tls: Tls | None
    metadata: tuple[tuple[str, str], ...]
    options: ChannelOptions


def endpoint(target: str, *, token: str | None, tls: Tls | bool | None, retry: bool) -> Endpoint:
    """Raises ValueError for an address gRPC would misread, and for a token that would cross a network in the clear."""
    address = normal_target(target)
    local = is_local(address)
    secure = Tls() if tls is True else tls or None
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        # Notices a server that vanished without a word; the server allows a ping every 10 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.enable_retries", int(retry)),
    ]
    if retry:
        options.append(("grpc.service_config", SERVICE_CONFIG))
    if local:
        options.append(("grpc.enable_http_proxy", 0))  # a proxy variable must not catch loopback
    if secure and secure.server_name:
        options.append(("grpc.ssl_target_name_override", secure.server_name))
    return in_name_of(Endpoint(address, secure, (), tuple(options)), token)


def in_name_of(where: Endpoint, token: str | None) -> Endpoint:
    """The same place, asked in the name that `token` proves. Raises ValueError as `endpoint` does for a token."""
    if not token:
        return replace(where, metadata=())
    if not where.tls and not is_local(where.target):
        raise ValueError(f"refusing to send a token to {where.target} without TLS; pass tls=True, or a Tls with its ca")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("a token is printable ASCII without spaces; was it read with its line end?")
    return replace(where, metadata=(("authorization", f"Bearer {token}"),))


def normal_target(target: str) -> str:
    """`host:port`, `unix:/path` or an absolute path of a socket, as gRPC takes it."""
    if not target:
        raise ValueError("an address is needed: host:port or unix:/path")
    if target.startswith(("http://", "https://")):
        raise ValueError(f"{target} is a URL; an address is host:port or unix:/path")
    return f"unix:{target}" if target.startswith("/") else target


def is_local(target: str) -> bool:
    """Whether the target never leaves the machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name: could be anywhere
        return False


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
