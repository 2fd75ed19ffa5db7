"""Adapters that come and go while a pod runs: what the operator asks of a pod, and what the pod says of it.

The operator writes the wishes into the pod's annotation `labels.ADAPTERS`, which the pod reads as a file. A container
beside the runtime carries them out (`treeline_runtime.fetch.adapters`) and logs a report whenever it changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

LONGEST_ERROR: Final = 300


class AdapterWish(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that the pod is to have. `name`: in its engine. `digest`: the beginning of its files', or ""."""

    name: str
    uri: str
    digest: str = ""


class AdapterReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """`loaded`: name → the first 16 digits of its files' digest. `errors`: name → why it is not; "" is the engine."""

    loaded: dict[str, Annotated[str, Meta(max_length=16)]] = {}
    errors: dict[str, Annotated[str, Meta(max_length=LONGEST_ERROR)]] = {}


def version_name(model: str, uri: str, digest: str) -> str:
    """The name in engines of the adapter behind a model's name. Another source or digest makes another name, so that
    both can be loaded while requests move from one to the other."""
    return f"{model}@{hashlib.sha256(f'{uri} {digest}'.encode()).hexdigest()[:10]}"


def is_version(name: str) -> bool:
    """Whether a name is one of `version_name`'s: others were loaded by somebody else."""
    return re.fullmatch("(?s).+@[0-9a-f]{10}", name) is not None


def wishes_text(wishes: Iterable[AdapterWish]) -> str:
    """The annotation; equal wishes give equal texts, in any order."""
    return msgspec.json.encode(sorted(wishes, key=lambda wish: wish.name)).decode()


def wishes_of(text: str) -> dict[str, AdapterWish]:
    """The wishes of an annotation, by name. Raises `msgspec.MsgspecError`, or RecursionError."""
    return {wish.name: wish for wish in msgspec.json.decode(text, type=tuple[AdapterWish, ...])}
