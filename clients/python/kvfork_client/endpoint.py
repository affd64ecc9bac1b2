"""Where a server is and how to talk to it: address, TLS, token, route, channel options. Pure; opens nothing.

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
INSTANCE = "x-kvfork-instance"  # metadata: the one server that a call is for; a proxy routes by it
SESSION = "x-kvfork-session"  # metadata: calls of one session belong on one server; for a proxy alone
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
    """All a channel needs, and what its calls say of themselves: in whose name they are, and where they should go."""

    target: str
    tls: Tls | None
    options: ChannelOptions
    token: str = ""
    instance: str = ""
    session: str = ""

    def metadata(self, instance: str = "") -> tuple[tuple[str, str], ...]:
        """Of a call. `instance`: who holds the snapshot that it is about, which counts before the endpoint's own."""
        said = (
            ("authorization", f"Bearer {self.token}" if self.token else ""),
            (INSTANCE, instance or self.instance),
            (SESSION, self.session),
        )
        return tuple((key, value) for key, value in said if value)


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
    return in_name_of(Endpoint(address, secure, tuple(options)), token)


def in_name_of(where: Endpoint, token: str | None) -> Endpoint:
    """The same place, asked in the name that `token` proves. Raises ValueError as `endpoint` does for a token."""
    if not token:
        return replace(where, token="")
    if not where.tls and not is_local(where.target):
        raise ValueError(f"refusing to send a token to {where.target} without TLS; pass tls=True, or a Tls with its ca")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("a token is printable ASCII without spaces; was it read with its line end?")
    return replace(where, token=token)


def routed(where: Endpoint, *, instance: str | None, session: str | None) -> Endpoint:
    """The same place with another route; None leaves that part as it is. Raises ValueError for what no header holds."""
    for what, value in (("an instance", instance), ("a session", session)):
        if value and not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ValueError(f"{what} is printable ASCII without spaces around it")
    return replace(
        where,
        instance=where.instance if instance is None else instance,
        session=where.session if session is None else session,
    )


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
