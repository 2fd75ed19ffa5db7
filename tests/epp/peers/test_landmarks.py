"""Peers' prefixes are predicted from a few hashes of a prompt."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from treeline_epp.index.index import Index
from treeline_epp.index.pods import Hit, Match, Pod
from treeline_epp.peers.landmarks import GRID, MOST_PODS, Landmarks, marks_of, told
from treeline_wire.peers import MOST_MARKS, Opened

SECRET = 0x1234_5678_9ABC_DEF0


def text(seed: object, size: int) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


def opened(key: bytes, confirmed: int = 0, namespace: str | None = None) -> Opened:
    return Opened(1, b"abcd", 0, 0, marks=told(marks_of(key, SECRET, "m", namespace), confirmed))


def on_grid(size: int) -> int:
    return max((place for place in GRID if place <= size), default=0)


def pods(count: int) -> list[Pod]:
    index = Index()
    return [index.add_pod(f"pod-{number}", "m") for number in range(count)]


def reach(landmarks: Landmarks, key: bytes, now: float = 0.0, namespace: str | None = None) -> dict[Pod, int]:
    return landmarks.reach(landmarks.marks("m", namespace, key), now)


@given(st.integers(0, 9000), st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 13000))
def test_a_predicted_hit_is_at_most_the_shared_prefix_and_little_less(
    shared: int, one: int, other: int, confirmed: int
) -> None:
    first = text("shared", shared) + b"1" + text("one", one)
    second = text("shared", shared) + b"2" + text("other", other)
    landmarks, (pod,) = Landmarks(SECRET), pods(1)
    landmarks.add(opened(first, min(confirmed, len(first))), pod, 10.0)
    found = reach(landmarks, second).get(pod, 0)
    assert found <= shared
    if shared > 0.6 * len(first) and shared >= GRID[0] and confirmed < 0.6 * len(first):
        assert found >= shared / 1.4, "rounded down"
    again = reach(landmarks, first + text("more", other)).get(pod, 0)
    assert again == (on_grid(len(first)) if on_grid(len(first)) > confirmed else 0), "and so is the same prompt"
    landmarks.check()


def test_continuations_of_a_confirmed_prefix_cost_little() -> None:
    key = text("long", 24_000)
    landmarks, (pod,) = Landmarks(SECRET), pods(1)
    news = opened(key, confirmed=on_grid(24_000) - 1)
    assert len(news.marks) == 1
    landmarks.add(news, pod, 10.0)
    assert reach(landmarks, key + b"!") == {pod: on_grid(24_000)}
    assert not opened(b"short").marks


def test_most_marks_are_near_the_end() -> None:
    key = text("long", GRID[20])
    every = marks_of(key, SECRET, "m", None)
    marks = told(every, 0)
    assert len(marks) == MOST_MARKS
    assert [every.index(mark) for mark in marks[-3:]] == [18, 19, 20]


def test_predictions_do_not_cross_namespaces() -> None:
    key = text("key", 3000)
    landmarks, (pod,) = Landmarks(SECRET), pods(1)
    landmarks.add(opened(key, namespace="a"), pod, 10.0)
    assert reach(landmarks, key, namespace="a") == {pod: on_grid(3000)}
    for other in (None, "", "b"):
        assert reach(landmarks, key, namespace=other) == {}
    assert landmarks.reach(landmarks.marks("other model", "a", key), 0.0) == {}


def test_a_prediction_ends_by_time_pod_state_or_withdrawal() -> None:
    index = Index()
    one, two = index.add_pod("one", "m"), index.add_pod("two", "m")
    key = text("key", 3000)
    news = opened(key)
    landmarks = Landmarks(SECRET)
    foresight = landmarks.add(news, one, 10.0)
    landmarks.add(news, two, 20.0)
    assert reach(landmarks, key) == {one: on_grid(3000), two: on_grid(3000)}
    assert reach(landmarks, key, now=10.0) == {two: on_grid(3000)}
    index.clear(two)
    assert reach(landmarks, key) == {one: on_grid(3000)}
    assert foresight is not None
    landmarks.withdraw(news, foresight)
    assert reach(landmarks, key) == {}
    landmarks.tick(0.0)
    assert len(landmarks) == 0
    landmarks.check()


def test_withdrawing_a_request_keeps_later_ones() -> None:
    (pod,), landmarks, news = pods(1), Landmarks(SECRET), opened(text("key", 3000))
    first = landmarks.add(news, pod, 10.0)
    landmarks.add(news, pod, 11.0)
    assert first is not None
    landmarks.withdraw(news, first)
    assert reach(landmarks, text("key", 3000)) == {pod: on_grid(3000)}


def test_predictions_take_bounded_memory_and_expire() -> None:
    landmarks, (pod,) = Landmarks(SECRET, most=500), pods(1)
    for number in range(300):
        landmarks.add(opened(text(number, 2000)), pod, 10.0)
        landmarks.check()
    assert len(landmarks) == 500
    assert reach(landmarks, text(299, 2000)) == {pod: on_grid(2000)}
    assert reach(landmarks, text(0, 2000)) == {}
    for _ in range(3):
        landmarks.tick(10.0)
    assert len(landmarks) == 0
    landmarks.check()


def test_the_newest_of_many_holders_are_known() -> None:
    landmarks, many = Landmarks(SECRET), pods(3 * MOST_PODS)
    for pod in (*many, many[-MOST_PODS]):
        landmarks.add(opened(text("shared", 3000)), pod, 10.0)
    landmarks.add(opened(text("shared", 3000)), many[0], 10.0)
    landmarks.check()
    known = set(many[-MOST_PODS:]) - {many[-MOST_PODS + 1]} | {many[0]}
    assert reach(landmarks, text("shared", 3000)) == dict.fromkeys(known, on_grid(3000))


def test_a_match_includes_predictions_beyond_it() -> None:
    one, two, capped = pods(3)
    capped.hit_caps[None] = (0, 0.0)  # type: ignore[index]
    landmarks, key = Landmarks(SECRET), text("key", 3000)
    for pod in (one, two, capped):
        landmarks.add(opened(key), pod, 10.0)
    known = {one: Hit(100, 400, 3200), two: Hit(100, 400, 400)}
    found = landmarks.foreseen(Match(special=known), landmarks.marks("m", None, key), 0.0)
    assert found.hit(one) == known[one], "more was known"
    assert found.hit(two) == Hit(100, 400, on_grid(3000))
    assert found.hit(capped) == Hit(), "an audit has found less"
