"""Sealed datagrams: only holders of the key can read or make one.

A datagram is one byte of version, the sender, a counter that never repeats, and the message under AES-GCM with both as
its nonce (NIST SP 800-38D: 96 bits, unique by construction). A seal does not show that a datagram is *new*:
`sequence.py` does.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from treeline_wire.peers import MOST_BYTES, SENDER_BYTES, VERSION

_COUNTER_BYTES: Final = 6
_HEAD_BYTES: Final = 1 + SENDER_BYTES + _COUNTER_BYTES
OVERHEAD_BYTES: Final = _HEAD_BYTES + 16
"""The head and AES-GCM's tag."""
_BEGINNING: Final = bytes((VERSION,))


def peer_key(secret: bytes) -> bytes:
    """Return the key that pickers with this secret share, for this purpose alone."""
    return hashlib.blake2b(secret, digest_size=32, person=b"treeline-peers").digest()


class Seal:
    """The seal of one process: `sender` is new at each start. `key` has 32 bytes."""

    def __init__(self, key: bytes, sender: bytes | None = None) -> None:
        self.sender = secrets.token_bytes(SENDER_BYTES) if sender is None else sender
        self._cipher = AESGCM(key)
        self._counter = 0

    def close(self, message: bytes) -> bytes:
        """Return the datagram of a message."""
        self._counter += 1
        head = _BEGINNING + self.sender + self._counter.to_bytes(_COUNTER_BYTES, "big")
        return head + self._cipher.encrypt(head[1:], message, head)

    def open(self, datagram: bytes) -> tuple[bytes, bytes] | None:
        """Return `(sender, message)`; None for a datagram made without the key, or in another version."""
        if not OVERHEAD_BYTES <= len(datagram) <= MOST_BYTES + OVERHEAD_BYTES or not datagram.startswith(_BEGINNING):
            return None
        head = datagram[:_HEAD_BYTES]
        try:
            return head[1 : 1 + SENDER_BYTES], self._cipher.decrypt(head[1:], datagram[_HEAD_BYTES:], head)
        except InvalidTag:
            return None
