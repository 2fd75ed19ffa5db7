"""How much work a template may do: time, steps, and the size of the values it makes.

Sizes are in units of about a byte. A container's size counts what is in it as often as it is in it, so that a small
graph of shared lists that would print as gigabytes is large here, too; what a container costs is only its own memory.
Every operation that makes a value is charged, and *before* it runs where the value could be much larger than its
operands. So no value passes the value limit, and the cost of all together never passes the total.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from jinja2 import Undefined

_OVERHEAD: Final = 64
_MAX_DEPTH: Final = 128
_MAX_BITS: Final = 4096
# Integers from here on may have equal hashes, and a set of many such takes quadratic time.
_COLLIDING_BITS: Final = 61
_COLLIDING_UNITS: Final = 4096
_MAX_CALL_DEPTH: Final = 64
_CONTAINERS: Final = (dict, list, tuple)
_PRINTABLE: Final[tuple[type, ...]] = (
    str,
    int,
    float,
    Undefined,
    range,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
)


class LimitError(Exception):
    """A template did more than it may."""


class Limits(NamedTuple):
    """Bounds of one rendering; sizes grow with the size of its input."""

    seconds: float = 2.0
    total_units: int = 64 << 20
    value_units: int = 4 << 20
    per_input_total: int = 64
    per_input_value: int = 4


class _Known(NamedTuple):
    value: object
    units: int
    depth: int


class Budget:
    """What is left for one rendering. Not shared between renderings."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[int, _Known] = {}
        self._left = limits.total_units
        self._value_limit = limits.value_units
        self._deadline = time.perf_counter() + limits.seconds
        self._call_depth = 0

    def admit_input(self, value: Any) -> Any:
        """A plain copy of a value of the caller's, made of JSON types; the budget grows with its size."""
        copy = self._plain(value, 0)
        value_limit, self._value_limit = self._value_limit, sys.maxsize
        units = self.size(copy)
        self._value_limit = value_limit + units * self._limits.per_input_value
        self._left += units * self._limits.per_input_total
        return copy

    def tick(self) -> None:
        """One step."""
        self._left -= 1
        if self._left < 0 or time.perf_counter() > self._deadline:
            raise LimitError("it takes too long" if self._left >= 0 else "it does too much")

    def check(self, units: int) -> None:
        """A value of a size may be made."""
        if units > self._value_limit:
            raise LimitError(f"it makes a value of {units} bytes")

    def charge(self, units: int) -> None:
        """Pay for a text (or anything as large), before it is made where its size can be told."""
        self._left -= units
        if units > self._value_limit or self._left < 0:
            self.check(units)
            raise LimitError("it does too much")

    def charged(self, value: Any) -> Any:
        """Pay for a value that has just been made, and return it."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, _CONTAINERS):
            self.check(self.size(value))
            self.charge(_OVERHEAD + 16 * len(value))
            self.tick()
        else:
            self.charge(self.size(value))
        return value

    def enter_call(self) -> None:
        """A macro or function is called; `leave_call` follows."""
        self.tick()
        self._call_depth += 1
        if self._call_depth > _MAX_CALL_DEPTH:
            raise LimitError(f"its calls are nested more than {_MAX_CALL_DEPTH} deep")

    def leave_call(self) -> None:
        self._call_depth -= 1

    def size(self, value: Any) -> int:
        """The units of a value. O(1) for text and for known containers."""
        return self._measure(value)[0]

    def depth(self, value: Any) -> int:
        """How deep containers are nested in a value."""
        return self._measure(value)[1]

    def text(self, value: Any) -> str:
        """What `str` says, for values that a template can print without printing its surroundings."""
        if isinstance(value, str):
            return value
        self.check_printable(value)
        return str(value)

    def check_printable(self, value: Any) -> None:
        """Refuse what prints its surroundings (namespaces, macros, loops), and pay for what is printed."""
        if value is None or isinstance(value, _PRINTABLE):
            return
        if isinstance(value, dict):
            self.charge(self.size(value))
            for key, item in value.items():
                self.check_printable(key)
                self.check_printable(item)
        elif isinstance(value, list | tuple):
            self.charge(self.size(value))
            for item in value:
                self.check_printable(item)
        else:
            raise LimitError(f"it prints a {type(value).__name__}")

    def _measure(self, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            return _OVERHEAD + len(value), 0
        if not isinstance(value, _CONTAINERS):
            return _number_units(value) if isinstance(value, int) else _OVERHEAD, 0
        known = self._known.get(id(value))
        if known is None:
            children: Iterable[Any] = value
            if isinstance(value, dict):
                children = [*value.keys(), *value.values()]
            known = self._remember(value, children)
        return known.units, known.depth

    def _remember(self, value: Any, children: Iterable[Any]) -> _Known:
        units, depth = _OVERHEAD, 0
        for child in children:
            child_units, child_depth = self._measure(child)
            units += child_units
            depth = max(depth, child_depth)
            if units > self._value_limit:
                raise LimitError(f"it makes a value of more than {self._value_limit} bytes")
        if depth >= _MAX_DEPTH:
            raise LimitError(f"it nests values more than {_MAX_DEPTH} deep")
        known = _Known(value, units, depth + 1)
        self._known[id(value)] = known  # keeps the value alive, so that its id stays its own
        return known

    def _plain(self, value: Any, depth: int) -> Any:
        """Templates must not meet objects with methods that nobody looked at."""
        if value is None or type(value) in (str, int, float, bool):
            return value
        if depth > _MAX_DEPTH:
            raise LimitError(f"the request nests values more than {_MAX_DEPTH} deep")
        copy: Any
        if isinstance(value, Mapping):
            copy = {self._plain(k, depth + 1): self._plain(v, depth + 1) for k, v in value.items()}
        elif isinstance(value, list | tuple):
            copy = [self._plain(item, depth + 1) for item in value]
        elif isinstance(value, str):
            return str.__str__(value)
        elif isinstance(value, bool | int):
            return int(value)
        elif isinstance(value, float):
            return float(value)
        else:
            return f"<{type(value).__name__}>"
        return copy


def _number_units(value: int) -> int:
    bits = value.bit_length()
    if bits > _MAX_BITS:
        raise LimitError("it makes a number too large")
    return _OVERHEAD if bits < _COLLIDING_BITS else _COLLIDING_UNITS


#: The budget of the rendering that runs in this context.
current: Final[ContextVar[Budget]] = ContextVar("treeline_template_budget")
