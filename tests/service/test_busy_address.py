"""An address that another server has: it is said at once, before a model is fetched or loaded."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from service import app
from service.cli import serve
from service.config import Config
from service.rpc.server import EXIT_CANNOT_LISTEN


@contextlib.contextmanager
def taken(where: str | tuple[str, int]) -> Iterator[str]:
    """Somebody listens; the address as a flag has it."""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind(where)
        listener.listen()
        name = listener.getsockname()
        yield name if isinstance(name, str) else f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", "--model", "no-such-model", *flags])
    return int(args.run(args))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_busy_port_is_told_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str], host: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(taken((host, 0)))
        except OSError as error:
            pytest.skip(f"{host} is not there: {error}")
        assert run("--address", address) == EXIT_CANNOT_LISTEN
    assert f"error: cannot listen on {address}: another server has it" in capsys.readouterr().err


def test_a_busy_socket_file_is_told_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "socket")
    with taken(path):
        assert run("--address", "none", "--unix-socket", path) == EXIT_CANNOT_LISTEN
    assert f"error: cannot listen on {path}: another server answers there" in capsys.readouterr().err


def test_with_free_addresses_the_model_is_looked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--address", "127.0.0.1:0", "--unix-socket", str(tmp_path / "socket")) == 1
    assert "error: 'no-such-model' is neither" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_loaded_where_another_server_came_in_between(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads: list[str] = []

    def loader(*_: object) -> object:
        return lambda: loads.append(threading.current_thread().name)

    def ready(addresses: Sequence[str]) -> None:
        raise AssertionError(addresses)

    monkeypatch.setattr(app, "loader", loader)
    with taken(("127.0.0.1", 0)) as address:
        code = asyncio.run(app.run(Config(address=address), tmp_path, "tiny", ready))
    assert (code, loads) == (EXIT_CANNOT_LISTEN, [])
