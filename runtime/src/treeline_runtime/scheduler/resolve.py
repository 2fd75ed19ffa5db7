"""What "auto" came to: limits that follow from configuration, model and machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.config import ModelConfig
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import resolve_context_length, resolve_device, resolve_dtype, resolve_kv_dtype
from treeline_runtime.scheduler.memory import bytes_per_token, num_pages
from treeline_runtime.scheduler.prompt_graphs import worth_capturing

GIB = 1 << 30
OTHER_BYTES = 5 * GIB // 4
"""FlashInfer's workspace (384 MiB), graphs (of decode 0.3 GiB for the shapes of Qwen3-0.6B and Llama-8B, of prompts 0.5
and 0.2)."""
LARGEST_GRAPH = 256
"""Sequences: beyond them a step is long enough to hide its launches."""


@dataclass(frozen=True)
class Resolved:
    """Limits in force."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    context_length: int
    page_size: int
    num_pages: int
    kv_bytes_per_token: int
    max_running_requests: int
    chunked_prefill_size: int
    overlap_depth: int
    max_graph_batch: int
    max_graph_tokens: int
    reserved_bytes: int
    """On a CUDA device, besides weights and KV pool."""

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and output of one request: of the context, and of the whole pool."""
        return min(self.context_length, self.max_total_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the info endpoint."""
        derived = {"max_total_tokens": self.max_total_tokens, "longest_request": self.longest_request}
        dtypes = {name: str(getattr(self, name)).removeprefix("torch.") for name in ("dtype", "kv_dtype")}
        return dataclasses.asdict(self) | derived | dtypes | {"device": str(self.device)}


def resolve(config: SchedulerConfig, model: Decoder) -> Resolved:
    """Raises ConfigError where the settings and the machine do not go together."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    on_cpu = device.type == "cpu"
    chunk = config.chunked_prefill_size or (1024 if on_cpu else _cuda_chunk(device))
    running = config.max_running_requests or (64 if on_cpu else 256)
    graphs = min(running, LARGEST_GRAPH) if config.max_graph_batch is None else min(running, config.max_graph_batch)
    if model.pooler is not None:
        graphs = 0  # nothing is decoded
    prompt_graphs = worth_capturing(model.config) if config.max_graph_tokens is None else config.max_graph_tokens
    prompt_graphs = min(prompt_graphs, chunk)
    context_length = resolve_context_length(config, model.config)
    reserved = 0 if on_cpu else _reserved(running, graphs, prompt_graphs, chunk, context_length, model.config, dtype)
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_length=context_length,
        page_size=config.page_size,
        num_pages=num_pages(config, model.config, kv_dtype, device, reserved),
        kv_bytes_per_token=bytes_per_token(model.config, kv_dtype),
        max_running_requests=running,
        # chunks end at page boundaries
        chunked_prefill_size=-(-chunk // config.page_size) * config.page_size,
        overlap_depth=(0 if on_cpu else 1) if config.overlap_depth is None else config.overlap_depth,
        max_graph_batch=0 if on_cpu else graphs,
        max_graph_tokens=0 if on_cpu else prompt_graphs,
        reserved_bytes=reserved,
    )


def _reserved(
    running: int,
    graphs: int,
    prompt_graphs: int,
    chunk: int,
    context_length: int,
    model: ModelConfig,
    dtype: torch.dtype,
) -> int:
    """Bytes on a CUDA device besides weights and KV pool."""
    tables = 2 * 8 * (running + 1) * context_length
    logits = graphs * model.vocab_size * dtype.itemsize
    experts = 0
    if model.moe is not None:  # each token of a step as often as it has experts, between their products and after
        experts = model.moe.top_k * (model.moe.intermediate_size + model.hidden_size)
    # what a step computes stays with its graphs: the stream, as it is and normed, and what is widest between
    heads = 3 * model.num_heads + 2 * model.num_kv_heads
    captured = 2 * model.hidden_size + max(3 * model.intermediate_size, heads * model.head_dim, experts)
    steps = (chunk * experts + prompt_graphs * captured) * dtype.itemsize
    return tables + logits + steps + OTHER_BYTES


def _cuda_chunk(device: torch.device) -> int:
    total = torch.cuda.get_device_properties(device).total_memory
    if total < 20 * GIB:
        return 2048
    if total < 60 * GIB:
        return 4096
    return 8192 if total < 160 * GIB else 16384
