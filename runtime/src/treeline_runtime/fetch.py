"""`python -m treeline_runtime.fetch`: a model from the Hugging Face Hub into a folder, for a pod's init container.

Several pods may share the folder's volume: one downloads under a lock while the others wait, and a folder that is
complete carries a marker, so that the next pod asks nothing of the network. What was downloaded before a crash is kept.

Standard output is read by others: a JSON object per line, `{"bytes_done": …, "bytes_total": …}`. A failure ends with
status 1 and one line, `Reason: text`, on standard error and in the termination log. Reasons: DownloadFailed,
ModelTooLarge, WeightsMissing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from treeline_wire.command_line import Parser
from treeline_wire.models import HubModel

from treeline_runtime.download import FILES, IGNORED, hub_problem

MARKER: Final = ".treeline-complete"
TOKENIZER_FILES: Final = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
WEIGHT_FILES: Final = [*FILES, *TOKENIZER_FILES, "*.py"]
"""More than our own runtime reads: other engines are served from the same folder."""
TERMINATION_LOG: Final = "/dev/termination-log"
PROGRESS_S: Final = 3.0
SPARE_BYTES: Final = 64 << 20
_LONGEST_REASON: Final = 1000

logger = logging.getLogger("treeline.fetch")


class FetchError(Exception):
    """The model cannot be had. `reason` is a word that a status can show."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Wanted:
    """One repository and the folder that it is to be in."""

    repo: str
    revision: str | None
    to: Path
    weights: bool = True

    @classmethod
    def parse(cls, uri: str, to: str, *, weights: bool = True) -> Wanted:
        """From `hf://org/name[@revision]`. Raises FetchError."""
        try:
            model = HubModel.parse(uri)
        except ValueError as error:
            raise FetchError("DownloadFailed", str(error)) from None
        return cls(model.repo, model.revision, Path(to), weights)

    @property
    def identity(self) -> dict[str, Any]:
        """What a complete folder says of itself. A branch that moved on the Hub is still the same to us."""
        return {"repo": self.repo, "revision": self.revision, "weights": self.weights}

    @property
    def partial(self) -> Path:
        return self.to.with_name(f"{self.to.name}.partial")

    @property
    def is_complete(self) -> bool:
        try:
            found = json.loads((self.to / MARKER).read_text())
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and self.identity.items() <= found.items()


class Progress:
    """Says from time to time how much of all folders together is there."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._before = 0
        self._last: tuple[int, int] | None = None
        self.total = 0

    def tell(self, done: int) -> None:
        """Print the state, unless it is the one that was printed last."""
        state = (min(self._before + done, self.total), self.total)
        if state != self._last:
            self._last = state
            print(json.dumps({"bytes_done": state[0], "bytes_total": state[1]}), file=self._out, flush=True)

    def finish(self, size: int) -> None:
        """A folder is there, `size` bytes of it."""
        self._before += size
        self.tell(0)


def fetch(wanted: Wanted, progress: Progress, *, every_s: float = PROGRESS_S) -> None:
    """Have the folder complete, by whomever. Raises FetchError."""
    try:
        wanted.to.parent.mkdir(parents=True, exist_ok=True)
        with _locked(wanted):
            if not wanted.is_complete:
                _download(wanted, progress, every_s)
                return
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError) or error.errno in _DISK_ERRORS:
            raise FetchError("DownloadFailed", f"cannot write {wanted.to}: {error.strerror}") from error
        raise
    size = _size(wanted.to)
    progress.total += size
    progress.finish(size)


_DISK_ERRORS: Final = frozenset({28, 30, 122})  # no space, read-only file system, quota


@contextlib.contextmanager
def _locked(wanted: Wanted) -> Iterator[None]:
    """One downloader at a time. A volume without locks goes without: its folder is still made complete in one move."""
    with wanted.to.with_name(f"{wanted.to.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s is being downloaded by another pod; waiting for it", wanted.repo)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("the volume of %s has no locks: %s", wanted.to, error)
        yield


def _download(wanted: Wanted, progress: Progress, every_s: float) -> None:
    files = _asked(wanted, _snapshot(wanted, dry_run=True))
    if wanted.weights and not any(file.filename.endswith(".safetensors") for file in files):
        raise FetchError("WeightsMissing", f"{wanted.repo} has no *.safetensors weights; other formats are not read")
    total = sum(file.file_size or 0 for file in files)
    progress.total += total
    missing = total - _size(wanted.partial)
    free = shutil.disk_usage(wanted.to.parent).free
    if missing + SPARE_BYTES > free:
        raise FetchError("ModelTooLarge", f"needs {_gib(missing)}, {_gib(free)} free in {wanted.to.parent}")
    commit = files[0].commit_hash if files else None
    with _telling(lambda: progress.tell(_size(wanted.partial)), every_s):
        _asked(wanted, _snapshot(wanted, revision=commit, local_dir=wanted.partial))
    there = _size(wanted.partial)
    if there < total:
        raise FetchError("DownloadFailed", f"{wanted.repo}: {there} of {total} bytes arrived; it is tried again")
    shutil.rmtree(wanted.partial / ".cache", ignore_errors=True)
    (wanted.partial / MARKER).write_text(json.dumps({**wanted.identity, "commit": commit}))
    shutil.rmtree(wanted.to, ignore_errors=True)
    wanted.partial.rename(wanted.to)
    progress.finish(total)


def _snapshot(wanted: Wanted, **options: Any) -> Callable[[], Any]:
    # imported late: it takes a second, and a folder that is complete needs none of it
    from huggingface_hub import snapshot_download

    patterns = WEIGHT_FILES if wanted.weights else TOKENIZER_FILES
    asked = {"revision": wanted.revision, "local_dir": wanted.partial, **options}
    return lambda: snapshot_download(wanted.repo, allow_patterns=patterns, ignore_patterns=IGNORED, **asked)


def _asked(wanted: Wanted, call: Callable[[], Any]) -> Any:
    from huggingface_hub import errors

    try:
        return call()
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise
        problem: BaseException = error
    except Exception as error:  # the library lets errors of several HTTP clients through
        problem = error
    if isinstance(problem, errors.DryRunError) and problem.__cause__ is not None:
        problem = problem.__cause__
    status = getattr(getattr(problem, "response", None), "status_code", None)
    code = f"{status} " if status else ""
    raise FetchError("DownloadFailed", f"{code}{wanted.repo} {hub_problem(problem, wanted.revision)}") from problem


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
    """Bytes on disk, those of unfinished files too."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                # Space may be reserved before the bytes are there: what counts is what is written.
                found = os.stat(os.path.join(root, name))
                total += min(found.st_size, found.st_blocks * 512) if name.endswith(".incomplete") else found.st_size
    return total


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="python -m treeline_runtime.fetch", description=__doc__)
    parser.add_argument("--uri", action="append", default=[], help="hf://org/name[@revision]; may be repeated")
    parser.add_argument("--to", action="append", default=[], help="folder for the --uri of the same place")
    parser.add_argument("--tokenizer-uri", help="a repository of which only the tokenizer is needed")
    parser.add_argument("--tokenizer-to", help="folder for it")
    parser.add_argument("--progress-seconds", type=float, default=PROGRESS_S, help="how often progress is printed")
    parser.add_argument("--termination-log", default=TERMINATION_LOG, help="file that gets the reason of a failure")
    args = parser.parse_args(argv)
    if len(args.uri) != len(args.to) or bool(args.tokenizer_uri) != bool(args.tokenizer_to):
        parser.error("every --uri needs its --to, and --tokenizer-uri its --tokenizer-to")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch everything that is asked for; the exit status."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    progress = Progress(sys.stdout)
    began = time.monotonic()
    try:
        wanted = [Wanted.parse(uri, to) for uri, to in zip(args.uri, args.to, strict=True)]
        if args.tokenizer_uri:
            wanted.append(Wanted.parse(args.tokenizer_uri, args.tokenizer_to, weights=False))
        for one in wanted:
            fetch(one, progress, every_s=args.progress_seconds)
    except FetchError as error:
        line = " ".join(f"{error.reason}: {error}".split())[:_LONGEST_REASON]
        sys.stderr.write(f"{line}\n")
        with contextlib.suppress(OSError):
            Path(args.termination_log).write_text(line)
        return 1
    logger.info("complete after %.0f s", time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
