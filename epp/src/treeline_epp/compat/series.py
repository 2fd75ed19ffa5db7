"""Series of metrics that cost little to count and to show: labels that are bounded, histograms without a lock.

They are counted by one thread, the event loop's, which also renders the page, as those of `counters`. The page is in
Prometheus' text format 0.0.4; prometheus_client takes some twenty times as long for a histogram, and the loop waits.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

MOST_VALUES = 1000
"""Of one label."""
OTHER = "other"
_LONGEST = 256


class Bounded:
    """The values of one label: the first `MOST_VALUES` that come, and then `OTHER`."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label for a value."""
        if value in self._known:
            return value
        if len(self._known) >= self._most or len(value) > _LONGEST:
            return OTHER
        self._known.add(value)
        return value

    def forget(self, value: str) -> None:
        """It has gone for good, and another may take its place."""
        self._known.discard(value)


class Histogram:
    """Counts of one series by upper bound."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """O(log bounds)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """What another with the same bounds has counted."""
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        self.sum += other.sum

    def lines(self, name: str, labels: str, bounds: Sequence[float]) -> str:
        """Its samples, with some of its bounds. `labels` are as `label_text` has them."""
        total, wanted = 0, dict(zip(bounds, _endings(tuple(bounds)), strict=True))
        begin = f'{name}_bucket{{{labels}{"," if labels else ""}le="'
        found = []
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            if (ending := wanted.get(bound)) is not None:
                found.append(f"{begin}{ending}{total}\n")
        whole = sum(self._counts)
        rest = f"{{{labels}}}" if labels else ""
        found.append(f'{begin}+Inf"}} {whole}\n{name}_count{rest} {whole}\n{name}_sum{rest} {self.sum!r}\n')
        return "".join(found)


@functools.lru_cache(maxsize=256)
def _endings(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(f'{_text(bound)}"}} ' for bound in bounds)


def _text(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Between the braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in zip(names, values, strict=True))


def head(name: str, kind: str, text: str) -> str:
    """What goes before the samples of a metric; the words are ours."""
    return f"# HELP {name} [ALPHA] {text}\n# TYPE {name} {kind}\n"


def samples(name: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> str:
    """Lines of a counter or gauge."""
    found = []
    for had, value in values:
        text = label_text(labels, had)
        found.append(f"{name}{{{text}}} {value!r}\n" if text else f"{name} {value!r}\n")
    return "".join(found)
