"""The objects of a collection in one namespace, by name: the plain sink of a reflector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Objects(Generic[T]):
    """The objects of a collection. `read` converts an object's JSON for storage; it raises `msgspec.MsgspecError`.

    A list replaces `objects`, events change it in place. `revision` counts changes. An unreadable object keeps its last
    known state.
    """

    def __init__(self, read: Callable[[msgspec.Raw], T]) -> None:
        self.objects: dict[str, T] = {}
        self.revision = 0
        self._read = read
        self._listed: dict[str, T] = {}

    def begin(self) -> None:
        """Start a list."""
        self._listed = {}

    def listed(self, data: msgspec.Raw) -> None:
        """Add an object that the list names."""
        name = _named(data).metadata.name
        try:
            self._listed[name] = self._read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if name in self.objects:
                self._listed[name] = self.objects[name]
            raise

    def complete(self, version: str) -> bool:
        """End the list, which replaces `objects`. Returns whether something changed."""
        news = self._listed != self.objects
        self.objects, self._listed = self._listed, {}
        self.revision += news
        return news

    def changed(self, data: msgspec.Raw) -> bool:
        """Store a new or changed object. Returns whether it differs."""
        name, new = _named(data).metadata.name, self._read(data)
        if self.objects.get(name) == new:
            return False
        self.objects[name] = new
        self.revision += 1
        return True

    def deleted(self, data: msgspec.Raw) -> bool:
        """Remove a deleted object. Returns whether it was stored."""
        gone = self.objects.pop(_named(data).metadata.name, None) is not None
        self.revision += gone
        return gone


class _Meta(msgspec.Struct):
    name: str = ""


class _Named(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


_named = msgspec.json.Decoder(_Named).decode
