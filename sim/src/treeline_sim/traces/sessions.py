"""Traces of conversations: each request continues the one before it. Open loop: the time of a turn depends on how long
the answer before it takes to write and read, not on when it arrived.
"""

from __future__ import annotations

from collections.abc import Iterator

from treeline_sim.routers import TraceRequest
from treeline_sim.traces.base import Draw, Trace, merged

TOKEN_S = 0.02
"""Seconds for each token of an answer, before the next turn's thinking begins."""
CONTEXT = 100_000
"""Most tokens of a code agent's conversation."""


def multi_turn(draw: Draw) -> Iterator[TraceRequest]:
    """Chats with time to think: one of 20 system prompts of 200 to 2,000 tokens, 3 to 10 turns of 30 to 500 tokens and
    50 to 400 out; then the answer is written (20 ms a token), and some 15 s of thought (exponential). The lengths are
    about those of ShareGPT's conversations, by which vLLM and SGLang are measured."""
    systems = [draw.text(draw.log_between(200, 2000)) for _ in range(20)]

    def chat(at: float) -> Iterator[TraceRequest]:
        text = draw.rng.choice(systems)
        for _ in range(draw.between(3, 10)):
            request = draw.request(at, text.extended(draw.log_between(30, 500), draw.rng), draw.log_between(50, 400))
            yield request
            text = request.whole
            at += TOKEN_S * request.output_tokens + draw.rng.expovariate(1 / 15.0)

    return merged((at, chat(at)) for at in draw.arrivals(draw.rate / 6.5))


def code_agent(draw: Draw) -> Iterator[TraceRequest]:
    """Agents that write code, as the test plan of llm-d's and SMG's issues describes them: 3k tokens of system prompt
    and tools (3 kinds), a task and files up to 30k, 2 to 20 turns each of which brings 300 to 6,000 tokens of a tool's
    output, 50 to 800 out, up to 100k in all; tools take some 4 s (exponential)."""
    kinds = [draw.text(3000) for _ in range(3)]

    def task(at: float) -> Iterator[TraceRequest]:
        text = draw.rng.choice(kinds).extended(draw.log_between(200, 27_000), draw.rng)
        for _ in range(draw.between(2, 20)):
            request = draw.request(at, text, draw.log_between(50, 800))
            yield request
            text = request.whole.extended(draw.log_between(300, 6000), draw.rng)
            if text.tokens > CONTEXT:
                return
            at += TOKEN_S * request.output_tokens + draw.rng.expovariate(1 / 4.0)

    return merged((at, task(at)) for at in draw.arrivals(draw.rate / 10.5))


def tool_branches(draw: Draw) -> Iterator[TraceRequest]:
    """Agents that try several ways at once: one of 30 sets of tools (1,000 to 6,000 tokens), a task of 100 to 2,000;
    then 2 to 6 rounds, in each of which 2 to 5 branches go on from the same text within 20 ms, each with 100 to 1,500
    tokens that a tool has said, 30 to 300 out. The next round goes on from one of them; tools take some 2 s
    (exponential). Our own, in the shape of tree search over tools."""
    kinds = [draw.text(draw.log_between(1000, 6000)) for _ in range(30)]

    def task(at: float) -> Iterator[TraceRequest]:
        text = draw.rng.choice(kinds).extended(draw.log_between(100, 2000), draw.rng)
        for _ in range(draw.between(2, 6)):
            branches = []
            for offset in sorted(draw.rng.uniform(0.0, 0.02) for _ in range(draw.between(2, 5))):
                prompt = text.extended(draw.log_between(100, 1500), draw.rng)
                branches.append(draw.request(at + offset, prompt, draw.log_between(30, 300)))
            yield from branches
            chosen = draw.rng.choice(branches)
            text, at = chosen.whole, chosen.at + TOKEN_S * chosen.output_tokens + draw.rng.expovariate(1 / 2.0) + 0.02

    return merged((at, task(at)) for at in draw.arrivals(draw.rate / 14))


TRACES = (
    Trace("multi-turn", "chats of 3 to 10 turns, 15 s of thought between", 160.0, 16_000, multi_turn),
    Trace("code-agent", "3k to 100k tokens, 2 to 20 turns", 16.0, 4000, code_agent),
    Trace(
        "tool-branches", "rounds of 2 to 5 branches of one text, each with what a tool said", 90.0, 8000, tool_branches
    ),
)
