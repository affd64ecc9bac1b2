"""Compiled forms and the rows that follow them: the server's side of `form_worker`'s processes.

Owns those processes: the root, begun at the first form and begun anew when it has died; a process for each compiled
form, the last ones kept, each for its owner alone, so that no time tells of another's; one for each row. What becomes
of a process costs its own form or row. No more than so many compile at a time, and no owner takes all those places.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from threading import Lock

from service.errors import EngineDown, InvalidField, QueueFull
from service.request import Constraint
from service.text.form_frames import HEAD, REQUEST, TOKEN, Reply, Request, Vocabulary
from service.text.tokens import TextCodec

MAX_KEPT = 32  # compiled forms, each a process that waits; agents send the same ones again and again
COMPILE_PLACES = max(2, min(8, (os.cpu_count() or 1) // 2))
OWNER_PLACES = COMPILE_PLACES // 2
START_SECONDS = 120.0  # by the clock, for the root to read the vocabulary, and for a child to begin
PATIENCE = 10.0  # times its processor time, and as many seconds more, that a process may take by the clock

_LONGEST_MESSAGE = 400  # characters of llguidance's own error


class Gone(Exception):
    """A process has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormLimits:
    """What a form may cost. Seconds are processor time."""

    form_seconds: float = 5.0  # to compile it
    form_bytes: int = 512 << 20  # of memory, beside the vocabulary's
    mask_seconds: float = 2.0  # ahead of what each token gives, see `TOKEN_SECONDS`
    watch: bool = sys.platform == "darwin"  # the kernel has no limit of memory there


class FormRow:
    """One row's process. Its first mask is being made; each token that is told is answered, and has the next made.

    The waits are seconds. Any one thread at a time; the process ends when the last reference goes.
    """

    def __init__(self, end: socket.socket, patience: float) -> None:
        self._descriptor = end.detach()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._patience = patience
        self._asked = time.monotonic()
        self._data = bytearray()
        weakref.finalize(self, os.close, self._descriptor)

    def take(self, token: int) -> None:
        """Tells the token that was picked. Raises Gone."""
        self._asked = time.monotonic()
        try:
            os.write(self._descriptor, TOKEN.pack(token))
        except OSError as error:
            raise Gone("has ended") from error

    def answer(self, wait: float) -> tuple[Reply, bytes] | None:
        """The next frame, if it comes within `wait`. Raises Gone."""
        until = time.monotonic() + wait
        while True:
            if len(self._data) >= HEAD.size:
                kind, length = HEAD.unpack_from(self._data)
                end = HEAD.size + length
                if len(self._data) >= end:
                    payload = bytes(self._data[HEAD.size : end])
                    del self._data[:end]
                    return Reply(kind), payload
            now = time.monotonic()
            if not self._poll.poll(max(0.0, until - now) * 1000):
                if now - self._asked > self._patience:
                    raise Gone("does not answer")
                return None
            try:
                more = os.read(self._descriptor, 1 << 18)
            except OSError:
                more = b""
            if not more:
                raise Gone("has ended")
            self._data += more

    @property
    def waited(self) -> float:
        """Seconds since a token was told."""
        return time.monotonic() - self._asked


class Forms:
    """Compiled forms of one model. On the event loop alone, but for `close`."""

    def __init__(self, codec: TextCodec, limits: FormLimits) -> None:
        self.limits = limits
        self._codec = codec
        self._root: _Root | None = None
        self._starting = Lock()
        self._kept: OrderedDict[tuple[str, Constraint], _Process] = OrderedDict()
        self._places = asyncio.Semaphore(COMPILE_PLACES)
        self._places_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def open(self, owner: str, constraint: Constraint) -> FormRow:
        """A row that follows the form from its beginning.

        InvalidField says why the form cannot be had; QueueFull: the system has no room for a process; EngineDown:
        the processes do not begin, or were ended from outside, which is no fault of the form's.
        """
        for last in (False, True):
            form = self._kept.get((owner, constraint)) or await self._compile_in_turn(owner, constraint)
            self._kept.move_to_end((owner, constraint))
            try:
                row = await form.fork()
            except Gone:  # somebody has ended the form's process since it was compiled
                self._forget((owner, constraint))
                form.kill()
                if last:
                    raise _no_process() from None
                continue
            return FormRow(row.end, self._patience(self.limits.mask_seconds))
        raise AssertionError

    def close(self) -> None:
        """Ends every process at once."""
        for key in list(self._kept):
            self._forget(key)
        with self._starting:
            if self._root is not None:
                self._root.kill_all()
                self._root = None

    async def _compile_in_turn(self, owner: str, constraint: Constraint) -> _Process:
        places = self._places_of.get(owner)
        if places is None:
            places = self._places_of[owner] = asyncio.Semaphore(OWNER_PLACES)
        async with places, self._places:
            form = self._kept.get((owner, constraint))  # since somebody of the owner's was before
            if form is None:
                form = self._kept[owner, constraint] = await self._compile(constraint)
                if len(self._kept) > MAX_KEPT:
                    (most, _), *_ = Counter(owner for owner, _ in self._kept).most_common(1)
                    self._forget(next(key for key in self._kept if key[0] == most))
            return form

    async def _compile(self, constraint: Constraint) -> _Process:
        field = f"constraint.{constraint.form.value}"
        form = await self._new_form()
        began = time.monotonic()
        try:
            asked = json.dumps([constraint.form.value, constraint.text, constraint.options]).encode()
            async with asyncio.timeout(self._patience(self.limits.form_seconds)):
                await form.send(asked)
                kind, words = await form.receive()
        except (Gone, TimeoutError):
            form.kill()
            raise InvalidField.at(field, self._too_much(time.monotonic() - began)) from None
        except BaseException:  # the call has ended, and its compiling with it; it is raised on
            form.kill()
            raise
        if kind is Reply.INVALID:
            form.close()
            raise InvalidField.at(field, one_line(words.decode(errors="replace")))
        return form

    def _too_much(self, seconds: float) -> str:
        if seconds >= self.limits.form_seconds:
            return f"takes more than {self.limits.form_seconds:g} s to compile"
        return f"is nested too deeply to compile, or takes more than {self.limits.form_bytes >> 20} MiB"

    async def _new_form(self) -> _Process:
        """A form's process, with nothing compiled. Raises EngineDown or QueueFull if there can be none."""
        for _ in range(2):
            root = self._root
            with contextlib.suppress(Gone):
                if root is None or not root.alive:
                    root = await asyncio.to_thread(self._start)
                return await root.fork()
            if root is not None:
                root.kill_all()
        raise _no_process()

    def _start(self) -> _Root:
        with self._starting:
            if self._root is None or not self._root.alive:
                self._root = _Root(_vocabulary(self._codec, self.limits))
            return self._root

    def _forget(self, key: tuple[str, Constraint]) -> None:
        form = self._kept.pop(key, None)
        if form is not None:
            form.close()

    @staticmethod
    def _patience(seconds: float) -> float:
        return PATIENCE * seconds + PATIENCE


class _Process:
    """A process that forks others for the asking, and the way to it."""

    def __init__(self, end: socket.socket, parent: _Process | None = None, number: int = 0) -> None:
        end.settimeout(0)
        weakref.finalize(self, end.close)
        self.end = end
        self._parent = parent
        self._number = number
        self._children = itertools.count(1)

    async def fork(self) -> _Process:
        """A child that has begun. Raises Gone if this process has ended or hangs, QueueFull if there is no room."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _no_room() from error
        child = _Process(ours, self, next(self._children))
        try:
            with theirs:
                socket.send_fds(self.end, [REQUEST.pack(Request.FORK, child._number)], [theirs.fileno()])
            async with asyncio.timeout(START_SECONDS):
                kind, _ = await child.receive()
        except TimeoutError as error:
            child.kill()
            raise Gone("hangs") from error
        except BlockingIOError as error:  # more forks are asked for already than the socket holds
            child.close()
            raise _no_room() from error
        except OSError as error:
            child.close()
            raise Gone("has ended") from error
        except BaseException:
            child.kill()
            raise
        if kind is Reply.NO_ROOM:
            child.close()
            raise _no_room()
        return child

    def kill(self) -> None:
        """Ends it, whatever it is doing."""
        self.close()
        if self._parent is not None:
            with contextlib.suppress(OSError):  # then it has ended, and so will its children
                self._parent.end.send(REQUEST.pack(Request.KILL, self._number))

    def close(self) -> None:
        """Ends it when it is done with what it is doing."""
        self.end.close()

    async def send(self, payload: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self.end, HEAD.pack(0, len(payload)) + payload)
        except OSError as error:
            raise Gone("has ended") from error

    async def receive(self) -> tuple[Reply, bytes]:
        """One frame; nothing behind it is read. Raises Gone."""
        kind, length = HEAD.unpack(await self._exactly(HEAD.size))
        return Reply(kind), await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                more = await asyncio.get_running_loop().sock_recv(self.end, count - len(data))
            except OSError:
                more = b""
            if not more:
                raise Gone("has ended")
            data += more
        return bytes(data)


class _Root(_Process):
    """The process that has read the vocabulary. Blocks while it begins, some seconds for a large one.

    Raises Gone if it does not begin, QueueFull if there is no room for it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            ours, self._process = self._begun()
        except OSError as error:
            raise _no_room() from error
        try:
            ours.settimeout(START_SECONDS)  # whoever closes the server must not wait for ever
            payload = pickle.dumps(vocabulary)
            ours.sendall(HEAD.pack(0, len(payload)) + payload)
            if not ours.recv(HEAD.size):
                raise Gone("does not begin")
        except BaseException as error:
            _end(self._process)
            ours.close()
            if isinstance(error, OSError):
                raise Gone("does not begin") from error
            raise
        super().__init__(ours)
        weakref.finalize(self, _end, self._process)

    @staticmethod
    def _begun() -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            # The same modules as here, whatever lies in the working folder, and nothing else of the environment.
            code = f"from service.text.form_worker import main; main({theirs.fileno()})"
            environment = {
                "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
                "TOKENIZERS_PARALLELISM": "false",  # threads would not survive a fork
            }
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic's words hold what a caller sent
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # signals to the server's group are the server's
            )
        return ours, process

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill_all(self) -> None:
        """Ends it with all its descendants."""
        _end(self._process)  # first: at the socket's end it would go alone, and its group could not be named any more
        self.close()


def _end(root: subprocess.Popen[bytes]) -> None:
    if root.poll() is None:  # until it was waited for, the group's number is nobody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
        root.wait()


def _no_process() -> EngineDown:
    return EngineDown("no process can be begun that compiles the form", hint="try again", retry_after=2.0)


def _no_room() -> QueueFull:
    return QueueFull(
        "the system has no room for another process, and a form needs one",
        hint="try again when other calls have ended, or without a constraint",
    )


def _vocabulary(codec: TextCodec, limits: FormLimits) -> Vocabulary:
    return Vocabulary(
        tokens=[codec.token_bytes(token) for token in range(codec.vocab_size)],
        special_ids=sorted(token for token in codec.special_ids if token < codec.vocab_size),
        eos_ids=sorted(codec.eos_ids),
        bos_id=codec.bos_id,
        tokenizer=codec.tokenizer_file,
        guards=codec.guards,
        form_seconds=limits.form_seconds,
        form_bytes=limits.form_bytes,
        mask_seconds=limits.mask_seconds,
        watch=limits.watch,
    )


def one_line(message: str) -> str:
    """llguidance's words, without the grammar or the addresses of its code that it may show behind them."""
    if message.startswith("NoExtension"):
        return NOTHING_FITS
    for behind in ("<non-verbose", "<backtrace>"):
        message = message.partition(behind)[0]
    return " ".join(message.split())[:_LONGEST_MESSAGE]


NOTHING_FITS = "no token fits the form any more"
