"""What the log has of those who were not let in: nothing of their words, and no line for each of their attempts."""

from __future__ import annotations

import asyncio
import struct
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.e2e.live import LiveServer
from tests.rpc.wire import GOAWAY, Wire, frame

FORGED = b"\x1b[31mE1130 00:00:00.000000 kvfork: the store was deleted\n"
TIMES = 20


async def attempts(address: str) -> None:
    """Farewells with words in them, and what is no HTTP/2."""
    for _ in range(TIMES):
        wire = await Wire.to(address)
        await wire.send(frame(GOAWAY, struct.pack(">II", 0, 2) + FORGED))
        await wire.close()
        wire = await Wire.to(address, greet=False)
        await wire.send(FORGED * 10)
        await wire.ended()
        await wire.close()


def compressed(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        for _ in range(TIMES):
            with pytest.raises(grpc.RpcError):
                HealthStub(channel).Check(health_pb2.HealthCheckRequest(), compression=grpc.Compression.Gzip)


def test_the_words_of_strangers_are_not_in_the_log() -> None:
    with LiveServer("tiny-llama") as server:
        asyncio.run(asyncio.wait_for(attempts(server.address), 60))
        compressed(server.address)
        server.model()  # served as before
        assert server.terminate() == 0
        log = server.log.read_bytes()
    assert b"kvfork" in log
    assert b"store was deleted" not in log and b"\x1b" not in log
    assert len(log.splitlines()) < TIMES


def test_failed_handshakes_are_not_logged_one_by_one(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=localhost", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with LiveServer("tiny-llama", "--tls-cert", str(certificate), "--tls-key", str(key), wait=False) as server:
        asyncio.run(asyncio.wait_for(attempts(server.address), 60))
        server.process.terminate()
        server.process.wait(60)
        lines = server.log.read_bytes().splitlines()
    assert len(lines) < TIMES
