"""Adapters that come and go while a pod runs: what the operator asks of a pod, and what the pod says of it.

The operator writes the wishes into the pod's annotation `labels.ADAPTERS`, which the pod reads as a file. A container
beside the runtime carries them out (`treeline_runtime.fetch.adapters`) and logs a report whenever it changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

import msgspec

LOADED_DIGITS: Final = 16
"""Digits of an adapter's digest in reports: a thousand of them must fit a line of a log."""
_VERSION: Final = re.compile(r".+@[0-9a-f]{10}", re.DOTALL)


class AdapterWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that the pod is to have. `name`: in its engine. `digest`: of its files, or the beginning of that; ""
    if any will do."""

    name: str
    uri: str
    digest: str = ""


class AdapterReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`asked`: `mark` of the annotation that it answers. `loaded`: name → the beginning of the digest of its files.
    `errors`: name → why it is not loaded; "" is the engine's."""

    asked: str
    loaded: dict[str, str] = {}
    errors: dict[str, str] = {}


def version_name(model: str, uri: str, digest: str) -> str:
    """The name in engines of the adapter behind a model's name. Another source or digest makes another name, so that
    both can be loaded while requests move from one to the other."""
    return f"{model}@{hashlib.sha256(f'{uri} {digest}'.encode()).hexdigest()[:10]}"


def is_version(name: str) -> bool:
    """Whether a name is one of `version_name`'s: others were loaded by somebody else."""
    return _VERSION.fullmatch(name) is not None


def wishes_text(wishes: Iterable[AdapterWish]) -> str:
    """The annotation; equal wishes give equal texts, in any order."""
    return msgspec.json.encode(sorted(wishes, key=lambda wish: wish.name)).decode()


def wishes_of(text: str) -> tuple[AdapterWish, ...]:
    """Read the annotation. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(text, type=tuple[AdapterWish, ...])


def mark(text: str) -> str:
    """A short name of an annotation's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
