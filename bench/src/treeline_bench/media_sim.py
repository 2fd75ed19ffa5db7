"""Benchmark `media-sim`: whether chats with images find their caches, on simulated engines.

Method. Four engines as in `routing-sim`, and chats of eight turns: a system prompt of 100 tokens, the same for all; the
first turn shows an image, each later one with a chance of three in ten; half of the images are new, the others are of
100 that all chats show; 256 to 2,000 tokens each. 30 to 300 tokens of text a turn, 50 to 300 out. The picker learns an
image's tokens from events, of our runtime's form (`ours`) and of vLLM's (`vllm`). `media.hit_vs_oracle`: hit rate ÷
that of the better of the two oracles of `routing-sim`.

Bias. That of `routing-sim`. Encoders take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from treeline_sim.model.images import PicturedText, draw_image
from treeline_sim.routers import ORACLES, TraceRequest
from treeline_sim.traces.base import Draw, Trace, merged
from treeline_sim.traces.sessions import TOKEN_S

from treeline_bench.context import Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.results import Row

TURNS = 8
REPLICAS = 4
SHOWN_AGAIN = 0.3
FORMS = {"ours": False, "vllm": True}


def image_chats(vllm: bool, draw: Draw) -> Iterator[TraceRequest]:
    """Yield the requests of the chats; see the module."""
    rng = draw.rng
    known = [draw_image(draw.log_between(256, 2000), rng) for _ in range(100)]
    system = PicturedText(draw.block_size, vllm=vllm).extended(100, rng)

    def chat(at: float) -> Iterator[TraceRequest]:
        text = system
        for turn in range(TURNS):
            if not turn or rng.random() < SHOWN_AGAIN:
                new = rng.random() < 0.5
                image = draw_image(draw.log_between(256, 2000), rng) if new else rng.choice(known)
                text = text.extended(5, rng).shown(image)
            text, out = text.extended(draw.log_between(30, 300), rng), draw.log_between(50, 300)
            whole = text.extended(out, rng)
            yield TraceRequest(at, text, whole, out)
            text = whole
            at += TOKEN_S * out + rng.expovariate(1 / 15.0)

    return merged((at, chat(at)) for at in draw.arrivals(draw.rate / TURNS))


def run(context: Context) -> list[Row]:
    """Rows of both forms."""
    from treeline_sim.figures import compare
    from treeline_sim.picker_core import DEFAULT_POLICY
    from treeline_sim.run import Plan, simulate  # with the picker's room, as in `routing_sim`

    rows: list[Row] = []
    for form, vllm in FORMS.items():
        trace = Trace("image-chat", "chats of 8 turns with images", 160.0, 4000, partial(image_chats, vllm))
        plan = Plan(trace, endpoints=REPLICAS, requests=400 if context.quick else 4000)
        found = []
        for policy in (DEFAULT_POLICY, *ORACLES):
            context.display.phase(f"image chats, {form}: {policy}", plan.total)
            found.append(simulate(plan, policy, context.display.done))
        ours = compare(found)[0]
        rows += [
            row(f"media.hit_vs_oracle.{form}", ours.hit_vs_oracle or 0.0),
            row(f"media.hit_rate.{form}", ours.figures.hit_rate),
            row(f"media.errors.{form}", ours.figures.errors),
        ]
    return rows


BENCHMARK = Benchmark("media-sim", "Images on simulated engines", "hits of chats with images (a minute)", run)
