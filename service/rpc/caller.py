"""Who calls. Owns the one place where a servicer's owner comes from; `door` finds out who it is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import grpc.aio

from service.auth.callers import Caller
from service.errors import AdminRequired

# Each call runs in a task of its own, and the door writes here before the handler runs in it. There is no default:
# a handler that was reached past the door fails.
CALLER: ContextVar[Caller] = ContextVar("caller")


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The owner in whose name the call runs: every name that it uses is looked up within this owner."""
    del context
    return CALLER.get().owner


def is_admin(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the call may see and change what belongs to everybody."""
    del context
    return CALLER.get().admin


def require_admin(context: grpc.aio.ServicerContext[Any, Any], what: str) -> None:
    """Raises AdminRequired if the caller is none; `what` is what it wanted."""
    if not is_admin(context):
        raise AdminRequired(
            f"{what} concerns every owner: it takes an admin", hint="ask who runs the server, or use an admin's token"
        )
