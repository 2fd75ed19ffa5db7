"""The list-watch machine alone: its requests, the contents of its sink, and its pauses."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kube_api import Collection, TooOld, expired, line
from treeline_kube.errors import (
    Forbidden,
    Gone,
    KubeError,
    Malformed,
    NotFound,
    Throttled,
    Timeout,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from treeline_kube.objects import Objects
from treeline_kube.reflector import OutOfOrder, Reflector, State, Timing
from treeline_kube.resources import Collection as Followed
from treeline_kube.resources import Resource

PODS = Followed(Resource("v1", "Pod", "pods"), "ns", "a=b")
MODELS = Followed(Resource("treeline.dev/v1alpha1", "InferenceModel", "inferencemodels"), "ns")
BACKOFF_S = Timing().backoff_s


class _Object(msgspec.Struct):
    value: int


def read(data: msgspec.Raw) -> int:
    return _decode(data).value


_decode = msgspec.json.Decoder(_Object).decode


def obj(name: str, value: int, version: int = 2) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "value": value}


class Mirror(Reflector):
    """A reflector with the plain sink."""

    def __init__(self, collection: Followed = PODS, **options: Any) -> None:
        self.kept = Objects(read)
        super().__init__(collection, self.kept, rng=random.Random(1), **options)

    @property
    def objects(self) -> dict[str, int]:
        return self.kept.objects

    def asked(self) -> dict[str, str]:
        return dict(self.request().query)

    @property
    def watches_next(self) -> bool:
        return self.request().verb == "watch"


def make(collection: Followed = PODS, **options: Any) -> Mirror:
    return Mirror(collection, **options)


def listed(objects: dict[str, int], version: int = 10) -> bytes:
    items = [obj(name, value) for name, value in objects.items()]
    return json.dumps({"metadata": {"resourceVersion": str(version)}, "items": items}).encode()


def synced(**options: Any) -> Mirror:
    mirror = make(**options)
    assert mirror.on_page(listed({"a": 1}), 0.0)
    mirror.on_open(0.0)
    return mirror


def test_a_reflector_lists_in_pages_and_then_watches_from_the_lists_version() -> None:
    mirror = make()
    asked = mirror.request()
    assert (asked.verb, asked.resource, asked.path) == ("list", "pods", "/api/v1/namespaces/ns/pods")
    assert mirror.asked() == {"labelSelector": "a=b", "limit": "100"}
    first = {"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [obj("a", 1)]}
    assert not mirror.on_page(json.dumps(first).encode(), 1.0)
    assert (mirror.objects, mirror.synced) == ({}, False)
    assert mirror.asked()["continue"] == "more"
    assert mirror.on_page(listed({"b": 2}, version=9), 1.0)
    assert (mirror.objects, mirror.usable) == ({"a": 1, "b": 2}, True)
    assert mirror.watches_next
    asked_for = mirror.asked()
    assert (asked_for["resourceVersion"], asked_for["allowWatchBookmarks"]) == ("9", "true")
    assert MODELS.path == "/apis/treeline.dev/v1alpha1/namespaces/ns/inferencemodels"


REFUSED = (Unauthorized, Forbidden, NotFound, Malformed)
LOST = (Unreachable, Timeout, Unavailable, Throttled)
TABLE: dict[tuple[State, str], State] = {
    (State.LISTING, "page"): State.LISTING,
    (State.LISTING, "last page"): State.RESUMING,
    (State.RESUMING, "open"): State.WATCHING,
    (State.WATCHING, "object"): State.WATCHING,
    (State.WATCHING, "bookmark"): State.WATCHING,
    (State.WATCHING, "end"): State.RESUMING,
    **{(State.LISTING, error.__name__): State.LISTING for error in (*LOST, *REFUSED, Gone)},
    **{(State.RESUMING, error.__name__): State.RESUMING for error in LOST},
    **{(State.WATCHING, error.__name__): State.RESUMING for error in LOST},
    **{(state, e.__name__): State.LISTING for e in (*REFUSED, Gone) for state in State if state is not State.LISTING},
}
ERRORS = {error.__name__: error for error in (*LOST, *REFUSED, Gone)}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", sorted({event for _, event in TABLE}))
def test_each_event_in_each_state_follows_the_table(state: State, event: str) -> None:
    mirror = make()
    if state is not State.LISTING:
        mirror.on_page(listed({"a": 1}), 0.0)
    if state is State.WATCHING:
        mirror.on_open(0.0)

    def happens() -> None:
        match event:
            case "page":
                body = {"metadata": {"resourceVersion": "9", "continue": "c"}, "items": []}
                mirror.on_page(json.dumps(body).encode(), 1.0)
            case "last page":
                mirror.on_page(listed({}), 1.0)
            case "open":
                mirror.on_open(1.0)
            case "object":
                mirror.on_data(line("ADDED", obj("b", 2)), 1.0)
            case "bookmark":
                mirror.on_data(line("BOOKMARK", {"metadata": {"resourceVersion": "99"}}), 1.0)
            case "end":
                mirror.on_end(1.0)
            case _:
                mirror.on_failure(ERRORS[event]("why"), 1.0)

    expected = TABLE.get((state, event))
    if expected is None:
        with pytest.raises(OutOfOrder):
            happens()
    else:
        happens()
        assert mirror.state is expected


def test_a_polling_reflector_lists_again_and_never_watches() -> None:
    mirror = make(timing=Timing(poll_s=60.0))
    for value in (1, 1, 2):
        assert not mirror.watches_next
        mirror.on_page(listed({"a": value}), 0.0)
        assert 45.0 <= mirror.pause_after_list() <= 60.0
    assert (mirror.objects, mirror.lists, mirror.error) == ({"a": 2}, 3, None)
    mirror.on_failure(Unreachable("no"), 1.0)
    assert mirror.health(1.0).error == "unreachable: no"
    mirror.on_page(listed({"a": 2}), 2.0)
    assert mirror.error is None


def test_events_change_the_state_whole_or_in_pieces() -> None:
    events = line("ADDED", obj("b", 2, 11)) + line("MODIFIED", obj("a", 5, 12)) + line("DELETED", obj("b", 2, 13))
    for size in (len(events), 1, 7):
        mirror = synced()
        for start in range(0, len(events), size):
            mirror.on_data(events[start : start + size], 1.0)
        assert mirror.objects == {"a": 5}
        assert mirror.asked()["resourceVersion"] == "13"
        assert mirror.events == 3


def test_only_relevant_differences_are_changes() -> None:
    mirror = synced()
    assert not mirror.on_data(line("MODIFIED", obj("a", 1, 20)), 1.0)
    assert not mirror.on_data(line("DELETED", obj("unknown", 1, 21)), 1.0)
    assert not mirror.on_data(line("BOOKMARK", {"metadata": {"resourceVersion": "99"}}), 1.0)
    assert mirror.asked()["resourceVersion"] == "99"
    assert mirror.on_data(line("MODIFIED", obj("a", 2, 100)), 1.0)


def test_a_relist_replaces_the_state_only_when_it_is_complete() -> None:
    mirror = synced()
    with pytest.raises(Gone) as caught:
        mirror.on_data(expired(), 5.0)
    assert mirror.on_failure(caught.value, 5.0) <= BACKOFF_S[0]
    assert not mirror.watches_next
    page = {"metadata": {"resourceVersion": "20", "continue": "c"}, "items": [obj("z", 1)]}
    mirror.on_page(json.dumps(page).encode(), 6.0)
    assert mirror.objects == {"a": 1}
    assert mirror.on_page(listed({"y": 1}, 20), 6.0)
    assert mirror.objects == {"z": 1, "y": 1}
    assert mirror.lists == 2


def test_an_expired_paged_list_is_requested_in_one_piece() -> None:
    mirror = make()
    page = {"metadata": {"resourceVersion": "20", "continue": "c"}, "items": [obj("z", 1)]}
    mirror.on_page(json.dumps(page).encode(), 0.0)
    mirror.on_failure(Gone("continue token expired"), 0.0)
    assert "limit" not in mirror.asked()
    mirror.on_page(listed({"y": 1}), 0.0)
    assert mirror.objects == {"y": 1}


def test_a_lost_connection_is_continued_and_a_long_outage_listed() -> None:
    mirror = synced()
    pauses = [mirror.on_failure(Unreachable("refused"), 1.0 + i) for i in range(12)]
    assert mirror.watches_next
    assert pauses[0] <= BACKOFF_S[0]
    assert BACKOFF_S[1] / 2 <= pauses[-1] <= BACKOFF_S[1]
    assert mirror.health(13.0).error == "unreachable: refused"
    mirror.on_failure(Unreachable("refused"), Timing().outage_s + 1.0)
    assert not mirror.watches_next
    assert mirror.objects == {"a": 1}, "what is known stays"
    assert mirror.on_page(listed({"a": 1}), 70.0) is False
    mirror.on_open(70.0)
    assert mirror.health(71.0) == msgspec.convert(
        {"synced": True, "watching": True, "age_s": 1.0, "error": None}, type(mirror.health(0))
    )


def test_pauses_shrink_only_after_data() -> None:
    mirror = synced()
    for at in range(8):
        mirror.on_failure(Unavailable("busy"), float(at))
        mirror.on_open(float(at))
    assert mirror.on_failure(Unavailable("busy"), 9.0) > 1.0
    mirror.on_open(9.0)
    mirror.on_data(line("BOOKMARK", {"metadata": {"resourceVersion": "99"}}), 9.0)
    assert mirror.on_failure(Unavailable("busy"), 9.0) <= BACKOFF_S[0]


def test_a_watch_that_ends_on_time_resumes_at_once_and_a_short_one_waits() -> None:
    mirror = synced()
    assert mirror.on_end(300.0) == 0.0
    mirror.on_open(300.0)
    assert mirror.on_end(300.1) > 0.0
    assert mirror.watches_next


def test_an_optional_kind_that_is_missing_or_forbidden_is_reported_once_and_retried_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (Forbidden("no"), NotFound("no")):
        caplog.clear()
        mirror = make(MODELS, optional=True)
        assert not mirror.usable
        with caplog.at_level(logging.INFO, "treeline_kube"):
            pauses = [mirror.on_failure(error, float(i)) for i in range(5)]
        assert mirror.usable
        assert not mirror.synced
        assert min(pauses) >= 0.8 * Timing().absent_s
        assert len(caplog.records) == 1
        assert mirror.on_page(listed({"a": 1}), 60.0)
        assert mirror.objects == {"a": 1}


def test_a_required_kind_that_is_forbidden_is_not_synced_and_tried_more_often() -> None:
    mirror = make()
    assert max(mirror.on_failure(Forbidden("no"), float(i)) for i in range(20)) <= BACKOFF_S[1]
    assert not mirror.usable
    assert mirror.errors == {"forbidden": 20}


def test_a_watch_that_is_forbidden_becomes_a_slow_poll() -> None:
    mirror = make()
    pauses = []
    for i in range(12):
        mirror.on_page(listed({"a": i}), float(i))
        pauses.append(mirror.on_failure(Forbidden("watch is forbidden"), float(i)))
        assert not mirror.watches_next
    assert mirror.objects == {"a": 11}
    assert pauses[-1] > 5.0


def test_a_reflector_waits_as_long_as_a_busy_server_asks() -> None:
    assert make().on_failure(Throttled("later", retry_after_s=7.0), 0.0) == 7.0


def test_unreadable_objects_keep_their_last_state(caplog: pytest.LogCaptureFixture) -> None:
    mirror = synced()
    with caplog.at_level(logging.ERROR, "treeline_kube"):
        broken = {"metadata": {"name": "a", "resourceVersion": "30"}, "value": "text"}
        assert not mirror.on_data(line("MODIFIED", broken), 1.0)
        assert (mirror.objects, mirror.errors["unreadable"]) == ({"a": 1}, 1)
        assert mirror.asked()["resourceVersion"] == "30"
        mirror.on_failure(Gone("relist"), 2.0)
        body = {"metadata": {"resourceVersion": "31"}, "items": [broken, obj("b", 2)]}
        mirror.on_page(json.dumps(body).encode(), 2.0)
    assert mirror.objects == {"a": 1, "b": 2}


def test_a_deeply_nested_object_does_not_block_others() -> None:
    deep = (
        b'{"metadata": {"name": "deep", "resourceVersion": "30"}, "value": 3, "more": '
        + b"[" * 9990
        + b"]" * 9990
        + b"}"
    )
    limit, mirror = sys.getrecursionlimit(), synced()
    assert mirror.on_data(b'{"type": "ADDED", "object": ' + deep + b"}\n", 1.0)
    mirror.on_failure(Gone("relist"), 2.0)
    other = json.dumps(obj("b", 2)).encode()
    mirror.on_page(b'{"metadata": {"resourceVersion": "31"}, "items": [' + deep + b", " + other + b"]}", 2.0)
    assert mirror.objects == {"deep": 3, "b": 2}
    assert sys.getrecursionlimit() == limit
    mirror.on_failure(Gone("relist"), 3.0)
    with pytest.raises(Malformed):
        mirror.on_page(b'{"metadata": ' + b"[" * 100_000, 3.0)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"metadata": {}}', b"\xff"])
def test_an_answer_that_is_not_a_list_is_a_failure(body: bytes) -> None:
    mirror = synced()
    mirror.on_failure(Gone("relist"), 0.0)
    with pytest.raises(Malformed):
        mirror.on_page(body, 0.0)
    assert mirror.objects == {"a": 1}


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_line_of_a_watch_is_an_event_or_a_failure(data: bytes) -> None:
    mirror = synced()
    with contextlib.suppress(KubeError):
        mirror.on_data(data + b"\n", 0.0)
    assert mirror.on_failure(Malformed("whatever it was"), 0.0) > 0.0


FAULTS = {"busy": Unavailable, "silent": Timeout, "forbidden": Forbidden}


class World:
    """A collection, and a mirror that follows it over an unreliable connection."""

    def __init__(self) -> None:
        self.collection = Collection()
        self.mirror = make()
        self.now = 0.0
        self.stream: Iterator[bytes] | None = None

    def step(self, fault: str) -> None:
        """Take one step of the driver, with a fault or without."""
        self.now += 1.0
        mirror = self.mirror
        try:
            if fault == "cut":
                self.stream = None
                raise Unreachable("cut")
            if self.stream is not None and fault in FAULTS:
                raise FAULTS[fault](fault)
            if self.stream is not None:
                self.pump()
                if fault == "end":
                    self.stream = None
                    mirror.on_end(self.now)
                return
            asked = mirror.request()
            if fault in FAULTS:
                raise FAULTS[fault](fault)
            query = dict(asked.query)
            if asked.verb == "list":
                mirror.on_page(self.collection.page({**query, "limit": "2"}), self.now)
                return
            version = int(query["resourceVersion"])
            self.collection.since(version)
            mirror.on_open(self.now)
            self.stream = self.lines(version)
        except TooOld:
            mirror.on_failure(Gone("gone"), self.now)
        except KubeError as failure:
            self.stream = None
            self.now += mirror.on_failure(failure, self.now)

    def lines(self, version: int) -> Iterator[bytes]:
        while True:
            try:
                found = self.collection.since(version)
            except TooOld:
                yield expired()
                return
            version = self.collection.version
            yield b"".join(found) + self.collection.bookmark()

    def pump(self) -> None:
        assert self.stream is not None
        data = next(self.stream)
        half = len(data) // 2
        self.mirror.on_data(data[:half], self.now)
        self.mirror.on_data(data[half:], self.now)


CHANGES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abcdefg"), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.sampled_from("abcdefg"), st.just(0)),
    st.tuples(st.just("compact"), st.just(""), st.just(0)),
    st.tuples(st.just("step"), st.sampled_from(["", "", "cut", "end", "busy", "silent", "forbidden"]), st.just(0)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(CHANGES, max_size=40))
def test_the_mirror_converges_to_the_server_after_any_faults(changes: list[tuple[str, str, int]]) -> None:
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
