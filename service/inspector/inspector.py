"""The inspector's life. Owns the socket file to the door, the channel over it, the listener, and their order."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from service.inspector import guard
from service.inspector.gateway import Gateway
from service.inspector.http import HttpServer
from service.inspector.site import Site


class Inspector:
    """`start`, then `close`. The server is to listen on `door` as well: calls are made there."""

    def __init__(
        self,
        *,
        context: Callable[[], ssl.SSLContext] | None = None,
        names: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`context`: what to serve TLS with, asked for at each connection; None: in the clear. `names`: of it."""
        self._context = context
        self._names = names
        # Of mode 0700, with a short path: systems take about 100 characters for a socket.
        self._folder = tempfile.TemporaryDirectory(prefix="kvfork-")
        self.door = Path(self._folder.name) / "door"
        self._gateway = Gateway(f"unix:{self.door}")
        self._http: HttpServer | None = None

    async def start(self, host: str, port: int) -> str:
        """Listens; returns the page's address. Raises OSError, and is closed then."""
        tls = self._context is not None
        loopback = ipaddress.ip_address(host).is_loopback
        site = Site(self._gateway, tls=tls, loopback=loopback, names=self._names)
        self._http = HttpServer(site.respond, tls=self._context, always=guard.HEADERS)
        self._gateway.open()
        try:
            bound = await self._http.start(host, port)
        except OSError:
            await self.close()
            raise
        return f"{'https' if tls else 'http'}://{bound}/"

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        await self._gateway.close()
        self._folder.cleanup()
