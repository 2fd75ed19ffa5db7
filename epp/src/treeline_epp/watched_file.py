"""Files that are read again and again while the picker runs: they may be replaced by anything meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


def read_file(file: Path, most_bytes: int) -> bytes:
    """What a file holds. Raises OSError, also for one with more than `most_bytes` and for what is no regular file: a
    pipe would be waited for, a device read without end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(file))
    return data


class WatchedFile(Generic[T]):
    """A file that is looked at again and again, and parsed only where its bytes are others than at the last look."""

    def __init__(
        self,
        file: Path,
        most_bytes: int,
        parse: Callable[[bytes], T],
        read: Callable[[Path, int], bytes] = read_file,
    ) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self._parse = parse
        self._read = read
        self._seen: tuple[bytes, T | Exception] | None = None

    def look(self) -> T:
        """What it says. Blocks. Raises OSError, and the ValueError or MsgspecError of `parse`."""
        data = self._read(self._file, self._most_bytes)
        if self._seen is None or self._seen[0] != data:
            try:
                self._seen = data, self._parse(data)
            except (ValueError, msgspec.MsgspecError) as error:
                self._seen = data, error
        found = self._seen[1]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found
