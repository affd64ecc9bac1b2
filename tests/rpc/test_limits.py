"""Sizes: large messages pass up to the limit, larger ones are refused, and a reader that stalls holds up nobody."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.internal import encoder
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import types_pb2

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


def test_a_message_over_the_limit_is_refused_before_it_is_read():
    async def story():
        async with serving(max_request_bytes=MIB) as s:
            for size in (MIB, 32 * MIB):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await drained(s.inference.Generate(request(size)))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert s.core.calls == []
            assert len(await drained(s.inference.Generate(request(MIB - 100)))) == 3  # the server is as it was

    run(story)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=["gzip", "deflate"])
@pytest.mark.parametrize("service", ["health", "inference"])
def test_a_compressed_message_is_never_unpacked(compression, service):
    """gRPC would unpack all of it before it looks at the limit: a megabyte on the wire can be a gigabyte."""

    async def story():
        async with serving(max_request_bytes=MIB) as s:
            call = s.health.Check if service == "health" else s.inference.CountTokens
            message = health_pb2.HealthCheckRequest() if service == "health" else request(1000)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, compression=compression)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "disabled" in caught.value.details()
            assert s.core.calls == []
            if service == "health":
                assert (await call(message)).status == health_pb2.HealthCheckResponse.SERVING

    run(story)


def empty_parts(count: int) -> bytes:
    """A request of raw input with so many parts that have nothing in them: two bytes each."""
    return field(pb.GenerateRequest, "input", field(types_pb2.Input, "raw", b"\x0a\x00" * count))


def field(message: Any, name: str, data: bytes) -> bytes:
    return encoder.TagBytes(message.DESCRIPTOR.fields_by_name[name].number, 2) + encoder._VarintBytes(len(data)) + data


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_millions_of_empty_parts_are_counted_before_anything_is_made_of_them():
    """Parsed, these 24 MiB were 700 MiB; what is held now is the bytes themselves, here and at the client."""

    async def story():
        async with serving() as s, grpc.aio.insecure_channel(s.addresses[0]) as channel:
            call = channel.unary_stream("/kvfork.v1.InferenceService/Generate")
            data = empty_parts(12 * 2**20)
            before = high_water(anew=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_the_end(call(data))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "a request has at most 262,144 fields, and 4,194,304 numbers in one"
            assert high_water() - before < 200 * MIB
            assert s.core.calls == []

    run(story)


def high_water(*, anew: bool = False) -> int:
    """The most memory that the process has held, in bytes; `anew`: that it holds now, from which the mark starts."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_an_open_service_takes_no_more_than_a_name():
    async def story():
        async with serving() as s:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.health.Check(health_pb2.HealthCheckRequest(service="x" * 1100))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "a request of this method has at most 1,024 bytes"

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
