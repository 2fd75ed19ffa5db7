"""Tokenizers from flags: `--tokenizer [MODEL=]URI` and `--chat-template [MODEL=]FILE`.

Everything here blocks, and runs in threads: see `watch`.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self
from urllib.parse import unquote, urlsplit

import msgspec
from treeline_wire.models import HubModel
from treeline_wire.tokenizer import FILES, MAX_BUNDLE_BYTES, MORE_TEMPLATES, BundleError, TokenizerBundle

MAX_TEMPLATE_BYTES: Final = 1 << 20
LOOK_S: Final = 2.0
"""Seconds between checks of a folder, by `stat`: network file systems (a claim that several pods mount) report no
changes."""
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


class SourceError(Exception):
    """A tokenizer cannot be loaded; the message says why and what to do."""


class ForModel(NamedTuple):
    """The value of a flag for one model, or for all (`model` is empty)."""

    model: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `MODEL=VALUE`, or `VALUE` alone, in which `=` may only follow a scheme. Raises ValueError."""
        before, equals, value = text.partition("=")
        if not equals or "://" in before:
            before, value = "", text
        elif not before:
            raise ValueError(f"{text!r} names no model before '='")
        if not value:
            raise ValueError(f"{text!r} has no value after the model")
        return cls(before, value)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A configured tokenizer: for a model as its engines call it, or for all; from the Hub or a folder, with the chat
    template in a file instead of its own.
    """

    model: str
    source: HubModel | Path
    template: Path | None = None

    def __str__(self) -> str:
        if isinstance(self.source, Path):
            return str(self.source)
        repo, revision = self.source
        return f"hf://{repo}" + (f"@{revision}" if revision else "")


def specs_of(tokenizers: Sequence[ForModel], templates: Sequence[ForModel]) -> tuple[TokenizerSpec, ...]:
    """Parse the values of the flags. Raises ValueError for impossible ones."""
    for flag, given in (("--tokenizer", tokenizers), ("--chat-template", templates)):
        models = [one.model for one in given]
        twice = next((model for model in models if models.count(model) > 1), None)
        if twice is not None:
            raise ValueError(f"{flag} is given twice for {f'model {twice!r}' if twice else 'all models'}")
    files = {one.model: Path(one.value).expanduser() for one in templates}
    if alone := files.keys() - {one.model for one in tokenizers}:
        model = min(alone)
        example = f"{model}=" if model else ""
        raise ValueError(f"--chat-template {example}FILE needs --tokenizer {example}URI, which it is a part of")
    return tuple(TokenizerSpec(model, _source(value), files.get(model)) for model, value in tokenizers)


def _source(uri: str) -> HubModel | Path:
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri).expanduser()
    match scheme:
        case "hf":
            return HubModel.parse(uri)
        case "path" if rest.startswith("/"):
            return Path(rest)
        case "file" if urlsplit(uri).netloc in ("", "localhost"):
            return Path(unquote(urlsplit(uri).path))
        case "pvc":
            raise ValueError(f"{uri!r}: mount the claim into the picker's pod and give the path there")
    raise ValueError(
        f"{uri!r} is not a source of tokenizers: give hf://org/name[@revision], a directory or file:///DIR"
    )


class Origin(Protocol):
    """A place from which a tokenizer is read. All methods block."""

    recheck_s: float

    def kept(self) -> tuple[str, TokenizerBundle] | None:
        """Return the version and tokenizer that an earlier process cached here, if there is one."""
        ...

    def version(self) -> str:
        """Return the present version, a text that changes with it. Raises `SourceError`."""
        ...

    def read(self, version: str) -> TokenizerBundle:
        """Return the tokenizer of this version. Raises `SourceError`."""
        ...


class _Document(msgspec.Struct):
    """The member that every tokenizer.json has."""

    model: msgspec.Raw


def read_folder(folder: Path) -> TokenizerBundle:
    """Return the bundle of a model directory with a complete tokenizer.json: one that is still being written is an
    error. Raises `BundleError`.
    """
    bundle = TokenizerBundle.from_dir(folder)
    try:
        msgspec.json.decode(bundle.tokenizer_json, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{folder / FILES[0]} is not a tokenizer: {error}") from error
    return bundle


class FolderOrigin:
    """A model directory in Hugging Face's layout, which may appear, change and disappear."""

    recheck_s = LOOK_S

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed: tuple[str, SourceError] | None = None

    def kept(self) -> None:
        """Return None: a folder needs no cache."""

    def version(self) -> str:
        """Return sizes and times of its files. Raises `SourceError`."""
        folder = self._folder
        try:
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise SourceError(f"{folder} is a file: give the directory that holds tokenizer.json")
            if not (folder / FILES[0]).exists():
                raise SourceError(f"{folder} has no {FILES[0]}: give a model's directory in Hugging Face's layout")
            templates = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
        except (FileNotFoundError, NotADirectoryError):
            hub = f"; a model of the Hub is hf://{folder}" if _HUB_NAME.fullmatch(str(folder)) else ""
            raise SourceError(
                f"there is no directory {folder}: correct the path, or mount the volume that it is on{hub}"
            ) from None
        except OSError as error:
            raise SourceError(f"cannot read {folder}: {error.strerror}; let the picker's user read it") from error
        return _looks([*(folder / name for name in FILES), *templates], MAX_BUNDLE_BYTES)

    def read(self, version: str) -> TokenizerBundle:
        """Read the present files, whatever `version` is; bad files are not read twice. Raises `SourceError`."""
        if self._failed is not None and self._failed[0] == version:
            raise self._failed[1]
        try:
            return read_folder(self._folder)
        except BundleError as error:
            problem = SourceError(f"{error}; copy the model's tokenizer files there again")
            self._failed = version, problem
            raise problem from error


class TokenizerLoader:
    """The present tokenizer of one spec: read again when its parts have changed. The origin is checked for changes at
    most every `recheck_s`, its template's file each time.
    """

    def __init__(self, spec: TokenizerSpec, origin: Origin, clock: Callable[[], float] = time.monotonic) -> None:
        self._template = spec.template
        self._origin = origin
        self._clock = clock
        self._due = clock()
        self._read: tuple[str, TokenizerBundle] | None = None
        self._made: tuple[tuple[str, str], TokenizerBundle] | None = None
        self.recheck_s = origin.recheck_s

    def kept(self) -> TokenizerBundle | None:
        """Return the cached tokenizer, at once. Raises `SourceError` if its template cannot be read."""
        self._read = self._origin.kept()
        return None if self._read is None else self._whole(*self._read)

    def load(self) -> TokenizerBundle:
        """Return the present tokenizer; the same object if nothing has changed. Raises `SourceError`."""
        now = self._clock()
        if self._read is None or now >= self._due:
            version = self._origin.version()
            if self._read is None or self._read[0] != version:
                self._read = version, self._origin.read(version)
            self._due = now + self.recheck_s / 2  # calls are not that regular
        return self._whole(*self._read)

    def _whole(self, version: str, bundle: TokenizerBundle) -> TokenizerBundle:
        """Return the bundle, with the template in the file instead of its own."""
        file = self._template
        parts = version, "" if file is None else _looks([file], MAX_TEMPLATE_BYTES)
        if self._made is None or self._made[0] != parts:
            if file is not None:
                bundle = TokenizerBundle.build(
                    bundle.tokenizer_json,
                    chat_template=_template(file),
                    special_tokens=bundle.special_tokens,
                    add_bos=bundle.add_bos,
                    media=bundle.media,
                )
            self._made = parts, bundle
        return self._made[1]


def _template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read the chat template {file}: {error}; correct --chat-template") from error


def _looks(files: Sequence[Path], most_bytes: int) -> str:
    """Return sizes and times of the files that exist. Raises `SourceError` for folders, and for too many bytes."""
    looks = []
    total = 0
    for file in files:
        try:
            found = file.stat()
        except FileNotFoundError:
            looks.append("-")
            continue
        except OSError as error:
            raise SourceError(f"cannot read {file}: {error.strerror}; let the picker's user read it") from error
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{file} is not a file: give one")
        total += found.st_size
        looks.append(f"{file.name}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}")
    if total > most_bytes:
        raise SourceError(f"{files[0]}: {total} bytes are more than any tokenizer has, at most {most_bytes} are read")
    return " ".join(looks)
