"""The traces: in order, equal for equal seeds, and of the shape that they claim."""

import json
from itertools import islice, pairwise
from pathlib import Path

import pytest
from treeline_sim.figures import endless_hit_rate
from treeline_sim.routers import TraceRequest
from treeline_sim.traces import TRACES, trace_named
from treeline_sim.traces.base import Draw
from treeline_sim.traces.mooncake import TraceError, read_mooncake

SHAPES = {  # prompts at least, at most; output at least, at most; hit rate of an endless cache at least, at most
    "generated-shared-prefix": (2176, 2176, 256, 256, 0.6, 0.95),
    "150x5": (7200, 7200, 1000, 1000, 0.30, 0.99),
    "83x8k": (9000, 9000, 1000, 1000, 0.60, 0.99),
    "bursts": (2148, 16_684, 64, 256, 0.85, 0.94),
    "zipf": (600, 8600, 100, 300, 0.25, 0.95),
    "mooncake-like": (1024, 120_000, 50, 1200, 0.1, 0.7),
    "shuffled-documents": (2000, 12_500, 50, 300, 0.1, 0.6),
    "jumping": (1050, 12_400, 100, 300, 0.3, 0.95),
    "unequal-pods": (600, 9000, 100, 400, 0.3, 0.95),
    "tool-branches": (1200, 20_000, 30, 300, 0.6, 0.98),
    "multi-turn": (230, 11_000, 50, 400, 0.5, 0.9),
    "code-agent": (3200, 100_000, 50, 800, 0.6, 0.95),
}


def made(name: str, count: int, seed: int = 1) -> list[TraceRequest]:
    trace = TRACES[name]
    return list(islice(trace.generate(Draw(seed, 64, trace.rate)), count))


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_has_its_claimed_shape(name: str) -> None:
    shortest, longest, least, most, low, high = SHAPES[name]
    requests = made(name, 240)
    assert len(requests) == 240
    assert all(first.at <= second.at for first, second in pairwise(requests))
    assert all(shortest <= request.prompt.tokens <= longest for request in requests)
    assert all(least <= request.output_tokens <= most for request in requests)
    for request in requests[:50]:
        assert request.whole.tokens == request.prompt.tokens + request.output_tokens
        assert request.whole.blocks[: len(request.prompt.blocks)] == request.prompt.blocks
    assert low <= endless_hit_rate(requests, 64) <= high
    rate = len(requests) / requests[-1].at
    assert 0.4 <= rate / TRACES[name].rate <= 1.6 or name in (
        "multi-turn",
        "code-agent",
        "tool-branches",
    )  # those climb at first


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_determined_by_its_seed(name: str) -> None:
    first, again, other = made(name, 30), made(name, 30), made(name, 30, seed=2)
    assert [(one.at, one.prompt.blocks) for one in first] == [(one.at, one.prompt.blocks) for one in again]
    assert [one.prompt.blocks for one in first] != [one.prompt.blocks for one in other]


def test_the_rate_of_conversations_is_that_of_their_requests() -> None:
    trace = TRACES["multi-turn"]
    requests = list(islice(trace.generate(Draw(1, 4096, 60.0)), 12_000))
    later = [request for request in requests if request.at > 100]
    assert len(later) / (requests[-1].at - 100) == pytest.approx(60.0, rel=0.15)


def test_an_unknown_trace_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="150x5"):
        trace_named("nothing")


def line(timestamp: float, tokens: int, blocks: list[int], output: int = 5) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": blocks, "more": 1}
    )


def test_a_published_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(0, 1100, [7, 8, 9]), "", line(3000, 1500, [7, 8, 10])]))
    first, second = read_mooncake(path, 64, seed=1, speedup=2.0)
    assert (first.at, second.at) == (0.0, 1.5)
    assert (first.prompt.tokens, second.prompt.tokens, second.output_tokens) == (1100, 1500, 5)
    shared = sum(a == b for a, b in zip(first.prompt.blocks, second.prompt.blocks, strict=False))
    assert shared == 1024 // 64


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        line(1000, 513, [1]),
        line(1000, 0, []),
        line(1000, 10, [1], output=0),
        line(-5, 10, [1]),
        '{"timestamp": 1}',
        line(1000, 10_000_000, [1] * 20_000),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(0, 100, [1]) + "\n" + bad + "\n")
    with pytest.raises(TraceError, match="line 2"):
        list(read_mooncake(path, 64, seed=1))
