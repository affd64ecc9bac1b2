"""Calls on which nothing is said for long: a client's keepalive pings do not end them, and a flood of pings still does.

Time runs thirty times as fast: the client pings every second, which is as often as gRPC core lets it, and the server
forgives in as much less time. `tests/clients/test_silent_calls.py` holds the real times. Besides, every channel
argument that is used is one that gRPC core knows.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvfork_client.endpoint import endpoint

from service.config import Config
from service.rpc import server

from .conftest import FINISHED, STARTED, ScriptedCore, run, serving

ROOT = Path(__file__).resolve().parents[2]
FASTER = 30
PING_INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"
SILENCE = 7.0  # seconds and as many pings; the fourth would end the connection


def arguments(tree: ast.AST) -> Iterable[str]:
    """The names in pairs such as ("grpc.so_reuseport", 0)."""
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(name)), _]) if name.startswith("grpc."):
                yield name


def test_every_channel_argument_is_one_that_the_library_knows() -> None:
    """Core ignores what it does not know, without a word: a name that is spelled wrong sets nothing."""
    library = Path(cygrpc.__file__).read_bytes()
    used = {
        name: str(path.relative_to(ROOT))
        for folder in ("service", "kvcache", "clients/python", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in arguments(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {name for name, _ in server.options(Config())} <= used.keys()
    assert len(used) >= 20
    assert {name: path for name, path in used.items() if name.encode() + b"\0" not in library} == {}


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgives pings in a thirtieth of the time."""
    options = server.options

    def faster(config: Config) -> list[tuple[str, int]]:
        return [(name, value // FASTER if name == PING_INTERVAL else value) for name, value in options(config)]

    monkeypatch.setattr(server, "options", faster)


def pinging(address: str, every_ms: int) -> grpc.aio.Channel:
    """A channel of our own client's that pings so often, whether or not anything was said meanwhile."""
    own = dict(endpoint(address, token=None, tls=None, retry=True).options)
    faster = {"grpc.keepalive_time_ms": every_ms, "grpc.http2.max_pings_without_data": 0}
    return grpc.aio.insecure_channel(address, options=tuple({**own, **faster}.items()))


def test_a_silent_call_outlives_its_clients_own_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)

    async def silence() -> None:
        await asyncio.sleep(SILENCE)

    async def call(script: list[Any]) -> None:
        own = dict(endpoint("127.0.0.1:1", token=None, tls=None, retry=True).options)
        async with serving(ScriptedCore(script=script)) as s:
            async with pinging(s.addresses[0], int(own["grpc.keepalive_time_ms"]) // FASTER) as channel:
                stream = InferenceServiceStub(channel).Generate(pb.GenerateRequest(parent="snapshots/one"))
                assert [message.WhichOneof("event") async for message in stream] == ["started", "finished"]
            assert [name for name, *_ in s.core.calls] == ["generate"]  # once: no retry took its place

    async def story() -> None:
        in_prefill, in_queue = [STARTED, silence, FINISHED], [silence, STARTED, FINISHED]
        await asyncio.gather(call(in_prefill), call(in_queue))

    run(story)


def test_a_client_that_pings_too_often_still_loses_its_connection() -> None:
    async def story() -> None:
        silent = asyncio.Event()
        core = ScriptedCore(script=[STARTED, silent.wait, FINISHED])  # type: ignore[list-item]
        async with serving(core) as s, pinging(s.addresses[0], 1000) as channel:
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(parent="snapshots/one"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "Too many pings" in (caught.value.details() or "")

    run(story)
