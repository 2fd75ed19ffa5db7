"""Selection by name."""

from __future__ import annotations

from typing import Generic, TypeVar

from treeline_runtime.config import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name → object. An unknown name is a ConfigError that lists the valid ones."""

    def __init__(self, what: str, things: dict[str, T]) -> None:
        self._what = what
        self._things = things

    def get(self, name: str) -> T:
        try:
            return self._things[name]
        except KeyError:
            raise ConfigError(f"unknown {self._what} {name!r}; known: {', '.join(self.names())}") from None

    def names(self) -> list[str]:
        return sorted(self._things)
