"""The two messages of grpc.health.v1 that a client needs, on the wire.

They have one field each and will never change, so the client does without a dependency on their generated stubs, which
would have to share a descriptor pool with a server's in the same process.
"""

from __future__ import annotations

from .values import HealthStatus

_SERVICE_FIELD = b"\x0a"  # field 1, length-delimited
_STATUS_FIELD = 0x08  # field 1, varint


def check_request(service: str) -> bytes:
    """HealthCheckRequest{service}. Raises ValueError for names of 128 bytes and more, which no service has."""
    name = service.encode()
    if len(name) >= 128:
        raise ValueError("a service name has fewer than 128 bytes")
    return _SERVICE_FIELD + bytes([len(name)]) + name if name else b""


def check_status(reply: bytes) -> HealthStatus:
    """HealthCheckResponse{status}: empty for 0, else the field's tag and a one-byte varint."""
    if len(reply) == 2 and reply[0] == _STATUS_FIELD:
        return HealthStatus(reply[1])
    return HealthStatus.UNKNOWN
