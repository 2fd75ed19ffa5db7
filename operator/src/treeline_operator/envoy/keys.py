"""API keys for Envoy: read from a mounted Secret, written as the file from which Envoy takes them while it runs."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from treeline_wire import headers

log = logging.getLogger(__name__)

FILTER: Final = "envoy.filters.http.api_key_auth"
"""The filter's name, which is also the name of the resource that Envoy looks for in the file."""
TYPE_URL: Final = "type.googleapis.com/envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth"
KEY_HEADERS: Final = ("authorization", "x-api-key")
"""Headers that may carry a client's key. The filter strips `Bearer `; several clients send the second one."""
CLIENT_HEADER: Final = headers.CLIENT
"""The header in which Envoy names the client of a key."""

MIN_KEY: Final = 8
"""Characters of the shortest key: with fewer a client could be guessed."""
KEY_FORM: Final = f"an API key is {MIN_KEY} or more printable ASCII characters without blanks, one a line"
_KEY: Final = re.compile(rb"[!-~]{%d,}" % MIN_KEY)
_LINES_TOLD: Final = 5
"""A binary file has thousands of lines that are no key; its first ones say which file it is."""

Credentials = tuple[tuple[str, str], ...]
"""Pairs of a key and the client whom it belongs to; a client may have several keys."""


def credentials(keys: Mapping[str, Iterable[str]]) -> Credentials:
    """Client → its keys, as Envoy accepts them: none empty, none twice. A key of two clients counts for the first by
    name, with a line in the log; keys are never logged.
    """
    owners: dict[str, str] = {}
    for client in sorted(keys):
        if not any(keys[client]):
            log.warning("client %s has no API key: it is refused", client)
        for key in filter(None, keys[client]):
            if owners.setdefault(key, client) != client:
                log.warning("client %s has the same API key as client %s", client, owners[key])
    return tuple(owners.items())


def read_secret(folder: Path) -> dict[str, tuple[str, ...]]:
    """The mounted Secret: file name = client, content = its key, or several, one a line.

    Two keys of a client allow rotation without a gap. Lines that are not keys (`KEY_FORM`) are skipped, and the log
    says where they are. Raises OSError.
    """
    return {client: _keys(client, content) for client, content in _contents(folder).items()}


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not (path.name.startswith(".") or path.is_dir())  # the kubelet's own links
    }


def _keys(client: str, content: bytes) -> tuple[str, ...]:
    # Bytes, and no line ends but \n: decoded with replacements, or split as text is, a random key would become several
    # short ones, equal to those of others.
    lines = {number: line.strip(b" \t\r") for number, line in enumerate(content.split(b"\n"), start=1)}
    refused = [str(number) for number, line in lines.items() if line and not _KEY.fullmatch(line)]
    if refused:
        shown = ", ".join(refused[:_LINES_TOLD]) + (", ..." if len(refused) > _LINES_TOLD else "")
        log.warning("file %r, line %s: refused: %s", client, shown, KEY_FORM)
    return tuple(line.decode("ascii") for line in lines.values() if _KEY.fullmatch(line))


def filter_settings(known: Credentials) -> dict[str, Any]:
    """The filter's settings as plain JSON. Without credentials every request is refused."""
    return {
        "credentials": [{"key": key, "client": client} for key, client in known],
        "key_sources": [{"header": header} for header in KEY_HEADERS],
        "forwarding": {"header": CLIENT_HEADER, "hide_credentials": True},
    }


def discovery_json(known: Credentials, version: str) -> str:
    """The file's text: a discovery response with the filter as its one resource."""
    resource = {
        "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "name": FILTER,
        "typed_config": {"@type": TYPE_URL, **filter_settings(known)},
    }
    return json.dumps({"version_info": version, "resources": [resource]})


class KeyFile:
    """Keeps Envoy's file equal to the mounted Secret. Envoy sees a change because the file is replaced by renaming."""

    def __init__(self, secret: Path, file: Path) -> None:
        self._secret = secret
        self._file = file
        self._read: dict[str, bytes] | None = None
        self._version = 0

    def refresh(self) -> bool:
        """Write the file if the Secret has changed; True if it was written. Raises OSError."""
        found = _contents(self._secret)
        if found == self._read:
            return False
        known = credentials({client: _keys(client, content) for client, content in found.items()})
        self._version += 1
        unfinished = self._file.with_name(f".{self._file.name}.new")
        unfinished.unlink(missing_ok=True)
        # Readable by us and Envoy only, from its first byte on.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(discovery_json(known, str(self._version)))
        unfinished.replace(self._file)
        self._read = found
        clients = sorted({client for _, client in known})
        if clients:
            log.info("API keys of %d clients: %s", len(clients), ", ".join(clients))
        else:
            log.warning("no API key in %s: every request is refused", self._secret)
        return True
