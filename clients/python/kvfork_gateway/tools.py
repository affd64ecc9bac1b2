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
from functools import partial
from typing import Any

from .messages import ToolCall, Turn

OPENINGS = (
    "<tool_call>",
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<|START_ACTION|>",
    "<|tool_call>",
    "<start_function_call>",
    "<minimax:tool_call>",
    "<longcat_tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|start|>",
    "<|channel|>",
)
"""What a call may begin with, whatever the model."""

_CLOSINGS = (
    "</tool_call>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<｜tool▁calls▁end｜>",
    "<|END_ACTION|>",
    "<tool_call|>",
    "<end_function_call>",
    "</minimax:tool_call>",
    "</longcat_tool_call>",
)
_MARK = "|".join(map(re.escape, OPENINGS + _CLOSINGS))
_BETWEEN = re.compile(rf"(?:[\s,;]|{_MARK})*")
_AROUND = re.compile(rf"^(?:\s|{_MARK})+|(?:\s|{_MARK})+$")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_IN_FUNCTION = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_PARAMETER_END = re.compile(r"\s*</parameter>")
_HARMONY = re.compile(r"\bto=(?:functions\.)?([\w.-]+)[^{]*<\|message\|>(.*?)(<\|call\|>|<\|end\|>|$)", re.DOTALL)
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def parse(text: str, *, cut: bool = False) -> list[ToolCall]:
    """The calls that a model wrote, in order; none if it is in no known form. Each gets an id of its own.

    `cut`: the model was stopped; those are told that were whole by then.
    """
    for read in (partial(_json, cut=cut), partial(_harmony, cut=cut), _tags, _pythonic):
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


def hold_from(text: str, openings: Sequence[str]) -> int:
    """Where white space and the beginning of a mark begin, at the end of `text`: nobody knows yet what they will be."""
    longest = min(len(text), max(map(len, openings)) - 1)
    for length in range(longest, 0, -1):
        if any(opening.startswith(text[-length:]) for opening in openings):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


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


def _json(text: str, *, cut: bool) -> list[tuple[str, str]]:
    """Objects, or arrays of them, one after the other, with nothing but marks and separators between."""
    found: list[tuple[str, str]] = []
    at = _after(_BETWEEN, text, 0)
    while at < len(text):
        try:
            made, end = _DECODER.raw_decode(text, at)
        except ValueError:
            return found if cut else []
        for item in made if isinstance(made, list) else [made]:
            if isinstance(item, dict) and isinstance(item.get("function"), dict):
                item = item["function"]
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str):
                return []
            arguments = item.get("arguments", item.get("parameters", {}))
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append((name, as_text))
        at = _after(_BETWEEN, text, end)
    return found


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _harmony(text: str, *, cut: bool) -> list[tuple[str, str]]:
    return [(match[1], match[2].strip()) for match in _HARMONY.finditer(text) if match[3] or not cut]


def _tags(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while (opened := _FUNCTION.search(text, at)) is not None:
        arguments: dict[str, Any] = {}
        at = opened.end()
        while (inner := _IN_FUNCTION.search(text, at)) is not None and inner[1] is not None:
            value = _value(text, inner.end())
            if value is None:
                return found
            arguments[inner[1].strip()], at = value
        if inner is None:
            return found
        found.append((opened[1].strip(), json.dumps(arguments, ensure_ascii=False)))
        at = inner.end()
    return found


def _value(text: str, at: int) -> tuple[Any, int] | None:
    """(a parameter: JSON where it is, else the text; where what closes it ends); None if nothing does."""
    try:
        made, end = _DECODER.raw_decode(text, _after(_SPACE, text, at))
        closed = _PARAMETER_END.match(text, end)
        if closed is not None:
            return made, closed.end()
    except (ValueError, RecursionError):
        pass
    end = text.find("</parameter>", at)
    return None if end < 0 else (text[at:end].removesuffix("\n"), end + len("</parameter>"))


def _pythonic(text: str) -> list[tuple[str, str]]:
    """`[name(argument=literal, …), …]`."""
    try:
        made = ast.parse(_AROUND.sub("", text), mode="eval").body
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
