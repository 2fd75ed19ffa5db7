"""Processors' outputs in shared memory: one for equal images, kept while requests use it, then while there is room."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from treeline_runtime.processes import SocketFolder

SHARED_MEMORY = Path("/dev/shm")
LEAST_BYTES = 1 << 30
"""Free shared memory without which temporary files take its place: containers have 64 MB unless told otherwise."""
MOST_BYTES = 8 << 30
_SHARE = 2
"""At most one part of so many of what is free at the start."""


class FullError(Exception):
    """No room now."""


@dataclass
class Stored:
    """An output: `count` tokens for the prompt, and a file of float32 numbers."""

    path: str
    size: int
    count: int
    grid: tuple[int, int, int]
    shape: tuple[int, ...]
    seconds: float = 1.0
    times: tuple[float, ...] = ()
    """As in `Made`."""
    uses: int = 0


class MediaFiles:
    """Outputs by digest, `most` bytes of them. A folder that only this user may read; it ends with `close`, or the next
    server removes it. Threads may share it."""

    def __init__(self, most: int | None = None) -> None:
        """most: None: by what is free."""
        roomy = SHARED_MEMORY.is_dir() and _free_bytes(SHARED_MEMORY) >= LEAST_BYTES
        self._folder = SocketFolder(SHARED_MEMORY if roomy else None)
        self.most = min(_free_bytes(self._folder.path) // _SHARE, MOST_BYTES) if most is None else most
        self.used = 0
        self._stored: dict[bytes, Stored] = {}
        """The least recently used first."""
        self._lock = threading.Lock()

    def close(self) -> None:
        self._folder.__exit__()

    def hold(self, digest: bytes) -> Stored | None:
        """Begins a use of an output, if there is one; `release` ends it."""
        with self._lock:
            found = self._stored.pop(digest, None)
            if found is not None:
                self._stored[digest] = found
                found.uses += 1
            return found

    def release(self, digest: bytes) -> None:
        with self._lock:
            self._stored[digest].uses -= 1

    @contextlib.contextmanager
    def writing(self, digest: bytes, made: Stored) -> Iterator[BinaryIO]:
        """Opens the file of a new output, which is there when the block has ended. Raises FullError, also for a file
        that shared memory has no room for; then nothing is left of it."""
        path = self._folder.path / f"{digest.hex()}.{threading.get_ident()}"
        self._reserve(made.size)
        try:
            with path.open("xb") as file:
                yield file
            with self._lock:
                if digest in self._stored:  # another request had the same image, and was faster
                    path.unlink()
                    self.used -= made.size
                    return
                os.rename(path, made.path)
                self._stored[digest] = made
        except BaseException as error:
            with self._lock:
                self.used -= made.size
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise FullError(str(error)) from error
            raise

    def path_of(self, digest: bytes) -> str:
        return str(self._folder.path / digest.hex())

    def _reserve(self, size: int) -> None:
        """Makes room by removing what no request uses. Raises FullError."""
        with self._lock:
            unused = [digest for digest, stored in self._stored.items() if not stored.uses]
            if self.used + size - sum(self._stored[digest].size for digest in unused) > self.most:
                raise FullError(f"{size} bytes more than {self.used} in use, of {self.most}")
            for digest in unused:
                if self.used + size <= self.most:
                    break
                gone = self._stored.pop(digest)
                self.used -= gone.size
                Path(gone.path).unlink(missing_ok=True)
            self.used += size


def _free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize
