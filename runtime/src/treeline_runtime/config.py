"""Settings of the engine, frozen, in layers: EngineConfig (model and memory) → SchedulerConfig (order and limits).

`None` and "auto" mean "derive it"; what was derived is in the resolved config that the scheduler keeps. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ConfigError(ValueError):
    """A setting that cannot work, with the setting's name and what to do."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What is computed, where, and how much memory it may take."""

    model: str
    """Directory in the Hugging Face layout (config.json, *.safetensors, tokenizer.json)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on CPU (bfloat16 weights are upcast), bfloat16 on CUDA."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int | None = None
    """torch's threads in this process; None leaves torch's own choice."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right shapes, from `seed`; only config.json is read."""
    attention_backend: str = "auto"
    context_length: int | None = None
    """Prompt + output tokens of one request; None: what the model was trained for."""
    page_size: int = 16
    """Tokens in one page of the KV pool and in one block of the KV events."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens; None: from memory."""
    mem_fraction: float | None = None
    """Share of memory for weights and the KV pool (CUDA: of the device, default 0.85; CPU: of what is free for
    the pool alone, default 0.1 and at most 1 GiB)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {self.page_size}")
        if self.mem_fraction is not None and not 0 < self.mem_fraction <= 1:
            raise ConfigError(f"mem_fraction must lie in (0, 1], not {self.mem_fraction}")
        for name in ("context_length", "max_total_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """Which requests run when."""

    max_running_requests: int | None = None
    """None: 64 on CPU, 256 on CUDA."""
    max_queued_requests: int | None = None
    """Waiting requests beyond this are refused with 503; None: no limit."""
    chunked_prefill_size: int | None = None
    """Prompt tokens computed in one step, all requests together; None: 1024 on CPU, by memory on CUDA."""
    schedule_policy: str = "fcfs"
    """fcfs, or lpm (longest cached prefix first)."""
    schedule_conservativeness: float = 1.0
    """Scales the share of its allowed output that a running request is expected to produce."""
    eviction_policy: str = "lru"
    prefills_in_a_row: int = 1
    """Prefill steps that may follow each other while requests wait to decode: bounds a decode stall."""
    overlap_depth: int = 0
    """Launched batches whose results are not processed yet when the next one is launched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_running_requests", "chunked_prefill_size", "prefills_in_a_row"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests must not be negative, not {self.max_queued_requests}")
        if self.schedule_conservativeness < 0:
            raise ConfigError("schedule_conservativeness must not be negative")
        if self.overlap_depth not in (0, 1):
            raise ConfigError(f"overlap_depth must be 0 or 1, not {self.overlap_depth}")
