"""Counters and histograms of our own: the page is the one that prometheus_client's make."""

from __future__ import annotations

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from treeline_epp.metrics import Counter, Histogram

LABELS = [("a", "x"), ("a", 'quo"te\n'), ("b", "x"), ("a", "x")]


def test_the_page_of_counters_equals_the_librarys() -> None:
    ours, theirs = CollectorRegistry(auto_describe=False), CollectorRegistry(auto_describe=False)
    plain, labelled = Counter("plain", "Words.", (), ours), Counter("labelled", "More.", ("one", "two"), ours)
    Counter("never", "Nothing.", (), ours)
    Counter("empty", "Nothing.", ("one",), ours)
    their_plain = prometheus_client.Counter("plain", "Words.", registry=theirs)
    their_labelled = prometheus_client.Counter("labelled", "More.", ("one", "two"), registry=theirs)
    prometheus_client.Counter("never", "Nothing.", registry=theirs)
    prometheus_client.Counter("empty", "Nothing.", ("one",), registry=theirs)
    for amount in (1, 2.5, 10**9):
        plain.inc(amount)
        their_plain.inc(amount)
    for values in LABELS:
        labelled.labels(*values).inc()
        their_labelled.labels(*values).inc()
    assert generate_latest(ours) == generate_latest(theirs)
    for counter in (labelled, their_labelled):
        counter.remove("b", "x")
    labelled.remove("was", "never")
    assert generate_latest(ours) == generate_latest(theirs)
    assert ours.get_sample_value("labelled_total", {"one": "a", "two": "x"}) == 2


def test_the_page_of_a_histogram_equals_the_librarys() -> None:
    ours, theirs = CollectorRegistry(auto_describe=False), CollectorRegistry(auto_describe=False)
    bounds = (50e-6, 0.1, 1.0, 2.5, 30.0)
    histogram = Histogram("seconds", "More.", bounds, ours)
    their_histogram = prometheus_client.Histogram("seconds", "More.", buckets=bounds, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for value in (0.0, 49e-6, 50e-6, 0.1, 0.10001, 2.25, 30.0, 31.5, 1e9):
        histogram.observe(value)
        their_histogram.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_labels_are_all_or_none() -> None:
    counter = Counter("c", "Words.", ("one",), CollectorRegistry())
    with pytest.raises(ValueError, match="labels"):
        counter.inc()
    with pytest.raises(ValueError, match="one"):
        counter.labels("a", "b")


def test_two_counters_of_one_name_are_refused() -> None:
    registry = CollectorRegistry(auto_describe=False)
    Counter("c", "Words.", (), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counter("c", "Words.", (), registry)
