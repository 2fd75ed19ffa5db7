"""Access to a runtime's sockets: a CURVE key pair shared by the processes of one installation.

An event stream contains every user's prompts. With keys, sockets talk only to peers that have the pair. A CURVE client
needs the server's public key, so the *whole pair* is secret, and both files are protected. Without keys, sockets bind
to loopback.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq

PUBLIC_FILE: Final = "public.key"
SECRET_FILE: Final = "secret.key"
_Z85_LEN: Final = 40


class KeyFileError(ValueError):
    """A key file is missing, malformed, readable by everyone, or the two do not match."""


@dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair, both halves in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> CurveKeys:
        """Reads `public.key` and `secret.key`. Raises `KeyFileError`."""
        folder = Path(directory)
        keys = cls(_read(folder / PUBLIC_FILE), _read(folder / SECRET_FILE))
        try:
            public = zmq.curve_public(keys.secret)
        except zmq.ZMQError as error:
            raise KeyFileError(f"{folder / SECRET_FILE} is not a key: not in Z85") from error
        if public != keys.public:
            raise KeyFileError(f"{folder}: {PUBLIC_FILE} does not belong to {SECRET_FILE}")
        return keys

    @classmethod
    def generate(cls, directory: str | os.PathLike[str]) -> CurveKeys:
        """Writes a new pair, readable by the owner only. Never replaces existing files."""
        folder = Path(directory)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        public, secret = zmq.curve_keypair()
        for name, value in ((SECRET_FILE, secret), (PUBLIC_FILE, public)):
            try:
                fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                raise KeyFileError(f"cannot write {folder / name}: {error.strerror}") from error
            with os.fdopen(fd, "wb") as file:
                file.write(value + b"\n")
        return cls(public, secret)

    def secure_server(self, sock: zmq.Socket[Any]) -> None:
        """Allows only holders of the pair to talk to `sock`. Call before bind."""
        sock.curve_publickey = self.public
        sock.curve_secretkey = self.secret
        sock.curve_server = True

    def secure_client(self, sock: zmq.Socket[Any]) -> None:
        """Makes `sock` talk to servers with this pair. Call before connect."""
        sock.curve_publickey = self.public
        sock.curve_secretkey = self.secret
        sock.curve_serverkey = self.public


def is_loopback(host: str) -> bool:
    """Returns whether `host` is reachable from this machine only. Unknown names count as reachable from elsewhere."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Returns a file's content without surrounding space. Raises `KeyFileError`, also if everyone may read the file."""
    try:
        mode = Path(path).stat().st_mode
        value = Path(path).read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o007:
        raise KeyFileError(f"{path} is open to everyone (mode {stat.S_IMODE(mode):04o}); chmod o-rwx it")
    return value


def _read(path: Path) -> bytes:
    value = read_secret(path)
    if len(value) != _Z85_LEN:
        raise KeyFileError(f"{path} is not a key: {_Z85_LEN} characters expected, {len(value)} found")
    return value
