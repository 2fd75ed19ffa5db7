"""`treeline size` computes the memory that the runtime allocates; its speeds are near the measured ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from treeline.size.estimate import CONTEXT_BYTES, Fit, Load, Speed, fit, replicas
from treeline.size.gpus import GIB, GPUS, Gpu, gpu
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.kvcache.pool import KVPool
from treeline_runtime.memory import bytes_per_token
from treeline_runtime.models import ModelConfig
from treeline_runtime.models.config import parse_config
from treeline_runtime.models.quantization.fp8 import E4M3
from treeline_runtime.models.shards import Rank, own
from treeline_runtime.scheduler import resolve

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests" / "runtime" / "models" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
SETTINGS = SchedulerConfig(model="m")


def model(name: str) -> ModelConfig:
    return parse_config(json.loads((CONFIGS / f"{name}.json").read_text()), {})


# ---- what fits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("name", NAMES)
def test_a_token_takes_what_the_pool_allocates_for_it(name, stored):
    shape = model(name)
    pool = KVPool(
        num_layers=shape.num_layers,
        num_pages=2,
        page_size=16,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        stored=stored,
    )
    bytes_of_pages = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert bytes_of_pages == 3 * 16 * bytes_per_token(shape, 1 if stored else 2)  # a page pads batches


VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"mem_fraction": 0.95},
    {"context_length": 2048},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"tp_size": 4},
    {"pp_size": 2},
)
CASES = [
    (name, settings, gpu_name)
    for name in NAMES
    for settings in VARIED
    for gpu_name in ("h200", "l4", "t4")
    # others are refused, see below
    if not ("quantization" in settings and model(name).moe)
    and not ("kv_cache_dtype" in settings and gpu_name == "t4")
    and not ({"tp_size", "pp_size"} & set(settings) and model(name).vision)
]


@pytest.mark.parametrize(("name", "settings", "gpu_name"), CASES)
def test_the_cache_has_as_many_tokens_as_serve_would_give_it(name, settings, gpu_name, monkeypatch):
    """The runtime's own `resolve` computes it, on a stub of a GPU with a size and the memory that the weights leave."""
    shape, device = model(name), GPUS[gpu_name]
    config = SchedulerConfig(model="m", device="cuda", **settings)
    found = fit(shape, config, device)
    left = device.memory - found.weights - CONTEXT_BYTES
    capability = (9, 0) if device.has_fp8 else (7, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=device.memory))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (left, device.memory))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found.weights)
    ranks = [Rank(0, config.tp_size, stage, config.pp_size) for stage in range(config.pp_size)]
    # the last stage has no more room than another: it has head and norm, and as many layers
    decoder = SimpleNamespace(config=shape, own=own(shape, ranks[-1]), pooler=None, drafter=None)
    if found.cache_tokens:
        limits = resolve.resolve(config, decoder)  # type: ignore[arg-type]
        assert limits.max_total_tokens == found.cache_tokens
        assert limits.kv_bytes_per_token == found.kv_bytes_per_token
        assert limits.max_running_requests == found.running
        assert str(limits.dtype).removeprefix("torch.") == found.dtype
    else:
        assert found.shortage > 0
        with pytest.raises(ConfigError, match="no memory left for the KV pool"):
            resolve.resolve(config, decoder)  # type: ignore[arg-type]


def test_the_shortfall_equals_the_missing_memory():
    shape = model("Llama-3.1-8B")
    short = fit(shape, SETTINGS, Gpu("x", 18 * GIB))
    assert short.cache_tokens == 0
    enough = fit(shape, SETTINGS, Gpu("x", 18 * GIB + math.ceil(short.shortage / 0.85)))
    assert enough.cache_tokens == 16


def test_settings_that_do_not_go_together_are_refused_as_serve_refuses_them():
    with pytest.raises(ConfigError, match="has experts"):
        fit(model("Mixtral-8x7B"), replace(SETTINGS, quantization="fp8"), GPUS["h200"])
    with pytest.raises(ConfigError, match="needs a GPU from Ada on; a100-80 is older"):
        fit(model("Llama-3.1-8B"), replace(SETTINGS, kv_cache_dtype="fp8_e4m3"), GPUS["a100-80"])


def test_fp8_saves_nothing_on_a_gpu_that_cannot_multiply_it():
    shape, fp8 = model("Llama-3.1-8B"), replace(SETTINGS, quantization="fp8")
    assert fit(shape, fp8, GPUS["a100-80"]).weights == fit(shape, SETTINGS, GPUS["a100-80"]).weights
    assert fit(shape, fp8, GPUS["h100"]).weights < 0.6 * fit(shape, SETTINGS, GPUS["h100"]).weights


@pytest.mark.parametrize(("text", "gib"), [("H100", 79.2), ("24", 24), ("48GiB", 48), ("16 gb", 16), ("1.5", 1.5)])
def test_gpus_are_named_or_sized(text, gib):
    assert gpu(text).memory == int(gib * GIB)


# ---- how fast -------------------------------------------------------------------------------------------------

SHAPES = {"llama8b": "Llama-3.1-8B", "qwen3_0_6b": "Qwen3-0.6B", "qwen3_30b_a3b": "Qwen3-30B-A3B"}
DECODED = 80
"""About as many tokens as the benchmark's sequences have grown by when it measures."""


def speed(name: str) -> Speed:
    shape = model(name)
    return Speed(shape, fit(shape, SETTINGS, GPUS["h200"]))


def test_speeds_are_within_a_quarter_of_those_measured_on_an_h200():
    rows = {row["metric"]: row["value"] for row in json.loads((ROOT / "bench/results/engine.json").read_text())["rows"]}
    errors = {}
    for short, name in SHAPES.items():
        estimate = speed(name)
        for batch, context in ((1, 512), (64, 1024), (256, 1024)):
            metric = f"engine.decode.{short}.b{batch}.ctx{context}"
            errors[metric] = 1000 * estimate.step_s(batch, context + DECODED) / rows[metric] - 1
        metric = f"engine.prefill.{short}.4096"
        errors[metric] = 4096 / estimate.prefill_s(4096) / rows[metric] - 1
    assert len(errors) == 12
    assert {metric: error for metric, error in errors.items() if abs(error) > 1 / 4} == {}


def found(tokens: int = 10**6) -> Fit:
    return replace(fit(model("Llama-3.1-8B"), SETTINGS, GPUS["h200"]), cache_tokens=tokens)


def test_more_load_needs_more_replicas_and_a_cached_prefix_fewer():
    estimate = speed("Llama-3.1-8B")
    counts = [replicas(Load(rate, 4000, 200), found(), estimate) for rate in (0.1, 10, 20, 40)]
    assert [one.count for one in counts if one] == sorted(one.count for one in counts if one)
    assert counts[0] is not None
    assert counts[0].count == 1
    assert counts[-1] is not None
    cached = replicas(Load(40, 4000, 200, 0.9), found(), estimate)
    assert cached is not None
    assert cached.count < counts[-1].count
    assert cached.prefill_s < counts[-1].prefill_s / 5


def test_each_replica_has_the_sequences_that_littles_law_gives_it():
    load = Load(30, 1000, 300)
    needed = replicas(load, found(), speed("Llama-3.1-8B"))
    assert needed is not None
    assert needed.batch == pytest.approx(load.requests_s / needed.count * load.output_tokens * needed.token_s, rel=0.05)
    assert needed.batch < found().sequences(1300)


def test_a_load_whose_requests_do_not_fit_has_no_replicas():
    estimate = speed("Llama-3.1-8B")
    assert replicas(Load(1, 900, 200), found(tokens=1000), estimate) is None
    assert replicas(Load(1, 200_000, 200), found(), estimate) is None


def test_windows_save_time_and_no_memory():
    windowed = model("gemma-3-1b")
    full = replace(windowed, scoring=replace(windowed.scoring, windows=()))
    both = [fit(shape, SETTINGS, GPUS["h200"]) for shape in (windowed, full)]
    assert both[0].cache_tokens == both[1].cache_tokens
    steps = [Speed(shape, one).step_s(64, 30_000) for shape, one in zip((windowed, full), both, strict=True)]
    assert steps[0] < steps[1] / 2


def test_a_step_of_few_tokens_reads_few_experts():
    estimate = speed("Qwen3-30B-A3B")
    assert estimate.step_s(1, 10) < estimate.step_s(64, 10) / 4
    assert estimate.step_s(128, 10) < estimate.step_s(64, 10) * 1.2
