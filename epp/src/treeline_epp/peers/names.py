"""The value of `--peers`: the names of other pickers."""

from __future__ import annotations

import argparse

_MOST_NAMES = 64


def peer_names(text: str) -> tuple[tuple[str, int], ...]:
    """Other pickers by the flag `--peers`: `HOST:PORT,HOST:PORT,…`, IPv6 in brackets. Raises argparse's complaint."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not 0 < len(words) <= _MOST_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of 1 to {_MOST_NAMES} of HOST:PORT")
    return tuple(_name(word) for word in words)


def _name(word: str) -> tuple[str, int]:
    host, _, port = word.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = word.startswith("[")
    if not host or (":" in host and not bracketed) or not (port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not HOST:PORT")
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{word!r}: a port is a number from 1 to 65535")
    return host, int(port)
