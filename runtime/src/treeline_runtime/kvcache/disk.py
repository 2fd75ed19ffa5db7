"""The disk tier: a file per page, DIR/<fingerprint>/<first two digits>/<digest>.

A file is a header and the page, written under a temporary name and renamed. Whatever is not exactly the page that was
asked for (short, of another model, with a wrong byte) is a miss, and is deleted. The index is what the folder has;
pages of other fingerprints are never found, but count and are evicted like all others.

The scheduler's thread keeps the index; `write`, `read` and `delete` are called by other threads.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache.page import PageFormat

MAGIC = b"TLPAGE\x00\x01"
"""The last byte is the version of the file's format."""
HEADER = struct.Struct(">8s16s32sQQ")
"""Magic, fingerprint, digest, bytes of the page, checksum."""
LOCK = "lock"
_FINGERPRINT = re.compile("[0-9a-f]{32}")
_DIGEST = re.compile("[0-9a-f]{64}")


class BadPage(Exception):
    """The file is not the page that was asked for."""


Key = tuple[bytes, bytes]
"""Fingerprint and digest."""


class DiskTier:
    """Pages by digest, of one format. `folder` belongs to one process at a time."""

    def __init__(self, folder: Path, most_bytes: int, form: PageFormat) -> None:
        """Reads the folder. Raises ConfigError."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._form = form
        self._files: OrderedDict[Key, int] = OrderedDict()
        """Bytes of each, the least recently used first."""
        self._being_written: set[bytes] = set()
        self.num_bytes = 0
        """Of all files, and of those being written."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for _, key, size in sorted(self._found()):
                self._files[key] = size
                self.num_bytes += size
            self.delete(self._make_room(0))
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"--disk-cache {folder} is another server's: give each a folder of its own") from None
        except OSError as error:
            raise ConfigError(f"--disk-cache {folder} cannot be used: {error}") from None

    def _found(self) -> Iterator[tuple[int, Key, int]]:
        """(time, key, bytes) of each page; deletes what an earlier process has not completed."""
        for family in self._folder.iterdir():
            if not _FINGERPRINT.fullmatch(family.name):
                continue
            for folder in family.iterdir():
                for entry in os.scandir(folder):
                    stat = entry.stat()
                    if _DIGEST.fullmatch(entry.name):
                        yield stat.st_mtime_ns, (bytes.fromhex(family.name), bytes.fromhex(entry.name)), stat.st_size
                    else:
                        os.unlink(entry.path)

    @property
    def num_pages(self) -> int:
        """Of all fingerprints."""
        return len(self._files)

    def has(self, digest: bytes) -> bool:
        return (self._form.fingerprint, digest) in self._files

    def touch(self, digest: bytes) -> None:
        self._files.move_to_end((self._form.fingerprint, digest))

    def renew(self, form: PageFormat) -> None:
        """From now on, finds pages of this format alone. Nothing may be written or read."""
        assert not self._being_written
        self._form = form

    def begin_write(self, digest: bytes) -> list[Key] | None:
        """Makes room for a page. Returns what `delete` has to delete first; None if the page is here, is being written,
        or is larger than the tier."""
        size = HEADER.size + self._form.nbytes
        if self.has(digest) or digest in self._being_written or size > self._most_bytes:
            return None
        self._being_written.add(digest)
        victims = self._make_room(size)
        self.num_bytes += size
        return victims

    def _make_room(self, size: int) -> list[Key]:
        victims = []
        while self._files and self.num_bytes + size > self._most_bytes:
            key, freed = self._files.popitem(last=False)
            self.num_bytes -= freed
            victims.append(key)
        return victims

    def end_write(self, digest: bytes, *, written: bool) -> None:
        self._being_written.remove(digest)
        size = HEADER.size + self._form.nbytes
        if written:
            self._files[self._form.fingerprint, digest] = size
        else:
            self.num_bytes -= size

    def forget(self, digest: bytes) -> None:
        """The page's file is bad, and is deleted by whoever found out. Idempotent."""
        self.num_bytes -= self._files.pop((self._form.fingerprint, digest), 0)

    def clear(self) -> None:
        """Deletes all pages, of other fingerprints too; none may be written or read. A failure is the next start's."""
        assert not self._being_written
        for family in {fingerprint for fingerprint, _ in self._files}:
            shutil.rmtree(self._folder / family.hex(), ignore_errors=True)
        self._files.clear()
        self.num_bytes = 0

    def close(self) -> None:
        os.close(self._lock)

    # ---- in any thread ------------------------------------------------------------------------------------

    def _path(self, key: Key) -> Path:
        fingerprint, digest = key[0].hex(), key[1].hex()
        return self._folder / fingerprint / digest[:2] / digest

    def write(self, digest: bytes, checksum: int, page: npt.NDArray[np.uint8]) -> None:
        """Raises OSError, and then there is no file."""
        path = self._path((self._form.fingerprint, digest))
        for folder in (path.parent.parent, path.parent):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        beside = path.with_suffix(".new")
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(file, "wb", buffering=0) as opened:
                header = HEADER.pack(MAGIC, self._form.fingerprint, digest, self._form.nbytes, checksum)
                for part in (memoryview(header), page.data):
                    while part:
                        part = part[opened.write(part) :]
            beside.rename(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def read(self, digest: bytes, to: npt.NDArray[np.uint8]) -> int:
        """Reads a page; returns its checksum. Raises BadPage if the file is not the page (then it is deleted), or
        OSError."""
        path = self._path((self._form.fingerprint, digest))
        expected = [MAGIC, self._form.fingerprint, digest, self._form.nbytes]
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(HEADER.size)
                *found, checksum = HEADER.unpack(head) if len(head) == HEADER.size else (0,)
                rest = to.data
                while found == expected and rest and (count := file.readinto(rest)):
                    rest = rest[count:]
        except FileNotFoundError:
            raise BadPage(f"{path} is gone") from None
        if found != expected or rest or self._form.checksum(digest, to.data) != checksum:
            self.delete([(self._form.fingerprint, digest)])
            raise BadPage(f"{path} is not the page that its name says")
        with suppress(OSError):
            os.utime(path)  # so that the next process knows what was used last
        return int(checksum)

    def delete(self, keys: Iterable[Key]) -> None:
        """Deletes files; what cannot be deleted, the next process finds again."""
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()
