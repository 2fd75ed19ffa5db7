"""Measures the engine's speed in one process without HTTP: decode steps, prompts, a batch of requests; beside floors.

    python runtime/benchmarks/engine.py --shape llama8b

A *shape* is a model's config.json with random weights; `tiny` is for a CPU. Prints a row of JSON for each figure:

- `decode.SHAPE.bN.ctxC`: milliseconds of a step of N sequences that began with C tokens. N prompts are continued by 16
  and by 144 tokens (greedy); the difference, divided by 128, is a step without prompts and all else. A run before that
  is not counted, since the first run of a size includes one-time work.
- `prefill.SHAPE.N`: prompt tokens a second, of one uncached prompt of N tokens, the best of five.
- `first_token.SHAPE.N`: milliseconds from a prompt of N tokens to its first token, alone, the best of ten.
- `offline.SHAPE`: output tokens a second of 256 requests with 100 to 1,024 tokens in and out, temperature 0.6.
- `start.SHAPE`: seconds to build the engine: weights, kernels (unless compiled already), graphs.

Floors, as `floor.…`: a step moves all weights but the input embedding (of experts, the average number that its tokens
use) and the cache of all its sequences through memory once. A prompt takes two operations per weight that a token uses,
and four per pair of tokens, head and dimension, of which causality needs half. The device's limits are measured first:
bytes read and written by a large copy, and a large matrix product of random bfloat16 numbers. With `--ranks` each GPU
has its part of weights, cache and operations, and sums take no time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from treeline_runtime import Engine, SamplingParams

COMMON = {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "llama70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3_0_6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen3_30b_a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
DECODE = ((1, 512), (64, 1024), (256, 1024))
SHORT, LONG = 16, 144
PROMPT = 4096
SHORT_PROMPT = 64
OFFLINE = 256


def report(metric: str, value: float) -> None:
    sys.stdout.write(json.dumps({"metric": metric, "value": value}) + "\n")
    sys.stdout.flush()


class Bench:
    """One engine of one shape."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        self.name = name
        self.shape = SHAPES[name]
        self.ranks = config.get("tp_size", 1)
        self.weight_bytes = 1 if config.get("quantization") == "fp8" else 2
        (folder / "config.json").write_text(json.dumps(self.shape | COMMON))
        started = time.perf_counter()
        self.engine = Engine(folder, load_format="dummy", context_length=8192, **config)
        self.synchronize()
        report(f"start.{name}", time.perf_counter() - started)
        self.limits = self.engine.scheduler.limits

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def run(self, batch: int, context: int, output: int) -> float:
        """Seconds for so many fresh prompts."""
        prompts = [random.choices(range(10, 4000), k=context) for _ in range(batch)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=output)
        started = time.perf_counter()
        outputs = self.engine.generate(prompts, params)
        seconds = time.perf_counter() - started
        assert all(len(each.token_ids) == output for each in outputs)
        return seconds

    def step_ms(self, batch: int, context: int, rounds: int) -> float:
        """The median of some rounds. Raises RuntimeError where other work of the machine took longer than the steps."""
        self.run(batch, context, SHORT)
        steps = []
        for _ in range(rounds):
            short = self.run(batch, context, SHORT)
            steps.append((self.run(batch, context, LONG) - short) / (LONG - SHORT) * 1e3)
        step = statistics.median(steps)
        if step <= 0:
            raise RuntimeError(f"{LONG} tokens took no longer than {SHORT}: measure again, or with more --rounds")
        return step

    def offline(self, count: int, most: int) -> float:
        """Output tokens a second."""
        rng = random.Random(0)
        prompts = [rng.choices(range(10, 4000), k=rng.randint(most // 10, most)) for _ in range(count)]
        lengths = [rng.randint(most // 10, most) for _ in range(count)]
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_new_tokens=length) for length in lengths]
        started = time.perf_counter()
        self.engine.generate(prompts, params)
        return sum(lengths) / (time.perf_counter() - started)

    def floors(self, bandwidth: float, rate: float) -> None:
        """Reports the best possible figures of a device with this many bytes and operations a second."""
        shape = self.shape
        hidden, layers, dim = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        for batch, context in DECODE:
            layer = attention + feed_forward_weights(shape, batch)
            weights = (self.weight_bytes * layers * layer + 2 * hidden * shape["vocab_size"]) / self.ranks
            cache = batch * (context + (SHORT + LONG) / 2) * self.limits.kv_bytes_per_token
            report(f"floor.decode.{self.name}.b{batch}.ctx{context}", (weights + cache) / bandwidth * 1e3)
        layer = attention + feed_forward_weights(shape, 1)
        operations = 2 * layers * layer * PROMPT + 2 * layers * heads * dim * PROMPT**2
        report(f"floor.prefill.{self.name}.{PROMPT}", self.ranks * PROMPT / (operations / rate))


def feed_forward_weights(shape: dict[str, Any], tokens: int) -> float:
    """Elements of a layer that so many tokens read, if each goes to any of the experts."""
    hidden = shape["hidden_size"]
    if "num_experts" not in shape:
        return float(3 * hidden * shape["intermediate_size"])
    experts = shape["num_experts"]
    met = experts * (1 - (1 - shape["num_experts_per_tok"] / experts) ** tokens)
    return float(hidden * (experts + 3 * met * shape["moe_intermediate_size"]))


def copy_bytes_s() -> float:
    """Bytes read and written by a second of copying."""
    size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source))


def multiply_flop_s() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: torch.mm(a, b))


def seconds_of(work: Any) -> float:
    """The median of ten, by the device's clock."""
    times = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs that share the model (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="of each decode figure (default: 3)")
    parser.add_argument("--quick", action="store_true", help="small batches, one round: proves that it works")
    parser.add_argument("--set", default="{}", metavar="JSON", help='fields of the configuration, {"page_size": 64}')
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        # before the engine takes the memory
        ceilings = (copy_bytes_s(), multiply_flop_s()) if torch.cuda.is_available() and not args.quick else None
        torch.cuda.empty_cache()
        bench = Bench(args.shape, Path(folder), {"tp_size": args.ranks} | json.loads(args.set))
        if ceilings is None:
            report(f"decode.{args.shape}.b4.ctx64", bench.step_ms(4, 64, 1))
            report(f"prefill.{args.shape}.512", 512 / bench.run(1, 512, 1))
            report(f"offline.{args.shape}", bench.offline(8, 64))
            return 0
        bandwidth, rate = ceilings
        report(f"device.copy_tb_s.{args.shape}", bandwidth / 1e12)
        report(f"device.multiply_tflop_s.{args.shape}", rate / 1e12)
        bench.floors(bandwidth, rate)
        for batch, context in ((1, 8), (4, 64), (64, 256)):  # warms up kernels and choices
            bench.run(batch, context, 8)
        for batch, context in DECODE:
            report(f"decode.{args.shape}.b{batch}.ctx{context}", bench.step_ms(batch, context, args.rounds))
        bench.run(1, PROMPT, 1)
        report(f"prefill.{args.shape}.{PROMPT}", PROMPT / min(bench.run(1, PROMPT, 1) for _ in range(5)))
        bench.run(1, SHORT_PROMPT, 1)
        first = min(bench.run(1, SHORT_PROMPT, 1) for _ in range(10))
        report(f"first_token.{args.shape}.{SHORT_PROMPT}", first * 1e3)
        bench.offline(4, 64)
        report(f"offline.{args.shape}", bench.offline(OFFLINE, 1024))
    return 0


if __name__ == "__main__":
    sys.exit(main())
