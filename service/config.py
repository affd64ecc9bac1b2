"""The server's settings, as the rest of it sees them. A `Config` that exists is valid.

Where they come from, and what they are called there, is `service.options`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvcache.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy, Checkpoints
from service.config_file import ConfigError
from service.config_values import GIB, MIB, split_address, split_page_address

__all__ = ["Config", "ConfigError"]

MOST_PIXELS = 89_000_000  # beyond it the image library warns, and a picture takes a gigabyte while it is decoded
_AT_LEAST_ONE = (
    "max_batch",
    "max_request_bytes",
    "max_text_bytes",
    "max_image_bytes",
    "max_image_pixels",
    "form_bytes",
    "max_fork_branches",
    "max_snapshots",
    "max_watches",
    "default_max_tokens",
    "active_bytes",
    "prefill_budget",
    "max_connections",
    "max_owner_calls",
)
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # goes into a header, and a host's name will do
_LONGEST_SOCKET_PATH = 103  # macOS; Linux takes four more


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of one server. Sizes are bytes, times seconds. Raises ConfigError if they contradict each other."""

    address: str = "127.0.0.1:50051"  # "" for no TCP listener
    unix_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    token_command: str = ""
    token_refresh: float = 60.0
    admins: tuple[str, ...] = ()
    reflection: bool | None = None  # None: only where nobody but this machine can ask
    max_connections: int = 500
    max_owner_calls: int = 256
    max_owner_running: int | None = None  # None: see `owner_running`; 0: no limit
    request_seconds: float = 60.0
    model: str = "smollm2"
    instance: str = ""  # "": the store's own, which lasts as long as it, or one of this process
    max_batch: int = 8
    max_queue: int = 64
    max_request_bytes: int = 64 * MIB
    max_text_bytes: int = 2 * MIB
    max_images: int = 32
    max_image_bytes: int = 32 * MIB
    max_image_pixels: int = 4096 * 4096
    image_bytes: int = 512 * MIB
    form_seconds: float = 5.0
    form_bytes: int = 512 * MIB
    mask_seconds: float = 2.0
    max_fork_branches: int = 64
    max_snapshots: int = 10_000
    max_pinned: int = 1_000
    max_pinned_bytes: int | None = None  # None: no limit
    max_watches: int = 16
    default_ttl: float = 3600.0
    max_ttl: float = 7 * 86400.0
    default_max_tokens: int = 512
    active_bytes: int = 1 * GIB
    memory_bytes: int = 1 * GIB
    disk_bytes: int = 8 * GIB
    scratch_dir: Path = Path(tempfile.gettempdir())
    store_dir: Path | None = None  # None: nothing outlives the process
    key_file: Path | None = None
    key_command: str = ""
    carry_over: bool = False  # durable snapshots of another fingerprint of the same model
    exchange_key: Path | None = None  # None: no snapshot comes from, or goes to, another instance
    checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS.policy
    state_spacing: int = DEFAULT_CHECKPOINTS.state_spacing
    daily_write_bytes: int | None = None  # None: no limit
    snapshot_wait: float = 10.0
    prefill_budget: int = 320
    share_decoded: bool = False
    share_prefixes: bool = False
    drain_seconds: float = 30.0
    write_stall_seconds: float = 30.0
    watchdog_seconds: float = 60.0
    engine_restarts: int = 3
    metrics: str = ""  # "" for none
    inspector: str = ""  # "" for none
    traces: str = "off"
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.address and self.unix_socket is None:
            raise ConfigError("address: nowhere to listen: give an address or a unix socket")
        self._check_exposure()
        if self.metrics:
            split_page_address("metrics", self.metrics)
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > _LONGEST_SOCKET_PATH:
            raise ConfigError(f"unix_socket: the system takes at most {_LONGEST_SOCKET_PATH} bytes of path")
        if not self.model:
            raise ConfigError("model: must be a name or a folder")
        if self.instance and not _INSTANCE.fullmatch(self.instance):
            raise ConfigError(
                "instance: must be 1 to 63 ASCII letters, digits, dots, dashes and underscores, and begin with one of "
                f'the first two, is "{self.instance}"'
            )
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in (
            "max_images",
            "image_bytes",
            "max_queue",
            "max_pinned",
            "memory_bytes",
            "disk_bytes",
            "drain_seconds",
            "engine_restarts",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        if self.max_image_pixels > MOST_PIXELS:
            raise ConfigError(f"max_image_pixels: must be at most {MOST_PIXELS}")
        if not 0 < self.default_ttl <= self.max_ttl:
            raise ConfigError(f"default_ttl: must be above 0 and at most max_ttl ({self.max_ttl:g} s)")
        if self.key_file is not None and self.key_command:
            raise ConfigError("key_file: give either it or key_command")
        if self.store_dir is None and (self.key_file is not None or self.key_command):
            name = "key_file" if self.key_file is not None else "key_command"
            raise ConfigError(f"{name}: is of no use without store_dir")
        if self.store_dir is None and self.carry_over:
            raise ConfigError("carry_over: is of no use without store_dir")
        if self.checkpoints is CheckpointPolicy.OFF and self.store_dir is not None:
            raise ConfigError("checkpoints: off writes nothing, so store_dir would keep nothing; give one or the other")
        try:
            self.kept_on_the_way()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.snapshot_wait < 0:
            raise ConfigError("snapshot_wait: must not be negative")
        for name in ("daily_write_bytes", "max_pinned_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        for name in (
            "write_stall_seconds",
            "watchdog_seconds",
            "token_refresh",
            "request_seconds",
            "form_seconds",
            "mask_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")

    def _check_exposure(self) -> None:
        """What is said in the clear stays on this machine, and who is not on it must say who it is."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert: a certificate and its key go together: give tls_cert and tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca: is of no use without tls_cert and tls_key")
        if self.tls_cert is not None and not self.address and not self.inspector:
            raise ConfigError("tls_cert: is of no use without an address; a unix socket needs no TLS")
        if self.tokens is not None and self.token_command:
            raise ConfigError("tokens: give either it or token_command")
        if self.admins and not self.authenticates:
            raise ConfigError("admins: without authentication everybody is one: give tokens or tls_client_ca too")
        if self.share_prefixes and not self.authenticates:
            raise ConfigError("share_prefixes: without authentication there is one owner, who shares with nobody")
        if self.unix_socket is not None and self.authenticates and not self.takes_tokens:
            raise ConfigError("unix_socket: callers there have no certificate: give tokens too")
        if self.inspector and self.authenticates and not self.takes_tokens:
            raise ConfigError("inspector: a page cannot show a certificate to the calls it makes: give tokens too")
        if self.address:
            self._check_listener("address", self.address, split_address(self.address)[0])
        if self.inspector:
            self._check_listener("inspector", self.inspector, split_page_address("inspector", self.inspector)[0])

    def _check_listener(self, name: str, address: str, host: str) -> None:
        if ipaddress.ip_address(host).is_loopback:
            return
        if self.tls_cert is None:
            raise ConfigError(
                f'{name}: "{address}" is not loopback: others could read and change what passes. Give tls_cert '
                "and tls_key, or listen on 127.0.0.1, [::1] or a unix socket and forward the port"
            )
        if not self.authenticates:
            raise ConfigError(
                f'{name}: "{address}" is not loopback: whoever reaches it could use every snapshot. Give tokens, '
                "token_command or tls_client_ca, which say who calls"
            )

    @property
    def takes_tokens(self) -> bool:
        """Whether callers may show a bearer token."""
        return self.tokens is not None or bool(self.token_command)

    @property
    def authenticates(self) -> bool:
        """Whether callers have to say who they are; if not, there is one owner."""
        return self.takes_tokens or self.tls_client_ca is not None

    @property
    def owner_running(self) -> int:
        """Most calls of one owner that the model has at a time; 0: no limit."""
        if self.max_owner_running is not None:
            return self.max_owner_running
        return max(1, self.max_batch * 3 // 4) if self.authenticates else 0

    @property
    def reflects(self) -> bool:
        """Whether the contract can be asked for over the wire."""
        if self.reflection is not None:
            return self.reflection
        return not self.address or ipaddress.ip_address(split_address(self.address)[0]).is_loopback

    @property
    def disk_budget(self) -> int:
        """Bytes that the disk tier may take."""
        return 0 if self.checkpoints is CheckpointPolicy.OFF else self.disk_bytes

    def kept_on_the_way(self) -> Checkpoints:
        """What store and cache keep of what a run passes. Raises ValueError if it makes no sense."""
        return Checkpoints(policy=self.checkpoints, state_spacing=self.state_spacing)
