"""A request id seen before gets the reply it got; a failed or cancelled call is not remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvcache.receipt import Usage
from service import idempotency
from service.errors import InvalidField, RequestInProgress
from service.events import Delta, Event, Finished, FinishReason, Marked, Progress, Started, Timing, TokenLogprob
from service.idempotency import MEMORY_SECONDS, Replays
from service.request import ForkCall, GenerateCall, Stopping

STARTED = Started(generation="generations/1", instance="i", prompt_tokens=3, seed=1, queue_seconds=0.0)
FINISHED = Finished(reason=FinishReason.EOS, usage=Usage(prompt_tokens=0), timing=Timing())
CALL = ForkCall(parent="snapshots/x", branches=(), request_id="r1")
GENERATE = GenerateCall(request_id="r1", deadline=5.0)


class Service:
    """Counts what really runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replays = Replays(lambda: self.now)
        self.served: list[tuple[object, str]] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.events: list[Event] = [STARTED, FINISHED]

    async def unary(self, call: ForkCall, owner: str) -> str:
        self.served.append((call, owner))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return f"reply {len(self.served)}"

    async def stream(self, call: GenerateCall, owner: str) -> AsyncIterator[Event]:
        self.served.append((call, owner))
        for event in self.events:
            yield event
        if self.error is not None:
            raise self.error


@pytest.fixture
def service() -> Service:
    return Service()


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(play())  # type: ignore[arg-type]


def test_a_retry_gets_the_first_reply_and_runs_nothing(service: Service) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        assert [await fork(CALL, "a") for _ in range(3)] == ["reply 1"] * 3
        assert len(service.served) == 1

    run(play)


def test_an_id_means_something_to_its_owner_and_method_only(service: Service) -> None:
    async def play() -> None:
        fork, rollback = (service.replays.unary(method, service.unary) for method in ("Fork", "Rollback"))
        assert [await fork(CALL, "a"), await fork(CALL, "b"), await rollback(CALL, "a")] == [
            "reply 1", "reply 2", "reply 3",
        ]  # fmt: skip

    run(play)


def test_calls_without_an_id_always_run(service: Service) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        plain = replace(CALL, request_id="")
        assert [await fork(plain, "a") for _ in range(2)] == ["reply 1", "reply 2"]
        generate = service.replays.generate(service.stream)
        for _ in range(2):
            assert [e async for e in generate(GenerateCall(), "a")] == service.events
        assert len(service.served) == 4

    run(play)


def test_an_id_used_for_another_request_is_refused(service: Service) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        await fork(CALL, "a")
        with pytest.raises(InvalidField) as error:
            await fork(replace(CALL, parent="snapshots/y"), "a")
        assert error.value.reason == "REQUEST_ID_REUSED"
        assert [v.field for v in error.value.fields] == ["request_id"]
        assert len(service.served) == 1

    run(play)


@pytest.mark.parametrize("same", [True, False])
def test_a_retry_while_the_first_runs_is_told_so(service: Service, same: bool) -> None:
    async def play() -> None:
        service.gate = asyncio.Event()
        fork = service.replays.unary("Fork", service.unary)
        first = asyncio.create_task(fork(CALL, "a"))
        await asyncio.sleep(0)
        with pytest.raises(RequestInProgress if same else InvalidField):
            await fork(CALL if same else replace(CALL, parent="snapshots/y"), "a")
        service.gate.set()
        assert await first == await fork(CALL, "a") == "reply 1"

    run(play)


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_what_did_not_end_well_runs_anew(service: Service, how: str) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        if how == "failed":
            service.error = ValueError("as planned")
            with pytest.raises(ValueError, match="as planned"):
                await fork(CALL, "a")
            service.error = None
        else:
            service.gate = asyncio.Event()
            first = asyncio.create_task(fork(CALL, "a"))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            service.gate = None
        assert await fork(CALL, "a") == "reply 2"

    run(play)


def test_replies_are_forgotten_in_time_and_beyond_a_number(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        await fork(CALL, "a")
        service.now = MEMORY_SECONDS
        assert await fork(CALL, "a") == "reply 1"
        service.now += 1
        assert await fork(CALL, "a") == "reply 2"
        monkeypatch.setattr(idempotency, "MEMORY_CALLS", 3)
        for number in range(3):
            await fork(replace(CALL, request_id=f"n{number}"), "a")
        assert len(service.replays._done["a"].replies) == 3
        assert await fork(CALL, "a") == "reply 6"

    run(play)


def test_a_callers_replies_take_so_many_bytes_and_flush_nobody_elses(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        fork = service.replays.unary("Fork", service.unary)
        assert await fork(CALL, "b") == "reply 1"
        monkeypatch.setattr(idempotency, "MEMORY_BYTES", 10_000)
        monkeypatch.setattr(idempotency, "MEMORY_CALLS", 8)

        def large(number: int, size: int) -> ForkCall:
            return ForkCall(parent="x" * size, branches=(), request_id=f"n{number}")

        for number in range(4):
            await fork(large(number, 3_000), "a")  # replies 2 to 5: three of them fit
        await fork(large(4, 20_000), "a")  # too large by itself
        assert [request_id for _, _, request_id in service.replays._done["a"].replies] == ["n1", "n2", "n3"]
        assert await fork(large(3, 3_000), "a") == "reply 5"
        assert await fork(large(4, 20_000), "a") == "reply 7"
        for number in range(20):
            await fork(replace(CALL, request_id=f"o{number}"), "a")
        assert len(service.replays._done["a"].replies) == 8
        assert await fork(CALL, "b") == "reply 1"
        service.now = MEMORY_SECONDS + 1
        await fork(replace(CALL, request_id="late"), "c")
        assert list(service.replays._done) == ["c"]  # nobody's stay beyond their time

    run(play)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, b"x")


def test_a_streams_replay_has_its_marks_its_whole_text_in_one_piece_and_its_end(service: Service) -> None:
    mark = Marked(mark=0, snapshot=None)
    service.events = [
        STARTED,
        Progress(1, 3),
        mark,
        Delta(text="He", first_position=3, token_count=1, token_ids=(5,), logprobs=(logprob(5),)),
        Delta(text="", first_position=4, token_count=1, token_ids=(6,), logprobs=(logprob(6),)),
        Delta(text="llo", first_position=5, token_count=2, token_ids=(7, 8), logprobs=(logprob(7), logprob(8))),
        FINISHED,
    ]
    whole = Delta(
        text="Hello",
        first_position=3,
        token_count=4,
        token_ids=(5, 6, 7, 8),
        logprobs=tuple(map(logprob, (5, 6, 7, 8))),
    )

    async def play() -> None:
        generate = service.replays.generate(service.stream)
        assert [e async for e in generate(GENERATE, "a")] == service.events
        again = replace(GENERATE, deadline=1.0)  # less time left, the same request
        assert [e async for e in generate(again, "a")] == [STARTED, mark, whole, FINISHED]
        with pytest.raises(InvalidField):
            async for _ in generate(replace(GENERATE, stopping=Stopping(max_tokens=3)), "a"):
                pass
        assert len(service.served) == 1

    run(play)


@pytest.mark.parametrize("how", ["failed", "left early"])
def test_a_stream_that_did_not_finish_runs_anew(service: Service, how: str) -> None:
    async def play() -> None:
        generate = service.replays.generate(service.stream)
        if how == "failed":
            service.events, service.error = [STARTED], ValueError("as planned")
            with pytest.raises(ValueError, match="as planned"):
                async for _ in generate(GENERATE, "a"):
                    pass
            service.events, service.error = [STARTED, FINISHED], None
        else:
            async with aclosing(generate(GENERATE, "a")) as events:  # type: ignore[type-var]
                async for _ in events:
                    break
        assert [e async for e in generate(GENERATE, "a")] == service.events
        assert len(service.served) == 2

    run(play)


def test_a_stream_that_runs_refuses_its_retry(service: Service) -> None:
    async def play() -> None:
        generate = service.replays.generate(service.stream)
        async with aclosing(generate(GENERATE, "a")) as events:  # type: ignore[type-var]
            await anext(events)
            with pytest.raises(RequestInProgress):
                await anext(generate(replace(GENERATE, deadline=2.0), "a"))

    run(play)
