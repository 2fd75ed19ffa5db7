"""Tokenizers of the Hugging Face Hub: fetched with its library, cached on disk, checked for changes from time to time.

The library takes the token from `HF_TOKEN` (or its file) and the mirror from `HF_ENDPOINT`. The cache has the finished
bundle and its commit, one file for each repository and revision, so that a picker starts without the Hub. Everything
here blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from treeline_wire.models import HubModel
from treeline_wire.tokenizer import FILES, MAX_BUNDLE_BYTES, MORE_TEMPLATES, BundleError, TokenizerBundle

from treeline_epp.tokenizers.sources import SourceError, read_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)

RECHECK_S: Final = 600.0
"""Seconds between checks whether a branch has moved."""
MAX_CACHE_BYTES: Final = 1 << 30
_MAX_FILES: Final = 64
_SPARE_BYTES: Final = 16 << 20
_TIMEOUT_S: Final = 20.0
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_MIRRORS_COMMIT: Final = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
"""The form of a mirror's commit, which becomes a part of URLs."""
_PARTIAL: Final = ".fetch-"
_FORGOTTEN_S: Final = 3600.0
"""Age after which a download's folder belongs to a dead process."""
_HUB: Final = "https://huggingface.co"


class _Kept(msgspec.Struct):
    """A file of the cache."""

    uri: str
    commit: str
    bundle: TokenizerBundle


class TokenizerCache:
    """A folder of tokenizers, which other pickers may share. Beyond `most_bytes` the oldest go."""

    def __init__(self, folder: Path, most_bytes: int = MAX_CACHE_BYTES) -> None:
        self.folder = folder
        self._most_bytes = most_bytes

    def get(self, uri: str) -> tuple[str, TokenizerBundle] | None:
        """Return commit and tokenizer; None without a usable file."""
        file = self._file(uri)
        try:
            if file.stat().st_size > 2 * MAX_BUNDLE_BYTES:
                return None
            kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the cached tokenizer %s cannot be read, and is fetched again: %s", file, error)
            return None
        return (kept.commit, kept.bundle) if kept.uri == uri else None

    def put(self, uri: str, commit: str, bundle: TokenizerBundle) -> None:
        """Write a tokenizer to the cache, atomically. Raises OSError."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=_PARTIAL, delete=False) as file:
            try:
                file.write(msgspec.json.encode(_Kept(uri, commit, bundle)))
                file.close()
                os.replace(file.name, self._file(uri))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
        self._prune(self._file(uri))

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """Make a folder for a download, which is removed afterwards. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{_PARTIAL}*"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_PARTIAL, ignore_cleanup_errors=True) as made:
            yield Path(made)

    def _file(self, uri: str) -> Path:
        plain = re.sub(r"[^\w.-]+", "-", uri.removeprefix("hf://"), flags=re.ASCII)[:100]
        made_of = "\n".join([uri, *FILES])  # a version that reads other files makes another bundle of them
        return self.folder / f"{plain}.{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.json"

    def _prune(self, newest: Path) -> None:
        """Remove the oldest files, except the newest one, until the others fit."""
        found = []
        for file in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):  # another picker may have removed it
                look = file.stat()
                found.append((look.st_mtime, look.st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total > self._most_bytes and file != newest:
                with contextlib.suppress(OSError):
                    file.unlink()
                    total -= size


class HubOrigin:
    """A repository of the Hub; see `sources.Origin`. `endpoint` replaces the library's address of the Hub."""

    recheck_s = RECHECK_S

    def __init__(self, model: HubModel, uri: str, cache: TokenizerCache, endpoint: str | None = None) -> None:
        self._model = model
        self._uri = uri
        self._cache = cache
        self._endpoint = endpoint or os.environ.get("HF_ENDPOINT") or None

    def kept(self) -> tuple[str, TokenizerBundle] | None:
        """Return the cached version and tokenizer."""
        return self._cache.get(self._uri)

    def version(self) -> str:
        """Return the commit of the revision. A revision that is a commit needs no request. Raises `SourceError`."""
        repo, revision = self._model
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        with self._told():
            commit = self._api().model_info(repo, revision=revision, timeout=_TIMEOUT_S).sha
        if not isinstance(commit, str) or not _MIRRORS_COMMIT.fullmatch(commit):
            raise SourceError(f"{self._where} does not say which commit {self._uri} is at: set HF_ENDPOINT to a Hub")
        return commit

    def read(self, version: str) -> TokenizerBundle:
        """Download the files of this commit, and cache the bundle. Raises `SourceError`."""
        with self._told(), self._cache.workplace() as folder:
            self._download(version, folder)
            bundle = read_folder(folder)
            self._cache.put(self._uri, version, bundle)
        log.info("fetched the tokenizer of %s at commit %s", self._uri, version)
        return bundle

    def _download(self, commit: str, folder: Path) -> None:
        api, repo = self._api(), self._model.repo
        listed = api.model_info(repo, revision=commit, files_metadata=True, timeout=_TIMEOUT_S).siblings or []
        sizes = {file.rfilename: file.size or 0 for file in listed if _wanted(file.rfilename)}
        if FILES[0] not in sizes:
            raise SourceError(
                f"{self._uri} has no {FILES[0]} (only fast tokenizers can be used): name a repository that has one"
            )
        total = sum(sizes.values())
        if total > MAX_BUNDLE_BYTES or len(sizes) > _MAX_FILES:
            raise SourceError(
                f"{self._uri} has {len(sizes)} tokenizer files of {total} bytes together; at most {_MAX_FILES} of "
                f"{MAX_BUNDLE_BYTES} bytes are read: name a repository with fewer"
            )
        if 3 * total + _SPARE_BYTES > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sent = 0
        for name in sizes:
            sent += self._sent_size(name, commit)
            if sent > MAX_BUNDLE_BYTES:
                raise SourceError(f"{self._where} would send more of {self._uri} than it lists; set HF_ENDPOINT")
            api.hf_hub_download(repo, name, revision=commit, local_dir=folder, etag_timeout=_TIMEOUT_S)

    def _sent_size(self, name: str, commit: str) -> int:
        """Return a file's size by the answer that would send it: a mirror may list other sizes, or none."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._model.repo, name, revision=commit, endpoint=self._endpoint)
        return get_hf_file_metadata(url, timeout=_TIMEOUT_S).size or 0

    def _api(self) -> HfApi:
        # Imported late: most pickers fetch nothing.
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        return HfApi(endpoint=self._endpoint)

    @property
    def _where(self) -> str:
        return self._endpoint or _HUB

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn every error into a `SourceError`."""
        try:
            yield
        except SourceError:
            raise
        except BundleError as error:
            raise SourceError(f"the tokenizer of {self._uri} cannot be used: {error}") from error
        except Exception as error:  # the library passes on errors of several HTTP clients
            raise SourceError(self._problem(error)) from error

    def _problem(self, error: Exception) -> str:
        from huggingface_hub import errors

        status = getattr(getattr(error, "response", None), "status_code", None)
        match error:
            case errors.GatedRepoError():
                return f"{self._uri} is gated: accept its terms on the Hub and set HF_TOKEN to a token of that account"
            case errors.RevisionNotFoundError():
                return f"{self._uri}: there is no revision {self._model.revision!r}; correct what is behind the @"
            case errors.RepositoryNotFoundError():
                return f"{self._uri} is not on {self._where}, or is private: check the name, or set HF_TOKEN ({status})"
            case errors.HfHubHTTPError() if status in (401, 403):
                return f"{self._where} refuses {self._uri} ({status}): set HF_TOKEN to a token that may read it"
            case errors.HfHubHTTPError() if status is not None:
                return f"{self._where} answers {status} for {self._uri}; it is asked again"
            case OSError() if error.errno in _DISK:
                return f"cannot keep {self._uri} in {self._cache.folder}: {error.strerror}; {_DISK[error.errno]}"
        kind = type(error)
        if isinstance(error, OSError) or kind.__module__.startswith("httpx"):
            what = str(error).strip().partition("\n")[0][:200] or kind.__name__
            return f"cannot reach {self._where} for {self._uri}: {what}; let it through, or set HF_ENDPOINT to a mirror"
        return f"{self._uri} could not be fetched: {kind.__name__}: {str(error)[:200]}"


_ELSEWHERE: Final = "give another directory with --tokenizer-cache"
_DISK: Final = {
    errno.ENOSPC: f"make room, or {_ELSEWHERE}",
    errno.EDQUOT: f"make room, or {_ELSEWHERE}",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.ENOTDIR: _ELSEWHERE,
    errno.EEXIST: _ELSEWHERE,
}


def _wanted(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return name in FILES or (folder == MORE_TEMPLATES and file.endswith(".jinja"))
