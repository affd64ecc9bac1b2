"""A generation as the caller sees it: events, results, and how it ends on both sides."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from contract_peer import Peer, refuse
from flavours import Flavour
from kvfork.v1 import inference_service_pb2 as inf
from kvfork_client import (
    AsyncClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Delta,
    Finished,
    FinishReason,
    Internal,
    Mark,
    Marked,
    Message,
    Progress,
    ResourceExhausted,
    Sampling,
    SaveOptions,
    SnapshotNotFound,
    Started,
    Stopping,
    Unavailable,
    Usage,
)


def test_events_come_in_the_order_of_the_contract(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    peer.answer = "ab"
    generation = flavour.do(
        client.generate,
        [Message.user("hi")],
        save=SaveOptions(snapshot_id="the-end-0"),
        marks=[Mark.prompt_end(SaveOptions(snapshot_id="the-prompt"))],
        sampling=Sampling(seed=5),
        token_ids=True,
        progress=True,
    )
    events = flavour.all(generation.events)
    prompt = len("<user>hi<assistant>")
    usage = Usage(prompt_tokens=prompt, new_tokens=prompt, completion_tokens=2)
    end = generation.finished.snapshot
    assert events == [
        Started(generation="generations/1", instance="peer", prompt_tokens=prompt, seed=5),
        Progress(done_tokens=prompt, total_tokens=prompt),
        Marked(mark=0, snapshot=generation.marks[0]),
        Delta(text="a", first_position=prompt, token_count=1, token_ids=(97,)),
        Delta(text="b", first_position=prompt + 1, token_count=1, token_ids=(98,)),
        Finished(reason=FinishReason.EOS, snapshot=end, usage=usage),
    ]
    assert (end.name, end.token_count) == ("snapshots/the-end-0", prompt + 2)
    assert generation.marks[0].name == "snapshots/the-prompt"
    assert peer.wait_ended() == "finished"


def test_iterating_gives_the_deltas_whose_text_is_the_whole(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x")
    deltas = flavour.all(lambda: generation)
    assert "".join(delta.text for delta in deltas) == generation.text == peer.answer
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert generation.ttft > 0
    assert flavour.all(lambda: generation) == []  # nothing comes after the end


def test_result_holds_text_ids_and_receipt(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x", token_ids=True, stopping=Stopping(max_tokens=3))
    result = flavour.do(generation.result)
    assert (result.text, result.token_ids) == ("fou", (102, 111, 117))
    assert result.finished == Finished(
        reason=FinishReason.MAX_TOKENS, usage=Usage(prompt_tokens=1, new_tokens=1, completion_tokens=3)
    )
    assert flavour.do(generation.result) == result


def test_a_result_holds_each_channels_text(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started())
        for channel, text in ((1, "hm"), (1, "."), (2, "<call>"), (0, "Ye"), (1, "so"), (0, "s")):
            yield inf.GenerateResponse(delta=inf.Delta(text=text, token_count=1, channel=channel))
        yield inf.GenerateResponse(finished=inf.Finished(reason=inf.FINISH_REASON_EOS))

    peer.scripts["Generate"] = script
    generation = flavour.do(flavour.client(peer.address).generate, "x")
    result = flavour.do(generation.result)
    assert (result.text, result.reasoning, result.tool_calls) == ("Yes", "hm.so", "<call>")


def test_a_snapshot_out_of_a_generation_goes_on(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    first = flavour.do(flavour.do(client.generate, "x", save=True).result)
    second = flavour.do(flavour.do(first.snapshot.generate, "y").result)
    assert second.usage.cached_tokens == first.snapshot.token_count == 1 + len(peer.answer)
    assert peer.requests("Generate")[-1].parent == first.snapshot.name


def test_unknown_events_are_skipped(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started(generation="generations/g"))
        yield inf.GenerateResponse()  # what a newer server's event looks like to an older client
        yield inf.GenerateResponse(finished=inf.Finished(reason=99))

    peer.scripts["Generate"] = script
    client = flavour.client(peer.address)
    events = flavour.all(lambda: client.generate("x").events())
    assert events == [Started(generation="generations/g"), Finished(reason=FinishReason.UNSPECIFIED)]


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_leaving_the_loop_cancels(peer: Peer) -> None:
    peer.hold = threading.Event()
    with Client(peer.address) as client:
        generation = client.generate("x")
        for _ in generation:
            break
        assert peer.wait_ended() == "cancelled"
        assert generation.text == "f"
        with pytest.raises(Cancelled):
            generation.result()


def test_an_error_in_the_loop_cancels(peer: Peer) -> None:
    peer.hold = threading.Event()
    with Client(peer.address) as client:

        def read() -> None:
            for _ in client.generate("x"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            read()
        assert peer.wait_ended() == "cancelled"


def test_leaving_the_block_cancels(peer: Peer) -> None:
    peer.hold = threading.Event()
    with Client(peer.address) as client:
        with client.generate("x") as generation:
            next(generation)
        assert peer.wait_ended() == "cancelled"


def test_dropping_the_object_cancels(peer: Peer) -> None:
    peer.hold = threading.Event()
    with Client(peer.address) as client:
        generation = client.generate("x")
        next(generation)
        del generation
        assert peer.wait_ended() == "cancelled"


def test_leaving_the_async_loop_cancels(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            generation = client.generate("x")
            async for _ in generation:
                break
            assert await asyncio.to_thread(peer.wait_ended) == "cancelled"
            assert generation.text == "f"
            with pytest.raises(Cancelled):
                await generation.result()

    runner.run(story())


def test_leaving_the_async_block_cancels(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            async with client.generate("x") as generation:
                await anext(generation)
            assert await asyncio.to_thread(peer.wait_ended) == "cancelled"

    runner.run(story())


def test_dropping_the_async_object_cancels(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            generation = client.generate("x")
            await anext(generation)
            del generation
            assert await asyncio.to_thread(peer.wait_ended) == "cancelled"

    runner.run(story())


def test_dropping_the_async_object_in_another_thread_cancels(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            held = [client.generate("x")]
            await anext(held[0])
            await asyncio.to_thread(held.clear)
            assert await asyncio.to_thread(peer.wait_ended) == "cancelled"

    runner.run(story())


def test_cancelling_the_task_cancels_the_generation(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            generation = client.generate("x")
            await anext(generation)
            task = asyncio.create_task(generation.result())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(peer.wait_ended) == "cancelled"

    runner.run(story())


def test_cancel_from_another_task_is_a_typed_error_to_the_reader(peer: Peer, runner: asyncio.Runner) -> None:
    peer.hold = threading.Event()

    async def story() -> None:
        async with AsyncClient(peer.address) as client:
            generation = client.generate("x")
            await anext(generation)
            reader = asyncio.create_task(generation.result())
            await asyncio.sleep(0.05)
            generation.cancel()
            with pytest.raises(Cancelled):
                await reader

    runner.run(story())


def test_cancel_from_another_thread_is_a_typed_error_to_the_reader(peer: Peer) -> None:
    peer.hold = threading.Event()
    with Client(peer.address) as client:
        generation = client.generate("x")
        next(generation)
        timer = threading.Timer(0.05, generation.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            generation.result()
        timer.join()


def test_a_finished_generation_is_not_cancelled(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    for _ in range(20):
        generation = flavour.do(client.generate, "x")
        flavour.do(generation.result)
        flavour.do(generation.cancel)
        del generation
    gc.collect()
    assert [peer.wait_ended() for _ in range(20)] == ["finished"] * 20


def test_stop_ends_it_cleanly(peer: Peer, flavour: Flavour) -> None:
    peer.hold = threading.Event()
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x", save=True)
    flavour.do(generation.__anext__ if flavour.runner else generation.__next__)
    assert flavour.do(generation.stop) is True
    result = flavour.do(generation.result)
    assert (result.text, result.finished.reason) == ("f", FinishReason.STOPPED)
    assert result.snapshot.token_count == 2
    assert peer.wait_ended() == "finished"
    assert flavour.do(generation.stop) is False


def test_stop_before_the_start_is_sent_once_there_is_a_name(peer: Peer, flavour: Flavour) -> None:
    peer.hold = threading.Event()
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x")
    assert flavour.do(generation.stop) is True
    result = flavour.do(generation.result)
    assert result.finished.reason is FinishReason.STOPPED
    assert [request.generation for request in peer.requests("StopGeneration")] == ["generations/1"]


def test_a_stream_that_ends_without_finished_is_an_error(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started(generation="generations/g"))
        yield inf.GenerateResponse(delta=inf.Delta(text="half", token_count=1))

    peer.scripts["Generate"] = script
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x")
    with pytest.raises(Internal) as caught:
        flavour.do(generation.result)
    assert caught.value.reason == "TRUNCATED"
    assert generation.text == "half"


def test_the_deadline_ends_it_on_both_sides(peer: Peer, flavour: Flavour) -> None:
    peer.hold = threading.Event()
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x", timeout=1.0)
    with pytest.raises(DeadlineExceeded):
        flavour.do(generation.result)
    assert peer.wait_ended() == "cancelled"
    assert generation.text == "f"


def test_the_clients_timeout_is_the_default(peer: Peer, flavour: Flavour) -> None:
    left: list[float] = []

    def script(request: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        return inf.CountTokensResponse()

    peer.scripts["CountTokens"] = script
    client = flavour.client(peer.address, timeout=100)
    flavour.do(client.count_tokens, "x")
    flavour.do(client.count_tokens, "x", timeout=20)
    assert left == [pytest.approx(100, abs=30), pytest.approx(20, abs=10)]


def test_not_found_on_the_first_message_marks_the_handle_gone(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    snapshot = flavour.do(client.create_snapshot, "x")
    peer.snapshots.clear()
    peer.contents.clear()
    generation = flavour.do(snapshot.generate, "y")
    with pytest.raises(SnapshotNotFound) as caught:
        flavour.do(generation.result)
    assert caught.value.resource == snapshot.name
    assert snapshot.gone is caught.value
    with pytest.raises(SnapshotNotFound):  # and again, however it is read
        flavour.all(generation.events)


def test_another_snapshots_absence_does_not_mark_the_handle(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    snapshot = flavour.do(client.create_snapshot, "x")
    with pytest.raises(SnapshotNotFound):
        flavour.do(snapshot.rollback, ancestor="snapshots/other-one")
    assert snapshot.gone is None


def test_an_error_in_the_middle_keeps_the_text_so_far(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started(generation="generations/g"))
        yield inf.GenerateResponse(delta=inf.Delta(text="so far", token_count=2))
        refuse(context, "RESOURCE_EXHAUSTED", "SLOW_READER", "too slow")

    peer.scripts["Generate"] = script
    client = flavour.client(peer.address)
    generation = flavour.do(client.generate, "x")
    with pytest.raises(ResourceExhausted) as caught:
        flavour.do(generation.result)
    assert caught.value.reason == "SLOW_READER"
    assert generation.text == "so far"


# -- retries -----------------------------------------------------------------------------------------------------------


def _fails(times: int, then: Any) -> Any:
    """A script that is unavailable that many times."""
    left = [times]

    def script(request: Any, context: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            refuse(context, "UNAVAILABLE", "MODEL_LOADING", "loading")
        return then(request, context)

    return script


def test_unavailable_is_retried_with_the_same_request_id(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["Fork"] = _fails(2, peer.Fork)
    client = flavour.client(peer.address)
    snapshot = flavour.do(client.create_snapshot, "x")
    assert len(flavour.do(snapshot.fork, 2)) == 2
    ids = [request.request_id for request in peer.requests("Fork")]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert ids[0]


def test_a_generation_is_retried_before_its_first_message(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["Generate"] = _fails(1, peer.Generate)
    client = flavour.client(peer.address)
    assert flavour.do(flavour.do(client.generate, "x").result).text == peer.answer
    assert len(peer.requests("Generate")) == 2


def test_a_generation_is_not_retried_after_its_first_message(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> Any:
        yield inf.GenerateResponse(started=inf.Started(generation="generations/g"))
        refuse(context, "UNAVAILABLE", "SERVER_DRAINING", "going down")

    peer.scripts["Generate"] = script
    client = flavour.client(peer.address)
    with pytest.raises(Unavailable):
        flavour.do(flavour.do(client.generate, "x").result)
    assert len(peer.requests("Generate")) == 1


def test_retries_end_after_four_attempts(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["GetServerInfo"] = _fails(99, None)
    client = flavour.client(peer.address)
    with pytest.raises(Unavailable):
        flavour.do(client.server_info)
    assert len(peer.requests("GetServerInfo")) == 4


def test_other_codes_are_not_retried(peer: Peer, flavour: Flavour) -> None:
    def script(request: Any, context: Any) -> None:
        refuse(context, "RESOURCE_EXHAUSTED", "QUEUE_FULL", "full")

    peer.scripts["GetServerInfo"] = script
    client = flavour.client(peer.address)
    with pytest.raises(ResourceExhausted):
        flavour.do(client.server_info)
    assert len(peer.requests("GetServerInfo")) == 1


def test_retry_can_be_switched_off(peer: Peer, flavour: Flavour) -> None:
    peer.scripts["GetServerInfo"] = _fails(99, None)
    client = flavour.client(peer.address, retry=False)
    with pytest.raises(Unavailable):
        flavour.do(client.server_info)
    assert len(peer.requests("GetServerInfo")) == 1
