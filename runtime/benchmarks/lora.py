"""Measures what adapters cost: batches without any on an engine that serves them, and batches of many.

    python runtime/benchmarks/lora.py --shape tiny

Two engines with the same random weights decode the same batch one after the other, in turns. One serves adapters of all
attention and feed-forward layers, more of them than it has slots. Prints a row of JSON for each figure, of BATCH
requests; a share is the median of the rounds' shares, without the first round.

- `lora.base_share`: tokens per second without adapters, by the engine that serves them ÷ by the other.
- `lora.throughput_share`: the same, when each request has one of the adapters.
- `lora.load_s`: seconds to load an adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine import COMMON, SHAPES, report
from safetensors.torch import save_file
from treeline_runtime import Engine, SamplingParams
from work import Work

BATCH, RANK = 32, 16


def write_adapters(folder: Path, shape: dict[str, int], count: int) -> list[str]:
    """Writes adapters of random numbers; returns their names."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    wide, narrow = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes = {"q_proj": (wide, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden), "o_proj": (hidden, wide)}
    sizes = {f"self_attn.{name}": size for name, size in sizes.items()}
    sizes |= {f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")} | {"mlp.down_proj": (hidden, inner)}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    for number in range(count):
        tensors = {}
        for layer in range(shape["num_hidden_layers"]):
            for name, (outputs, inputs) in sizes.items():
                module = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, inputs).bfloat16() * inputs**-0.5
                tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, RANK).bfloat16() * 0.05
        (folder / str(number)).mkdir()
        save_file(tensors, folder / str(number) / "adapter_model.safetensors")
        (folder / str(number) / "adapter_config.json").write_text(json.dumps(config))
    return [str(number) for number in range(count)]


def tokens_s(engine: Engine, work: Work, adapters: list[str] | None = None) -> float:
    """Output tokens per second of all requests at once, with no page from before."""
    engine.flush_cache()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=work.lengths[0])

    async def run() -> None:
        options = [{"lora_path": name} for name in adapters] if adapters else [{}] * BATCH
        asked = zip(work.prompts, options, strict=True)
        await asyncio.gather(*(engine.async_generate(ids, params, **each) for ids, each in asked))

    began = time.perf_counter()
    asyncio.run(run())
    return sum(work.lengths) / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--known", type=int, default=100, help="adapters that are loaded")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="few short answers: proves that it works")
    args = parser.parse_args()
    rounds, output, known = (2, 8, 4) if args.quick else (21, 64, args.known)
    shape, work = SHAPES[args.shape], Work.streams(BATCH, 64, output)
    settings = {"load_format": "dummy", "max_running_requests": BATCH, "max_total_tokens": 2 * BATCH * (64 + output)}
    rng, base_shares, shares = random.Random(0), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(shape | COMMON))
        names = write_adapters(folder, shape, known)
        adapters = {"lora_root": place, "max_loras": args.slots, "max_lora_rank": RANK, "max_lora_memory": 1 << 40}
        with Engine(folder, **settings) as plain, Engine(folder, **settings, **adapters) as served:
            began = time.perf_counter()
            for name in names:
                served.load_lora_adapter(name, name)
            load_s = (time.perf_counter() - began) / known
            for _ in range(rounds):
                turns = [(plain, None), (served, None), (served, rng.choices(names, k=BATCH))]
                found = {turn: tokens_s(turns[turn][0], work, turns[turn][1]) for turn in rng.sample(range(3), 3)}
                base_shares.append(found[1] / found[0])
                shares.append(found[2] / found[0])
    report("lora.base_share", statistics.median(base_shares[1:]))
    report("lora.throughput_share", statistics.median(shares[1:]))
    report("lora.load_s", load_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
