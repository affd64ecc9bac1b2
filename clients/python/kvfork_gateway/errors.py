"""What a caller is told when something is wrong: the protocol's error object, HTTP status and headers. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import kvfork_client as kv

Header = tuple[str, str]


class Refused(Exception):
    """A request that is not answered. `param` names what is wrong with it, `code` the kind for programs."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "",
        retry_after: float | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after
        self.facts = dict(facts or {})

    def body(self) -> dict[str, Any]:
        """The error object; `kvfork` has the server's facts, where there are some."""
        error: dict[str, Any] = {
            "message": self.text,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.facts:
            error["kvfork"] = self.facts
        return {"error": error}

    def headers(self) -> tuple[Header, ...]:
        """When to come again, or that it is of no use: the official clients repeat 409, 429 and 5xx by themselves."""
        if self.retry_after is None:
            return () if self.status in (500, 502, 503, 504) else (("x-should-retry", "false"),)
        return (
            ("retry-after", str(max(1, math.ceil(self.retry_after)))),
            ("retry-after-ms", str(max(1, math.ceil(self.retry_after * 1000)))),
            ("x-should-retry", "true"),
        )


# The first class that fits decides. (class, status, type, code)
_TABLE: tuple[tuple[type[kv.KVForkError], int, str, str | None], ...] = (
    (kv.ContextOverflow, 400, "invalid_request_error", "context_length_exceeded"),
    (kv.ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (kv.WrongInstance, 400, "invalid_request_error", None),
    (kv.NotFound, 404, "invalid_request_error", None),
    (kv.InvalidArgument, 400, "invalid_request_error", "invalid_value"),
    (kv.OutOfRange, 400, "invalid_request_error", "invalid_value"),
    (kv.Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (kv.PermissionDenied, 403, "permission_error", None),
    (kv.SnapshotInUse, 409, "invalid_request_error", None),
    (kv.FailedPrecondition, 400, "invalid_request_error", None),
    (kv.AlreadyExists, 409, "invalid_request_error", None),
    (kv.Aborted, 409, "invalid_request_error", None),
    (kv.ResourceExhausted, 429, "rate_limit_error", "rate_limit_exceeded"),
    (kv.Unavailable, 503, "server_error", None),
    (kv.DeadlineExceeded, 504, "server_error", None),
    (kv.Unimplemented, 501, "server_error", None),
    (kv.Cancelled, 499, "server_error", None),
)

_PARAMS = (
    (re.compile(r"sampling\.(\w+).*"), r"\1"),
    (re.compile(r"stopping\.(\w+).*"), r"\1"),
    (re.compile(r"output\.top_logprobs"), "top_logprobs"),
    (re.compile(r"constraint\.lark.*"), "tools"),
    (re.compile(r"constraint\b.*"), "response_format"),
    (re.compile(r"input\.chat\.template_vars_json.*"), "chat_template_kwargs"),
    (re.compile(r"input\.chat\.messages\[(\d+)\]\.parts\[(\d+)\].*"), r"messages[\1].content[\2]"),
    (re.compile(r"input\.chat\.messages\[(\d+)\].*"), r"messages[\1]"),
    (re.compile(r"input\b.*"), "messages"),
    (re.compile(r"(model|priority)"), r"\1"),
    (re.compile(r"(parent|max_recompute_tokens)"), r"kvfork.\1"),
    (re.compile(r"(save\b.*)"), r"kvfork.\1"),
)


def param_of(field: str) -> str:
    """The parameter behind a field of the contract; the field itself for one that no parameter sets."""
    for pattern, param in _PARAMS:
        match = pattern.fullmatch(field)
        if match is not None:
            return match.expand(param)
    return field


def refused_by(error: kv.KVForkError) -> Refused:
    """The server's status as the protocol tells it."""
    found = next((row for row in _TABLE if isinstance(error, row[0])), None)
    _, status, kind, code = found or (None, 500, "server_error", None)
    fields = [one.field for one in error.fields]
    param = param_of(fields[0]) if fields else None
    if param is None and isinstance(error, kv.ModelNotFound):
        param = "model"
    if param is None and isinstance(error, kv.TemplateMissing):
        param = "messages"
    text = error.text or error.label
    if error.fields:
        text = "; ".join(f"{param_of(one.field)}: {one.description}" for one in error.fields)
    if error.advice and status < 500:
        text = f"{text} ({error.advice})"
    facts = dict(error.metadata)
    if error.reason:
        facts["reason"] = error.reason
    if error.incident:
        facts["incident"] = error.incident
    return Refused(
        status,
        text,
        param=param,
        code=code or (error.reason.lower() or None),
        kind=kind,
        retry_after=error.retry_after,
        facts=facts,
    )
