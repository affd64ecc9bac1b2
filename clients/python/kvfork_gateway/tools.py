"""Tool calls between the model's own words and the protocol's. Owns the forms that are known and what is remembered.

A server tells which text is a call; how it is written is the model's habit. A history that repeats a call has to read
as the model wrote it, so that is remembered by the calls' ids, within bounds.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from .messages import ToolCall, Turn

_MARKS = re.compile(
    r"</?tool_call>|<\|tool_calls?_(?:start|end)\|>|<\|tool_calls_section_(?:begin|end)\|>|"
    r"<\|(?:START|END)_ACTION\|>|\[TOOL_CALLS\]|<\|python_tag\|>|</?minimax:tool_call>|</?longcat_tool_call>"
)
_XML = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_HARMONY = re.compile(r"\bto=(?:functions\.)?([\w.-]+)[^{]*<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|$)", re.DOTALL)


def parse(text: str) -> list[ToolCall]:
    """The calls that a model wrote, in order; none if it is in no known form. Each gets an id of its own."""
    for read in (_harmony, _xml, _json, _pythonic):
        try:
            found = read(text)
        except RecursionError:  # nested deeper than this can follow: nothing that anybody could call
            continue
        if found:
            return [
                ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)
                for name, arguments in found
            ]
    return []


def spelled(turn: Turn) -> str:
    """An assistant's turn in the commonest form, for calls that nobody here has seen."""
    pieces = ["".join(part for part in turn.content if isinstance(part, str))]
    for call in turn.calls:
        try:
            written = _spelled(call.name, json.loads(call.arguments))
        except (ValueError, RecursionError):
            written = _spelled(call.name, call.arguments)
        pieces.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(piece for piece in pieces if piece)


class Spellings:
    """How turns with calls were written, by caller and the ids of their calls. The least recently used go first."""

    def __init__(self, *, entries: int = 4096, total_bytes: int = 16 * 2**20) -> None:
        self._entries = entries
        self._most_bytes = total_bytes
        self._known: OrderedDict[tuple[Hashable, tuple[str, ...]], tuple[str, str]] = OrderedDict()
        self._bytes = 0

    def remember(self, caller: Hashable, calls: Sequence[ToolCall], content: str, written: str) -> None:
        """`content` is what the caller was told beside the calls."""
        self._known[caller, tuple(call.id for call in calls)] = (content, written)
        self._bytes += len(content) + len(written)
        while self._known and (len(self._known) > self._entries or self._bytes > self._most_bytes):
            _, gone = self._known.popitem(last=False)
            self._bytes -= sum(map(len, gone))

    def spelled(self, caller: Hashable, turn: Turn) -> str:
        """As it was written if that is known and the turn is unchanged; else `spelled`."""
        key = (caller, tuple(call.id for call in turn.calls))
        known = self._known.get(key)
        content = "".join(part for part in turn.content if isinstance(part, str))
        if known is None or known[0] != content:
            return spelled(turn)
        self._known.move_to_end(key)
        return known[1]


def _spelled(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _harmony(text: str) -> list[tuple[str, str]]:
    return [(match[1], match[2].strip()) for match in _HARMONY.finditer(text)]


def _xml(text: str) -> list[tuple[str, str]]:
    found = []
    for match in _XML.finditer(text):
        arguments = {name.strip(): _value(value) for name, value in _XML_ARGUMENT.findall(match[2])}
        found.append((match[1].strip(), json.dumps(arguments, ensure_ascii=False)))
    return found


def _value(text: str) -> Any:
    """A parameter: JSON where it is, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(text: str) -> list[tuple[str, str]]:
    """Objects, or arrays of them, one after the other, with nothing but marks and separators between."""
    rest = _MARKS.sub(" ", text).strip()
    decoder = json.JSONDecoder()
    found: list[tuple[str, str]] = []
    while rest:
        try:
            made, end = decoder.raw_decode(rest)
        except ValueError:
            return []
        for item in made if isinstance(made, list) else [made]:
            if isinstance(item, dict) and isinstance(item.get("function"), dict):
                item = item["function"]
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str):
                return []
            arguments = item.get("arguments", item.get("parameters", {}))
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append((name, as_text))
        rest = rest[end:].lstrip(" \t\r\n,;")
    return found


def _pythonic(text: str) -> list[tuple[str, str]]:
    """`[name(argument=literal, …), …]`."""
    source = _MARKS.sub(" ", text).strip()
    try:
        made = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, MemoryError):
        return []
    found = []
    for item in made.elts if isinstance(made, ast.List) else [made]:
        if not isinstance(item, ast.Call) or item.args or not isinstance(item.func, ast.Name | ast.Attribute):
            return []
        try:
            arguments = {word.arg: ast.literal_eval(word.value) for word in item.keywords if word.arg is not None}
            found.append((ast.unparse(item.func), json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, TypeError):
            return []
    return found
