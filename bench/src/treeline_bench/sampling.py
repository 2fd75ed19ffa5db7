"""Benchmark `sampling`: does a request with a seed get the same answer alone and among others?

Method. One runtime (`treeline serve`) of the tiny model answers `PROMPTS` prompts of `PROMPT_TOKENS` random words, each
with a seed of its own, temperature 1, `OUTPUT_TOKENS` tokens: one after another, then `AT_ONCE` at once in another
order, with an empty cache each time. A batch sums in another order than a single row does, so its logits differ in the
last bits; a sampler that is sensitive to those shows it here. `sampling.equal` is the share of answers that are the
same to the last token. With a GPU the runtime takes it, unless CUDA_VISIBLE_DEVICES hides it.
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from treeline_bench.context import Benchmark, Context
from treeline_bench.metrics import row
from treeline_bench.processes import child, free_ports
from treeline_bench.prompts import PromptMaker
from treeline_bench.results import Row

PROMPTS, QUICK_PROMPTS = 200, 12
PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 48, 48, 64


@dataclass(frozen=True)
class Asked:
    """A request and its seed."""

    prompt: str
    seed: int

    def body(self) -> bytes:
        settings = {"temperature": 1.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "logprobs": 0}
        return json.dumps({"prompt": self.prompt, "seed": self.seed, **settings}).encode()


def run(context: Context) -> list[Row]:
    maker, rng = PromptMaker.of_model(context.model), random.Random(0)
    count = QUICK_PROMPTS if context.quick else PROMPTS
    asked = [Asked(maker.text(PROMPT_TOKENS, rng), seed) for seed in range(count)]
    port, admin_port = free_ports(2)
    url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    argv = [sys.executable, "-m", "treeline_runtime", "--model", str(context.model), "--no-events"]
    argv += ["--port", str(port), "--admin-port", str(admin_port)]
    with child("runtime", argv, context.folder) as runtime, ThreadPoolExecutor(AT_ONCE) as threads:
        runtime.wait_ready(f"{url}/ready", 120)
        context.display.phase("sampling: one after another", count)
        alone = []
        for one in asked:
            alone.append(_tokens(url, one))
            context.display.done(1)
        _post(f"{admin_url}/flush_cache", b"")
        context.display.phase(f"sampling: {AT_ONCE} at once")
        order = rng.sample(range(count), count)
        among = dict(zip(order, threads.map(lambda i: _tokens(url, asked[i]), order), strict=True))
    equal = sum(among[i] == alone[i] for i in range(count))
    return [row("sampling.equal", equal / count), row("sampling.compared", count)]


def _tokens(url: str, asked: Asked) -> list[str]:
    choice = json.loads(_post(f"{url}/v1/completions", asked.body()))["choices"][0]
    tokens: list[str] = choice["logprobs"]["tokens"]
    return tokens


def _post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        said: bytes = answer.read()
    return said


BENCHMARK = Benchmark("sampling", "Seeded sampling", "the same answer alone and among others (a minute)", run)
