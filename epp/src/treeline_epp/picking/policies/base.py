"""The interface of policies, the form of their names (`NAME`, or `NAME:key=value,key=value`), and parts of rankings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from treeline_epp.picking.request import Request
from treeline_epp.picking.table import Floats, Mask

Key = TypeVar("Key")
Value = TypeVar("Value")
NO_FLOATS: Floats = np.zeros(0)
BYTES_PER_TOKEN = 4
"""Assumed bytes of text per token, for policies that count a prompt's tokens."""


def _no_adapter(_name: str) -> Mask:
    return np.zeros(0, np.bool_)


class Candidates(Struct, frozen=True):
    """The candidates of one pick, at `now`.

    `cost_s`, `cached_tokens` and `uncached_tokens` (of the prompt) are by candidate; `identity` is a number below 2⁵²
    that identifies the endpoint, the same in every picker (see `Endpoint.identity`); `in_flight` are its requests, by
    its last report and the reservations since, or the reservations alone without a report.
    `has_adapter(lora)` marks the candidates that are known to have loaded an adapter.
    """

    cost_s: Floats
    cached_tokens: Floats
    uncached_tokens: Floats = NO_FLOATS
    identity: Floats = NO_FLOATS
    in_flight: Floats = NO_FLOATS
    has_adapter: Callable[[str], Mask] = _no_adapter
    now: float = 0.0


Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=1)]
Count = Annotated[int, Meta(ge=1)]


class NoParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters: for policies without settings."""


class Policy(ABC):
    """Ranks candidates, best first; filters have decided which may be picked at all. Its state is its own; with the
    same seed and the same calls it gives the same answers.
    """

    name: ClassVar[str]
    parameters: ClassVar[type[Struct]] = NoParameters
    """The settings: names, types and bounds."""
    by_cost: ClassVar[bool] = False
    """Whether it reads only costs and cached tokens. Then a session's next request goes where its last one went, while
    that costs little more (`sessions`)."""

    def __init__(self, parameters: Any, rng: Random) -> None:
        """Make a policy; `parameters` are of the class's own type."""
        self._set = parameters
        self._rng = rng

    @abstractmethod
    def rank(self, request: Request, candidates: Candidates, count: int) -> list[int]:
        """Return the places of the best `count` (≥ 1; fewer if there are fewer), by preference, none of them twice."""


class PolicyError(ValueError):
    """There is no such policy, or its parameters are wrong; the message lists the choices."""


class Choice(Struct, frozen=True):
    """A policy by name, with parameters as texts. `str` gives the form that `parse` reads."""

    name: str
    parameters: Mapping[str, str] = {}

    def __str__(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}:{given}" if given else self.name

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse `NAME[:key=value,…]`. Raises `PolicyError` for another form; it does not check that the policy and its
        parameters exist.
        """
        name, colon, rest = text.strip().partition(":")
        found: dict[str, str] = {}
        for word in rest.split(",") if colon else ():
            key, equals, value = (part.strip() for part in word.partition("="))
            if not key or not equals:
                raise PolicyError(f"{word!r} is not of the form key=value (as in {name}:key=value,key=value)")
            if key in found:
                raise PolicyError(f"parameter {key!r} is there twice")
            found[key] = value
        return cls(name, found)


def read_parameters(policy: type[Policy], given: Mapping[str, str]) -> Struct:
    """Convert parameters to their types. Raises `PolicyError`, which lists the choices."""
    fields = msgspec.structs.fields(policy.parameters)
    names = [field.name for field in fields]
    if unknown := [name for name in given if name not in names]:
        there = f"it has {', '.join(names)}" if names else "it has none"
        raise PolicyError(f"policy {policy.name} has no parameter {unknown[0]!r}; {there}")
    try:
        found = msgspec.convert(dict(given), policy.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy {policy.name}: {error}") from None
    for name in given:
        value = getattr(found, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise PolicyError(f"policy {policy.name}: {name} must be a finite number")
    return found


class Recent(Generic[Key, Value]):
    """At most `room` values by their keys, the most recently used: for keys that clients choose.

    >>> last = Recent(2)
    >>> for key in "aabc":
    ...     last.put(key, key.upper())
    >>> last.get("a"), last.get("b"), last.get("c")
    (None, 'B', 'C')
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """Return the value, which counts as used now; None without one. O(1)."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Set a value. O(1)."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._room:
            self._values.popitem(last=False)


def lowest(values: Floats | npt.NDArray[np.uint64], count: int) -> list[int]:
    """Return the places of the lowest values, in order; the order of equal ones is fixed. O(n + count log count)."""
    if count >= len(values):
        order: list[int] = np.argsort(values, kind="stable").tolist()
        return order
    below: list[int] = np.argpartition(values, count - 1)[:count].tolist()
    return sorted(sorted(below), key=values.__getitem__)


def one_of(places: npt.NDArray[np.int64], rng: Random) -> int:
    """Return one of them at random; a single one needs no random number."""
    return int(places[0] if len(places) == 1 else places[rng.randrange(len(places))])


def lightest(load: Floats, rng: Random) -> int:
    """Return the place of the lowest value, one of equals at random. O(n)."""
    return one_of(np.flatnonzero(load == load.min()), rng)


def least_loaded(load: Floats, count: int, rng: Random) -> list[int]:
    """Return the lightest `count`, the first one of equals at random. O(n)."""
    return led_by(lightest(load, rng), lowest(load, count), count)


def led_by(first: int, order: list[int], count: int) -> list[int]:
    """Return `order` with `first` moved to the front."""
    return [first, *(at for at in order if at != first)][:count]
