"""The folder of a model: downloaded once for all pods, and kept in part if a try fails.

Pods may share the volume: one downloads under a lock while others wait. A complete folder has a marker, so the next pod
needs no network. Partial downloads survive a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

from treeline_runtime.download import FILES

OURS: Final = ".treeline-"
MARKER: Final = f"{OURS}complete"
PROGRESS_S: Final = 3.0
SPARE_BYTES: Final = 64 << 20
_LONGEST_NAME: Final = 512
_MOST_FOLDERS: Final = 16

logger = logging.getLogger("treeline.fetch")


TOKENIZER_FILES: Final = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
WEIGHT_FILES: Final = [*FILES, *TOKENIZER_FILES, "*.py"]
"""More than our runtime reads: other engines use the same folder."""
DISK_ERRORS: Final = frozenset({28, 30, 36, 122})
"""No space, read-only file system, name too long, quota."""


class FetchError(Exception):
    """The model cannot be fetched. `reason` is one word for a status."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Listing(NamedTuple):
    """Files to download with their sizes, and a name of this version, if there is one."""

    sizes: Mapping[str, int]
    version: str | None


class Origin(Protocol):
    """A source of a model, or of its tokenizer only. Methods raise FetchError, and OSErrors in DISK_ERRORS."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The entries that mark a folder as a complete download of this origin."""

    def look(self, to: Path) -> Listing:
        """Lists the files that `download` would fetch into this folder."""

    def download(self, listed: Listing, to: Path) -> None:
        """Fetches these files into a folder that may contain some from an earlier try."""


@dataclass(frozen=True)
class Wanted:
    """A model to fetch, and its folder. `weights`: whether weights are fetched, or only the tokenizer.
    `uri`: for models of the Hub. `spare`: share of the disk that stays free."""

    origin: Origin
    to: Path
    weights: bool = True
    uri: str | None = None
    spare: float = 0.0

    @property
    def partial(self) -> Path:
        return self.to.with_name(f"{self.to.name}.partial")

    @property
    def is_complete(self) -> bool:
        return self.origin.identity.items() <= self._marker.items()

    @property
    def commit(self) -> str | None:
        return self._marker.get("commit")

    @property
    def _marker(self) -> dict[str, Any]:
        try:
            found = json.loads((self.to / MARKER).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Progress:
    """Reports how much of all folders has been downloaded, and their `commits` by URI."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._before = 0
        self._last: tuple[int, int] | None = None
        self.total = 0
        self.commits: dict[str, str] = {}

    def tell(self, done: int) -> None:
        state = (min(self._before + done, self.total), self.total)
        if state != self._last:
            self._last = state
            said = {"bytes_done": state[0], "bytes_total": state[1]}
            print(json.dumps(said | ({"commits": self.commits} if self.commits else {})), file=self._out, flush=True)

    def finish(self, size: int) -> None:
        """A folder is complete, with `size` bytes."""
        self._before += size
        self.tell(0)


def fetch(wanted: Wanted, progress: Progress, *, every_s: float = PROGRESS_S) -> None:
    """Waits until the folder is complete, by this or another process. Raises FetchError."""
    try:
        wanted.to.parent.mkdir(parents=True, exist_ok=True)
        with _locked(wanted):
            if not wanted.is_complete:
                _download(wanted, progress, every_s)
                return
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError) or error.errno in DISK_ERRORS:
            raise FetchError("DownloadFailed", f"cannot write {wanted.to}: {error.strerror}") from error
        raise
    _note_commit(wanted, progress, wanted.commit)
    size = _size(wanted.to)
    progress.total += size
    progress.finish(size)


def _note_commit(wanted: Wanted, progress: Progress, commit: str | None) -> None:
    if wanted.uri and commit:
        progress.commits[wanted.uri] = commit


@contextlib.contextmanager
def _locked(wanted: Wanted) -> Iterator[None]:
    """One downloader at a time. Volumes without locks do without; the folder is still completed by one move."""
    with wanted.to.with_name(f"{wanted.to.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s is being downloaded by another pod; waiting for it", wanted.origin.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("the volume of %s has no locks: %s", wanted.to, error)
        yield


def _download(wanted: Wanted, progress: Progress, every_s: float) -> None:
    name = wanted.origin.name
    listed = wanted.origin.look(wanted.partial)
    for file in filter(_is_no_models, listed.sizes):
        where = f"{name} has a file with a name that no model needs, {file[:80]!r}"
        raise FetchError("DownloadFailed", f"{where}: remove it, or name another folder")
    if wanted.weights and not any(file.endswith(".safetensors") for file in listed.sizes):
        raise FetchError("WeightsMissing", f"{name} has no *.safetensors weights; other formats are not read")
    _note_commit(wanted, progress, listed.version)
    total = sum(listed.sizes.values())
    progress.total += total
    missing = total - _size(wanted.partial)
    disk = shutil.disk_usage(wanted.to.parent)
    free = max(0, disk.free - max(SPARE_BYTES, int(wanted.spare * disk.total)))
    if missing > free:
        raise FetchError("ModelTooLarge", f"needs {_gib(missing)}, {_gib(free)} free in {wanted.to.parent}")
    with _telling(lambda: progress.tell(_size(wanted.partial)), every_s):
        wanted.origin.download(listed, wanted.partial)
    there = sum((wanted.partial / file).stat().st_size for file in listed.sizes if (wanted.partial / file).is_file())
    if there < total:
        raise FetchError("DownloadFailed", f"{name}: {there} of {total} bytes arrived; it is tried again")
    # The same times in every pod: only pods whose files of weights have equal ones give each other pages. Files that
    # another user began on a shared volume keep theirs.
    at = zlib.crc32(str(listed.version).encode())
    for path in filter(Path.is_file, (wanted.partial / file for file in listed.sizes)):
        with contextlib.suppress(PermissionError):
            os.utime(path, (at, at))
    (wanted.partial / MARKER).write_text(json.dumps({**wanted.origin.identity, "commit": listed.version}))
    shutil.rmtree(wanted.to, ignore_errors=True)
    wanted.partial.rename(wanted.to)
    progress.finish(total)


def _is_no_models(file: str) -> bool:
    """Names that would clash with ours, or cost too much."""
    parts = file.split("/")
    return len(file) > _LONGEST_NAME or len(parts) > _MOST_FOLDERS or any(part.startswith(OURS) for part in parts)


@contextlib.contextmanager
def _telling(tell: Callable[[], None], every_s: float) -> Iterator[None]:
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every_s):
            tell()

    tell()
    thread = threading.Thread(target=loop, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    """Bytes on disk, unfinished files included, our own excluded."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            if name.startswith(OURS):
                continue
            with contextlib.suppress(OSError):
                # Space may be reserved before the bytes are there: only written bytes count.
                found = os.stat(os.path.join(root, name))
                total += min(found.st_size, found.st_blocks * 512) if name.endswith(".incomplete") else found.st_size
    return total


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
