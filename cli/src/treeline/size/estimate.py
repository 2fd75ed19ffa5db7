"""Computes what fits on a GPU, which is arithmetic, and how fast it is, which is an estimate. No I/O.

The estimate has two rules. A decode step reads each weight that it uses and all visible keys and values once, at
`BANDWIDTH_SHARE` of the data sheet's bandwidth, plus `STEP_S`. A prompt is computed at `FLOP_SHARE` of the data sheet's
dense 16-bit FLOP/s. The three numbers were fitted to this engine on an H200; docs/capacity.md compares the rules with
the measurements, and `tests/cli/size/test_estimate.py` checks them.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.memory import bytes_per_token, kv_budget, reserved_bytes, resolve_context_length, step_limits
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.model_config import ModelConfig
from treeline_runtime.models.quantization.scheme import ONLINE
from treeline_runtime.models.shards import Rank, check_ranks, own
from treeline_runtime.models.sizes import Part, parts_of

from treeline.size.gpus import Gpu

BANDWIDTH_SHARE = 0.70
STEP_S = 0.0005
FLOP_SHARE = 0.48
ALL_REDUCE_S = 8e-6
"""Seconds for which GPUs add a decode step's hidden states, twice a layer: measured on two H200, 64 sequences."""
BUSY = 0.7
"""Share of a replica's throughput that a load may take; the rest is for bursts."""
CONTEXT_BYTES = 600 << 20
"""Bytes of a device that CUDA itself takes: 595 MiB on an H200."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Load:
    """The requests of clients."""

    requests_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_share: float = 0.0
    """Share of the prompt's tokens that the cache has already."""


@dataclass(frozen=True)
class Fit:
    """A model on one GPU, or on several that share it. Bytes are those of each."""

    gpu: Gpu
    dtype: str
    kv_dtype: str
    tp_size: int
    pp_size: int
    parts: list[Part]
    reserved: int
    """Bytes for tables, workspaces, graphs and CUDA."""
    kv_bytes_per_token: int
    cache_tokens: int
    """0: the model does not fit."""
    shortage: int
    """Bytes that are missing for the first page of the cache."""
    context_length: int
    running: int
    """Requests that are computed at once, at most."""

    @property
    def gpus(self) -> int:
        """GPUs that share the model."""
        return self.tp_size * self.pp_size

    @property
    def weights(self) -> int:
        return sum(part.bytes for part in self.parts)

    def sequences(self, tokens: int) -> int:
        """The number of sequences of this length that are computed at once."""
        return min(self.cache_tokens // tokens, self.running)


def fit(model: ModelConfig, config: SchedulerConfig, gpu: Gpu) -> Fit:
    """Computes the fit with the defaults of `treeline serve`, for the stage with the least room. Raises ConfigError or
    ModelError if settings, model and GPU do not go together."""
    check_ranks(model, config.tp_size, config.pp_size, config.ep_size)
    ranks = (Rank(0, config.tp_size, stage, config.pp_size) for stage in range(config.pp_size))
    return min((_fit_of(model, config, gpu, rank) for rank in ranks), key=lambda one: (one.cache_tokens, -one.shortage))


def _fit_of(model: ModelConfig, config: SchedulerConfig, gpu: Gpu, rank: Rank) -> Fit:
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpu.has_bfloat16 else "float16"
    scheme = model.quantization or (ONLINE if config.quantization == "fp8" else None)
    if scheme is not None and model.moe is not None:
        raise ConfigError(f"--quantization fp8 is not supported for {model.architecture}, which has experts")
    if config.kv_cache_dtype != "auto" and not gpu.has_fp8:
        raise ConfigError(f"--kv-dtype {config.kv_cache_dtype} needs a GPU from Ada on; {gpu.name} is older")
    element = ELEMENT_BYTES[dtype]
    mine = own(model, rank, config.ep_size)
    kv_bytes = bytes_per_token(mine, element if config.kv_cache_dtype == "auto" else 1)
    # an older GPU cannot multiply fp8, so it keeps the weights unquantised
    parts = parts_of(model, element, scheme if gpu.has_fp8 else None, rank, config.ep_size)
    limits = step_limits(config, mine, gpu.memory)
    context_length = resolve_context_length(config, model)
    reserved = reserved_bytes(limits, context_length, mine, element) + CONTEXT_BYTES
    left = kv_budget(config, gpu.memory - sum(part.bytes for part in parts), gpu.memory) - reserved
    page_bytes = kv_bytes * config.page_size
    return Fit(
        gpu=gpu,
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        parts=parts,
        reserved=reserved,
        kv_bytes_per_token=kv_bytes,
        cache_tokens=max(left, 0) // page_bytes * config.page_size,
        shortage=max(page_bytes - left, 0),
        context_length=context_length,
        running=limits.running,
    )


class Speed:
    """The speed of a model on a GPU with a known data sheet."""

    def __init__(self, model: ModelConfig, found: Fit) -> None:
        assert found.gpu.tb_s is not None
        assert found.gpu.tflop_s is not None
        self._model, self._fit = model, found
        self._bytes_s = found.gpu.tb_s * 1e12 * BANDWIDTH_SHARE
        self._flop_s = found.gpu.tflop_s * 1e12 * FLOP_SHARE

    def step_s(self, batch: int, context: float) -> float:
        """Seconds of a decode step of `batch` sequences with `context` tokens each."""
        moved = self._weights(batch) + batch * self._seen(context) * self._fit.kv_bytes_per_token
        sums = 2 * self._model.num_layers * ALL_REDUCE_S if self._fit.tp_size > 1 else 0.0
        return STEP_S + sums + self._fit.pp_size * moved / self._bytes_s  # one stage after another

    def prefill_s(self, tokens: float, cached: float = 0.0) -> float:
        """Seconds to compute `tokens` of a prompt that follow `cached` ones."""
        model = self._model
        matrices = ("embedding", "language-model head")  # only a prompt's last token goes to the head
        weights = sum(part.active for part in self._fit.parts if part.name not in matrices)
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * self._seen(cached + tokens / 2)
        return tokens * (2 * weights + attention) / (self._flop_s * self._fit.tp_size)

    def _weights(self, batch: int) -> float:
        """Bytes that a step of `batch` tokens reads; of the experts, only the chosen ones."""
        moe, total = self._model.moe, 0.0
        for part in self._fit.parts:
            if part.name == "experts" and moe is not None:
                total += part.bytes * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
            elif part.active:
                total += part.bytes
        return total

    def _seen(self, context: float) -> float:
        """Tokens that attention sees, averaged over layers: a window hides earlier ones."""
        windows = self._model.scoring.windows or (None,)
        return sum(min(context, window or math.inf) for window in windows) / len(windows)


@dataclass(frozen=True)
class Replicas:
    """The replicas that a load needs."""

    count: int
    batch: float
    """Sequences that each replica computes at once."""
    token_s: float
    """Seconds between two tokens of an answer."""
    prefill_s: float
    """Seconds to compute a prompt without its cached part."""


def replicas(load: Load, found: Fit, speed: Speed) -> Replicas | None:
    """Computes the replicas for a load; None if not even one of its requests fits."""
    tokens = load.prompt_tokens + load.output_tokens
    largest = found.sequences(tokens)
    if largest == 0 or tokens > found.context_length:
        return None
    context = load.prompt_tokens + load.output_tokens / 2
    cached = load.prompt_tokens * load.prefix_share
    prefill_s = speed.prefill_s(load.prompt_tokens - cached, cached)
    # a full replica spends on a request its prefill and the request's share of each of its steps
    request_s = prefill_s + load.output_tokens * speed.step_s(largest, context) / largest
    count = max(1, math.ceil(load.requests_s * request_s / BUSY))
    each = load.requests_s / count
    batch = token_s = 0.0
    for _ in range(100):  # Little's law: a longer step means more sequences, and these a longer step
        token_s = speed.step_s(max(1, round(batch)), context) / (1 - each * prefill_s)
        batch = min(each * load.output_tokens * token_s, largest)
    return Replicas(count, batch, token_s, prefill_s)


def with_fp8(config: SchedulerConfig) -> SchedulerConfig:
    return replace(config, quantization="fp8")


def smallest_tp_size(model: ModelConfig, config: SchedulerConfig, gpu: Gpu) -> int | None:
    """GPUs of this kind that hold the model together, up to the eight of a machine; None if these do not."""
    for tp_size in (size for size in (2, 4, 8) if size > config.tp_size):
        with contextlib.suppress(ConfigError, ModelError):
            ep_size = tp_size if config.ep_size > 1 else 1
            if fit(model, replace(config, tp_size=tp_size, ep_size=ep_size), gpu).cache_tokens:
                return tp_size
    return None
