"""One choice of a completion: the server's events added up, and the deltas that a stream shows of them. Pure.

Channels become fields: the answer is `content`, reasoning `reasoning_content`, tool calls `tool_calls`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvfork_client import AsyncSnapshot, Channel, Delta, Finished, FinishReason, TokenLogprob

from .messages import ToolCall
from .tools import OPENINGS, hold_from, parse

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
    """One of n. `index` is its number; `calls`: tool calls are told apart, as the request offers tools.

    `opening`: calls are part of the answer's text, from the first of these marks on, as a grammar has it; else the
    server tells them apart.
    """

    def __init__(self, index: int, *, calls: bool, logprobs: bool, opening: str | None = None) -> None:
        self.index = index
        self.ids = array("I")
        self.finished: Finished[AsyncSnapshot] | None = None
        self.reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self.said: list[str] = []  # answer and calls as the model wrote them, reasoning left out
        self.left_out = False  # what may be the beginning of a call, since the answer was cut there
        self._wants_calls = calls
        self._opening = opening
        self._openings = OPENINGS if opening is None else (opening,)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._call = ""  # a run of calls, as far as it is known
        self._held = ""  # white space that may only stand between two calls, and what may become a mark
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
                self._note(event.logprobs)
                if self._opening is not None and self._call:
                    self._call += event.text
                    return []
                return self._end_of_calls() + self._answer(event.text)

    def finish(self, event: Finished[AsyncSnapshot]) -> list[Chunk]:
        """The rest, and last of all the reason."""
        self.finished = event
        shown = self._end_of_calls(cut=self.cut)
        held, self._held = self._held, ""
        if self._may_go_on(held.lstrip(), event):
            self.left_out = True
        elif held.strip() or not self.calls:
            shown += self._show(self._covered(held), content=held) if held else []
        shown.append({"delta": {}, "logprobs": None, "finish_reason": self.reason})
        return shown

    @property
    def cut(self) -> bool:
        """Whether the model would have gone on: neither it nor its grammar came to an end."""
        assert self.finished is not None
        reason = self.finished.reason
        return reason is not FinishReason.EOS and (reason is not FinishReason.STOP or self.finished.stop is not None)

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

    def _answer(self, text: str) -> list[Chunk]:
        if self._wants_calls:
            text = self._held + text
            at = text.find(self._opening) if self._opening is not None else -1
            if at >= 0:
                self._call, text = text[at:], text[:at].rstrip()
                self._held = ""
            else:
                solid = hold_from(text, self._openings)
                text, self._held = text[:solid], text[solid:]
        entries = self._covered(text)
        if not text and not entries:
            return []
        return self._show(entries, content=text)

    def _may_go_on(self, text: str, event: Finished[AsyncSnapshot]) -> bool:
        """Whether `text` is the beginning of a call that was cut there."""
        if not text or not self.cut:
            return False
        text += event.stop or ""
        return any(opening.startswith(text) or text.startswith(opening) for opening in self._openings)

    def _note(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self._logprobs is None:
            return
        for token in logprobs:
            self._waiting.append((self._token_bytes, token))
            self._token_bytes += len(token.token_bytes)

    def _covered(self, text: str) -> list[Chunk]:
        """The tokens whose text begins in `text`, which is next. What ends a text is no part of it."""
        if self._logprobs is None:
            return []
        self._text_bytes += len(text.encode())
        ready = [token for start, token in self._waiting if start < self._text_bytes]
        del self._waiting[: len(ready)]
        entries = [_logprob(token) for token in ready]
        self._logprobs += entries
        return entries

    def _end_of_calls(self, *, cut: bool = False) -> list[Chunk]:
        """`cut`: what is not whole is nothing, since nobody could call it."""
        if not self._call:
            return []
        text, self._call = self._call, ""
        calls = parse(text, cut=cut)
        self.left_out = self.left_out or cut
        if not calls:  # nothing that anybody could call: the caller gets to see what it is
            if cut:
                return []
            held, self._held = self._held, ""
            return self._show(self._covered(held), content=held + text)
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
