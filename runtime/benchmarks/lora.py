"""Measures what adapters cost: batches without any on an engine that serves them, and batches of many.

    python runtime/benchmarks/lora.py --shape tiny

Two engines with the same random weights decode the same batch one after the other, in turns. One serves adapters of all
attention and feed-forward layers, and knows more of them than it has slots. Prints a row of JSON for each figure, of
BATCH requests; a share is the median of the rounds' shares, without the first round.

- `lora.base_share`: tokens per second without adapters, by the engine that serves them ÷ by the other.
- `lora.throughput_share`: the same, when each request has an adapter of its own, of which half are in slots before.
- `lora.crowded_share`: the same with slots for half of these adapters only, so that requests wait for their turn.
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


def shares(plain: Engine, served: Engine, work: Work, names: list[str], rounds: int) -> tuple[float, float]:
    """Tokens per second by `served` without adapters, and with one for each request, ÷ by `plain`."""
    rng, base, share = random.Random(0), list[float](), list[float]()
    asked = rng.sample(names, BATCH)
    for _ in range(rounds + 1):
        others = [name for name in names if name not in asked]
        asked = rng.sample(asked, BATCH // 2) + rng.sample(others, BATCH // 2)
        turns = [(plain, None), (served, None), (served, asked)]
        found = {turn: tokens_s(turns[turn][0], work, turns[turn][1]) for turn in rng.sample(range(3), 3)}
        base.append(found[1] / found[0])
        share.append(found[2] / found[0])
    return statistics.median(base[1:]), statistics.median(share[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--known", type=int, default=100, help="adapters that are loaded")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few short answers: proves that it works")
    args = parser.parse_args()
    rounds, output, known = (2, 8, 2 * BATCH) if args.quick else (args.rounds, 256, args.known)
    shape, work = SHAPES[args.shape], Work.streams(BATCH, 64, output)
    settings = {"load_format": "dummy", "max_running_requests": BATCH, "max_total_tokens": 2 * BATCH * (64 + output)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(shape | COMMON))
        names = write_adapters(folder, shape, known)
        adapters = {"lora_root": place, "max_lora_rank": RANK, "max_lora_memory": 1 << 40}
        with Engine(folder, **settings) as plain:
            for slots, name in ((BATCH, "throughput"), (BATCH // 2, "crowded")):
                with Engine(folder, **settings, **adapters, max_loras=slots) as served:
                    began = time.perf_counter()
                    for adapter in names:
                        served.load_lora_adapter(adapter, adapter)
                    load_s = (time.perf_counter() - began) / known
                    base, share = shares(plain, served, work, names, rounds)
                if name == "throughput":
                    report("lora.base_share", base)
                    report("lora.load_s", load_s)
                report(f"lora.{name}_share", share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
