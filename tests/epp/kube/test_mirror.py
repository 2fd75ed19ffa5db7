"""The list-watch machine alone: what it asks, what it believes, and how long it waits."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kube_api import Collection, Gone, expired, line
from treeline_epp.kube.mirror import BACKOFF_S, OUTAGE_S, PAGE, SLOW_S, Failure, Mirror, Resource

PODS = Resource("pods", "v1", "ns", selector="a=b")
OPTIONAL = Resource("inferencemodels", "v1alpha1", "ns", group="treeline.dev", optional=True)


class _Object(msgspec.Struct):
    value: int


def read(data: msgspec.Raw) -> int:
    return _decode(data).value


_decode = msgspec.json.Decoder(_Object).decode


def obj(name: str, value: int, version: int = 2) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}


def make(resource: Resource = PODS) -> Mirror[int]:
    return Mirror(resource, read, random.Random(1))


def listed(objects: dict[str, int], version: int = 10) -> bytes:
    items = [obj(name, value) for name, value in objects.items()]
    return json.dumps({"metadata": {"resourceVersion": str(version)}, "items": items}).encode()


def synced(resource: Resource = PODS) -> Mirror[int]:
    mirror = make(resource)
    assert mirror.on_page(listed({"a": 1}), 0.0)
    mirror.on_open(0.0)
    return mirror


def test_it_lists_in_pages_and_then_watches_from_the_lists_version() -> None:
    mirror = make()
    asked = mirror.request()
    assert (asked.path, asked.watch) == ("/api/v1/namespaces/ns/pods", False)
    assert asked.query == {"labelSelector": "a=b", "limit": str(PAGE)}
    first = {"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [obj("a", 1)]}
    assert not mirror.on_page(json.dumps(first).encode(), 1.0)
    assert (mirror.objects, mirror.synced) == ({}, False)
    assert mirror.request().query["continue"] == "more"
    assert mirror.on_page(listed({"b": 2}, version=9), 1.0)
    assert (mirror.objects, mirror.settled) == ({"a": 1, "b": 2}, True)
    asked = mirror.request()
    assert asked.watch
    assert (asked.query["resourceVersion"], asked.query["allowWatchBookmarks"]) == ("9", "true")
    assert OPTIONAL.path == "/apis/treeline.dev/v1alpha1/namespaces/ns/inferencemodels"


def test_events_change_the_state_whole_or_in_pieces() -> None:
    events = (
        line("ADDED", obj("b", 2, 11)) + line("MODIFIED", obj("a", 5, 12)) + line("DELETED", obj("b", 2, 13))
    )
    for size in (len(events), 1, 7):
        mirror = synced()
        for start in range(0, len(events), size):
            mirror.feed(events[start : start + size], 1.0)
        assert mirror.objects == {"a": 5}
        assert mirror.request().query["resourceVersion"] == "13"
        assert mirror.events == 3


def test_only_what_matters_is_a_change() -> None:
    mirror = synced()
    assert not mirror.feed(line("MODIFIED", obj("a", 1, 20)), 1.0)
    assert not mirror.feed(line("DELETED", obj("stranger", 1, 21)), 1.0)
    assert not mirror.feed(line("BOOKMARK", {"metadata": {"resourceVersion": "99"}}), 1.0)
    assert mirror.request().query["resourceVersion"] == "99"
    assert mirror.feed(line("MODIFIED", obj("a", 2, 100)), 1.0)


def test_a_relist_replaces_the_state_only_when_it_is_complete() -> None:
    mirror = synced()
    with pytest.raises(Failure) as caught:
        mirror.feed(expired(), 5.0)
    assert caught.value.reason == "expired"
    assert mirror.on_failure(caught.value, 5.0) <= BACKOFF_S[0]
    assert not mirror.request().watch
    page = {"metadata": {"resourceVersion": "20", "continue": "c"}, "items": [obj("z", 1)]}
    mirror.on_page(json.dumps(page).encode(), 6.0)
    assert mirror.objects == {"a": 1}
    assert mirror.on_page(listed({"y": 1}, 20), 6.0)
    assert mirror.objects == {"z": 1, "y": 1}
    assert mirror.lists == 2


def test_a_list_that_outlives_its_pages_is_asked_for_in_one_piece() -> None:
    mirror = make()
    page = {"metadata": {"resourceVersion": "20", "continue": "c"}, "items": [obj("z", 1)]}
    mirror.on_page(json.dumps(page).encode(), 0.0)
    mirror.on_failure(Failure(410, "continue token expired"), 0.0)
    assert "limit" not in mirror.request().query
    mirror.on_page(listed({"y": 1}), 0.0)
    assert mirror.objects == {"y": 1}


def test_a_lost_connection_is_continued_and_a_long_outage_listed() -> None:
    mirror = synced()
    pauses = [mirror.on_failure(Failure(0, "refused"), 1.0 + i) for i in range(12)]
    assert mirror.request().watch
    assert pauses[0] <= BACKOFF_S[0]
    assert BACKOFF_S[1] / 2 <= pauses[-1] <= BACKOFF_S[1]
    assert mirror.health(13.0).error == "unreachable: refused"
    mirror.on_failure(Failure(0, "refused"), OUTAGE_S + 1.0)
    assert not mirror.request().watch
    assert mirror.objects == {"a": 1}, "what is known stays"
    assert mirror.on_page(listed({"a": 1}), 70.0) is False
    mirror.on_open(70.0)
    assert mirror.health(71.0) == msgspec.convert(
        {"synced": True, "watching": True, "age_s": 1.0, "error": None}, type(mirror.health(0))
    )


def test_pauses_shrink_only_when_something_came() -> None:
    mirror = synced()
    for at in range(8):
        mirror.on_failure(Failure(503, "busy"), float(at))
        mirror.on_open(float(at))
    assert mirror.on_failure(Failure(503, "busy"), 9.0) > 1.0
    mirror.on_open(9.0)
    mirror.feed(line("BOOKMARK", {"metadata": {"resourceVersion": "99"}}), 9.0)
    assert mirror.on_failure(Failure(503, "busy"), 9.0) <= BACKOFF_S[0]


def test_a_watch_that_ends_at_its_time_goes_on_at_once_and_one_that_ends_at_once_waits() -> None:
    mirror = synced()
    assert mirror.on_end(300.0) == 0.0
    mirror.on_open(300.0)
    assert mirror.on_end(300.1) > 0.0
    assert mirror.request().watch


def test_an_optional_kind_that_is_missing_or_forbidden_is_said_once_and_tried_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for status in (403, 404):
        caplog.clear()
        mirror = make(OPTIONAL)
        assert not mirror.settled
        with caplog.at_level(logging.INFO, "treeline_epp"):
            pauses = [mirror.on_failure(Failure(status, "no"), float(i)) for i in range(5)]
        assert mirror.settled
        assert not mirror.synced
        assert min(pauses) >= 0.8 * SLOW_S
        assert len(caplog.records) == 1
        assert mirror.on_page(listed({"a": 1}), 60.0)
        assert mirror.objects == {"a": 1}


def test_a_required_kind_that_is_forbidden_is_not_synced_and_tried_more_often() -> None:
    mirror = make()
    assert max(mirror.on_failure(Failure(403, "no"), float(i)) for i in range(20)) <= BACKOFF_S[1]
    assert not mirror.settled
    assert mirror.errors == {"forbidden": 20}


def test_a_watch_that_is_forbidden_becomes_a_slow_poll() -> None:
    mirror = make()
    pauses = []
    for i in range(12):
        mirror.on_page(listed({"a": i}), float(i))
        pauses.append(mirror.on_failure(Failure(403, "watch is forbidden"), float(i)))
        assert not mirror.request().watch
    assert mirror.objects == {"a": 11}
    assert pauses[-1] > 5.0


def test_it_waits_as_long_as_a_busy_server_says() -> None:
    assert make().on_failure(Failure(429, "later", retry_after_s=7.0), 0.0) == 7.0


def test_an_object_that_cannot_be_read_leaves_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    mirror = synced()
    with caplog.at_level(logging.ERROR, "treeline_epp"):
        broken = {"metadata": {"name": "a", "resourceVersion": "30"}, "value": "text"}
        assert not mirror.feed(line("MODIFIED", broken), 1.0)
        assert (mirror.objects, mirror.errors["unreadable"]) == ({"a": 1}, 1)
        assert mirror.request().query["resourceVersion"] == "30"
        body = {"metadata": {"resourceVersion": "31"}, "items": [broken, obj("b", 2)]}
        mirror.on_page(json.dumps(body).encode(), 2.0)
    assert mirror.objects == {"a": 1, "b": 2}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"metadata": {}}', b"\xff"])
def test_what_is_no_list_is_a_failure(body: bytes) -> None:
    mirror = synced()
    with pytest.raises(Failure) as caught:
        mirror.on_page(body, 0.0)
    assert caught.value.reason == "malformed"
    assert mirror.objects == {"a": 1}


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_whatever_a_watch_brings_is_an_event_or_a_failure(data: bytes) -> None:
    mirror = synced()
    with contextlib.suppress(Failure):
        mirror.feed(data + b"\n", 0.0)
    assert mirror.on_failure(Failure(200, "whatever it was"), 0.0) > 0.0


class World:
    """A collection, and a mirror that is connected to it by a bad line."""

    def __init__(self) -> None:
        self.collection = Collection()
        self.mirror = make()
        self.now = 0.0
        self.stream: Iterator[bytes] | None = None

    def step(self, fault: str) -> None:
        """One thing that the driver would do, with a fault or without."""
        self.now += 1.0
        mirror = self.mirror
        try:
            if fault == "cut":
                self.stream = None
                raise Failure(0, "cut")
            if self.stream is not None:
                self.pump()
                if fault == "end":
                    self.stream = None
                    mirror.on_end(self.now)
                return
            asked = mirror.request()
            if fault == "busy":
                raise Failure(503, "busy")
            if not asked.watch:
                mirror.on_page(self.collection.page({**asked.query, "limit": "2"}), self.now)
                return
            version = int(asked.query["resourceVersion"])
            self.collection.since(version)
            mirror.on_open(self.now)
            self.stream = self.lines(version)
        except Gone:
            mirror.on_failure(Failure(410, "gone"), self.now)
        except Failure as failure:
            self.stream = None
            self.now += mirror.on_failure(failure, self.now)

    def lines(self, version: int) -> Iterator[bytes]:
        while True:
            try:
                found = self.collection.since(version)
            except Gone:
                yield expired()
                return
            version = self.collection.version
            yield b"".join(found) + self.collection.bookmark()

    def pump(self) -> None:
        assert self.stream is not None
        data = next(self.stream)
        half = len(data) // 2
        self.mirror.feed(data[:half], self.now)
        self.mirror.feed(data[half:], self.now)


CHANGES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcdefg"), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.sampled_from("abcdefg"), st.just(0)),
    st.tuples(st.just("compact"), st.just(""), st.just(0)),
    st.tuples(st.just("step"), st.sampled_from(["", "", "cut", "end", "busy"]), st.just(0)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(CHANGES, max_size=40))
def test_whatever_breaks_the_mirror_comes_to_equal_the_server(changes: list[tuple[str, str, int]]) -> None:
    logging.disable(logging.WARNING)
    try:
        world = World()
        for what, name, value in changes:
            match what:
                case "put":
                    world.collection.put({"metadata": {"name": name}, "value": value})
                case "delete":
                    world.collection.delete(name)
                case "compact":
                    world.collection.compact()
                case _:
                    world.step(name)
        for _ in range(12):
            world.step("")
        truth = {name: found["value"] for name, found in world.collection.objects.items()}
        assert world.mirror.objects == truth
    finally:
        logging.disable(logging.NOTSET)
