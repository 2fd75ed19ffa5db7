"""The file that holds the quotas, read again when it has changed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from treeline_epp.flow.quotas import Quotas, QuotaTable
from treeline_epp.yaml_text import decode_yaml

log = logging.getLogger(__name__)

REREAD_S = 2.0
_MOST_BYTES = 4 * 1024 * 1024


class QuotaFileError(ValueError):
    """The file cannot be used; the message says why."""


def read_quotas(file: Path) -> QuotaTable:
    """What a file (YAML or JSON) says. Raises QuotaFileError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise QuotaFileError(f"{file} has more than {_MOST_BYTES} bytes")
        return decode_yaml(data, QuotaTable)
    except (OSError, msgspec.MsgspecError) as error:
        raise QuotaFileError(f"{file}: {error}") from error


class QuotaFile:
    """Keeps quotas as their file has them. One that cannot be used changes nothing and is told once."""

    def __init__(self, file: Path) -> None:
        """Raises QuotaFileError."""
        self._file = file
        self._table = read_quotas(file)
        self._version = _version(file)
        self._said = ""
        self._due = time.monotonic() + REREAD_S
        self.quotas = Quotas(self._table)

    def look(self, now: float) -> Quotas:
        """The quotas, as of a look at the file not long ago."""
        if now < self._due:
            return self.quotas
        self._due = now + REREAD_S
        version = _version(self._file)
        if version == self._version:
            return self.quotas
        self._version = version
        try:
            table, said = read_quotas(self._file), ""
        except QuotaFileError as error:
            table, said = self._table, str(error)
            if said != self._said:
                log.error("--quotas-file cannot be used, the old quotas stay: %s", said)
        if table != self._table:
            log.info("quotas of %d clients", len(table.clients))
            self._table = table
            self.quotas.set(table)
        self._said = said
        return self.quotas


def _version(file: Path) -> tuple[int, int, int] | None:
    """Another one, if the file was replaced or written; None where it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
