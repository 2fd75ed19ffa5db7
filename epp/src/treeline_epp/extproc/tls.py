"""TLS of the ports for proxies: a certificate from files, read again when they change, or a new one made at start."""

from __future__ import annotations

import datetime
import logging
import ssl
import tempfile
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from treeline_epp.files import read_file

log = logging.getLogger(__name__)

_MOST_BYTES = 1024 * 1024
"""Largest file: as much as a Secret holds."""
_LIFETIME = datetime.timedelta(days=3650)


class TlsError(Exception):
    """The certificate's files cannot be used; the message says why."""


def client_checking(folder: Path) -> grpc.ServerCredentials:
    """Return grpcio server credentials for mutual TLS, by the folder's `ca.crt`. Raises `TlsError`."""
    files = _Files(folder, clients=True)
    try:
        return grpc.dynamic_ssl_server_credentials(
            files.read(),
            files.changed,  # type: ignore[arg-type]
            require_client_authentication=True,
        )
    except (OSError, ValueError) as error:
        raise _told(folder, error) from error


def _told(folder: Path | None, error: Exception) -> TlsError:
    if isinstance(error, OSError) and error.filename is not None:
        why = f"cannot read {error.filename} ({error.strerror})"
        return TlsError(f"--cert-path: {why}: name a folder with tls.crt and tls.key that may be read")
    return TlsError(f"--cert-path {folder}: {error}")


def self_signed() -> tuple[bytes, bytes]:
    """Return a new `(key, certificate)`, both PEM. No proxy can verify it; it hides prompts on the network."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Treeline endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)


class Certificate:
    """A certificate for a server that speaks TLS by Python's `ssl`, with ALPN `h2`."""

    def __init__(self, folder: Path | None, *, clients: bool = False) -> None:
        self._folder = folder
        self._files = None if folder is None else _Files(folder, clients=clients)

    def context(self) -> ssl.SSLContext:
        """Return the first context. Raises `TlsError`."""
        if self._files is None:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                for file, content in zip(("tls.key", "tls.crt"), self_signed(), strict=True):
                    (folder / file).write_bytes(content)
                return _Files(folder, clients=False).context()
        try:
            self._files.read()
            return self._files.context()
        except (OSError, ValueError) as error:
            raise _told(self._folder, error) from error

    def changed(self) -> ssl.SSLContext | None:
        """Return a new context if the files have changed and can be used; the caller polls."""
        if self._files is None or self._files.changed() is None:
            return None
        try:
            return self._files.context()
        except (OSError, ValueError) as error:  # changed again meanwhile
            log.error("the new certificate cannot be used, the old one stays: %s", error)
            return None


class _Files:
    """The files `tls.key` and `tls.crt` of a folder, as in a mounted Secret, and `ca.crt` to check clients."""

    def __init__(self, folder: Path, *, clients: bool) -> None:
        names = ("tls.key", "tls.crt", "ca.crt") if clients else ("tls.key", "tls.crt")
        self._paths = [folder / name for name in names]
        self._seen: tuple[tuple[int, ...], ...] = ()
        self._said = ""

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read the files. Raises OSError, or ValueError if one is no certificate or key, or the two do not match."""
        state = self._state()
        key, chain, *authorities = (read_file(path, _MOST_BYTES) for path in self._paths)
        self._seen = state  # a file that could not be read is tried again
        try:
            certificate = x509.load_pem_x509_certificate(chain)
            if serialization.load_pem_private_key(key, None).public_key() != certificate.public_key():
                raise ValueError("tls.key is not the key of tls.crt")
            for authority in authorities:
                x509.load_pem_x509_certificates(authority)
        except (TypeError, UnsupportedAlgorithm) as error:  # a key with a password, or of an unknown kind
            raise ValueError(str(error)) from error
        return grpc.ssl_server_certificate_configuration([(key, chain)], *authorities)

    def context(self) -> ssl.SSLContext:
        """Make a context. Raises OSError (`ssl.SSLError` is one)."""
        key, chain, *authorities = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(chain, key)
        for path in authorities:
            context.load_verify_locations(path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new pair if the files have changed and can be used; grpcio asks at every handshake."""
        try:
            if self._state() == self._seen:
                return None
            found = self.read()
        except (OSError, ValueError) as error:
            if str(error) != self._said:  # log it once: this runs every second, and at every handshake
                self._said = str(error)
                log.error("the new certificate cannot be used, the old one stays: %s", error)
            return None
        self._said = ""
        log.info("a new certificate is in use")
        return found

    def _state(self) -> tuple[tuple[int, ...], ...]:
        """Return the files' state, whose change means a new version; copied files may keep their times."""
        found = [path.stat() for path in self._paths]
        return tuple((file.st_mtime_ns, file.st_ctime_ns, file.st_ino, file.st_size) for file in found)
