"""Certificates and their authority. Elliptic keys, which are made at once."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Issued(NamedTuple):
    """The files of a certificate."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.cert = folder / "ca.crt"
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_signs_certificates(), critical=True)
        self._write(self.cert, builder)

    def key(self, name: str) -> Path:
        """A private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = self._folder / f"{name}.key"
        path.write_bytes(_pem(key))
        return path

    def issue(
        self,
        name: str,
        common_name: str,
        organizations: Sequence[str] = (),
        *,
        addresses: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> Issued:
        """A certificate for a client, and also for a server if it has addresses or names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, o) for o in organizations),
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            ]
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if addresses or names:
            alternatives = [
                *(x509.IPAddress(ipaddress.ip_address(a)) for a in addresses),
                *(x509.DNSName(n) for n in names),
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        issued = self.existing(name)
        self._write(issued.cert, builder)
        issued.key.write_bytes(_pem(key))
        return issued

    def existing(self, name: str) -> Issued:
        """The certificate of that name."""
        return Issued(self._folder / f"{name}.crt", self._folder / f"{name}.key")

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=7))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(authority, critical=False)
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def context_of(authority: Authority, client: Issued) -> ssl.SSLContext:
    """TLS that trusts the authority and presents the client's certificate."""
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.load_cert_chain(client.cert, client.key)
    return context


def _signs_certificates() -> x509.KeyUsage:
    others = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
    )
    unset = dict.fromkeys((*others, "crl_sign", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, **unset)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
