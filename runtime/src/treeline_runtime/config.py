"""Settings of the engine, frozen, in layers: EngineConfig (model and memory) → SchedulerConfig (order and limits).

`args.ServerArgs`, the command line's settings, is the layer above. `None` and "auto" mean "derive it"; results are in
`scheduler.resolve.Resolved`. No torch here.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from treeline_wire.ports import RANKS
from treeline_wire.settings import ConfigError, check, setting

from treeline_runtime.logit_processors import entry

MOST_NAME_CHARS = 256
"""Characters of an adapter's name."""


def meeting_place(text: str) -> tuple[str, int]:
    """The HOST[:PORT] of --dist-init-addr → host and port. Raises ConfigError."""
    try:
        place = urlsplit(f"//{text}")
        host, port = place.hostname or "", RANKS if place.port is None else place.port
        host.encode("idna")
    except ValueError:
        host, port = "", 0
    if not host or not port or place.netloc != text or place.username is not None or text.split() != [text]:
        raise ConfigError(f"--dist-init-addr: expected HOST or HOST:PORT, got {text!r}")
    return host, port


_UNITS = {"": 1, **{f"{unit}i": 1 << shift for unit, shift in (("k", 10), ("m", 20), ("g", 30), ("t", 40))}}


def size_in_bytes(text: str) -> int:
    """16GiB (or 16Gi) → bytes. Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([A-Za-z]*)", text)
    unit = None if found is None else _UNITS.get(found[2].lower().removesuffix("b"))
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a size like 16GiB, got {text!r}")
    return int(float(found[1]) * unit)


def adapter_entry(text: str) -> str:
    """NAME=PATH of --lora-modules. Raises argparse.ArgumentTypeError."""
    name, is_there, path = text.partition("=")
    if not (0 < len(name) <= MOST_NAME_CHARS and name.isprintable() and is_there and path):
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return text


__all__ = ["ConfigError", "EngineConfig", "SchedulerConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Model, device, and memory."""

    model: str = setting(
        group="serving",
        metavar="MODEL",
        word=True,
        rare=True,
        help="a checkpoint folder, or org/name on the Hugging Face Hub, where org/name@REV is a branch, tag or commit",
    )
    task: Literal["auto", "generate", "embed", "score", "reward"] = setting(
        "auto",
        group="engine",
        help="generate = text; embed = vectors; score = relevance of documents; reward = outputs of a "
        "classification head (default: auto: by the checkpoint)",
    )
    matryoshka: bool = setting(
        False,
        group="engine",
        rare=True,
        help="allow shorter embeddings (`dimensions`) without is_matryoshka in config.json",
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
        "auto", group="engine", rare=True, help="dummy = random weights (default: auto)"
    )
    quantization: Literal["auto", "fp8"] = setting(
        "auto",
        group="engine",
        help="fp8 = quantise projections while loading (default: auto: as the checkpoint has them)",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = setting(
        "auto",
        group="engine",
        help="fp8_e4m3 = room for twice the tokens of bfloat16, at lower precision (default: auto: the model's)",
    )
    threads: int | None = setting(
        None, group="engine", rare=True, metavar="N", at_least=1, help="CPU threads of the model (default: all cores)"
    )
    tp_size: int = setting(
        1,
        group="engine",
        metavar="N",
        at_least=1,
        at_most=64,
        help="split the model over N GPUs, cuda:0 and on; with --nnodes over those of all machines (on a CPU over N "
        "processes) (default: %(default)s)",
    )
    nnodes: int = setting(
        1,
        group="engine",
        rare=True,
        metavar="N",
        at_least=1,
        at_most=64,
        env="LWS_GROUP_SIZE",
        help="machines that compute the model together, each with the same command but for --node-rank (default: "
        "LWS_GROUP_SIZE, which a LeaderWorkerSet sets, or 1)",
    )
    dist_init_addr: str | None = setting(
        None,
        group="engine",
        rare=True,
        metavar="HOST[:PORT]",
        env="LWS_LEADER_ADDRESS",
        help=f"address of the first machine, where it awaits the others (default: LWS_LEADER_ADDRESS; port {RANKS})",
    )
    pp_size: int = setting(
        1,
        group="engine",
        rare=True,
        metavar="N",
        at_least=1,
        at_most=64,
        help="split the model's layers into N stages, each on --tp-size GPUs, which compute one after another: for "
        "GPUs without a fast link between them (default: %(default)s)",
    )
    ep_size: int = setting(
        1,
        group="engine",
        rare=True,
        metavar="N",
        at_least=1,
        help="divide a model's experts, each of them whole, over N GPUs: the --tp-size N that share the model, or "
        "those of --dp-size N engines, which then take every step together (default: %(default)s: each is sliced)",
    )
    attention_backend: str = setting(
        "auto",
        group=None,
        help="flashinfer, triton or torch_sdpa (default: auto: the fastest that can serve the model here)",
    )
    max_graph_batch: int | None = setting(
        None,
        group=None,
        at_least=0,
        help="decode batches up to this size are captured as CUDA graphs; 0 = none (default: max_running_requests, at "
        "most 256)",
    )
    max_graph_tokens: int | None = setting(
        None,
        group=None,
        at_least=0,
        help="steps of prompts of up to so many tokens are captured as CUDA graphs; 0 = none (default: by the model's "
        "size, 256 to 4096)",
    )
    context_length: int | None = setting(
        None,
        group="engine",
        metavar="TOKENS",
        at_least=8,
        help="prompt + output limit of a request (default: the model's)",
    )
    page_size: int = setting(
        16,
        group="engine",
        rare=True,
        metavar="TOKENS",
        at_least=1,
        help="cache page = event block (default: %(default)s)",
    )
    max_total_tokens: int | None = setting(
        None,
        group="engine",
        rare=True,
        metavar="TOKENS",
        at_least=1,
        help="size of the KV cache (default: from memory)",
    )
    mem_fraction: float | None = setting(
        None,
        group="engine",
        metavar="F",
        above=0,
        at_most=1,
        help="share of memory for the KV cache: on CUDA of the device, weights included (default: 0.85); on a CPU "
        "of the free memory (default: 0.1, at most 1 GiB)",
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        group="engine",
        rare=True,
        also="--lora-paths",
        metavar="NAME=PATH",
        several=True,
        parse=adapter_entry,
        help="LoRA adapters to load at the start, in peft's form; a request selects one by `model: NAME` (default: "
        "none)",
    )
    lora_root: str | None = setting(
        None,
        group="engine",
        rare=True,
        metavar="DIR",
        help="folder below which adapters may be loaded while the server runs (default: none may)",
    )
    max_loras: int = setting(
        8,
        group="engine",
        rare=True,
        metavar="N",
        at_least=1,
        at_most=1024,
        help="adapters on the device at once; more of them take turns (default: %(default)s)",
    )
    max_lora_rank: int = setting(
        64,
        group="engine",
        rare=True,
        metavar="R",
        at_least=1,
        at_most=512,
        help="the highest rank of an adapter, for which each of --max-loras has room (default: %(default)s)",
    )
    max_lora_memory: int | None = setting(
        None,
        group="engine",
        rare=True,
        metavar="SIZE",
        parse=size_in_bytes,
        above=0,
        help="host memory of each rank for adapters, e.g. 4GiB; beyond it the least recently used ones are read again "
        "when they are needed (default: a tenth of what is free)",
    )
    speculative_algorithm: Literal["off", "NGRAM", "EAGLE3", "STANDALONE"] = setting(
        "off",
        group="scheduling",
        help="guess tokens by texts, a head or a small model, and verify them in one step (default: %(default)s)",
    )
    speculative_draft_model_path: str | None = setting(
        None,
        group="scheduling",
        metavar="DIR",
        help="folder of that head or small model",
    )
    enable_return_hidden_states: bool = setting(
        False,
        group="engine",
        rare=True,
        help="let requests ask for hidden states, a vector per computed token",
    )
    seed: int = setting(0, group=None, help="of dummy weights")

    def __post_init__(self) -> None:
        check(self)
        if self.ep_size not in (1, self.expert_ranks):
            raise ConfigError(
                f"--ep-size {self.ep_size} is not supported with these sizes: use --ep-size {self.expert_ranks}, of "
                "--tp-size, or without that of --dp-size; or leave it out"
            )
        if self.ranks % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} does not divide the {self.ranks} ranks of all machines (--tp-size times "
                "--pp-size)"
            )
        if self.dist_init_addr is not None:
            meeting_place(self.dist_init_addr)
        elif self.nnodes > 1:
            raise ConfigError("--nnodes needs --dist-init-addr, the address of the first machine")

    @property
    def serves_adapters(self) -> bool:
        return bool(self.lora_modules or self.lora_root)

    @property
    def ranks_here(self) -> int:
        return self.ranks // self.nnodes

    @property
    def ranks(self) -> int:
        """Processes, each with a GPU of its own, that compute the model together."""
        return self.tp_size * self.pp_size

    @property
    def expert_ranks(self) -> int:
        """The ranks over which whole experts may be divided."""
        return self.tp_size


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(EngineConfig):
    """Order and limits of requests."""

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
    waiting_timeout: float | None = setting(
        None,
        group="scheduling",
        rare=True,
        metavar="S",
        above=0,
        help="503 for a request that has not begun after S seconds (default: no limit)",
    )
    request_timeout: float | None = setting(
        None,
        group="scheduling",
        rare=True,
        metavar="S",
        above=0,
        help="504 for a request that has not ended after S seconds (default: no limit)",
    )
    chunked_prefill_size: int | None = setting(
        None,
        group="scheduling",
        metavar="TOKENS",
        at_least=1,
        help="prompt tokens per step, all requests together (default: 1024 on a CPU, by memory on CUDA)",
    )
    mixed_chunk: bool = setting(
        False,
        group="scheduling",
        rare=True,
        help="decode running requests within prefill steps",
    )
    prefills_in_a_row: int = setting(
        1,
        group=None,
        at_least=1,
        help="prefill steps that running requests wait for at most, before they decode (default: 1)",
    )
    schedule_policy: Literal["fcfs", "lpm", "priority"] = setting(
        "fcfs",
        group="scheduling",
        help="order of a client's waiting requests: fcfs; lpm = longest cached prefix first; priority = by the "
        "requests' field. Clients take turns (default: fcfs)",
    )
    starvation_bound: float = setting(
        30.0,
        group=None,
        at_least=0,
        help="a request that has waited longer is next, whatever the policy (default: 30)",
    )
    schedule_low_priority_values_first: bool = setting(
        False,
        group=None,
        help="a lower priority is more urgent, as for vLLM; else a higher one, as for SGLang",
    )
    eviction_policy: Literal["lru", "lfu", "priority"] = setting(
        "lru",
        group="scheduling",
        rare=True,
        help="what the cache evicts first; priority = pages that only low priorities used (default: lru)",
    )
    prefix_cache: Literal["radix", "off"] = setting(
        "radix",
        group="scheduling",
        rare=True,
        help="radix = reuse the longest common prefix of earlier requests (default: %(default)s)",
    )
    host_cache: int | None = setting(
        None,
        group="scheduling",
        metavar="SIZE",
        parse=size_in_bytes,
        above=0,
        help="host memory, e.g. 16GiB, for cached pages that were used twice: a prefix that has left the device comes "
        "back from there (default: none)",
    )
    disk_cache: str | None = setting(
        None,
        group="scheduling",
        metavar="DIR",
        help="folder for the pages of --host-cache, which outlive the server there; it holds prompts (default: none)",
    )
    disk_cache_size: int = setting(
        100 << 30,
        group="scheduling",
        rare=True,
        metavar="SIZE",
        parse=size_in_bytes,
        above=0,
        help="bytes of --disk-cache, all models together (default: 100GiB)",
    )
    cache_audit: float = setting(
        0.0,
        group="scheduling",
        rare=True,
        metavar="SHARE",
        at_least=0,
        at_most=1,
        help="share of requests with cached tokens that are computed again without the cache while the engine is idle; "
        "a cache that changes answers is switched off (default: %(default)s)",
    )
    logit_processor: tuple[str, ...] = setting(
        (),
        group="engine",
        rare=True,
        metavar="NAME=module:attribute",
        repeated=True,
        parse=entry,
        help="let requests select this class from PYTHONPATH by `custom_logit_processor: NAME`, with "
        "`custom_params`; repeatable. NAME alone is a built-in one: disallowed_tokens, thinking_budget "
        "(default: none)",
    )
    speculative_num_draft_tokens: int = setting(
        7,
        group="scheduling",
        rare=True,
        metavar="N",
        at_least=1,
        at_most=32,
        help="guesses for a request in a step, at most; fewer where many are wrong or many requests decode (default: "
        "%(default)s)",
    )
    speculative_simulate_acceptance: float | None = setting(
        None,
        group="scheduling",
        rare=True,
        metavar="RATE",
        at_least=0,
        at_most=1,
        help="to measure speed: take guesses for right at this rate, whatever they are. Outputs are nonsense",
    )
    jump_forward: bool = setting(True, group=None, help="text that a grammar forces is not sampled")
    schedule_conservativeness: float = setting(
        1.0,
        group=None,
        at_least=0,
        help="scales the share of its allowed output that a running request is expected to produce",
    )
    overlap_depth: int | None = setting(
        None,
        group=None,
        at_least=0,
        at_most=1,
        help="launched batches whose results are not processed yet when the next one is launched (None: 1 on CUDA, "
        "0 on a CPU, where a launch computes)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_cache is not None and self.host_cache is None:
            raise ConfigError("--disk-cache needs --host-cache, through which its pages come and go")
        if self.host_cache is not None and self.nnodes > 1:
            raise ConfigError("--host-cache needs all ranks of a model on one machine (--nnodes 1)")
        if self.host_cache is not None and self.prefix_cache == "off":
            raise ConfigError("--host-cache keeps pages of the prefix cache, which --prefix-cache off leaves out")
        self._check_drafter()

    def _check_drafter(self) -> None:
        named = self.speculative_algorithm in ("EAGLE3", "STANDALONE")
        if (self.speculative_draft_model_path is not None) != named:
            raise ConfigError("--speculative-algorithm EAGLE3 or STANDALONE needs --speculative-draft-model-path")
        if named and (self.pp_size > 1 or self.ep_size > self.tp_size):
            raise ConfigError(
                f"--speculative-algorithm {self.speculative_algorithm} is not supported with stages (--pp-size), nor "
                "for engines that share experts (--dp-size with --ep-size)"
            )

    @property
    def most_guesses(self) -> int:
        """Tokens of a request that are guessed for a step; 0: none ever."""
        off = self.speculative_algorithm == "off" and self.speculative_simulate_acceptance is None
        return 0 if off else self.speculative_num_draft_tokens

    @property
    def uses_priority(self) -> bool:
        """Whether a request's priority has an effect."""
        return "priority" in (self.schedule_policy, self.eviction_policy)
