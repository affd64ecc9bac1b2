"""A completion under way: its choices' events in one order, and the protocol's objects about them. Owns their shape."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import kvfork_client as kv

from .answer import Choice, Chunk
from .errors import refused_by
from .request import ChatRequest

_WAITING = 8  # events of a completion between the server and a reader who is slow
_SILENCE = 15.0  # seconds until a stream shows that it is still there


class Stream:
    """One choice and the generation behind it."""

    def __init__(self, choice: Choice, generation: kv.AsyncGeneration) -> None:
        self.choice = choice
        self.generation = generation
        self.events = generation.events()


class Completion:
    """`admitted`, then `parts` or `whole`, then `close`. `ended` is called once, however it ends."""

    def __init__(
        self,
        *,
        request: ChatRequest,
        model: kv.ModelInfo,
        prompt_usage: kv.Usage | None,
        ended: Callable[[Completion], None],
    ) -> None:
        """`prompt_usage`: of the prompt that the choices share, if it was computed before them."""
        self.streams: list[Stream] = []
        self._ended = ended
        self._request = request
        self._model = model
        self._prompt_usage = prompt_usage
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def choices(self) -> list[Choice]:
        return [stream.choice for stream in self.streams]

    async def admitted(self) -> None:
        """Waits for all choices to begin. Raises KVForkError."""
        for stream in self.streams:
            started = await anext(stream.events)
            assert isinstance(started, kv.Started)

    async def whole(self) -> Chunk:
        """The answer in one piece. Raises Refused, or what ended the reading of it."""
        async for _ in self._shown():
            pass
        return {
            **self._head("chat.completion"),
            "choices": [{**stream.choice.whole(), "kvfork": self._told(stream)} for stream in self.streams],
            "usage": self.usage(),
            "kvfork": self._receipt(),
        }

    async def parts(self) -> AsyncGenerator[Chunk | None, None]:
        """The chunks of a stream; None to show that it goes on. Raises as `whole`."""
        head = self._head("chat.completion.chunk")
        if self._request.include_usage:
            head["usage"] = None
        for choice in self.choices:
            delta = {"role": "assistant", "content": "", "refusal": None}
            part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**head, "choices": [part]}
        left = len(self.streams)
        async for shown in self._shown():
            if shown is None:
                yield None
                continue
            stream, parts = shown
            for part in parts:
                chunk = {**head, "choices": [{"index": stream.choice.index, **part}]}
                if part["finish_reason"] is not None:
                    left -= 1
                    chunk["choices"][0]["kvfork"] = self._told(stream)
                    if not left:
                        chunk["kvfork"] = self._receipt()
                yield chunk
        if self._request.include_usage:
            yield {**head, "choices": [], "usage": self.usage()}

    def usage(self) -> Chunk:
        """Tokens; a prompt counts once, however many choices it has."""
        prompt = self._prompt()
        completion = sum(_finished(stream).usage.completion_tokens for stream in self.streams)
        return {
            "prompt_tokens": prompt.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": prompt.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    async def close(self) -> None:
        """Cancels what runs. May be called again."""
        if self._closed:
            return
        self._closed = True
        for stream in self.streams:
            stream.generation.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._ended(self)

    async def _shown(self) -> AsyncIterator[tuple[Stream, list[Chunk]] | None]:
        """What each event of any choice shows, as it comes. Raises as `whole`."""
        queue: _Queue = asyncio.Queue(_WAITING)
        self._tasks = [asyncio.create_task(_read(stream, queue)) for stream in self.streams]
        left = len(self.streams)
        while left:
            try:
                async with asyncio.timeout(_SILENCE):
                    stream, shown = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(shown, kv.KVForkError):
                raise refused_by(shown)
            if isinstance(shown, Exception):
                raise shown
            left -= any(part["finish_reason"] is not None for part in shown)
            yield stream, shown

    def _head(self, kind: str) -> Chunk:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name.removeprefix("models/"),
            "system_fingerprint": f"fp_{self._model.fingerprint[:16]}",
        }

    def _prompt(self) -> kv.Usage:
        return self._prompt_usage or _finished(self.streams[0]).usage

    def _receipt(self) -> Chunk:
        prompt = asdict(self._prompt())
        prompt["miss_reason"] = self._prompt().miss_reason.name.lower()
        prompt["completion_tokens"] = self.usage()["completion_tokens"]
        first = self.streams[0]
        started = first.generation.started
        return {
            "snapshot": self._snapshot(first),
            "instance": started.instance if started is not None else "",
            "receipt": prompt,
        }

    def _told(self, stream: Stream) -> Chunk:
        """What the contract says of one choice beyond the protocol."""
        started, finished = stream.generation.started, _finished(stream)
        assert started is not None
        told: dict[str, Any] = {
            "snapshot": self._snapshot(stream),
            "generation": started.generation,
            "seed": started.seed,
            "reason": finished.reason.name.lower(),
            "timing": asdict(finished.timing),
        }
        if finished.stop is not None:
            told["stop"] = finished.stop
        if self._request.extension.save is not None and finished.save_error_reason:
            told["save_error"] = finished.save_error_reason
        return told

    def _snapshot(self, stream: Stream) -> str | None:
        """The name that the caller asked for; what the gateway keeps for itself comes and goes."""
        kept = _finished(stream).snapshot
        return kept.name if kept is not None and self._request.extension.save is not None else None


_Queue = asyncio.Queue[tuple[Stream, list[Chunk] | Exception]]


def _finished(stream: Stream) -> kv.Finished[kv.AsyncSnapshot]:
    assert stream.choice.finished is not None
    return stream.choice.finished


async def _read(stream: Stream, queue: _Queue) -> None:
    """One choice's events into the queue, or what ended them."""
    try:
        async for event in stream.events:
            if isinstance(event, kv.Delta):
                shown = stream.choice.delta(event)
            elif isinstance(event, kv.Finished):
                shown = stream.choice.finish(event)
            else:
                continue
            if shown:
                await queue.put((stream, shown))
    except Exception as error:  # a bug as well: whoever waits for the queue would wait for ever
        await queue.put((stream, error))
