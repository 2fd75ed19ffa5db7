"""Models in object stores: `s3://bucket/folder` and `gs://bucket/folder`.

Credentials, region and endpoint come from the environment under the clouds' usual names (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT_KEY). Without credentials the bucket is read
as public. obstore refuses keys that lead out of a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from treeline_runtime.download import IGNORED
from treeline_runtime.fetch.folder import OURS, TOKENIZER_FILES, WEIGHT_FILES, FetchError, Listing

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

SUMS: Final = "SHA256SUMS"
"""Written by `sha256sum * > SHA256SUMS`; if the folder has it, its files are checked."""
PIECE: Final = 16 << 20
"""Bytes of a request. A failed request is repeated, and this much of each file is in memory."""
_PIECE_TIMEOUT: Final = timedelta(minutes=5)
_FILES_AT_ONCE: Final = 8
_VERSION: Final = f"{OURS}version"
_MOST_OBJECTS: Final = 10_000
"""The most objects in a folder; a model has some hundreds."""
LISTING_S: Final = 300.0
_MOST_SUMS_BYTES: Final = 4 << 20
_CREDENTIALS: Final = {
    "s3": (
        "AWS",
        {
            *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
            *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        },
    ),
    "gs": (
        "GOOGLE",
        {
            *("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
            "GOOGLE_APPLICATION_CREDENTIALS",
        },
    ),
}
"""Scheme → the prefix of its variables, and the names that mean "credentials are given"."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile("<Code>(.*?)</Code>")


class Bucket:
    """A folder of a bucket. Implements `Origin`; the version is a digest of names, sizes and entity tags."""

    def __init__(self, uri: str, *, weights: bool = True, files: Sequence[str] = ()) -> None:
        """Raises FetchError."""
        self.name = uri
        self._patterns = files or (WEIGHT_FILES if weights else TOKENIZER_FILES)
        self._weights = weights
        self._tags: dict[str, str | None] = {}
        prefix, variables = _CREDENTIALS[uri.partition("://")[0]]
        self._unsigned = variables.isdisjoint(os.environ) and f"{prefix}_SKIP_SIGNATURE" not in os.environ
        with self._told():
            # The clouds' own addresses are https. An address with http:// is one that the pool's owner gave.
            options: ClientConfig = {"timeout": _PIECE_TIMEOUT, "allow_http": True}
            if self._unsigned:
                self._store = from_url(uri, client_options=options, skip_signature=True)
            else:
                self._store = from_url(uri, client_options=options)

    @property
    def identity(self) -> Mapping[str, Any]:
        """See Origin. A changed folder keeps its identity."""
        return {"uri": self.name, "weights": self._weights}

    def look(self, to: Path) -> Listing:
        with self._told():
            found = asyncio.run(self._listed())
        if not found:
            raise FetchError("WeightsMissing", f"{self.name} has no files of a model: correct the bucket or the folder")
        for one in found:
            if one["path"] == SUMS and one["size"] > _MOST_SUMS_BYTES:
                why = f"has a {SUMS} of {one['size']} bytes, at most {_MOST_SUMS_BYTES} are read"
                raise FetchError("DownloadFailed", f"{self.name} {why}: write it anew for the files of this folder")
        self._tags = {one["path"]: one["e_tag"] for one in found}
        seen = sorted((one["path"], one["size"], one["e_tag"]) for one in found)
        return Listing(
            {one["path"]: one["size"] for one in found}, hashlib.sha256(repr(seen).encode()).hexdigest()[:40]
        )

    async def _listed(self) -> list[ObjectMeta]:
        """Lists objects within a time limit: a server might always have one more, empty page."""
        found: list[ObjectMeta] = []
        seen = 0
        try:
            async with asyncio.timeout(LISTING_S):
                async for page in obstore.list(self._store):
                    seen += len(page)
                    if seen > _MOST_OBJECTS:
                        why = f"has more than {_MOST_OBJECTS} objects: name the folder of one model"
                        raise FetchError("DownloadFailed", f"{self.name} {why}")
                    found += [one for one in page if self._is_wanted(one["path"])]
        except TimeoutError:
            why = f"the list of {self.name} comes to no end: correct its store's address"
            raise FetchError("DownloadFailed", why) from None
        return found

    def download(self, listed: Listing, to: Path) -> None:
        """See Origin. Files of another version are removed: mixed files make no model."""
        version = to / _VERSION
        if not version.is_file() or version.read_text() != listed.version:
            shutil.rmtree(to, ignore_errors=True)
            to.mkdir(parents=True)
            version.write_text(listed.version or "")
        with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
            running = [threads.submit(self._file, name, size, to / name) for name, size in listed.sizes.items()]
            try:
                for one in running:
                    one.result()
            finally:
                threads.shutdown(cancel_futures=True)
        self._compare(to)
        version.unlink()

    def _is_wanted(self, path: str) -> bool:
        asked = path == SUMS or any(fnmatch(path, pattern) for pattern in self._patterns)
        return asked and not any(fnmatch(path, pattern) for pattern in IGNORED)

    def _file(self, name: str, size: int, to: Path) -> None:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            with to.open("ab") as file:
                there = file.tell()
                while there < size:
                    piece = self._piece(name, there, min(there + PIECE, size))
                    file.write(piece)
                    there += len(piece)
        except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
            raise FetchError("DownloadFailed", f"{self.name}: {name} is a file and a folder: remove one") from error

    def _piece(self, name: str, start: int, end: int) -> memoryview:
        """A range of the listed object; one that was replaced since is refused."""
        with self._told():
            asked = obstore.get(self._store, name, options={"range": (start, end), "if_match": self._tags[name]})
            piece = memoryview(asked.bytes())
        if len(piece) != end - start:
            raise FetchError("DownloadFailed", f"{self.name}: {len(piece)} bytes of {name} came, not {end - start}")
        return piece

    def _compare(self, folder: Path) -> None:
        """Compares with the folder's own digests. A file that differs is removed and fetched at the next try."""
        if SUMS not in self._tags:
            return
        digests = {}
        for line in (folder / SUMS).read_text(errors="replace").splitlines():
            digest, _, name = line.partition(" ")
            digests[name.lstrip(" *").removeprefix("./")] = digest
        for name in self._tags.keys() & digests.keys() - {SUMS}:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == digests[name].lower():
                    continue
            (folder / name).unlink()
            raise FetchError("DownloadFailed", f"{self.name}: {name} is not what {SUMS} says: upload it again")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Converts the library's errors to FetchError. Of an answer's body only the error code is shown."""
        try:
            yield
        except (BaseError, ValueError) as error:
            text = str(error).partition("Debug source")[0]
            status, code = _STATUS.search(text), _CODE.search(text)
            number = int(status[1]) if status else 0
            what = f"{number} {code[1] if code else ''}".strip() if number else text.partition("\n")[0].strip()
            if number in (401, 403) or isinstance(error, PermissionDeniedError | UnauthenticatedError):
                tried = "without credentials" if self._unsigned else "with these credentials"
                why = f"may not be read {tried} ({what}): correct the Secret of model.credentialsSecretRef"
                raise FetchError("DownloadFailed", f"{self.name} {why}") from error
            if number == 404 or isinstance(error, NotFoundError):
                why = f"is not there ({what}): correct the bucket, the folder, or the region"
                raise FetchError("WeightsMissing", f"{self.name} {why}") from error
            if number == 412:
                why = "was changed while it was downloaded; it is tried again"
                raise FetchError("DownloadFailed", f"{self.name} {why}") from error
            raise FetchError("DownloadFailed", f"{self.name} could not be downloaded: {what}") from error
