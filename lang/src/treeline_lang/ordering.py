"""In which order the programs of a batch are started, and what is cached before the first of those that share it.

The program is traced once up to its first request (`compiler.trace`): with its arguments, that says how the first
prompt of each item begins. In the order of these texts the items are visited as a depth-first walk of the tree of their
prefixes would, which no order beats where the cache holds the longest of them: what is computed for a prefix serves all
that share it before anything else is asked for.

Items that start at the same moment would each compute what they share, as none of them has been cached. So the first of
a group has it cached, and the others wait for that.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, AnyStr, Final, Protocol

from treeline_lang import background
from treeline_lang.compiler import prefix
from treeline_lang.compiler.nodes import Argument, Joined, Unknown
from treeline_lang.compiler.trace import Traced
from treeline_lang.executor import Run
from treeline_lang.expressions import at_path
from treeline_lang.transcript import Prompt

MIN_SHARED: Final = 64
"""Characters that are worth a request of their own; fewer are not."""
MIN_SAVED: Final = 2048
"""The same of a group within the batch, times those that would compute them for nothing. Each group costs its items one
more round trip: about as long as some hundred tokens take."""


class Traceable(Protocol):
    """A program, as far as a batch's order depends on it."""

    def traced(self, arguments: Mapping[str, Any], *, to_first_request: bool = False) -> Traced: ...


@dataclass(slots=True)
class Shared:
    """A text with which the prompts of several items begin."""

    text: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: Future[None] | None = None

    def warm(self, run: Run) -> None:
        """Returns once it is cached, or once that has failed: then the items compute it themselves. The first to come
        asks for it."""
        with self._lock:
            if self._asked is None:
                hint = run.send_ahead(Prompt(self.text))
                self._asked = asyncio.run_coroutine_threadsafe(hint, background.loop())
        with suppress(Exception):  # it was given up
            self._asked.result()

    def give_up(self) -> None:
        """Cancel the request for it: it is not needed any more."""
        self.close()
        if self._asked is not None:
            self._asked.cancel()

    def close(self) -> None:
        """It is not asked for, unless it has been."""
        with self._lock:
            self._asked = self._asked or Future()


@dataclass(frozen=True, slots=True)
class Plan:
    order: Sequence[int]
    """Numbers of the items."""
    shared: Mapping[int, Sequence[Shared]] = field(default_factory=dict)
    """By number of an item, shortest first."""

    def prepare(self, item: int, run: Run) -> None:
        """Before the item is started, in its thread."""
        for one in self.shared.get(item, ()):
            one.warm(run)

    def give_up(self) -> None:
        """The items that have not been started never will be."""
        shared = [one for item in self.order for one in self.shared.get(item, ())]
        for one in shared:  # first, so that an item that waits for one does not ask for the next
            one.close()
        for one in shared:
            one.give_up()


def plan_batch(program: Traceable, arguments: Sequence[Mapping[str, Any]], run: Run, threads: int) -> Plan:
    """arguments: of each item; threads: how many run at the same time. Never fails: at worst the order is the given
    one."""
    given = Plan(range(len(arguments)))
    if len(arguments) < 2:
        return given
    try:
        texts, keys = _beginnings(program, arguments, run)
    except Exception:
        return given
    order = sorted(range(len(arguments)), key=keys.__getitem__)
    if not (run.hints and run.backend.takes_hints and threads > 1):
        return Plan(order)
    shared: dict[int, list[Shared]] = {}
    for length, first, last in worthwhile([texts[item] for item in order], threads):
        one = Shared(texts[order[first]][:length])
        for item in order[first : last + 1]:
            shared.setdefault(item, []).append(one)
    return Plan(order, shared)


def _beginnings(
    program: Traceable, arguments: Sequence[Mapping[str, Any]], run: Run
) -> tuple[list[str], list[tuple[str, str]]]:
    """The text that the first prompt of each item begins with; and by what to order the items: that, and the argument
    at which the trace stopped, if there is one, since what follows is likely to be made of it."""
    traced = program.traced(_common(arguments), to_first_request=True)
    template = background.call(run.backend.template()) if prefix.has_turns(prefix.parts_of(traced.graph)) else None
    texts = [prefix.beginning(traced.graph, one, template) for one in arguments]
    cause = next(_arguments(traced.stopped_by), None)
    keys = [(text, _shown(one, cause)) for text, one in zip(texts, arguments, strict=True)]
    return texts, keys


def _common(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that all items have in common: constants of the batch, on which the program may
    branch. Plain data alone, and copies of it, as the trace shall not change what the runs are given."""
    first, *rest = arguments
    return {
        name: copy.deepcopy(value)
        for name, value in first.items()
        if all(one.get(name, arguments) is value for one in rest) and _plain(value)
    }


def _plain(value: Any) -> bool:
    match value:
        case list() | tuple():
            return all(_plain(item) for item in value)
        case dict():
            return all(_plain(key) and _plain(entry) for key, entry in value.items())
        case _:
            return value is None or type(value) in (str, int, float, bool, bytes)


def _arguments(value: Unknown | str | None) -> Iterator[Argument]:
    if isinstance(value, Argument):
        yield value
    elif isinstance(value, Joined):
        for part in value.parts:
            if not isinstance(part, str):
                yield from _arguments(part)


def _shown(arguments: Mapping[str, Any], argument: Argument | None) -> str:
    if argument is None:
        return ""
    try:
        value = at_path(arguments[argument.name], argument.path)
    except (LookupError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


# ---- what is worth caching ------------------------------------------------------------------------------------------


def worthwhile(texts: Sequence[str], threads: int) -> list[tuple[int, int, int]]:
    """→ (characters that they share, number of the first text, of the last one) of groups that are worth a request
    ahead, outer ones before those within them. texts: sorted."""
    chosen: list[tuple[int, int, int]] = []
    around: list[tuple[int, int, int]] = []
    """The chosen groups that contain this one, the innermost last."""
    for length, first, last in sorted(groups(texts), key=lambda group: (group[1], -group[2])):
        while around and around[-1][2] < first:
            around.pop()
        more = length - (around[-1][0] if around else 0)
        everybody = last - first + 1 == len(texts)
        saved = more * (min(last - first + 1, threads) - 1)
        if more > MIN_SHARED and (everybody or saved >= MIN_SAVED):
            chosen.append((length, first, last))
            around.append(chosen[-1])
    return chosen


def groups(texts: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """The inner nodes of the tree of sorted texts' prefixes: (length, first, last), where the texts from `first` to
    `last`, and no others, begin alike for `length` > 0 characters. O(n) of them, inner ones before those around them.
    """
    open_groups: list[tuple[int, int]] = []
    for index in range(1, len(texts) + 1):
        length = shared_length(texts[index - 1], texts[index]) if index < len(texts) else 0
        first = index - 1
        while open_groups and open_groups[-1][0] > length:
            deeper, first = open_groups.pop()
            yield deeper, first, index - 1
        if length and (not open_groups or open_groups[-1][0] < length):
            open_groups.append((length, first))


def shared_length(one: AnyStr, other: AnyStr) -> int:
    """Characters, or bytes, that two texts begin with alike. O(n), as halves are compared and not characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
