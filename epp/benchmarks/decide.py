"""Measure the way from a request's body to a decision, step by step. Prints JSON rows {metric, value, unit}.

    python epp/benchmarks/decide.py [--rounds 300] [--template FILE] [--seed 1]

The requests: chats of 1 KB, 30 KB and 220 KB (2, 20 and 100 turns and a system prompt) through the tokenizer of the
tiny model, with its template or another; each round asks another one of twenty whose first halves agree. The pools: 8,
100 and 1,000 endpoints that report their load; each holds the first half of a prompt, every tenth the whole of one.
What is timed is CPU time of one thread, for each step alone: `json` (decoding the body), `render` (of the chat, once
its shape is known), `key`, `match` (in the tree), `filter` (rows that may serve), `pick` (match, filter and scores),
`reserve`, `close`; and `route`, which is all that `Router.route` does (JSON to reservation, metrics too). The median
and the 99th percentile are told. A collection of garbage is part of the times where it falls.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.keyers.base import Renderer
from treeline_epp.metrics import Metrics
from treeline_epp.picking.decision import Outcome
from treeline_epp.picking.filters import rows_left
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import PickRequest
from treeline_epp.requests.messages import RouteRequest
from treeline_epp.requests.model_registry import ModelRegistry
from treeline_epp.requests.router import RoutedRequest, Router
from treeline_wire.dialects import dialect_of
from treeline_wire.events import BlockStored
from treeline_wire.keys import PrefixKeys
from treeline_wire.load import TreelineLoad
from treeline_wire.tokenizer import TokenizerBundle

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
CHATS = {"1kb": (1_000, 2), "30kb": (30_000, 20), "220kb": (220_000, 100)}
ENDPOINTS = (8, 100, 1_000)
PROMPTS = 20
BLOCK = 64
"""Bytes of a block: sixteen tokens of four."""
WORDS = ("all", "the", "king's", "horses", "and", "men", "couldn't", "put", "it", "together", "again", "before", "tea")


class Letters:
    """Token id → bytes: a token for each byte, all that the index wants of a tokenizer."""

    def __init__(self) -> None:
        self.token_bytes = [bytes([i]) for i in range(256)]


def text(rng: random.Random, size: int) -> str:
    made = " ".join(rng.choices(WORDS, k=size // 5 + 1))
    return made[:size].strip() + "."


def chat(rng: random.Random, size: int, turns: int, shared: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = list(shared)
    while len(messages) < 2 * turns:
        role = ("assistant", "user")[len(messages) % 2]
        messages.append({"role": role if messages else "system", "content": text(rng, size // (2 * turns))})
    return messages


class World:
    """A router, its endpoints, and requests for them."""

    def __init__(self, bundle: TokenizerBundle, endpoints: int, size: int, turns: int, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.registry = ModelRegistry()
        keyer = self.registry.add_keyer(bundle)
        assert keyer.renderer is not None, "its template is not rendered here"
        self.keyer, self.renderer = keyer, cast(Renderer, keyer.renderer)
        self.picker = Picker()
        self.router = Router(self.picker, self.registry, Metrics(), clock=lambda: self.now, draw=lambda: 0.5)
        self.now = 0.0
        first = chat(rng, size, turns, [])
        self.chats = [first, *(chat(rng, size, turns, first[:turns]) for _ in range(PROMPTS - 1))]
        self.bodies = [{"model": MODEL, "messages": each, "max_tokens": 64} for each in self.chats]
        self.raw = [msgspec.json.encode(body) for body in self.bodies]
        self.keys = [keyer.key(self.render(number)) for number in range(PROMPTS)]
        for number in range(endpoints):
            name = f"e{number}"
            spec = EndpointSpec(name, f"10.0.{number >> 8}.{number & 255}:8000", models=(MODEL,), engine="treeline")
            pod = self.picker.add_endpoint(spec).pod
            self.registry.set_endpoint(name, spec.pool, spec.models, keyer.fingerprint)
            self.report(name)
            key = self.keys[number // 10 % PROMPTS] or b""
            self.store(pod, key, 0, len(key) // 2 if number % 10 else len(key))

    def render(self, number: int) -> Any:
        prompt = self.renderer.whole(self.bodies[number], dialect_of("treeline", "completions"))
        assert prompt is not None, "the chat is too long to be rendered here"
        return prompt

    def store(self, pod: Any, key: bytes, start: int, end: int) -> None:
        hashes = [hash(key[:at]) & ((1 << 64) - 1) for at in range(start + BLOCK, end + 1, BLOCK)]
        tokens = list(key[: len(hashes) * BLOCK])
        if hashes:
            self.picker.index.apply(pod, BlockStored(hashes, None, tokens, BLOCK), cast(PrefixKeys, Letters()))

    def report(self, name: str) -> None:
        rng = self.rng
        load = TreelineLoad(
            page_size=16,
            running=rng.randrange(64),
            max_running=64,
            waiting_uncached_tokens=rng.choice((0, 0, rng.randrange(5_000))),
            prefill_tokens_per_s=rng.uniform(9_000, 11_000),
            decode_step_ms=rng.uniform(5, 9),
            pages_total=10_000,
            pages_used=rng.randrange(9_990),
            pages_cached=9,
        )
        self.picker.on_load(name, load, self.now)

    def measured(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds of each step, by its name."""
        times: dict[str, list[float]] = {}

        def timed(step: str, call: Callable[..., Any], *given: Any) -> Any:
            begin = time.thread_time_ns()
            found = call(*given)
            times.setdefault(step, []).append((time.thread_time_ns() - begin) / 1e3)
            return found

        picker, index = self.picker, self.picker.index
        for each in range(rounds):
            number, self.now = each % PROMPTS, self.now + 0.005
            for _ in range(max(1, len(picker.endpoints) // 200)):
                self.report(f"e{self.rng.randrange(len(picker.endpoints))}")
            headers = {":path": "/v1/chat/completions", ":method": "POST", "x-request-id": f"r{each}"}
            request = RouteRequest(headers, self.raw[number], None)
            timed("json", msgspec.json.decode, self.raw[number])
            prompt = timed("render", self.render, number)
            key = timed("key", self.keyer.key, prompt)
            asked = PickRequest("id", model=MODEL, key=key, prompt_tokens_estimate=len(key) // 4, max_output_tokens=64)
            timed("match", index.match, MODEL, None, key, self.now)
            picker.has_ready("default", MODEL)  # takes the reports in
            timed("filter", rows_left, asked, picker._table)
            decision = timed("pick", picker.pick, asked, self.now)
            lease = timed("reserve", picker.reserve, decision, self.now)
            timed("close", picker.close, lease, self.now, Outcome.HEADERS)
            routed = timed("route", self.router.route, request)
            assert isinstance(routed, RoutedRequest), routed
            self.router.release(routed)
            picker.on_tick(self.now)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--template", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    bundle = TokenizerBundle.from_dir(ROOT / "models" / "tiny")
    if args.template is not None:
        bundle = TokenizerBundle.build(
            bundle.tokenizer_json,
            chat_template=args.template.read_text(),
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        )
    for size, (chars, turns) in CHATS.items():
        for endpoints in ENDPOINTS:
            world = World(bundle, endpoints, chars, turns, args.seed)
            world.measured(PROMPTS)
            gc.collect()
            gc.freeze()
            for step, times in world.measured(args.rounds).items():
                times.sort()
                for name, at in (("p50", len(times) // 2), ("p99", len(times) * 99 // 100)):
                    row = {"metric": f"decide.{step}_us.{size}.{endpoints}.{name}", "value": round(times[at], 1)}
                    sys.stdout.write(json.dumps({**row, "unit": "us"}) + "\n")
            sys.stdout.flush()
            gc.unfreeze()


if __name__ == "__main__":
    main()
