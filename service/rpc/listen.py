"""Where the server listens. Owns the port, the socket file and its manners; shares neither with another server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio

from service.config import Config
from service.config_values import split_address


class CannotListen(Exception):
    """An address is taken or may not be used; the text says which and what to do."""


def look(config: Config) -> None:
    """Whether the addresses are free, ahead of work that would be in vain if not. Raises CannotListen.

    Binding them is what counts in the end: another server may come in between.
    """
    if config.address:
        host, port = split_address(config.address)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise _taken(host, port) from error
    if config.unix_socket is not None:
        UnixSocket(config.unix_socket).look()


def _taken(host: str, port: int) -> CannotListen:
    shown = f"[{host}]" if ":" in host else host
    text = f"cannot listen on {shown}:{port}: another server has it, or the system refuses"
    return CannotListen(f"{text}. Stop that one, or choose another --address")


def bind_tcp(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """Binds an address and returns it with the port in use; without `credentials` in the clear.

    Raises CannotListen if somebody else has it. `Config` sees to it that only loopback is bound in the clear.
    """
    host, port = split_address(address)
    shown = f"[{host}]" if ":" in host else host
    try:
        where = f"{shown}:{port}"
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:  # grpc's word for any failure to bind
        raise _taken(host, port) from error
    return f"{shown}:{bound}"


class UnixSocket:
    """One socket file: made with mode 0600, removed at the end if it is still ours."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._inode: int | None = None

    def bind(self, server: grpc.aio.Server) -> str:
        """Binds the file and returns its gRPC address. A file that nobody answers on is replaced.

        Raises CannotListen if a server answers on it, or if something else is in its place.
        """
        self._make_folder()
        # gRPC replaces an existing socket file unasked, a living server's too. So the look and the bind are one step
        # among servers of ours, held together by a lock on the folder, which leaves no file behind.
        with _locked(self.path.parent):
            self._clear()
            before = os.umask(0o177)  # from the first moment on, only the owner can connect
            try:
                server.add_insecure_port(f"unix:{self.path}")
            except RuntimeError as error:
                raise CannotListen(f"cannot listen on {self.path}: the system refuses") from error
            finally:
                os.umask(before)
            self._inode = self.path.stat().st_ino
        return f"unix:{self.path}"

    def look(self) -> None:
        """Raises CannotListen as `bind` would; binds nothing."""
        self._make_folder()
        with _locked(self.path.parent):
            self._clear()

    def remove(self) -> None:
        """Removes the file unless another server has put its own there."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CannotListen(f"cannot listen on {self.path}: {error.strerror}") from error

    def _clear(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise CannotListen(f"cannot listen on {self.path}: there is a file that is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)  # left behind by a server that was killed
                return
            except OSError as error:  # no permission, or a full backlog: somebody is there
                raise CannotListen(f"cannot listen on {self.path}: {error.strerror or 'it is in use'}") from error
        raise CannotListen(f"cannot listen on {self.path}: another server answers there")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
