"""The definition of a case, and all cases by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from treeline_conformance.bench import Bench
from treeline_conformance.messages import Mode
from treeline_conformance.verdict import Level, Need, When

Run = Callable[[Bench, Mode], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One expectation and its check. `says`: the expectation, in one sentence. `gie15`: the known behaviour of the
    inference extension's picker 1.5, empty if it is the same. `mode`: the request body mode of the exchange.
    """

    name: str
    level: Level
    says: str
    run: Run
    mode: Mode
    gie15: str = ""
    needs: frozenset[Need] = frozenset()
    when: When = When.RUNNING


CASES: Final[list[Case]] = []
ALL_MODES: Final = (Mode.DUPLEX, Mode.BUFFERED, Mode.STREAMED, Mode.NONE)
WITH_BODY: Final = (Mode.DUPLEX, Mode.BUFFERED)
"""The modes in which a picker sees the whole body before its decision."""


def case(
    name: str,
    level: Level,
    says: str,
    *,
    modes: Iterable[Mode] = (),
    gie15: str = "",
    needs: Iterable[Need] = (),
    when: When = When.RUNNING,
) -> Callable[[Run], Run]:
    """Register a case, or one for each of `modes`: `NAME@duplex` and so on. The protocol requires only full duplex: in
    other modes a MUST is a SHOULD.
    """

    def register(run: Run) -> Run:
        for mode in tuple(modes) or (None,):
            full = name if mode is None else f"{name}@{mode.word}"
            softer = mode not in (None, Mode.DUPLEX) and level is Level.MUST
            one = Case(
                full,
                Level.SHOULD if softer else level,
                says,
                run,
                mode or Mode.DUPLEX,
                gie15,
                frozenset(needs),
                when,
            )
            CASES.append(one)
        return run

    return register


def select(names: Iterable[str]) -> list[Case]:
    """Return the cases with these names, or in these groups: `P4`, `P4.list`, `@buffered`. Raises KeyError with a
    message.
    """
    wanted = list(names)
    for name in wanted:
        if not any(_matches(one.name, name) for one in CASES):
            groups = dict.fromkeys(one.name.partition(".")[0] for one in CASES)
            raise KeyError(f"no case is called {name!r}; --list has them; groups: {', '.join(groups)}")
    found = [one for one in CASES if not wanted or any(_matches(one.name, name) for name in wanted)]
    return sorted(found, key=_place)


def _place(one: Case) -> int:
    """Return a sort key: the points of the protocol come first, in their order."""
    group = one.name.partition(".")[0]
    return int(group[1:]) if group[:1] == "P" and group[1:].isdecimal() else len(CASES)


def _matches(name: str, wanted: str) -> bool:
    if wanted.startswith("@"):
        return name.endswith(wanted)
    return name == wanted or name.startswith((f"{wanted}.", f"{wanted}@"))
