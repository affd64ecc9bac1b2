"""Envoy in front of replicas, with the configuration that docs/replicas.md shows; only addresses are exchanged."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.absent import missing
from tests.e2e.live import PATIENCE, ROOT, until

GUIDE = ROOT / "docs" / "replicas.md"
SHOWN = ROOT / "docs" / "replicas" / "envoy.yaml"
ADMIN = '{"admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}}'


def program() -> Path:
    """The Envoy that the dev extra installs. Without one the test is skipped, and fails in CI."""
    found = importlib.util.find_spec("envoy")
    if found is None or found.origin is None:
        missing("ROUTING BETWEEN REPLICAS IS NOT TESTED HERE: there is no Envoy; install the replicas extra")
    return Path(found.origin).parent / "_bin" / "envoy"


def configuration(replicas: Sequence[str]) -> str:
    """The shown file, listening on a free port, for replicas at these addresses."""
    text = SHOWN.read_text()
    ports = {50051: 0} | {50061 + index: int(address.rpartition(":")[2]) for index, address in enumerate(replicas)}
    for shown, port in ports.items():
        assert text.count(f"port_value: {shown}}}") == 1
        text = text.replace(f"port_value: {shown}}}", f"port_value: {port}}}")
    return text


def secured(text: str) -> str:
    """The same with the guide's transport sockets: TLS towards callers and towards replicas."""
    towards_callers, towards_replicas = map(
        yaml.safe_load, re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    )
    made = yaml.safe_load(text)
    for listener in made["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            chain |= towards_callers
    for cluster in made["static_resources"]["clusters"]:
        cluster |= towards_replicas
    return json.dumps(made)


class Envoy:
    """A running Envoy. `address` is where clients go.

    `certificates`: with TLS on both sides, by the files that the guide names, in this folder.
    """

    def __init__(self, replicas: Sequence[str], *, certificates: Path | None = None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvfork-envoy-")
        home = Path(self._home.name)
        text = configuration(replicas)
        (home / "envoy.yaml").write_text(text if certificates is None else secured(text))
        where = home / "admin"
        self.log = home / "stderr"
        command = [program(), "-c", home / "envoy.yaml", "--config-yaml", ADMIN, "--admin-address-path", where]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, cwd=certificates)
        try:
            until(lambda: self._ended() or (where.exists() and where.read_text()), what="Envoy to start")
            self._admin = where.read_text()
            until(lambda: self._ended() or self._listening(), what="Envoy to listen")
        except BaseException:
            self.close()
            raise

    def healthy(self) -> set[int]:
        """Ports of the replicas that both clusters send calls to."""
        clusters = json.loads(self._ask("clusters?format=json"))["cluster_statuses"]
        well = [
            {
                host["address"]["socket_address"]["port_value"]
                for host in cluster["host_statuses"]
                if host["health_status"].get("eds_health_status") == "HEALTHY"
                and not host["health_status"].get("failed_active_health_check")
            }
            for cluster in clusters
        ]
        return set.intersection(*well)

    def close(self) -> None:
        """Ends it and removes its folder."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE)
                raise
        self._home.cleanup()

    def __enter__(self) -> Envoy:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ended(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return False

    def _listening(self) -> bool:
        listeners = json.loads(self._ask("listeners?format=json")).get("listener_statuses", [])
        for listener in listeners:
            socket = listener["local_address"]["socket_address"]
            self.address = f"{socket['address']}:{socket['port_value']}"
        return bool(listeners)

    def _ask(self, what: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._admin}/{what}", timeout=PATIENCE) as reply:
            read: bytes = reply.read()
        return read
