"""Certificates for tests: an authority, and what it signs. Keys are made on the spot and live as long as the folder."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """The two files."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, data in zip(paths, (self.certificate, self.key), strict=True):
            path.write_bytes(data)
        return paths


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._certificate = self._sign(self._name, self._key, [], ca=True)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, *, expired: bool = False) -> Pair:
        """For 127.0.0.1 and localhost."""
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return self._pair("server", here, expired=expired)

    def client(self, common: str = "", *, dns: tuple[str, ...] = (), uri: tuple[str, ...] = ()) -> Pair:
        """For a caller with these names."""
        names = [*map(x509.DNSName, dns), *map(x509.UniformResourceIdentifier, uri)]
        return self._pair(common, names)

    def _pair(self, common: str, names: list[x509.GeneralName], *, expired: bool = False) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_named(common), key, names, expired=expired)
        return Pair(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: list[x509.GeneralName],
        *,
        ca: bool = False,
        expired: bool = False,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * DAY)
            .not_valid_after(now - DAY if expired else now + DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)] if common else [])
