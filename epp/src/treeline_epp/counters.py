"""Counters, a gauge and histograms that cost next to nothing to count, on prometheus_client's pages.

The library's own take a lock and check for exemplars each time, a tenth of what a small request costs above its
transport. These are counted by one thread, the event loop's, which also renders the page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


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


class Level(Collector):
    """A gauge as prometheus_client's, of what comes and goes. `value` is how many there are."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.value = 0
        registry.register(self)

    def inc(self) -> None:
        """One more."""
        self.value += 1

    def dec(self) -> None:
        """One less."""
        self.value -= 1

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._text, self.value)

    def describe(self) -> Iterator[Metric]:
        return self.collect()


class Histogram(Collector):
    """A histogram as prometheus_client's, without labels. `bounds` ascend; one without end comes behind them."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """O(log bounds)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        total, buckets = 0, []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)

    def describe(self) -> Iterator[Metric]:
        return self.collect()


def _needs_labels(_amount: float = 1.0) -> None:
    raise ValueError("a counter with labels is counted by `labels(...)`")
