"""Files that are read again and again while the picker runs: they may be replaced by anything meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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
