"""The processes that compile forms and make masks: what a caller sent meets llguidance here, and nowhere else.

    the server ─► root: the vocabulary, read once ─► a fork for each form: compiled ─► a fork for each row: its matcher

A fork costs a millisecond or two and shares its parent's memory, so a compiled form is a process that waits, and a row
that follows it is a copy of that process. Whatever a form does to the library (recursion, time, memory) it does to its
own process: each has one thread, ends when whoever holds the other end of its socket closes it, and is ended by the
kernel beyond its processor time or memory. Where the kernel bounds no memory (macOS) its parent watches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from service.text.closed import close_objects
from service.text.form_frames import HEAD, REQUEST, TOKEN, TOKEN_SECONDS, Reply, Request, Vocabulary
from service.text.tokens import spans_of

LOOK_EVERY = 0.2  # seconds between looks at children: who has ended, and who has grown

# One line end with its indentation, or one space: a small model given free white space may write nothing else for ever.
_JSON_SPACE = r"(\n[ ]{0,40}|[ ])?"

# llguidance's own limits but one: a lexer state takes up to 2 kB, and a row must not hold half a gigabyte of them.
_LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)

_TICK = 0.001  # seconds
_STACK_BYTES = 8 << 20


def main(descriptor: int) -> None:
    """The root's life. It ends when the server's end of the socket is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):
        _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server decides, by closing the socket or by SIGKILL
    server = socket.socket(fileno=descriptor)
    vocabulary: Vocabulary = pickle.loads(receive(server)[1])  # from the server that started this process
    wrapper = cast(TokenizerWrapper, _Tokenizer(vocabulary))  # it only has to look like one
    tokenizer = LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_ids)
    gc.collect()
    gc.freeze()  # children share this memory as long as nobody writes to it
    send(server, Reply.READY)
    _raise(server, lambda own: _form(own, tokenizer, vocabulary), vocabulary)


def _raise(parent: socket.socket, live: Callable[[socket.socket], None], vocabulary: Vocabulary) -> None:
    """Forks a child for each FORK, until the other end of `parent` is closed. Never returns to a child's caller."""
    children: dict[int, int] = {}
    most = _memory(os.getpid()) + vocabulary.form_bytes
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    while True:
        ready = poll.poll(LOOK_EVERY * 1000 if children else None)
        for child, pid in list(children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[child]
            elif vocabulary.watch and _memory(pid) > most:
                os.kill(pid, signal.SIGKILL)
        if not ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(parent, REQUEST.size, 1)
        if not data:
            os._exit(0)
        what, child = REQUEST.unpack(data)
        if what == Request.KILL:
            if child in children:
                os.kill(children[child], signal.SIGKILL)
            continue
        try:
            pid = os.fork()
        except OSError:
            with contextlib.suppress(OSError):  # the server may have left
                os.write(descriptors[0], HEAD.pack(Reply.NO_ROOM, 0))
            os.close(descriptors[0])
            continue
        if pid:
            children[child] = pid
            os.close(descriptors[0])
            continue
        try:
            parent.close()
            live(socket.socket(fileno=descriptors[0]))
        finally:
            os._exit(1)


def _form(server: socket.socket, tokenizer: LLTokenizer, vocabulary: Vocabulary) -> None:
    """A form's life: it is compiled, then forks a row for each call that follows it."""
    if not vocabulary.watch:
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            _limit(kind, _address_space() + vocabulary.form_bytes)
    send(server, Reply.READY)
    form, text, options = json.loads(receive(server)[1])
    signal.setitimer(signal.ITIMER_PROF, vocabulary.form_seconds)
    try:
        matcher = _compiled(tokenizer, form, text, options)
    except ValueError as error:
        send(server, Reply.INVALID, str(error).encode(errors="replace"))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(server, Reply.READY)
    _raise(server, lambda own: _row(own, matcher, vocabulary.mask_seconds), vocabulary)


def _row(server: socket.socket, matcher: LLMatcher, seconds: float) -> None:
    """A row's life: a mask, then for each token what it makes of the text, and the next mask.

    Ends of itself where nothing can follow. SIGPROF ends it once its processor time is used up, which is `seconds`
    at first, and never more.
    """
    send(server, Reply.READY)
    left, began = seconds, time.process_time()
    signal.setitimer(signal.ITIMER_PROF, left)
    while _send_mask(server, matcher):
        signal.setitimer(signal.ITIMER_PROF, 0)
        left = min(seconds, left - (time.process_time() - began) + TOKEN_SECONDS)
        data = _exactly(server, TOKEN.size)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(left, _TICK))  # 0 would be no limit
        if not matcher.consume_token(*TOKEN.unpack(data)) or matcher.is_error():
            send(server, Reply.DEAD_END, matcher.get_error().encode(errors="replace"))
            return
        if matcher.is_stopped():
            send(server, Reply.IS_WHOLE if matcher.is_accepting() else Reply.DEAD_END)
            return
        send(server, Reply.GOES_ON)


def _send_mask(server: socket.socket, matcher: LLMatcher) -> bool:
    mask = matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        send(server, Reply.DEAD_END, matcher.get_error().encode(errors="replace"))
        return False
    send(server, Reply.MASK, bytes([matcher.is_accepting()]) + mask)
    return True


def _compiled(tokenizer: LLTokenizer, form: str, text: str, options: list[str]) -> LLMatcher:
    """Raises ValueError with what is wrong with the form."""
    matcher = LLMatcher(tokenizer, _grammar(form, text, options), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the dearest one, and a form that fits nothing fails here
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise ValueError(matcher.get_error() or "no text has this form")
    return matcher


def _grammar(form: str, text: str, options: list[str]) -> str:
    match form:
        case "json_schema":
            if not text.lstrip().startswith("{"):
                raise ValueError("must be a JSON object")
            try:
                closed = close_objects(text)
            except RecursionError:
                raise ValueError("is nested too deeply") from None
            return LLMatcher.grammar_from_json_schema(closed, defaults={"whitespace_pattern": _JSON_SPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)
        case _:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, options)))


class _Tokenizer:
    """A vocabulary in the form that llguidance asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(vocabulary.tokenizer)
        self._guards = vocabulary.guards
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        special = set(vocabulary.special_ids)
        self._ids = {data: token for token, data in enumerate(self.tokens) if data and token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of exactly this text: where a form leaves one way to go on, llguidance allows no other."""
        data = text.encode() if isinstance(text, str) else text
        ids = spans_of(self._backend, data.decode(errors="replace"), self._guards)[0]
        spelled = b"".join(self.tokens[token] for token in ids if token < len(self.tokens))
        return ids if spelled == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Half characters, and tokenizers that put spaces behind added tokens too; empty if no tokens spell it."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    break
            else:
                return []
            ids.append(token)
            at += length
        return ids


# -- frames and memory ----------------------------------------------------------------------------------------------


def send(to: socket.socket, kind: int, payload: bytes = b"") -> None:
    """One frame. Ends the process if nobody is there to read it."""
    try:
        to.sendall(HEAD.pack(kind, len(payload)) + payload)
    except OSError:
        os._exit(0)


def receive(source: socket.socket) -> tuple[int, bytes]:
    """(kind, payload) of one frame. Ends the process if none comes any more."""
    kind, length = HEAD.unpack(_exactly(source, HEAD.size))
    return kind, _exactly(source, length)


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            more = source.recv(min(count - len(data), 1 << 20))
        except OSError:
            more = b""
        if not more:
            os._exit(0)
        data += more
    return bytes(data)


def _limit(kind: int, most: int) -> None:
    """Lowers a limit of the kernel's to `most`; one that is lower already stays."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _memory(pid: int) -> int:
    """Bytes that the process holds in memory; 0 if it has ended."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v0: a UUID, then counters; the resident size is the seventh
        if ctypes.CDLL(None).proc_pid_rusage(pid, 0, ctypes.byref(usage)):
            return 0
        return int(usage[2 + 6])
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
