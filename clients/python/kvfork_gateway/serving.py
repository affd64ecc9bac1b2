"""The gateway's process: from settings to a listener, until it is told to end. Owns the order of start and end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import kvfork_client as kv
import uvicorn

from .completions import Completions
from .conversations import Bounds
from .http import Application

DRAIN_SECONDS = 20  # for answers under way, once the gateway is told to end
CANCEL_SECONDS = 5.0  # for those that are cut off then, to let go of what they hold
MOST_CONNECTIONS = 500  # at which a request is told to come again


class CannotStart(Exception):
    """The settings do not go together, a file is of no use, or the address is taken; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where to listen, and for whom. `aliases`: other names of models; "*" stands for all that are none."""

    server: str
    host: str = "127.0.0.1"
    port: int = 8080
    server_tls: kv.Tls | bool | None = None
    certificate: Path | None = None
    key: Path | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    most_body_bytes: int = 64 * 2**20
    bounds: Bounds = field(default_factory=Bounds)


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; `ready` is told the URL. Raises CannotStart."""
    asyncio.run(_run(settings, ready))


async def _run(settings: Settings, ready: Callable[[str], None]) -> None:
    loopback = _is_loopback(settings.host)
    if (settings.certificate is None) != (settings.key is None):
        raise CannotStart("a certificate and its key go together")
    if not loopback and settings.certificate is None:
        raise CannotStart(
            f"{settings.host} is not loopback: tokens and prompts would pass in the clear; give a certificate"
        )
    try:
        client = kv.AsyncClient(settings.server, tls=settings.server_tls)
        client.with_token("probe")
    except (ValueError, OSError) as error:
        raise CannotStart(str(error)) from None
    completions = Completions(client, bounds=settings.bounds, aliases=settings.aliases)
    application = Application(client, completions, loopback=loopback, most_body_bytes=settings.most_body_bytes)
    config = _config(settings, application)
    listener = _listen(settings.host, settings.port)
    server = _Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.end)
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.certificate is None else "https"
    ready(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
    try:
        await server.serve(sockets=[listener])
    finally:
        cut_off = list(server.server_state.tasks)  # by the end of the wait, or by a second signal
        for task in cut_off:
            task.cancel()
        if cut_off:
            await asyncio.wait(cut_off, timeout=CANCEL_SECONDS)
        await completions.close()
        await client.close()
        listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to this module: uvicorn's own handlers would raise them once more at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """The first time answers are waited for, the second time not."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _config(settings: Settings, application: Application) -> uvicorn.Config:
    """Loaded, the certificate too: who is told the URL can be answered there. Raises CannotStart."""
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    try:
        config.load()
    except OSError as error:  # no file, or one that holds something else, which is an SSLError
        raise CannotStart(f"cannot use {settings.certificate} with {settings.key}: {error}") from None
    return config


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
