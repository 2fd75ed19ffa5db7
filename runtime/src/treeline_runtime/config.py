"""Settings of the engine, frozen, in layers: EngineConfig (model and memory) → SchedulerConfig (order and limits).

The command line's `args.ServerArgs` is the layer above. `None` and "auto" mean "derive it"; what was derived is in
`scheduler.resolve.Resolved`. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treeline_wire.settings import ConfigError, check, setting

__all__ = ["ConfigError", "EngineConfig", "SchedulerConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What is computed, where, and how much memory it may take."""

    model: str = setting(
        group="serving",
        metavar="PATH_OR_HF_ID",
        help="a checkpoint folder, or org/name on the Hugging Face Hub",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", group="engine", help="(default: auto: float32 on CPU, bfloat16 on CUDA)"
    )
    device: str = setting(
        "auto",
        group="engine",
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N (default: what the machine has)",
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", group="engine", help="dummy = random weights (default: auto)"
    )
    quantization: Literal["auto", "fp8"] = setting(
        "auto",
        group="engine",
        help="fp8 = projections are quantised as they are loaded (default: auto: as the checkpoint has them)",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = setting(
        "auto",
        group="engine",
        help="fp8_e4m3 = twice the tokens of bfloat16, less exactly (default: auto: the model's)",
    )
    threads: int | None = setting(
        None, group="engine", metavar="N", at_least=1, help="CPU threads of the model (default: all cores)"
    )
    attention_backend: str = setting(
        "auto",
        group="engine",
        metavar="NAME",
        help="flashinfer, triton or torch_sdpa (default: auto: the fastest that can serve the model here)",
    )
    max_graph_batch: int | None = setting(
        None,
        group="engine",
        metavar="N",
        at_least=0,
        help="decode batches up to this size are captured as CUDA graphs; 0 = none (default: max_running_requests, at "
        "most 256)",
    )
    context_length: int | None = setting(
        None,
        group="engine",
        metavar="TOKENS",
        at_least=8,
        help="prompt + output limit of a request (default: what the model was trained for)",
    )
    page_size: int = setting(
        16,
        group="engine",
        metavar="TOKENS",
        at_least=1,
        help="cache page = event block (default: %(default)s)",
    )
    max_total_tokens: int | None = setting(
        None, group="engine", metavar="TOKENS", at_least=1, help="size of the KV cache (default: from memory)"
    )
    mem_fraction: float | None = setting(
        None,
        group="engine",
        metavar="F",
        above=0,
        at_most=1,
        help="share of memory for the KV cache: on CUDA of the device, weights included (default: 0.85); on a CPU of "
        "what is free (default: 0.1, at most 1 GiB)",
    )
    seed: int = setting(0, group=None, help="of dummy weights")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """Which requests run when."""

    max_running_requests: int | None = setting(
        None,
        group="scheduling",
        metavar="N",
        at_least=1,
        help="requests computed at once (default: 64 on a CPU, 256 on CUDA)",
    )
    max_queued_requests: int | None = setting(
        None,
        group="scheduling",
        metavar="N",
        at_least=0,
        help="requests waiting before 503 (default: no limit)",
    )
    chunked_prefill_size: int | None = setting(
        None,
        group="scheduling",
        metavar="TOKENS",
        at_least=1,
        help="prompt tokens per step, all requests together (default: 1024 on a CPU, by memory on CUDA)",
    )
    schedule_policy: str = setting(
        "fcfs",
        group="scheduling",
        metavar="NAME",
        help="order of the waiting queue: fcfs, or lpm = longest cached prefix first (default: fcfs)",
    )
    eviction_policy: str = setting(
        "lru",
        group="scheduling",
        metavar="NAME",
        help="what the cache forgets first, e.g. lru or lfu (default: lru)",
    )
    schedule_conservativeness: float = setting(
        1.0,
        group=None,
        at_least=0,
        help="scales the share of its allowed output that a running request is expected to produce",
    )
    prefills_in_a_row: int = setting(
        1,
        group=None,
        at_least=1,
        help="prefill steps that may follow each other while requests wait to decode: bounds a decode stall",
    )
    overlap_depth: int | None = setting(
        None,
        group=None,
        at_least=0,
        at_most=1,
        help="launched batches whose results are not processed yet when the next one is launched (None: 1 on CUDA, "
        "0 on a CPU, where a launch computes)",
    )
