"""Load reports are sent on change, at most twenty a second, and once a second without; at once when all requests have
ended."""

from __future__ import annotations

from treeline_runtime.published import LoadUpdate
from treeline_runtime.publisher.streams import HEARTBEAT_S, MIN_INTERVAL_S, LoadStream
from treeline_wire import frames
from treeline_wire.load import LoadStat, TreelineLoad, decode_load


def reports(messages: list[list[bytes]]) -> list[LoadStat | TreelineLoad]:
    return [decode_load(topic, payload) for topic, _, payload in map(frames.parse_live, messages)]


def test_the_first_report_is_due_at_once_and_then_every_second() -> None:
    stream = LoadStream(1, 16)
    assert len(stream.take(0.0)) == 2
    assert stream.take(HEARTBEAT_S - 0.01) == []
    assert len(stream.take(HEARTBEAT_S)) == 2


def test_changes_are_reported_at_most_every_fifty_milliseconds() -> None:
    stream = LoadStream(1, 16)
    stream.take(0.0)
    sent = 0
    for tick in range(1000):
        stream.on_load(LoadUpdate(running=tick, pages_cached=tick), tick / 1000)
        sent += bool(stream.take(tick / 1000))
    assert sent == 19
    stream.on_load(LoadUpdate(running=5000, pages_cached=7), 1.0)
    assert stream.due_at() <= 1.0 + MIN_INTERVAL_S
    stat, ours = reports(stream.take(2.0))
    assert isinstance(stat, LoadStat)
    assert isinstance(ours, TreelineLoad)
    assert stat.num_running == ours.running == 5000
    assert ours.pages_cached == 7


def test_the_end_of_the_last_request_is_reported_at_once() -> None:
    stream = LoadStream(1, 16)
    stream.on_load(LoadUpdate(running=1), 0.0)
    stream.take(0.0)
    stream.on_load(LoadUpdate(running=1, pages_used=2), 0.001)
    assert stream.take(0.001) == []
    stream.on_load(LoadUpdate(pages_cached=2), 0.002)
    stat, ours = reports(stream.take(0.002))
    assert isinstance(stat, LoadStat)
    assert isinstance(ours, TreelineLoad)
    assert stat.num_running == ours.in_flight == 0
    stream.on_load(LoadUpdate(pages_cached=3), 0.003)
    assert stream.take(0.003) == [], "it was idle before"


def test_an_unchanged_load_is_not_reported() -> None:
    stream = LoadStream(1, 16)
    stream.on_load(LoadUpdate(running=1), 0.0)
    stream.take(0.0)
    stream.on_load(LoadUpdate(running=1), 0.5)
    assert stream.take(0.5) == []


def test_load_reports_stop_while_the_scheduler_is_silent() -> None:
    stream = LoadStream(1, 16)
    stream.on_load(LoadUpdate(running=1), 0.0)
    sent = [second for second in range(60) if stream.take(float(second))]
    assert sent == [0, 1, 2, 3]
    assert stream.due_at() == float("inf"), "no report is due"
    stream.on_draining()
    assert stream.take(60.0), "the router gets the reports that it needs"
    stream.on_load(LoadUpdate(running=1), 70.0)
    assert stream.take(70.0)


def test_draining_is_reported_at_once_and_permanently() -> None:
    stream = LoadStream(1, 16)
    stream.take(0.0)
    stream.on_draining()
    _, ours = reports(stream.take(0.001))
    assert isinstance(ours, TreelineLoad)
    assert ours.draining
    stream.on_draining()
    assert stream.take(0.002) == []
    stream.on_load(LoadUpdate(running=3), 0.1)
    _, later = reports(stream.take(0.2))
    assert isinstance(later, TreelineLoad)
    assert later.draining


def test_both_forms_carry_the_load_and_the_same_number() -> None:
    stream = LoadStream(42, 16)
    stream.on_load(
        LoadUpdate(
            running=2,
            waiting=3,
            waiting_uncached_tokens=50,
            pages_used=4,
            pages_total=10,
            page_size=16,
            tokens_used=60,
            digests={"sql": "0a", "chat": "0b"},
            resident=["0b"],
        ),
        0.0,
    )
    first, second = stream.take(0.0)
    assert frames.parse_live(first)[:2] == (b"load", 0)
    assert frames.parse_live(second)[:2] == (b"treeline.load", 0)
    stat, ours = reports([first, second])
    assert isinstance(stat, LoadStat)
    assert isinstance(ours, TreelineLoad)
    assert (
        stat.num_waiting,
        stat.num_tokens,
        stat.max_total_num_tokens,
        stat.num_waiting_uncached_tokens,
    ) == (3, 60, 160, 50)
    assert (ours.adapters, ours.digests, ours.resident) == (["chat", "sql"], {"sql": "0a", "chat": "0b"}, ["0b"])
    assert (ours.epoch, ours.in_flight, ours.pages_used, ours.page_size) == (42, 5, 4, 16)
