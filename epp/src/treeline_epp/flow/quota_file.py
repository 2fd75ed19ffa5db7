"""The file that holds the quotas, read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from treeline_epp.flow.quotas import Quotas, QuotaTable
from treeline_epp.watched_file import read_file
from treeline_epp.yaml_text import decode_yaml

log = logging.getLogger(__name__)

REREAD_S = 2.0
MOST_BYTES = 1024 * 1024
"""As much as a ConfigMap or a Secret holds."""

Version = tuple[int, int, int] | None
_UNREAD: Version = (-1, -1, -1)
"""One that cannot be read at the moment may be later, as it is: by other rights, with a free descriptor."""


class QuotaFileError(ValueError):
    """The file cannot be used; the message says why."""


def read_quotas(file: Path) -> QuotaTable:
    """What a file (YAML or JSON) says. Raises QuotaFileError."""
    try:
        return decode_yaml(read_file(file, MOST_BYTES), QuotaTable)
    except (OSError, msgspec.MsgspecError) as error:
        raise QuotaFileError(f"{file}: {error}") from error


class _Look(NamedTuple):
    """What a look at the file found. `table` is None where it cannot be used, for this `error`."""

    version: Version
    table: QuotaTable | None
    error: str = ""
    changed: bool = True
    """Is the table another one than before?"""


class QuotaFile:
    """Keeps quotas as their file has them. One that cannot be used changes nothing, and is told: in a line of the log
    when that is new, and by `error` until it can be used again."""

    def __init__(self, file: Path, read: Callable[[Path], QuotaTable] = read_quotas) -> None:
        """Raises QuotaFileError."""
        self.file = file
        self.error = ""
        """Why the file as it is now is not what holds; empty while it is."""
        self._read = read
        self._version = _version(file)
        self._table = read(file)
        self.quotas = Quotas(self._table)

    async def follow(self) -> NoReturn:
        """Look at the file for ever."""
        while True:
            await asyncio.sleep(REREAD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look once. The file is read and parsed in a thread: for a megabyte of YAML that takes more than a second."""
        look = await asyncio.to_thread(self._look, self._version, self._table)
        if look is None:
            return
        self._version = look.version
        if look.table is None and look.error != self.error:
            log.error("--quotas-file cannot be used, the old quotas stay: %s", look.error)
        self.error = look.error
        if look.table is not None and look.changed:
            log.info("quotas of %d clients", len(look.table.clients))
            self._table = look.table
            self.quotas.set(look.table)

    def describe(self) -> dict[str, object]:
        """What holds, for a debug page."""
        table = self._table
        return {
            "file": str(self.file),
            "usable": not self.error,
            "error": self.error,
            "clients": len(table.clients),
            "default": table.default,
            "counted_clients": len(self.quotas),
            "exceeded": self.quotas.exceeded,
        }

    def _look(self, version: Version, table: QuotaTable) -> _Look | None:
        """None where the file is as it was. In a thread: it touches nothing of the object's that changes."""
        now = _version(self.file)
        if now == version:
            return None
        try:
            found = self._read(self.file)
        except QuotaFileError as error:
            unread = now is not None and isinstance(error.__cause__, OSError)
            return _Look(_UNREAD if unread else now, None, str(error))
        return _Look(now, found, changed=found != table)


def _version(file: Path) -> Version:
    """Another one, if the file was replaced or written; None where it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
