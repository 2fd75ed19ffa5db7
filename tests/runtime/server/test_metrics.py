"""Metrics of several HTTP processes, added up."""

from __future__ import annotations

import math

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from treeline_runtime.server.metrics import Metrics, Samples


def told(metrics: Metrics) -> Samples:
    """As they arrive from another process."""
    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(metrics.samples())), Samples)


def shown(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(page.decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample is there twice"
    return found


def test_the_sum_is_what_one_process_would_have_counted() -> None:
    parts, one = [Metrics("m") for _ in range(3)], Metrics("m")
    for index, part in enumerate(parts):
        for metrics in (part, one):
            metrics.requests.inc(1 + index)
            metrics.http_requests.labels("/x", 200).inc()
            metrics.http_requests.labels(f"/only/{index}", 503).inc(2)
            for seconds in (0.0005 * (1 + index), 0.1 * 4**index, math.pi * 100):
                metrics.time_to_first_token.observe(seconds)
        part.set("http_requests_active", 1 + index)
        one.set("http_requests_active", 6)
    parts[0].set("num_pages", 9)  # of the server: workers do not know it
    parts[1].set("num_pages", 5)
    one.set("num_pages", 9)
    total, whole = shown(parts[0].render([told(part) for part in parts[1:]])), shown(one.render())
    assert total.keys() == whole.keys()
    assert all(math.isclose(total[key], whole[key]) for key in whole)


def test_adding_changes_nothing_for_the_next_time() -> None:
    first, second = Metrics("m"), Metrics("m")
    second.requests.inc()
    samples = told(second)
    assert first.render([samples]) == first.render([samples]) != first.render()
