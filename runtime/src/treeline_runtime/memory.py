"""The division of memory: bytes per token, reserves for steps, and limits that follow from a GPU's size.

No torch here: `treeline size` computes with it what `treeline serve` is going to allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from treeline_runtime.config import ConfigError, EngineConfig, SchedulerConfig
from treeline_runtime.models.config import read_config
from treeline_runtime.models.eagle_config import read_eagle
from treeline_runtime.models.model_config import ModelConfig

GIB = 1 << 30
DEFAULT_FRACTION = 0.85
"""Share of a CUDA device's memory for weights and KV pool."""
OTHER_BYTES = 5 * GIB // 4
"""FlashInfer's workspace (384 MiB), graphs (of decode 0.3 GiB for Qwen3-0.6B and Llama-8B, of prompts 0.5 and 0.2)."""
CHAIN_BYTES = 3 * GIB // 2
"""What guesses on the device copy: see `scheduler.chains`."""
EMBEDDINGS_BYTES = 1 * GIB
"""Embeddings of images and videos that are kept on the device: of 32,768 tokens, for Qwen3-VL-8B."""
ENCODER_BYTES = 2 * EMBEDDINGS_BYTES + GIB
"""With those that a step adds, and what the encoder needs meanwhile."""
LARGEST_GRAPH = 256
"""Sequences: beyond them a step is long enough to hide its launches."""
_LEAST, _MOST = 256, 4096
_WORTH = 1.1e11
"""Weights of a layer times tokens, beyond which the device needs longer for a layer than the host to launch it: about
360 µs, of which an H200 makes 600 TFLOP/s."""


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step's size."""

    running: int
    """Requests computed at once."""
    chunk: int
    """Prompt tokens of a step."""
    graph_batch: int
    """Sequences of the largest decode step that is captured as a CUDA graph."""
    graph_tokens: int
    """Tokens of the largest step of prompts that is captured."""


def bytes_per_token(model: ModelConfig, element_bytes: int) -> int:
    """Bytes per token of the KV cache: keys and values of every layer, also of layers with a window, which keep all."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes


def kv_heads_of_ranks(config: EngineConfig, model: ModelConfig) -> int:
    """Key and value heads that all ranks have together: ranks that are more than the heads have copies of them."""
    return max(model.num_kv_heads, config.tp_size)


def draft_bytes_per_token(config: EngineConfig, model: ModelConfig, element_bytes: int) -> int:
    """Bytes per token of what a drafter keeps in the same pages: keys and values, and of a head the token's features.
    Raises ModelError."""
    path = config.speculative_draft_model_path
    if path is None:
        return 0
    if config.speculative_algorithm == "STANDALONE":
        return bytes_per_token(read_config(path), element_bytes)
    layer = read_eagle(path, model).layer
    return bytes_per_token(layer, element_bytes) + layer.hidden_size * element_bytes


def step_limits(config: SchedulerConfig, model: ModelConfig, cuda_bytes: int | None) -> StepLimits:
    """cuda_bytes: memory of the device; None: on a CPU."""
    chunk = config.chunked_prefill_size or (1024 if cuda_bytes is None else _chunk(cuda_bytes))
    running = config.max_running_requests or (64 if cuda_bytes is None else 256)
    graphs = min(
        running * (1 + config.most_guesses), LARGEST_GRAPH if config.max_graph_batch is None else config.max_graph_batch
    )
    prompts = min(worth_capturing(model) if config.max_graph_tokens is None else config.max_graph_tokens, chunk)
    if config.pp_size > 1:  # what stages send each other is not captured
        graphs = prompts = 0
    return StepLimits(running, chunk, graphs, prompts)


def worth_capturing(model: ModelConfig) -> int:
    """Tokens of a step up to which graphs save time."""
    heads = model.num_heads + model.num_kv_heads
    inner = model.intermediate_size if model.moe is None else model.moe.top_k * model.moe.intermediate_size
    weights = model.hidden_size * (2 * heads * model.head_dim + 3 * inner)
    tokens = -(-int(_WORTH / weights) // 64) * 64
    return min(max(tokens, _LEAST), _MOST)


def reserved_bytes(
    limits: StepLimits, context_length: int, model: ModelConfig, element_bytes: int, ranks: int = 1
) -> int:
    """Bytes on a CUDA device besides weights and KV pool. ranks: whose tokens the experts here compute."""
    tables = 2 * 8 * (limits.running + 1) * context_length
    logits = limits.graph_batch * model.vocab_size * element_bytes
    experts = 0
    if model.moe is not None:  # each token of a step as often as it has experts, between their products and after
        experts = ranks * model.moe.top_k * (model.moe.intermediate_size + model.hidden_size)
    # a step's intermediate tensors stay with its graphs: the stream, plain and normed, and the widest one between
    heads = 3 * model.num_heads + 2 * model.num_kv_heads
    captured = 2 * model.hidden_size + max(3 * model.intermediate_size, heads * model.head_dim, experts)
    steps = (limits.chunk * experts + limits.graph_tokens * captured) * element_bytes
    return tables + logits + steps + OTHER_BYTES + (ENCODER_BYTES if model.vision or model.audio else 0)


def kv_budget(config: EngineConfig, free: int, total: int) -> int:
    """Bytes of a CUDA device for the KV pool and the reserves of steps. free: bytes free once weights are loaded."""
    return int(free - total * (1 - (config.mem_fraction or DEFAULT_FRACTION)))


def resolve_context_length(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens per request: the configured number, checked against the model, or the model's training length."""
    if config.context_length is None:
        return model.max_position
    if config.context_length > model.longest_context:
        raise ConfigError(
            f"context_length {config.context_length} exceeds the model's {model.longest_context} positions: set at "
            "most these, or leave it out"
        )
    return config.context_length


def _chunk(total: int) -> int:
    if total < 20 * GIB:
        return 2048
    if total < 60 * GIB:
        return 4096
    return 8192 if total < 160 * GIB else 16384
