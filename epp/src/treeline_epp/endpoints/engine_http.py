"""Requests to an engine over HTTP, bounded in time and size."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from treeline_epp.endpoints.http_answer import BadAnswer, HttpError
from treeline_epp.endpoints.http_client import HttpClient
from treeline_epp.endpoints.spec import split_address
from treeline_epp.files import read_file

log = logging.getLogger(__name__)

_REREAD_S: Final = 10.0
_MOST_BYTES: Final = 4096


class EngineKey:
    """The API key in a file, to be sent as a bearer token. The file is read again every `_REREAD_S`; a file that cannot
    be used is logged once, and the engine is asked without a key.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key = ""
        self._due = float("-inf")
        self._problem = ""

    def __call__(self) -> str:
        """Return the current key; empty where there is none that can be used."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _REREAD_S
            try:
                key = read_file(self._file, _MOST_BYTES + 2).decode().strip()
                problem = "" if _usable(key) else "it must be one line of printable ASCII, of at most 4096 bytes"
            except (OSError, UnicodeDecodeError) as error:
                key, problem = "", str(error)
            if problem and problem != self._problem:
                log.error("API key %s cannot be used, engines are asked without it: %s", self._file, problem)
            self._key, self._problem = "" if problem else key, problem
        return self._key


def _usable(key: str) -> bool:
    return 0 < len(key) <= _MOST_BYTES and key.isascii() and key.isprintable() and " " not in key


T = TypeVar("T")

_DOCUMENT_TIMEOUT_S = 5.0
_DOCUMENT_BYTES = 4 << 20
_DOCUMENT_VALUES = 1 << 17
"""Most values in a document, counted by its brackets and commas: 4096 models of vLLM have some 80 thousand. Decoding
time grows with them, and the event loop waits for it."""
_PASSING = frozenset({408, 425, 429})
_REFUSED = frozenset({401, 403})


class EngineError(Exception):
    """The engine could not be asked, or its answer cannot be used."""


class UnusableError(EngineError):
    """A permanent failure: the engine would answer the same again, in an unknown shape or with a refusal."""


class RefusedError(UnusableError):
    """The engine requires a key that the picker does not have."""


class EngineHttp:
    """One engine's HTTP interface. `host` is its own address, `base` its URL."""

    def __init__(self, http: HttpClient, address: str) -> None:
        self.base = f"http://{address}"
        self.host = split_address(address)[0]
        self._http = http
        self._address = address

    async def document(self, path: str, into: type[T]) -> T | None:
        """Return a decoded document; None for 404. Raises `EngineError`: `UnusableError` if asking again is in vain."""
        try:
            status, content = await self.fetch(path, _DOCUMENT_TIMEOUT_S, _DOCUMENT_BYTES)
            if status == 404:
                return None
            if status != 200:
                raise _error_of(status)(f"{self.base}{path} is answered {status}")
            if sum(map(content.count, (b"{", b"[", b","))) > _DOCUMENT_VALUES:
                raise UnusableError(f"{self.base}{path} has more values than are read")
            return msgspec.json.decode(content, type=into)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnusableError(f"{self.base}{path}: {error!r}") from error
        except HttpError as error:
            raise EngineError(f"{self.base}{path}: {error!r}") from error

    async def fetch(self, path: str, total_s: float, most: int) -> tuple[int, bytes]:
        """Return status and body of a GET that takes at most `total_s` and `most` bytes. Raises `HttpError` and, where
        its body exceeds the bounds, `EngineError`.
        """
        try:
            answer = await self._http.get(self._address, path, within_s=total_s, most=most)
        except BadAnswer as error:
            raise EngineError(f"{self.base}{path}: {error}") from error
        return answer.status, answer.body


def _error_of(status: int) -> type[EngineError]:
    if status in _REFUSED:
        return RefusedError
    return UnusableError if 400 <= status < 500 and status not in _PASSING else EngineError
