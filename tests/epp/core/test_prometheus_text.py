"""Reads a few names of a metrics page: the same values as Prometheus' own parser, and invalid lines do no harm."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.cpu import reference_s
from treeline_epp.endpoints.prometheus_text import MOST_LINE_BYTES, MOST_SERIES, Series, series

NAMES = ("vllm:a", "vllm:a_b", "vllm:a_sum", "b")
LABEL_VALUES = st.text(st.sampled_from('ab"\\\n{},= #\u00e9\U0001f600'), max_size=6)
VALUES = st.floats() | st.integers(-5, 5).map(float)


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def judged(page: bytes, name: str) -> list[Series]:
    """Parse a page with the prometheus_client library and return the series of one name."""
    return [
        Series(dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == name
    ]


def agree(page: bytes, name: str) -> None:
    ours, theirs = series(page, name.encode()), judged(page, name)
    assert [one.labels for one in ours] == [one.labels for one in theirs]
    assert all(same(one.value, other.value) for one, other in zip(ours, theirs, strict=True))


@given(
    st.dictionaries(
        st.sampled_from(NAMES),
        st.lists(st.tuples(LABEL_VALUES, LABEL_VALUES, VALUES), max_size=4, unique_by=lambda each: each[:2]),
        max_size=4,
    )
)
def test_pages_of_the_library_are_read_as_the_library_reads_them(
    told: dict[str, list[tuple[str, str, float]]],
) -> None:
    registry = CollectorRegistry()
    for name, lines in told.items():
        gauge = Gauge(name, "what b 1\nvllm:a 7 says", ["x", "le_y"], registry=registry)
        for first, second, value in lines:
            gauge.labels(first, second).set(value)
    page = generate_latest(registry)
    for name in NAMES:
        agree(page, name)


@settings(max_examples=40)
@given(st.floats(0.0, 1e12), st.integers(0, 8), st.booleans())
def test_counters_and_histograms_are_read_in_both_formats(amount: float, count: int, exemplars: bool) -> None:
    registry = CollectorRegistry()
    counter = Counter("tokens", "text", ["source"], registry=registry)
    counter.labels("local_compute").inc(amount)
    histogram = Histogram("seconds", "text", ["engine"], buckets=[0.1, 1.0], registry=registry)
    for at in range(count):
        histogram.labels("0").observe(at / 7, {"trace": 'a"} 9'} if exemplars else None)
    page = generate_latest(registry)
    other = openmetrics.generate_latest(registry)
    for name in ("tokens_total", "seconds_sum", "seconds_count", "seconds_bucket", "tokens"):
        agree(page, name)
        assert series(other, name.encode()) == judged(page, name)


def test_spaces_timestamps_and_unlabelled_lines_are_read() -> None:
    page = b'a 1\na\t 2 1395066363000\na{} 3\na { x = "1" , y="2", } 4\na{x="}"}5\nab 6\na_ 7\nA 8\na'
    assert [(one.labels, one.value) for one in series(page, b"a")] == [
        ({}, 1.0),
        ({}, 2.0),
        ({}, 3.0),
        ({"x": "1", "y": "2"}, 4.0),
        ({"x": "}"}, 5.0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"a",
        b"a ",
        b"a{",
        b'a{x="1" 2',
        b'a{x="1"}',
        b'a{x="1"y="2"} 3',
        b"a{x=1} 2",
        b'a{x="\\"} 2',
        b"a 1_000",
        b"a 0x10",
        b"a one",
        b"a 1e",
        b"a \xff",
        b"a}1",
        b"a 1" + b" " * MOST_LINE_BYTES,
        b'a{x="' + b"\\" * (4 * MOST_LINE_BYTES) + b'"} 1',
    ],
)
def test_an_invalid_line_is_skipped_and_the_next_one_counts(line: bytes) -> None:
    assert series(line + b"\na 5\n", b"a") == [Series({}, 5.0)]


@given(st.binary(max_size=80), st.integers(0, 80))
def test_any_bytes_are_read_or_skipped(noise: bytes, at: int) -> None:
    whole = b'a{x="1",y="\\n"} 1.5e3 12\n' * 3
    for page in (noise, whole[:at] + noise + whole[at:]):
        assert all(isinstance(one.value, float) for one in series(page, b"a"))


def test_a_hostile_page_is_read_in_bounded_time() -> None:
    """The page has four mebibytes, the most that is read, of each kind of trap."""
    most_s = 150 * reference_s()
    for page in (b"a 1\n" * (1 << 20), b"\nvllm:num_requests_waitin" * (4 << 20 >> 5), b'a{x="' * (1 << 20)):
        began = time.thread_time()
        for name in (b"a", b"vllm:num_requests_waiting"):
            assert len(series(page, name)) <= MOST_SERIES
        assert time.thread_time() - began < most_s
