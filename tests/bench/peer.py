"""The peers: `mlx_lm.server` and `mlx_vlm.server` from the same environment, over their own HTTP endpoints."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from tests.bench.ours import CALL_SECONDS, START_SECONDS, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One peer's program: its flags at their best for what is measured, and where it answers.

    A server without an endpoint for raw text gets the text as the one turn of a chat.
    """

    name: str
    module: str
    flags: tuple[str, ...]
    chat: bool
    environment: tuple[tuple[str, str], ...] = ()


# Its defaults batch 32 decodes and 8 prompts, enough for every bench here; the prompt cache must hold what a bench
# comes back to.
MLX_LM = Kind(
    name=f"mlx_lm.server {version('mlx-lm')}",
    module="mlx_lm.server",
    flags=(
        *("--decode-concurrency", "32", "--prompt-concurrency", "8"),
        *("--prompt-cache-size", "32", "--log-level", "WARNING"),
    ),
    chat=False,
)
MLX_VLM = Kind(
    name=f"mlx_vlm.server {version('mlx-vlm')}",
    module="mlx_vlm.server",
    flags=("--log-level", "WARNING"),
    chat=True,
)
# As before, with its prefix cache, which is off unless asked for.
MLX_VLM_PREFIX = Kind(
    name=f"{MLX_VLM.name} with its prefix cache",
    module=MLX_VLM.module,
    flags=MLX_VLM.flags,
    chat=True,
    environment=(("APC_ENABLED", "1"), ("APC_DISK_ENABLED", "0")),
)
NAME = MLX_LM.name


@dataclass(slots=True)
class PeerReply:
    """One completion as its client saw it. Times as in `ours.Reply`; `times` has one entry an event."""

    sent: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    done: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent


class Peer:
    """A running peer."""

    def __init__(self, folder: Path, *flags: str, kind: Kind = MLX_LM) -> None:
        self.kind = kind
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tests.bench.peer_main", kind.module, str(folder)]
        self.process = Process(
            [*command, "--host", "127.0.0.1", "--port", str(self._port), *kind.flags, *flags], dict(kind.environment)
        )
        self._model = ""  # as the peer calls it

    def __enter__(self) -> Peer:
        until = time.monotonic() + START_SECONDS
        try:
            self._model = self.process.wait_line("serving ")
            while not self._answers():
                self.process.check()
                if time.monotonic() > until:
                    raise TimeoutError(f"{self.kind.name} did not come up:\n{self.process.log_tail()}")
                time.sleep(0.1)
            self.complete("Warm up.", 2)  # the model is loaded beside the HTTP server: wait for it as well
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        into: PeerReply | None = None,
        *,
        image: bytes | None = None,
        never: Sequence[int] = (),
    ) -> PeerReply:
        """Greedy completion of a raw text, streamed; returns when it has ended. `into` grows meanwhile.

        `image`: a PNG file before the text, for a server that takes chats. `never`: tokens that it may not pick, as
        are those that would end it.
        """
        content = prompt if image is None else [_image_part(image), {"type": "text", "text": prompt}]
        told = {"messages": [{"role": "user", "content": content}]} if self.kind.chat else {"prompt": prompt}
        body = {
            **told,
            "model": self._model if self.kind.chat else "default_model",
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"logit_bias": {str(token): -1000.0 for token in never}} if never else {}),
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_SECONDS)
        reply = into if into is not None else PeerReply(sent=0.0)
        reply.sent = time.perf_counter()
        path = "/v1/chat/completions" if self.kind.chat else "/v1/completions"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{self.kind.name} answered {response.status}: {response.read()!r}")
        while line := response.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                usage = event["usage"]
                reply.prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens", 0))
                reply.completion_tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
                reply.cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
            if event["choices"]:
                choice = event["choices"][0]
                text = (choice.get("delta", {}).get("content") if self.kind.chat else choice.get("text")) or ""
                if text or choice.get("finish_reason"):
                    reply.times.append(time.perf_counter())
                    reply.text += text
        reply.done = time.perf_counter()
        connection.close()
        return reply

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _image_part(image: bytes) -> dict[str, object]:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
