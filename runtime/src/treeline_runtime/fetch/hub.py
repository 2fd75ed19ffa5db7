"""Models of the Hugging Face Hub, `hf://org/name[@revision]`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeline_wire.models import HubModel

from treeline_runtime.download import IGNORED, hub_problem
from treeline_runtime.fetch.folder import DISK_ERRORS, TOKENIZER_FILES, WEIGHT_FILES, FetchError, Listing


class HubRepo:
    """A repository. Implements `Origin`; the version is its commit. `HF_TOKEN` comes from the environment."""

    def __init__(self, uri: str, *, weights: bool = True, files: Sequence[str] = (), commit: str | None = None) -> None:
        """`commit`: what the revision meant for other pods of the pool. Raises FetchError."""
        try:
            model = HubModel.parse(uri)
        except ValueError as error:
            raise FetchError("DownloadFailed", str(error)) from None
        self.name = model.repo
        self._revision = model.revision
        self._asked_for = commit or model.revision
        self._weights = weights
        self._patterns = [*files] or (WEIGHT_FILES if weights else TOKENIZER_FILES)

    @property
    def identity(self) -> Mapping[str, Any]:
        """See Origin. A branch that moved keeps its identity."""
        return {"repo": self.name, "revision": self._revision, "weights": self._weights}

    def look(self, to: Path) -> Listing:
        files = self._asked(lambda: self._snapshot(to, self._asked_for, dry_run=True))
        sizes = {file.filename: file.file_size or 0 for file in files}
        return Listing(sizes, files[0].commit_hash if files else None)

    def download(self, listed: Listing, to: Path) -> None:
        self._asked(lambda: self._snapshot(to, listed.version))
        shutil.rmtree(to / ".cache", ignore_errors=True)

    def _snapshot(self, to: Path, revision: str | None, **options: Any) -> Sequence[Any]:
        # imported late: it takes a second, and a complete folder does not need it
        from huggingface_hub import snapshot_download

        options |= {"revision": revision, "local_dir": to}
        found: Any = snapshot_download(self.name, allow_patterns=self._patterns, ignore_patterns=IGNORED, **options)
        return found if isinstance(found, list) else ()

    def _asked(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        from huggingface_hub import errors

        try:
            return call()
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            problem: BaseException = error
        except Exception as error:  # the library lets errors of several HTTP clients through
            problem = error
        if isinstance(problem, errors.DryRunError) and problem.__cause__ is not None:
            problem = problem.__cause__
        status = getattr(getattr(problem, "response", None), "status_code", None)
        code = f"{status} " if status else ""
        why = hub_problem(problem, self._asked_for)
        raise FetchError("DownloadFailed", f"{code}{self.name} {why}") from problem
