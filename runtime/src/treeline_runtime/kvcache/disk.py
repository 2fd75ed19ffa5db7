"""The disk tier: a folder with a file per page, named FINGERPRINT.DIGEST.

A file is a header and the page, written under a temporary name and renamed. Whatever is not exactly the page that was
asked for (short, of another model, with a wrong byte) is a miss, and is deleted. The index is what the folder has;
pages of other fingerprints are never found, but count and are evicted like all others.

The folder may be hostile: every file is opened by its name in it, links are not followed, and what has no name of ours
is neither read nor deleted. The scheduler's thread keeps the index; `write`, `read` and `delete` are called by others.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treeline_runtime.config import ConfigError
from treeline_runtime.kvcache.page import BadPage, PageFormat

MAGIC = b"TLPAGE\x00\x01"
"""The last byte is the version of the file's format."""
HEADER = struct.Struct(">8s16s32sQQ")
"""Magic, fingerprint, digest, bytes of the page, checksum."""
LOCK = "lock"
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})(\.new)?")


Key = tuple[bytes, bytes]
"""Fingerprint and digest."""


class DiskTier:
    """Pages by digest, of one format. `folder` belongs to one process at a time."""

    def __init__(self, folder: Path, most_bytes: int, form: PageFormat) -> None:
        """Reads the folder. Raises ConfigError."""
        self._most_bytes = most_bytes
        self._form = form
        self._files: OrderedDict[Key, int] = OrderedDict()
        """Bytes of each, the least recently used first."""
        self._being_written: set[bytes] = set()
        self.num_bytes = 0
        """Of all files, and of those being written."""
        if self._file_bytes > most_bytes:
            raise ConfigError(
                f"--disk-cache-size {most_bytes} is less than a page, which takes {self._file_bytes} bytes"
            )
        self._opened = ExitStack()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._opened.callback(os.close, self._folder)
            lock = self._open(LOCK, os.O_RDWR | os.O_CREAT)
            self._opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for _, key, size in sorted(self._found()):
                self._files[key] = size
                self.num_bytes += size
        except BlockingIOError:
            self.close()
            raise ConfigError(f"--disk-cache {folder} is another server's: give each a folder of its own") from None
        except OSError as error:
            self.close()
            raise ConfigError(f"--disk-cache {folder} cannot be used: {error}") from None
        self.delete(self._make_room(0))

    def _found(self) -> Iterator[tuple[int, Key, int]]:
        """(time, key, bytes) of each page; deletes what an earlier process has not completed."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name, status = _NAME.fullmatch(entry.name), entry.stat(follow_symlinks=False)
                if name is None or not stat.S_ISREG(status.st_mode):
                    continue
                if name[3]:
                    os.unlink(entry.name, dir_fd=self._folder)
                else:
                    yield status.st_mtime_ns, (bytes.fromhex(name[1]), bytes.fromhex(name[2])), status.st_size

    @property
    def _file_bytes(self) -> int:
        return HEADER.size + self._form.nbytes

    @property
    def num_pages(self) -> int:
        """Of all fingerprints."""
        return len(self._files)

    def has(self, digest: bytes) -> bool:
        return (self._form.fingerprint, digest) in self._files

    def touch(self, digests: Sequence[bytes]) -> None:
        """Pages of one sequence, in order, were used: the last one is evicted first."""
        for digest in reversed(digests):
            if self.has(digest):
                self._files.move_to_end((self._form.fingerprint, digest))

    def renew(self, form: PageFormat) -> None:
        """From now on, finds pages of this format alone. Nothing may be written or read."""
        assert not self._being_written
        self._form = form

    def begin_write(self, digest: bytes) -> list[Key] | None:
        """Makes room for a page. Returns what `delete` has to delete first; None if the page is here, or is being
        written."""
        if self.has(digest) or digest in self._being_written:
            return None
        self._being_written.add(digest)
        victims = self._make_room(self._file_bytes)
        self.num_bytes += self._file_bytes
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
        if written:
            self._files[self._form.fingerprint, digest] = self._file_bytes
        else:
            self.num_bytes -= self._file_bytes

    def forget(self, digest: bytes) -> None:
        """The page could not be read. Idempotent."""
        self.num_bytes -= self._files.pop((self._form.fingerprint, digest), 0)

    def clear(self) -> list[bytes]:
        """Deletes all pages, of other fingerprints too, and returns those of this one; none may be written or read."""
        assert not self._being_written
        gone = [digest for fingerprint, digest in self._files if fingerprint == self._form.fingerprint]
        self.delete(self._files)
        self._files.clear()
        self.num_bytes = 0
        return gone

    def close(self) -> None:
        self._opened.close()

    # ---- in any thread ------------------------------------------------------------------------------------

    def _open(self, name: str, flags: int) -> int:
        """Neither follows a link nor waits for the other end of a pipe."""
        always = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags | always, 0o600, dir_fd=self._folder)

    def write(self, digest: bytes, checksum: int, page: npt.NDArray[np.uint8]) -> None:
        """Raises OSError, and then there is no file."""
        name = _name((self._form.fingerprint, digest))
        beside = f"{name}.new"
        file = self._open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            with os.fdopen(file, "wb", buffering=0) as opened:
                header = HEADER.pack(MAGIC, self._form.fingerprint, digest, self._form.nbytes, checksum)
                for part in (memoryview(header), page.data):
                    while part:
                        part = part[opened.write(part) :]
            os.rename(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(beside, dir_fd=self._folder)
            raise

    def read(self, digest: bytes, to: npt.NDArray[np.uint8]) -> int:
        """Reads a page; returns its checksum. Raises BadPage if the file is not the page (then it is deleted), or
        OSError."""
        key = (self._form.fingerprint, digest)
        expected = [MAGIC, *key, self._form.nbytes]
        with os.fdopen(self._open(_name(key), os.O_RDONLY), "rb", buffering=0) as file:
            head = file.read(HEADER.size) or b""
            *found, checksum = HEADER.unpack(head) if len(head) == HEADER.size else (0,)
            rest = to.data
            while found == expected and rest and (count := file.readinto(rest)):
                rest = rest[count:]
            if found != expected or rest or self._form.checksum(digest, to.data) != checksum:
                self.delete([key])
                raise BadPage(f"{_name(key)} is not the page that its name says")
            with suppress(OSError):
                os.utime(file.fileno())  # so that the next process knows what was used last
        return int(checksum)

    def delete(self, keys: Iterable[Key]) -> None:
        """Deletes files; what cannot be deleted, the next process finds again."""
        for key in keys:
            with suppress(OSError):
                os.unlink(_name(key), dir_fd=self._folder)


def _name(key: Key) -> str:
    return f"{key[0].hex()}.{key[1].hex()}"
