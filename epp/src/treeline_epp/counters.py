"""Counters that cost next to nothing to count, on prometheus_client's pages.

The library's own take a lock and check for exemplars each time, a tenth of what a small request costs above its
transport. These are counted by one thread, the event loop's, which also renders the page.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry


class Count:
    """One number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """`amount` is not negative."""
        self.value += amount


class Counter(Collector):
    """A counter as prometheus_client's: by labels, or one number where it has none."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], Count] = {}
        self.inc = self.labels().inc if not labels else _needs_labels
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count with these values of its labels."""
        count = self._counts.get(values)
        if count is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            count = self._counts[values] = Count()
        return count

    def remove(self, *values: str) -> None:
        """It is no longer on the page, if it was."""
        self._counts.pop(values, None)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)


def _needs_labels(_amount: float = 1.0) -> None:
    raise ValueError("a counter with labels is counted by `labels(...)`")
