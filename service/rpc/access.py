"""What lets callers in, built from the settings and kept up to date. Owns the reloads and what a failed one means.

Files are looked at every second and on SIGHUP, the token command is run every `token_refresh`. What cannot be used is
logged, once, and leaves what was in use in use: a half-written file must lock nobody out and let nobody in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from service.auth.authenticator import Authenticator
from service.auth.source import TokenSource
from service.auth.tokens import TokensUnusable
from service.config import Config
from service.rpc.tls import ServerTls, TlsFiles, TlsUnusable

log = logging.getLogger(__name__)

LOOK_EVERY = 1.0  # seconds


class AccessUnusable(Exception):
    """Certificates or tokens that a server cannot start with; the text says which and why."""


class Access:
    """The authenticator and the TLS credentials of one server."""

    def __init__(self, config: Config) -> None:
        """Reads everything. Raises AccessUnusable."""
        self._tokens: TokenSource | None = None
        self.tls: ServerTls | None = None
        table = None
        try:
            if config.tls_cert is not None and config.tls_key is not None:
                self.tls = ServerTls(
                    TlsFiles(certificate=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca)
                )
            if config.takes_tokens:
                self._tokens = TokenSource(config.tokens, config.token_command, config.token_refresh)
                table = self._tokens.read()
        except (TlsUnusable, TokensUnusable) as error:
            raise AccessUnusable(str(error)) from None
        self.authenticator = Authenticator(
            tokens=table, certificates=config.tls_client_ca is not None, admins=frozenset(config.admins)
        )

    async def follow(self, now: asyncio.Event, *, every: float = LOOK_EVERY) -> None:
        """Takes up changes until cancelled. `now` set: looks at once, and runs the token command out of turn."""
        while True:
            try:
                async with asyncio.timeout(every):
                    await now.wait()
            except TimeoutError:
                pass
            forced = now.is_set()
            now.clear()
            tokens, tls = self._tokens, self.tls
            if tokens is not None and (forced or tokens.due()):
                await self._take_up(tokens.name, self._read_tokens)
            if tls is not None and (forced or tls.due()):
                await self._take_up(tls.name, tls.reload)

    async def _take_up(self, name: str, read: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(read)
        except (TlsUnusable, TokensUnusable) as error:
            log.error("%s; what was in use stays in use", error)
        except Exception as error:  # a bug must not end the reloads for good, and its words may hold a secret
            log.error("%s could not be read again: %s", name, type(error).__name__)
        else:
            log.info("%s was read again", name)

    def _read_tokens(self) -> None:
        assert self._tokens is not None
        self.authenticator.tokens = self._tokens.read()
