"""A real gateway in its own process. Owns start and stop; judges nothing but that its log has no complaint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai

from tests.e2e.live import PATIENCE, ROOT, LiveServer
from tests.e2e.proxy import Envoy

KEPT = {"kvfork-gateway": "reuse"}
"""Labels of what a gateway keeps of its own accord."""


class LiveGateway:
    """`kvfork gateway` as a subprocess in front of a server."""

    def __init__(self, server: LiveServer | Envoy, *flags: str) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", prefix="kvfork-gateway-")  # noqa: SIM115 - lives as long as this
        command = [sys.executable, "-m", "service", "gateway", "--server", server.address, "--address", "127.0.0.1:0"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFORK_")}
        self.process = subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT, env=clean
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), self.log
        self.url = line.split()[-1]
        self._clients: list[openai.OpenAI] = []

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """The official client, with nothing but its base URL changed."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, **options)
        self._clients.append(made)
        return made

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> str:
        """Of one that has ended: what it logged."""
        for client in self._clients:  # or their connections stay, for Python's collector to complain of in any test
            client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        log = self.log
        self._log.close()
        return log

    def __enter__(self) -> LiveGateway:
        return self

    def __exit__(self, *raised: object) -> None:
        code = self.terminate() if self.process.poll() is None else self.process.returncode
        log = self.close()
        assert code == 0, (code, log)
        assert log == ""
