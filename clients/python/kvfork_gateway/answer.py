"""One choice of a completion: the server's events added up, and the deltas that a stream shows of them. Pure.

Channels become fields: the answer is `content`, reasoning `reasoning_content`, tool calls `tool_calls`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvfork_client import AsyncSnapshot, Channel, Delta, Finished, FinishReason, TokenLogprob

from .messages import ToolCall
from .tools import parse

Chunk = dict[str, Any]

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.STOPPED: "stop",
    FinishReason.MAX_TOKENS: "length",
    FinishReason.CONTEXT_FULL: "length",
    FinishReason.TIME_LIMIT: "length",
}


class Choice:
    """One of n. `index` is its number; `calls`: tool calls are told apart, as the request offers tools."""

    def __init__(self, index: int, *, calls: bool, logprobs: bool) -> None:
        self.index = index
        self.ids = array("I")
        self.finished: Finished[AsyncSnapshot] | None = None
        self.reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self.said: list[str] = []  # answer and calls as the model wrote them, reasoning left out
        self._wants_calls = calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._call = ""  # a run of calls, as far as it is known
        self._space = ""  # white space that may only stand between two calls
        self._logprobs: list[Chunk] | None = [] if logprobs else None
        self._waiting: list[tuple[int, TokenLogprob]] = []  # (where its text begins, token), its text not shown yet
        self._token_bytes = 0
        self._text_bytes = 0

    def delta(self, event: Delta) -> list[Chunk]:
        """What a stream shows of it: parts of choices, without index."""
        self.ids.extend(event.token_ids)
        match event.channel:
            case Channel.REASONING:
                self.reasoning_tokens += event.token_count
                shown = self._end_of_calls()
                return shown + self._show(reasoning_content=event.text) if event.text else shown
            case Channel.TOOL_CALL if self._wants_calls:
                self.said.append(event.text)
                self._call += event.text
                return []
            case _:
                self.said.append(event.text)
                return self._end_of_calls() + self._answer(event.text, event.logprobs)

    def finish(self, event: Finished[AsyncSnapshot]) -> list[Chunk]:
        """The rest, and last of all the reason."""
        self.finished = event
        shown = self._end_of_calls()
        if self._space and not self.calls:
            shown += self._show(content=self._space)
        self._space = ""
        shown.append({"delta": {}, "logprobs": None, "finish_reason": self.reason})
        return shown

    @property
    def reason(self) -> str:
        assert self.finished is not None
        plain = _REASONS.get(self.finished.reason, "stop")
        return "tool_calls" if self.calls and plain == "stop" else plain

    def whole(self) -> Chunk:
        """The choice at the end."""
        content = "".join(self._content)
        message: Chunk = {
            "role": "assistant",
            "content": None if self.calls and not content else content,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": self.reason,
        }

    @property
    def content(self) -> str:
        return "".join(self._content)

    def _answer(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Chunk]:
        entries = self._covered(text, logprobs)
        if self._wants_calls:
            text = self._space + text
            solid = text.rstrip()
            text, self._space = solid, text[len(solid) :]
        if not text and not entries:
            return []
        return self._show(entries, content=text)

    def _covered(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Chunk]:
        """The tokens whose text has begun to be shown. What ends a text is no part of it: end token, stop string."""
        if self._logprobs is None:
            return []
        self._text_bytes += len(text.encode())
        for token in logprobs:
            self._waiting.append((self._token_bytes, token))
            self._token_bytes += len(token.token_bytes)
        ready = [token for start, token in self._waiting if start < self._text_bytes]
        del self._waiting[: len(ready)]
        entries = [_logprob(token) for token in ready]
        self._logprobs += entries
        return entries

    def _end_of_calls(self) -> list[Chunk]:
        if not self._call:
            return []
        text, self._call = self._call, ""
        calls = parse(text)
        if not calls:  # nothing that anybody could call: the caller gets to see what it is
            self._space, text = "", self._space + text
            return self._show(content=text)
        first = len(self.calls)
        self.calls += calls
        deltas = [{"index": first + i, **_call(call)} for i, call in enumerate(calls)]
        return [{"delta": {"tool_calls": deltas}, "logprobs": None, "finish_reason": None}]

    def _show(self, logprobs: Sequence[Chunk] = (), **delta: str) -> list[Chunk]:
        self._content.append(delta.get("content", ""))
        if "reasoning_content" in delta:
            self._reasoning.append(delta["reasoning_content"])
        shown = (
            {"content": list(logprobs), "refusal": None} if self._logprobs is not None and "content" in delta else None
        )
        return [{"delta": dict(delta), "logprobs": shown, "finish_reason": None}]


def _call(call: ToolCall) -> Chunk:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprob(token: TokenLogprob) -> Chunk:
    def entry(data: bytes, logprob: float) -> Chunk:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {
        **entry(token.token_bytes, token.logprob),
        "top_logprobs": [entry(one.token_bytes, one.logprob) for one in token.top],
    }
