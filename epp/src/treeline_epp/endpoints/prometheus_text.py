"""A parser of Prometheus' text format for a few names: an engine's page has thousands of lines, and a picker needs ten.

The format is https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4); OpenMetrics lines (exemplars
behind the value) are read, too. Only lines of the wanted name are decoded; a search of the page's bytes finds them: 100
KB take some 15 µs for each name, a parser of all lines milliseconds.
"""

from __future__ import annotations

import re

from msgspec import Struct

MOST_LINE_BYTES = 16 << 10
"""Longest line that is read. vLLM's longest, the one with its cache's settings, has about 2 KB."""
MOST_SERIES, MOST_SERIES_BYTES = 1024, 128 << 10
"""Most that is read of one name. A server of 64 ranks with eight priorities each has 512 series of some 200 bytes."""
_MOST_LABELS = 128

_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,?)')
_ESCAPED = re.compile(r"\\([\\n\"])")
_NUMBER = re.compile(rb"[ \t]*([+-]?(?:[0-9][0-9.eE+-]*|\.[0-9][0-9eE+-]*|[A-Za-z]+))(?:[ \t]|\Z)")


class Series(Struct, frozen=True, gc=False):
    """The labels and the value of one line; the value may be infinite or NaN."""

    labels: dict[str, str]
    value: float


def series(page: bytes, name: bytes) -> list[Series]:
    """Return all series of that name, in the page's order. Lines that cannot be parsed are skipped: the caller knows
    which metrics must be there. O(page) at memory speed, whatever the page contains.
    """
    found: list[Series] = []
    needle = b"\n" + name
    at = 0 if page.startswith(name) else page.find(needle) + 1
    if at == 0 and not page.startswith(name):
        return found
    left = MOST_SERIES_BYTES
    for _ in range(MOST_SERIES):
        end = page.find(b"\n", at)
        end = len(page) if end < 0 else end
        left -= min(end - at, MOST_LINE_BYTES)
        if left < 0:
            break
        if end - at <= MOST_LINE_BYTES and (one := _series(page[at + len(name) : end])) is not None:
            found.append(one)
        at = page.find(needle, end) + 1
        if at == 0:
            break
    return found


def _series(rest: bytes) -> Series | None:
    """Parse a line without its name."""
    labels: dict[str, str] = {}
    at = len(rest) - len(rest.lstrip(b" \t"))
    if rest[at : at + 1] == b"{":
        end = _read_labels(rest, at + 1, labels)
        if end is None:
            return None
        at = end
    elif at == 0:
        return None  # a longer name that begins with this one
    number = _NUMBER.match(rest, at)
    if number is None:
        return None
    try:
        return Series(labels, float(number[1]))
    except ValueError:
        return None


def _read_labels(rest: bytes, at: int, into: dict[str, str]) -> int | None:
    """Read `name="value", …}`; return where the rest of the line begins, `None` if the text has another form."""
    for _ in range(_MOST_LABELS):
        label = _LABEL.match(rest, at)
        if label is None:
            break
        into[label[1].decode()] = _unescaped(label[2].decode("utf-8", "replace"))
        at = label.end()
        if not label[3]:
            break
    while rest[at : at + 1] in (b" ", b"\t"):
        at += 1
    return at + 1 if rest[at : at + 1] == b"}" else None


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text
