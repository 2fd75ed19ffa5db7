"""A trace as requests with text, at a pace for small machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from treeline_sim.figures import endless_hit_rate
from treeline_sim.model.engine import EngineConfig
from treeline_sim.routers import TraceRequest
from treeline_sim.run import Plan
from treeline_sim.traces.base import Trace

from treeline_bench.context import BenchmarkError
from treeline_bench.prompts import PromptMaker
from treeline_bench.serving.messages import Conversation, Order, Turn

OUTPUT_TOKENS_S = 1500.0
PROMPT_TOKENS_S = 20_000.0
"""Prompt tokens a second that engines, router and a Python client on two cores can handle together; each output token
is an event."""
SAMPLE = 200
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Script:
    """The requests that each router gets. `speed`: engine time divided by wall time; arrivals are stretched by it,
    so that engines are as busy as at the trace's own rate. `moments`: arrivals, in seconds of wall time;
    `endless_hit_rate`: the hit rate of one endless cache, which no router exceeds."""

    engine: EngineConfig
    speed: float
    moments: list[float]
    conversations: list[Conversation]
    endless_hit_rate: float

    def order(self, port: int, model: str) -> Order:
        """The order for the load process."""
        return Order(
            host="127.0.0.1",
            port=port,
            path="/v1/completions",
            fields={"model": model, "stream": True, "stream_options": {"include_usage": True}},
            conversations=self.conversations,
            arrivals=self.moments,
            timeout_s=TIMEOUT_S,
        )


def script_of(trace: Trace, endpoints: int, seconds: float, maker: PromptMaker) -> Script:
    """The trace's first requests, in so many seconds of wall time. Raises BenchmarkError if there are none."""
    plan = Plan(trace, endpoints)
    speed = bearable(list(islice(plan.generate(), SAMPLE)))
    requests = list(takewhile(lambda request: request.at < seconds * speed, plan.generate()))
    if not requests:
        raise BenchmarkError(f"{trace.name}: no request comes within {seconds:g} s at {speed:.3f} of its rate")
    # Engines that serve say one word over and over, so no prompt goes on from an answer.
    asked = (replace(request, whole=request.prompt) for request in requests)
    return Script(
        engine=plan.engine,
        speed=speed,
        moments=[request.at / speed for request in requests],
        conversations=list(_texts(requests, maker)),
        endless_hit_rate=endless_hit_rate(asked, plan.engine.block_size),
    )


def bearable(sample: Sequence[TraceRequest]) -> float:
    """The share of a trace's rate that this machine can play, at most 1."""
    lasts = sample[-1].at
    output = sum(request.output_tokens for request in sample) / lasts
    prompt = sum(request.prompt.tokens for request in sample) / lasts
    return min(1.0, OUTPUT_TOKENS_S / output, PROMPT_TOKENS_S / prompt)


def _texts(requests: Iterable[TraceRequest], maker: PromptMaker) -> Iterable[Conversation]:
    """Each token becomes a word of one token, so that shared tokens are shared text."""
    words = maker.words
    for request in requests:
        size = request.prompt.block_size
        ids = request.prompt.ids(0, len(request.prompt.blocks) + 1, size)
        text = "".join(words[token % len(words)] for token in ids)
        yield Conversation([Turn(text, maker.count(text), request.output_tokens)])
