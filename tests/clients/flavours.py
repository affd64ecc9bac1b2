"""The two flavours of the client behind one way of driving them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from kvfork_client import AsyncClient, Client


class Flavour:
    """Drives either client by the same lines: what is awaitable is awaited, what iterates is listed."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner
        self.opened: list[Any] = []

    def client(self, target: str, **options: Any) -> Any:
        made = AsyncClient(target, **options) if self.runner else Client(target, **options)
        self.opened.append(made)
        return made

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls and, if need be, awaits."""
        if self.runner is None:
            return function(*args, **kwargs)

        async def call() -> Any:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return self.runner.run(call())

    def all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Everything that what the call returns iterates over."""
        if self.runner is None:
            return list(function(*args, **kwargs))

        async def collect() -> list[Any]:
            return [item async for item in function(*args, **kwargs)]

        return self.runner.run(collect())

    def close(self) -> None:
        for client in self.opened:
            self.do(client.close)
