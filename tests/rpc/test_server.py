"""Each RPC over a real server: what the core is asked, and what the client gets back."""

from __future__ import annotations

from kvfork.v1 import inference_service_pb2 as pb
from .conftest import run, serving


def test_generate_streams_the_cores_events_in_order():
    async def story():
        async with serving() as s:
            request = pb.GenerateRequest(parent="snapshots/abc")
            got = [message.WhichOneof("event") async for message in s.inference.Generate(request)]
            assert got == ["started", "delta", "finished"]
            assert s.core.ended == ["finished"]

    run(story)
