"""Who calls. Owns the one place where an owner comes from."""

from __future__ import annotations

from typing import Any

import grpc.aio

LOCAL = "local"


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The owner in whose name a call runs.

    One owner for all: only loopback and unix sockets can be bound (`service.config` sees to it), so whoever connects
    is on this machine. Authentication will put the peer's identity here.
    """
    del context
    return LOCAL
