"""Figures from records with known times."""

import msgspec
import pytest
from treeline_bench.serving.figures import figures, medians, ratios
from treeline_bench.serving.messages import UNFINISHED, LoadReport, Record
from treeline_bench.serving.summary import Summary, measures, parse_limits, summarise

MS = 1_000_000


def record(
    due_ms: float, sent_ms: float, tokens_ms: list[float], done_ms: float, output: int | None = None, **more: object
) -> Record:
    """Return a record with times in ms after the beginning, which is at 1 s of the clock."""
    begin = 1000 * MS
    return Record(
        conversation=0,
        turn=0,
        asked_prompt_tokens=10,
        asked_output_tokens=len(tokens_ms),
        due_ns=begin + int(due_ms * MS),
        begun_ns=begin + int(sent_ms * MS),
        sent_ns=begin + int(sent_ms * MS),
        done_ns=begin + int(done_ms * MS),
        tokens_ns=[begin + int(each * MS) for each in tokens_ms],
        prompt_tokens=10,
        output_tokens=len(tokens_ms) if output is None else output,
        **more,  # type: ignore[arg-type]
    )


def told(*records: Record, lag_ms: float = 0, busy: float = 0.1) -> LoadReport:
    return LoadReport(list(records), 1000 * MS, [int(lag_ms * MS)], busy)


def summary(*records: Record, limits: dict[str, float] | None = None) -> Summary:
    return summarise([told(*records)], limits or {})


def test_times_count_from_when_a_request_was_due() -> None:
    late = record(due_ms=100, sent_ms=150, tokens_ms=[200, 230, 250], done_ms=260)
    assert measures(late) == {"ttft": 100, "tpot": 25, "e2e": 160}
    found = summary(late)
    assert found.ttft_ms is not None
    assert found.ttft_ms.p50 == found.ttft_ms.max == 100
    assert found.itl_ms is not None
    assert (found.itl_ms.mean, found.itl_ms.p50, found.itl_ms.max) == (25, 25, 30)
    assert found.client.late_ms_p99 == 50


def test_time_per_token_takes_the_servers_count_not_the_chunks() -> None:
    assert measures(record(0, 0, [10, 110], 110, output=11))["tpot"] == 10
    assert measures(record(0, 0, [10], 10, output=1))["tpot"] is None
    assert measures(record(0, 0, [10], 10, output=5))["tpot"] is None  # all in one chunk: it is unknown
    assert summary(record(0, 0, [10, 110], 110, output=11)).tokens_per_chunk == 5.5


def test_rates_are_whole_answers_over_the_time_to_the_last_end() -> None:
    found = summary(
        record(0, 0, [100, 200], 200, cached_tokens=6),
        record(0, 0, [100], 500, error="HTTP 503", detail="full"),
        record(0, 0, [100, 300], 400, cached_tokens=0),
        record(0, 0, [], 300, error=UNFINISHED),
    )
    assert (found.requests, found.completed, found.unfinished, found.failed) == (4, 2, 1, 1)
    assert found.duration_s == 0.5
    assert (found.requests_s, found.prompt_tokens_s, found.output_tokens_s) == (4, 40, 8)
    assert found.cached_share == 0.3
    assert found.errors == {"HTTP 503": 1}
    assert found.examples == {"HTTP 503": "full"}
    assert found.mean_concurrency == pytest.approx((0.2 + 0.5 + 0.4 + 0.3) / 0.5)


def test_percentiles_of_known_values() -> None:
    found = summary(*(record(0, 0, [first], first) for first in range(1, 102)))
    assert found.ttft_ms is not None
    assert msgspec.structs.astuple(found.ttft_ms) == (51, 51, 91, 100, 101)


def test_goodput_takes_answers_that_keep_every_limit() -> None:
    limits = parse_limits(["ttft:100", "tpot:20"])
    found = summary(
        record(0, 0, [100, 120], 120),  # at the limits
        record(0, 0, [101, 110], 110),  # the first token is late
        record(0, 0, [50, 90], 90),  # slow after it
        record(0, 0, [90], 1000),  # one token: no time per token to be judged
        record(0, 0, [1, 2], 500, error="timeout"),
        limits=limits,
    )
    assert found.good == 2
    assert found.goodput_s == 2
    assert summary(record(0, 0, [1], 1)).good is None


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "itl:3", ":3"])
def test_limits_are_written_one_way_and_once(word: str) -> None:
    with pytest.raises(ValueError, match="a colon and milliseconds"):
        parse_limits([word])
    with pytest.raises(ValueError, match="two limits for ttft"):
        parse_limits(["ttft:3", "ttft:4"])


def test_a_client_that_cannot_keep_up_says_so() -> None:
    quick = record(0, 0, [1], 1)
    assert summarise([told(quick)], {}).client.trouble == ""
    assert "busy 99%" in summarise([told(quick), told(quick, busy=0.99)], {}).client.trouble
    assert "timers were 30 ms late" in summarise([told(quick, lag_ms=30)], {}).client.trouble
    assert "sent 40 ms late" in summarise([told(record(0, 40, [41], 41))], {}).client.trouble


def test_a_load_without_answers_has_no_times() -> None:
    found = summary(record(0, 0, [], 10, error="cannot connect"))
    assert (found.ttft_ms, found.itl_ms, found.e2e_ms, found.cached_share) == (None, None, None, None)
    assert figures(found) == {
        "requests_s": 0,
        "prompt_tokens_s": 0,
        "output_tokens_s": 0,
        "mean_concurrency": 1,
        "errors": 1,
    }
    assert summarise([LoadReport([], 5, [], 0.0)], {}).requests == 0


def test_several_processes_are_one_load() -> None:
    first, second = record(0, 0, [10], 100), record(0, 0, [30], 200)
    together = summarise([told(first), told(second)], {})
    assert together.completed == 2
    assert together.duration_s == 0.2
    assert together.ttft_ms is not None
    assert together.ttft_ms.mean == 20


def test_rounds_have_medians_and_ratios_compare_matching_rounds() -> None:
    ours = [summary(record(0, 0, [first], 1000)) for first in (10, 20, 90)]
    theirs = [summary(record(0, 0, [first], 1000)) for first in (20, 10, 90)]
    assert medians(ours)["ttft_ms.p50"] == 20
    assert ratios(ours, theirs)["ttft_ms.p50"] == 1  # of 0.5, 2 and 1
    assert ratios(ours[:1], theirs)["ttft_ms.p50"] == 0.5
    assert ratios(ours, []) == {}
