"""Where models are published, as `folder.fetch` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from treeline_runtime.download import FILES

TOKENIZER_FILES: Final = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
WEIGHT_FILES: Final = [*FILES, *TOKENIZER_FILES, "*.py"]
"""More than our own runtime reads: other engines are served from the same folder."""
DISK_ERRORS: Final = frozenset({28, 30, 36, 122})
"""No space, read-only file system, a name that is too long, quota."""


class FetchError(Exception):
    """The model cannot be had. `reason` is a word that a status can show."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Listing(NamedTuple):
    """What is to be downloaded: bytes by the file's name, and a name of this state of the files, if there is one."""

    sizes: Mapping[str, int]
    version: str | None


class Origin(Protocol):
    """A model, or its tokenizer alone, at one place. Its methods raise FetchError, and OSError of DISK_ERRORS."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What a complete folder says of itself."""

    def look(self, to: Path) -> Listing:
        """What `download` would bring into this folder."""

    def download(self, listed: Listing, to: Path) -> None:
        """Bring these files into a folder that may have some of them from an earlier try."""
