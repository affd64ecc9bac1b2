"""What a completion does when one of its readers meets what nobody expected, or is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import kvfork_client as kv
import pytest
from kvfork_gateway.answer import Choice
from kvfork_gateway.completion import Completion, Stream
from kvfork_gateway.http import Application, _Exchange
from kvfork_gateway.request import read

MODEL = kv.ModelInfo(name="models/m", fingerprint="f" * 64)


class _Told:
    """A generation that says what it was given, then nothing more."""

    started = kv.Started(generation="generations/1", instance="i", prompt_tokens=1, seed=1)

    def __init__(self, *events: Any) -> None:
        self._events = events
        self.cancelled = False

    async def events(self) -> AsyncIterator[Any]:
        for event in self._events:
            yield event
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


class _Failing(Choice):
    def delta(self, event: kv.Delta) -> list[Any]:
        raise ZeroDivisionError


def completion(choice: Choice, generation: _Told, ended: list[Completion]) -> Completion:
    made = Completion(
        request=read({"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        model=MODEL,
        prompt_usage=None,
        ended=ended.append,
    )
    made.streams.append(Stream(choice, generation))  # type: ignore[arg-type] - what it uses of one
    return made


DELTA = kv.Delta(text="x", token_ids=(1,), token_count=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_a_reader_ends_the_completion(stream: bool) -> None:
    ended: list[Completion] = []

    async def seen() -> None:
        made = completion(_Failing(0, calls=False, logprobs=False), _Told(DELTA), ended)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(_drained(made.parts()) if stream else made.whole(), 30.0)
        await made.close()

    asyncio.run(seen())
    assert len(ended) == 1


async def _drained(parts: AsyncIterator[Any]) -> None:
    async for _ in parts:
        pass


def test_a_stream_that_a_bug_ends_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    class Failing(Application):
        async def _route(self, exchange: _Exchange) -> None:
            made = completion(_Failing(0, calls=False, logprobs=False), _Told(DELTA), [])
            try:
                await exchange.stream(made.parts(), made.id)
            finally:
                await made.close()

    async def served() -> None:
        application = Failing(None, None, loopback=True, most_body_bytes=1)  # type: ignore[arg-type]
        await application({"type": "http", "method": "POST", "path": "/", "headers": []}, never, send)

    asyncio.run(asyncio.wait_for(served(), 30.0))
    *_, error, end = (message.get("body") for message in sent)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error" and end == b""
    assert "a bug: ZeroDivisionError" in caplog.text


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_close_that_is_cancelled_tells_its_end_all_the_same() -> None:
    ended: list[Completion] = []
    told = _Told(DELTA)

    async def left() -> None:
        made = completion(Choice(0, calls=False, logprobs=False), told, ended)
        async with aclosing(made.parts()) as parts:
            for _ in range(2):
                await anext(parts)
            closing = asyncio.create_task(made.close())
            await asyncio.sleep(0)  # it waits for its readers now
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing

    asyncio.run(left())
    assert len(ended) == 1 and told.cancelled
