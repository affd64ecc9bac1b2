"""The gRPC server's life. Owns its options, the order of start and stop, and what signals mean.

    start: bind, begin to load the model, health follows the core, ready
    first SIGTERM or SIGINT: health NOT_SERVING; new work is refused while the server still listens, so that Get, List
        and StopGeneration work and refusals carry a status; running generations end and deliver; the listener closes
    second signal: the process ends at once
    SIGHUP: certificates and tokens are read again

One asyncio loop, the caller's. Knows the rest of the server through `Inference` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from kvfork.v1 import inference_service_pb2_grpc, server_service_pb2_grpc, snapshot_service_pb2_grpc

from service.config import Config
from service.core_api import Inference
from service.rpc import health as health_rpc
from service.rpc.access import Access
from service.rpc.counting import CountingInterceptor
from service.rpc.door import Door
from service.rpc.ended import be_quiet_about_ended_calls
from service.rpc.health import HealthServicer
from service.rpc.inference import InferenceServicer
from service.rpc.interceptor import ErrorInterceptor
from service.rpc.listen import CannotListen, UnixSocket, bind_tcp
from service.rpc.reflection import add_reflection
from service.rpc.server_info import ServerServicer
from service.rpc.snapshots import SnapshotServicer

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CANNOT_LISTEN = 3

MAX_SEND_BYTES = 16 * 2**20
MAX_STREAMS = 200  # of one connection: more calls wait at the client; fewer than an owner may have by default
HEALTH_EVERY = 0.25  # seconds: a probe's period is 1 s or more
LINGER = 0.5  # seconds of listening after health has turned, for those who look before they call
GRACE = 5.0  # seconds for what is written to reach slow readers

SERVICES = (health_rpc.INFERENCE, health_rpc.SNAPSHOTS, health_rpc.SERVER, "grpc.health.v1.Health")


def options(config: Config) -> list[tuple[str, int]]:
    """C-core's settings."""
    return [
        # On by default on Linux: a second server would bind the same port unnoticed and take half of the calls, and
        # snapshots live in one process.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        # No compression: core unpacks all of a message before it looks at the limit, a stranger's too, and 64 MiB on
        # the wire can be 64 GiB. One bit: the message as it is.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_send_message_length", MAX_SEND_BYTES),
        # Clients may ping during a long prefill; the default answers that with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Nothing else notices a peer that vanished without a word.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Two pings too early are forgiven; the third ends the connection.
        ("grpc.http2.max_ping_strikes", 2),
        # Known or not; the default is no limit.
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Each takes a file descriptor, of which the store needs some too.
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # From connecting to the first frame of HTTP/2; the default is two minutes.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 900_000),
        # Above the first, refused now and then; above the second, always.
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
    ]


class RpcServer:
    """One listening server over one core. `start`, then `drain`, then `stop`."""

    def __init__(
        self, core: Inference, config: Config, access: Access | None = None, inner: Path | None = None
    ) -> None:
        """`access`: certificates and tokens that were read already. Raises AccessUnusable if it has to read them.

        `inner`: also listen on this socket file, for what serves callers of its own in this process. They come through
        the same door.
        """
        be_quiet_about_ended_calls()
        self._core = core
        self._config = config
        self._access = access or Access(config)
        self._look = asyncio.Event()
        self._health = HealthServicer()
        observer = core.observer
        door = Door(
            self._access.authenticator,
            observer.refused,
            max_calls=config.max_owner_calls,
            patience=config.request_seconds,
        )
        self._server = grpc.aio.server(
            interceptors=[
                door,
                CountingInterceptor(observer),
                ErrorInterceptor(core.server().instance, observer.refused),
            ],
            options=options(config),
        )
        self._sockets = [UnixSocket(path) for path in (config.unix_socket, inner) if path is not None]
        self._inner = inner
        self._background: list[asyncio.Task[None]] = []
        inference = InferenceServicer(core, write_stall=config.write_stall_seconds)
        snapshots = SnapshotServicer(core, write_stall=config.write_stall_seconds, patience=config.request_seconds)
        servicers: list[tuple[Callable[..., None], object]] = [  # grpc generates these without types
            (inference_service_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
            (snapshot_service_pb2_grpc.add_SnapshotServiceServicer_to_server, snapshots),
            (server_service_pb2_grpc.add_ServerServiceServicer_to_server, ServerServicer(core)),
            (health_pb2_grpc.add_HealthServicer_to_server, self._health),
        ]
        for add, servicer in servicers:
            add(servicer, self._server)
        if config.reflects:
            add_reflection(self._server, SERVICES)

    async def start(self, begin: Callable[[], None] = lambda: None) -> list[str]:
        """Binds and serves; returns the addresses that clients can use. Raises CannotListen, having bound nothing.

        `begin` is called in between: what is not worth beginning on an address that another server has.
        """
        addresses = []
        try:
            if self._config.address:
                tls = self._access.tls
                addresses.append(bind_tcp(self._server, self._config.address, tls.credentials() if tls else None))
            for socket in self._sockets:
                bound = socket.bind(self._server)
                if socket.path != self._inner:
                    addresses.append(bound)
        except CannotListen:
            await self._server.stop(None)
            raise
        begin()
        self._health.update(health_rpc.observe(self._core))
        self._background = [
            asyncio.create_task(health_rpc.follow(self._core, self._health, every=HEALTH_EVERY)),
            asyncio.create_task(self._access.follow(self._look)),
        ]
        await self._server.start()
        return addresses

    async def drain(self, *, linger: float = LINGER) -> None:
        """Refuses new work, ends running work cleanly, keeps listening meanwhile."""
        self._health.start_draining()
        self._core.start_draining()
        await asyncio.sleep(linger)
        await self._core.finish_running(self._config.drain_seconds)

    async def stop(self, grace: float | None = GRACE) -> None:
        """Closes the listener; what is still open after `grace` seconds is cancelled."""
        self._health.close()
        self._core.end_watches()
        await self._server.stop(grace)
        for task in self._background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.remove_sockets()

    def look_again(self) -> None:
        """Reads certificates and tokens again."""
        self._look.set()

    def remove_sockets(self) -> None:
        """Removes the socket files, those that are still ours."""
        for socket in self._sockets:
            socket.remove()


async def serve(
    core: Inference,
    config: Config,
    *,
    ready: Callable[[Sequence[str]], None],
    begin: Callable[[], None] = lambda: None,
    access: Access | None = None,
    inner: Path | None = None,
) -> int:
    """Serves until a signal says stop; `ready` hears the addresses. Returns the process's exit code.

    `begin` is called once the addresses are this server's, and not where they are another's.
    `access` and `inner` as RpcServer takes them; raises AccessUnusable as it does.
    """
    stopping = asyncio.Event()
    server = RpcServer(core, config, access, inner)

    def on_signal(number: int) -> None:
        if stopping.is_set():
            server.remove_sockets()
            os._exit(128 + number)  # at once: no thread, no atexit, no waiting for the model
        log.info("%s: draining; once more ends at once", signal.Signals(number).name)
        stopping.set()

    try:
        addresses = await server.start(begin)
    except CannotListen as error:
        log.error("%s", error)
        return EXIT_CANNOT_LISTEN
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, server.look_again)
    grace: float | None = None  # cancelled or failing: nothing to wait for
    try:
        ready(addresses)
        await stopping.wait()
        await server.drain()
        grace = GRACE
    finally:
        await server.stop(grace)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
    return EXIT_OK
