"""Checks the nesting depth of YAML and JSON before a recursive parser reads them.

libyaml's composer is recursive C: a hundred kilobytes of `[` crash the process. Its event parser is not, so this counts
events. JSON is covered too, since it is YAML.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

import yaml

MOST_DEPTH: Final = 100
RECURSION: Final = 12_000
"""Enough for JSON that is nested 10,000 deep, which API servers take and send: one such object must not keep all others
unread. Decoders in C recurse once for each level, with some hundred bytes of the stack."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENING = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSING = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


class TooDeepError(yaml.YAMLError):
    """The document is nested more than `MOST_DEPTH` deep."""


@contextlib.contextmanager
def deep_json() -> Iterator[None]:
    """Let decoders follow JSON as deep as API servers send it, within this context."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def check_depth(text: str | bytes) -> None:
    """Raises `TooDeepError`, and yaml.YAMLError for invalid YAML. O(text); stops where it is too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, _OPENING):
            depth += 1
            if depth > MOST_DEPTH:
                raise TooDeepError(f"nested more than {MOST_DEPTH} deep")
        elif isinstance(event, _CLOSING):
            depth -= 1


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON is nested more than `MOST_DEPTH` deep. O(size); stops where it is too deep."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        maps = [one.values() for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        level = [inner for inners in (*maps, *lists) for inner in inners]
        if not level:
            return False
    return True
