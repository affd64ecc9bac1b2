"""The listener's certificate. Owns reading the files, checking that they fit, and taking up changed ones.

gRPC asks for the certificate at each handshake, so a change needs no restart: connections that stand keep theirs, new
ones get the new. A pair that does not fit, as while the two files are being replaced, is not taken up.
"""

from __future__ import annotations

import datetime
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from service.auth.files import read_file

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20

Stamp = tuple[tuple[int, int, int] | None, ...]


class TlsUnusable(Exception):
    """Files that cannot be served with; the text names the one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. `client_ca`: callers need a certificate from there."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What the files were read as: for gRPC, for other listeners, and the names that the certificate is for."""

    configuration: Any
    context: ssl.SSLContext
    names: tuple[str, ...]


class ServerTls:
    """Credentials that follow their files."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises TlsUnusable."""
        self._files = files
        self._stamp = self._now()
        self._current = _read(files)
        self._offered = self._current

    @property
    def name(self) -> str:
        return f"the certificate {self._files.certificate}"

    def credentials(self) -> grpc.ServerCredentials:
        """For one listener."""
        return grpc.dynamic_ssl_server_credentials(
            self._current.configuration, self._fetch, require_client_authentication=self._files.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """For a listener that is not gRPC's; to be asked for at each connection, as gRPC asks at each handshake."""
        return self._current.context

    def names(self) -> tuple[str, ...]:
        """What the certificate in use calls the server, wildcards among it; addresses are not in it."""
        return self._current.names

    def due(self) -> bool:
        """Whether a file has changed since it was read."""
        return self._now() != self._stamp

    def reload(self) -> None:
        """Raises TlsUnusable; then the files in use stay in use."""
        self._stamp = self._now()
        self._current = _read(self._files)

    def _fetch(self) -> Any:
        # Called on a thread of gRPC's before each handshake; None: as it was.
        current = self._current
        if current is self._offered:
            return None
        self._offered = current
        return current.configuration

    def _now(self) -> Stamp:
        paths = (self._files.certificate, self._files.key, self._files.client_ca)
        return tuple(_stamp_of(path) for path in paths if path is not None)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(files: TlsFiles) -> _Read:
    """What a handshake cannot fail on: gRPC's own checks come too late and say nothing."""
    chain, key = _bytes(files.certificate), _bytes(files.key)
    roots = _bytes(files.client_ca) if files.client_ca is not None else None
    leaf = _certificates(chain, files.certificate)[0]
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except TypeError:
        raise TlsUnusable(f"the key {files.key} is encrypted: there is nobody to ask for its password") from None
    except Exception:  # every kind of damage has its own error, whose text is not for logs: this is a key
        raise TlsUnusable(f"there is no private key in {files.key}") from None
    if _public(private.public_key()) != _public(leaf.public_key()):
        raise TlsUnusable(f"the key {files.key} is not that of the certificate {files.certificate}")
    if roots is not None and files.client_ca is not None:
        _certificates(roots, files.client_ca)
    if leaf.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        log.warning("the certificate %s has expired on %s", files.certificate, leaf.not_valid_after_utc.date())
    return _Read(
        configuration=grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots),
        context=_context(files),
        names=_names(leaf),
    )


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")  # nobody is to be asked for one
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError:  # an SSLError is one; the files have changed under the reader
        raise TlsUnusable(f"the certificate {files.certificate} does not work with its key") from None
    return context


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):  # ValueError: an extension that is damaged
        return ()
    return tuple(found.get_values_for_type(x509.DNSName))


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path, MAX_BYTES)[0]
    except OSError as error:
        raise TlsUnusable(f"{path} cannot be read: {error.strerror or error}") from None


def _certificates(data: bytes, path: Path) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(data)
    except ValueError:
        found = []
    if not found:
        raise TlsUnusable(f"there is no certificate in {path}")
    return found


def _public(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded
