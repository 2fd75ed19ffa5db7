"""The file that holds the quotas, read again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from treeline_epp.flow.quotas import Quotas, QuotaTable
from treeline_epp.watched_file import WatchedFile, read_file
from treeline_epp.yaml_text import decode_yaml

log = logging.getLogger(__name__)

REREAD_S = 2.0
MOST_BYTES = 1024 * 1024
"""As much as a ConfigMap or a Secret holds."""


class QuotaFileError(ValueError):
    """The file cannot be used; the message says why."""


class QuotaFile:
    """Keeps quotas as their file has them. One that cannot be used changes nothing, and is told: in a line of the log
    when that is new, and by `error` until it can be used again."""

    def __init__(self, file: Path, read: Callable[[Path, int], bytes] = read_file) -> None:
        """Raises QuotaFileError."""
        self.file = file
        self.error = ""
        """Why the file as it is now is not what holds; empty while it is."""
        self._watched = WatchedFile(file, MOST_BYTES, lambda data: decode_yaml(data, QuotaTable), read)
        self.table = self._look()
        self.quotas = Quotas(self.table)

    async def follow(self) -> NoReturn:
        """Look at the file for ever."""
        while True:
            await asyncio.sleep(REREAD_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Look once. The file is read and, if it has changed, parsed in a thread: a megabyte of YAML takes more than a
        second."""
        try:
            table = await asyncio.to_thread(self._look)
        except QuotaFileError as error:
            if str(error) != self.error:
                log.error("--quotas-file cannot be used, the old quotas stay: %s", error)
            self.error = str(error)
            return
        self.error = ""
        if table is not self.table and table != self.table:
            log.info("quotas of %d clients", len(table.clients))
            self.table = table
            self.quotas.set(table)

    def describe(self) -> dict[str, object]:
        """What holds, for a debug page."""
        table = self.table
        return {
            "file": str(self.file),
            "usable": not self.error,
            "error": self.error,
            "clients": len(table.clients),
            "default": table.default,
            "counted_clients": len(self.quotas),
            "exceeded": self.quotas.exceeded,
        }

    def _look(self) -> QuotaTable:
        try:
            return self._watched.look()
        except (OSError, msgspec.MsgspecError) as error:
            raise QuotaFileError(f"{self.file}: {error}") from error
