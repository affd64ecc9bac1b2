"""What the model reads: `Input` messages into values. Total and pure; knows nothing of tokenizers or names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from kvfork.v1 import types_pb2 as pb

from service.request import (
    MIME_TYPES,
    ChatInput,
    ImagePart,
    Input,
    Message,
    Part,
    RawInput,
    Role,
    TextPart,
    TokenPart,
)
from service.rpc.fields import MAX_TOKEN_ID, Fields, quoted

_ROLES = {
    pb.ROLE_SYSTEM: Role.SYSTEM,
    pb.ROLE_USER: Role.USER,
    pb.ROLE_ASSISTANT: Role.ASSISTANT,
    pb.ROLE_TOOL: Role.TOOL,
}

MAX_VARS = 2**20  # characters of template variables, which are read on the event loop

_SHA256_BYTES = 32
_OTHER_NAMES = {"image/jpg": "image/jpeg"}

# Names that the renderer itself passes to the template or its loader: a caller's value would contradict the request,
# and "chat_template" would be code.
_RESERVED_VARS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "sanitize_control_tokens",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def read_input(message: pb.Input, path: str, fields: Fields, *, has_parent: bool) -> Input | None:
    """The input at `path`, or None if something in it is wrong."""
    match message.WhichOneof("form"):
        case "raw":
            return _read_raw(message.raw, f"{path}.raw", fields, has_parent=has_parent)
        case "chat":
            return _read_chat(message.chat, f"{path}.chat", fields)
        case _:
            fields.wrong(path, "one of raw and chat must be set")
            return None


def _read_raw(message: pb.RawInput, path: str, fields: Fields, *, has_parent: bool) -> RawInput:
    if not message.parts:
        fields.wrong(f"{path}.parts", "must not be empty")
    if message.add_special_tokens and has_parent:
        fields.wrong(f"{path}.add_special_tokens", "must be false with a parent: the context has begun already")
    parts = _read_parts(message.parts, path, fields)
    return RawInput(parts=parts, add_special_tokens=message.add_special_tokens)


def _read_chat(message: pb.ChatInput, path: str, fields: Fields) -> ChatInput:
    if not message.messages:
        fields.wrong(f"{path}.messages", "must not be empty")
    if fields.too_many(f"{path}.messages", parts=len(message.messages)):
        return ChatInput(messages=())
    messages = []
    for index, turn in enumerate(message.messages):
        at = f"{path}.messages[{index}]"
        role = _ROLES.get(turn.role)
        if role is None:
            fields.wrong(f"{at}.role", f"must be ROLE_SYSTEM, _USER, _ASSISTANT or _TOOL, is {int(turn.role)}")
            role = Role.USER
        if not turn.parts:
            fields.wrong(f"{at}.parts", 'must not be empty; an empty turn is one part with text ""')
        messages.append(Message(role, _read_parts(turn.parts, at, fields)))
    return ChatInput(
        messages=tuple(messages),
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else True,
        template_vars=_read_vars(message.template_vars_json, f"{path}.template_vars_json", fields),
    )


def _read_parts(parts: Sequence[pb.Part], path: str, fields: Fields) -> tuple[Part, ...]:
    read: list[Part] = []
    if fields.too_many(f"{path}.parts", parts=len(parts)):
        return ()
    for index, part in enumerate(parts):
        at = f"{path}.parts[{index}]"
        match part.WhichOneof("kind"):
            case "text":
                read.append(TextPart(part.text))
            case "tokens":
                ids = part.tokens.ids
                if not fields.too_many(f"{at}.tokens.ids", tokens=len(ids)):
                    read.append(TokenPart(read_token_ids(ids, f"{at}.tokens.ids", fields)))
            case "image":
                if not fields.too_many(f"{at}.image", images=1):
                    read.append(_read_image(part.image, f"{at}.image", fields))
            case _:
                fields.wrong(at, "one of text, tokens and image must be set")
    return tuple(read)


def _read_image(image: pb.Image, path: str, fields: Fields) -> ImagePart:
    mime_type = _OTHER_NAMES.get(image.mime_type.lower(), image.mime_type.lower())
    if mime_type and mime_type not in MIME_TYPES:
        text = f"must be one of {', '.join(MIME_TYPES)}, or empty; is {quoted(image.mime_type)}"
        fields.wrong(f"{path}.mime_type", text, reason="IMAGE_UNSUPPORTED")
        mime_type = ""
    match image.WhichOneof("source"):
        case "data":
            return ImagePart(data=image.data, mime_type=mime_type)
        case "sha256":
            if len(image.sha256) != _SHA256_BYTES:
                fields.wrong(f"{path}.sha256", f"must be {_SHA256_BYTES} bytes, is {len(image.sha256)}")
            return ImagePart(sha256=image.sha256, mime_type=mime_type)
        case _:
            fields.wrong(path, "one of data and sha256 must be set")
            return ImagePart(data=b"")


def read_token_ids(ids: Iterable[int], path: str, fields: Fields) -> tuple[int, ...]:
    """Token ids that some vocabulary could hold; the model's own bound is checked where the model is known."""
    read = tuple(ids)
    if read and max(read) > MAX_TOKEN_ID:
        for index, token in enumerate(read):
            if token > MAX_TOKEN_ID:
                fields.wrong(f"{path}[{index}]", f"must be at most {MAX_TOKEN_ID}, is {token}")
    return read


def _read_vars(text: str, path: str, fields: Fields) -> dict[str, object]:
    if not text:
        return {}
    if len(text) > MAX_VARS:
        fields.wrong(path, f"must have at most {MAX_VARS:,} characters, has {len(text):,}")
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        # The decoder's own words hold a place and no content; a RecursionError's are Python's business.
        fields.wrong(
            path, f"must be JSON: {error}" if isinstance(error, json.JSONDecodeError) else "must be plain JSON"
        )
        return {}
    if not isinstance(value, dict):
        fields.wrong(path, "must be a JSON object")
        return {}
    for name in sorted(_RESERVED_VARS & value.keys()):
        fields.wrong(path, f'"{name}" is not a template variable that a caller may set')
    return value


def _no_constant(name: str) -> object:
    raise ValueError(name)  # NaN and Infinity are Python's habit, not JSON
