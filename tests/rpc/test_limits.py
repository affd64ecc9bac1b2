"""Sizes: large messages pass up to the limit, larger ones are refused, and a reader that stalls holds up nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb

from service.request import RawInput, TextPart

from .conftest import FINISHED, STARTED, ScriptedCore, delta, drained, eventually, run, serving

MIB = 2**20


def request(size: int) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    message.input.raw.parts.add().text = "a" * size
    return message


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def test_a_5_mib_message_works():
    async def story():
        async with serving() as s:
            assert len(await drained(s.inference.Generate(request(5 * MIB)))) == 3
            call = s.core.calls[0][1]
            assert call.input == RawInput(parts=(TextPart("a" * 5 * MIB),))

    run(story)


@pytest.mark.parametrize(
    "compression",
    [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate],
    ids=["plain", "gzip", "deflate"],
)
def test_a_message_over_the_limit_is_refused_before_it_is_read(compression):
    async def story():
        async with serving(max_request_bytes=MIB) as s:
            for size in (MIB, 32 * MIB):  # compressed, both are tiny on the wire
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await drained(s.inference.Generate(request(size), compression=compression))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert s.core.calls == []
            # The server is as it was, and takes compressed messages below the limit.
            assert len(await drained(s.inference.Generate(request(MIB - 100), compression=compression))) == 3

    run(story)


def test_a_reader_that_stalls_loses_its_generation_and_hears_why():
    async def pause() -> None:
        await asyncio.sleep(0)

    script = (STARTED, *((delta("x" * 65536), pause) * 400), FINISHED)  # 25 MiB, far beyond any window
    core = ScriptedCore(script=script)

    async def story():
        async with serving(core, write_stall_seconds=0.5) as s:
            stalled = s.inference.Generate(pb.GenerateRequest(parent="snapshots/a"))
            assert (await stalled.read()).WhichOneof("event") == "started"
            await eventually(lambda: core.ended == ["closed"])  # freed, though the client still holds the call
            assert core.running == 0
            # Others are served meanwhile.
            core.script = (STARTED, FINISHED)
            async with grpc.aio.insecure_channel(s.addresses[0]) as other:
                raw = other.unary_stream("/kvfork.v1.InferenceService/Generate")
                assert len([m async for m in raw(pb.GenerateRequest(parent="snapshots/b").SerializeToString())]) == 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_the_end(stalled)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert b"SLOW_READER" in rpc_status.from_call(caught.value).SerializeToString()

    run(story)


def test_a_stalled_reader_that_gives_up_leaves_nothing(caplog):
    core = ScriptedCore(script=(STARTED, *([delta("x" * 65536)] * 400), FINISHED))

    async def story():
        async with serving(core, write_stall_seconds=0.5) as s:
            async with grpc.aio.insecure_channel(s.addresses[0]) as channel:
                raw = channel.unary_stream("/kvfork.v1.InferenceService/Generate")
                call = raw(pb.GenerateRequest(parent="snapshots/a").SerializeToString())
                await call.read()
                await eventually(lambda: core.ended == ["closed"])
                call.cancel()
            core.script = (STARTED, FINISHED)
            assert len(await drained(s.inference.Generate(pb.GenerateRequest(parent="snapshots/b")))) == 2

    run(story)
    assert caplog.text == ""


def test_a_reader_that_is_merely_slow_gets_everything():
    script = (STARTED, *(delta(f"{number:08}" * 8192) for number in range(200)), FINISHED)

    async def story():
        async with serving(ScriptedCore(script=script)) as s:
            call = s.inference.Generate(pb.GenerateRequest(parent="snapshots/a"))
            texts = []
            async for message in call:
                if message.WhichOneof("event") == "delta":
                    texts.append(message.delta.text[:8])
                    await asyncio.sleep(0.001)
            assert texts == [f"{number:08}" for number in range(200)]

    run(story)
