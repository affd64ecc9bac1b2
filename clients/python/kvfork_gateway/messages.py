"""The protocol's messages as the contract's turns. Owns which kinds of content there are; pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfork_client import Image, Message, Role

from .fields import Fields, object_of, refuse, text_of, unsupported

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_DATA_URL = re.compile(r"data:(image/(?:png|jpeg|jpg|webp))?(?:;[\w-]+=[\w.-]+)*;base64,", re.IGNORECASE)
_SHOWN_URL = 60  # characters of a refused URL that an error repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a function as the protocol has it; `arguments` is JSON as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. `content` is its text and images in order.

    `calls` are those of an assistant; `answers` is the id of the call that a tool's result is of.
    """

    role: Role
    content: tuple[str | Image, ...]
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""


Spelled = Callable[[Turn], str]
"""How an assistant's turn with calls reads in the model's own words."""


def turns_of(source: Sequence[Any] | None) -> tuple[Turn, ...]:
    """Raises Refused for the first thing that is wrong."""
    if not source:
        refuse("messages", "must hold at least one message")
    return tuple(_turn(object_of(item, f"messages[{i}]"), f"messages[{i}]") for i, item in enumerate(source))


def as_messages(turns: Sequence[Turn], spelled: Spelled) -> tuple[Message, ...]:
    """The same for the contract."""
    return tuple(Message(turn.role, (spelled(turn),) if turn.calls else turn.content) for turn in turns)


def images_of(turns: Sequence[Turn]) -> tuple[Image, ...]:
    """All images in reading order."""
    return tuple(part for turn in turns for part in turn.content if isinstance(part, Image))


def _turn(source: dict[str, Any] | Any, at: str) -> Turn:
    fields = Fields(source, at)
    name = fields.text("role") or ""
    role = _ROLES.get(name)
    if role is None:
        refuse(f"{at}.role", f'must be one of {", ".join(_ROLES)}, is "{name[:40]}"')
    calls = _calls(fields, at) if role is Role.ASSISTANT else ()
    content = _content(fields.take("content"), f"{at}.content", role, required=not calls)
    answers = (fields.text("tool_call_id") or "") if role is Role.TOOL else ""
    # What tells a reader of the log something, and the model nothing.
    fields.ignore("name", "tool_call_id", "refusal", "annotations", "reasoning_content", "reasoning", "kvfork")
    fields.rest_is_unknown()
    return Turn(role=role, content=content, calls=calls, answers=answers)


def _content(value: Any, at: str, role: Role, *, required: bool) -> tuple[str | Image, ...]:
    if value is None:
        if required and role is not Role.ASSISTANT:
            refuse(at, "is missing")
        return ("",) if required else ()
    if isinstance(value, str):
        return (text_of(value, at),)
    if not isinstance(value, list):
        refuse(at, "must be a string or an array of parts")
    return tuple(_part(object_of(item, f"{at}[{i}]"), f"{at}[{i}]", role) for i, item in enumerate(value)) or ("",)


def _part(source: Any, at: str, role: Role) -> str | Image:
    fields = Fields(source, at)
    kind = fields.text("type")
    if kind == "text":
        return text_of(fields.take("text"), f"{at}.text")
    if kind == "refusal":
        return text_of(fields.take("refusal"), f"{at}.refusal")
    if kind != "image_url":
        unsupported(f"{at}.type", f'must be "text" or "image_url", is "{str(kind)[:40]}"')
    if role is Role.SYSTEM:
        unsupported(f"{at}.type", "instructions hold no images")
    value = fields.take("image_url")
    inner = Fields({"url": value} if isinstance(value, str) else object_of(value, f"{at}.image_url"), f"{at}.image_url")
    url = inner.text("url") or ""
    detail = inner.text("detail") or "auto"
    if detail not in ("auto", "high"):
        unsupported(f"{at}.image_url.detail", "images are shown as the model's own processor prepares them")
    return _image(url, f"{at}.image_url.url")


def _image(url: str, at: str) -> Image:
    match = _DATA_URL.match(url)
    if match is None:
        text = "must be a data URL of a PNG, JPEG or WebP file in base64; nothing is fetched"
        unsupported(at, f'{text}: "{url[:_SHOWN_URL]}"')
    try:
        data = base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        refuse(at, "is no base64")
    if not data:
        refuse(at, "is empty")
    mime = (match[1] or "").lower()
    return Image(data=data, mime_type="image/jpeg" if mime == "image/jpg" else mime)


def _calls(fields: Fields, at: str) -> tuple[ToolCall, ...]:
    if fields.take("function_call") is not None:
        unsupported(f"{at}.function_call", "use tool_calls")
    calls = []
    for i, item in enumerate(fields.items("tool_calls") or ()):
        here = f"{at}.tool_calls[{i}]"
        call = Fields(object_of(item, here), here)
        if (call.text("type") or "function") != "function":
            unsupported(f"{here}.type", 'must be "function"')
        function = Fields(object_of(call.take("function"), f"{here}.function"), f"{here}.function")
        calls.append(
            ToolCall(
                id=call.text("id") or "",
                name=text_of(function.take("name"), f"{here}.function.name"),
                arguments=function.text("arguments") or "{}",
            )
        )
    return tuple(calls)
