"""The load that an engine's metrics page reports: the names of its metrics, by engine.

Names and meanings are those of vLLM 0.8.5 to 0.33 (`vllm/v1/metrics/loggers.py`), SGLang 0.4.6 to 0.5.23
(`srt/observability/metrics_collector.py`), and of the Gateway API inference extension's model server protocol
(TotalQueuedRequests, TotalRunningRequests, KVCacheUtilization), which also names those of TensorRT-LLM. Where an engine
has had several names for one thing, they are listed newest first, and the first that is present counts.

One server may have many series of one name: a data parallel rank each (vLLM's label `engine`, SGLang's `dp_rank`),
whose counts are added, unless each rank is an endpoint of its own: then it has its own series. The shards of one rank
(`tp_rank` and the like) all report the same, so one of them counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from treeline_epp.endpoints.prometheus_text import series
from treeline_epp.endpoints.scraped import ScrapedLoad, Totals

MOST = 1e15
"""Largest value that is believed. Negative values and NaN are not, either."""
_MOST_REQUESTS = 10**9
_SHARDS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "moe_dp_rank", "attn_cp_rank"})
_BLOCKS_AND_SIZES = (("num_gpu_blocks", "block_size"), ("num_pages", "page_size"))
"""Labels of an info series, as vLLM and SGLang name them."""
_TOKENS = "kv_cache_size_tokens"
"""Label of newer vLLMs with the cache's tokens, which differ from blocks × size where layers keep different tokens."""


class Metric(Struct, frozen=True):
    """The series of one name whose labels have these values; a missing label counts as empty."""

    name: str
    labels: Mapping[str, str] = {}


class Capacity(Struct, frozen=True):
    """The metrics that give the tokens that an engine's KV cache has room for: a gauge of tokens; an info series whose
    labels are blocks and their size; or a gauge for each of these two.
    """

    tokens: tuple[Metric, ...] = ()
    infos: tuple[str, ...] = ()
    blocks: Metric | None = None
    block_size: Metric | None = None


class MetricNames(Struct, frozen=True):
    """The names of one type of engine. `prefix` identifies its page; `path` is where the page is. `computed` is the
    running total of prompt tokens that were computed and not found in the cache. Pairs are totals that grow together:
    `prompts` requests and their tokens, `prefills` computed tokens and seconds, `steps` tokens and the seconds between
    them, `transfers` tokens of prompts that came from another engine and the seconds on their way. `adapters` has a
    series for each list of running adapters that there ever was; its value is when that was.
    """

    prefix: str = ""
    path: str = "/metrics"
    waiting: tuple[Metric, ...] = ()
    running: tuple[Metric, ...] = ()
    kv_usage: tuple[Metric, ...] = ()
    capacity: Capacity = Capacity()
    computed: tuple[Metric, ...] = ()
    prompts: tuple[tuple[Metric, Metric], ...] = ()
    prefills: tuple[tuple[Metric, Metric], ...] = ()
    steps: tuple[tuple[Metric, Metric], ...] = ()
    transfers: tuple[tuple[Metric, Metric], ...] = ()
    adapters: str = ""


def _sum_and_count(name: str) -> tuple[Metric, Metric]:
    return Metric(f"{name}_count"), Metric(f"{name}_sum")


_VLLM_COMPUTED = _sum_and_count("vllm:request_prefill_kv_computed_tokens")
VLLM = MetricNames(
    prefix="vllm:",
    waiting=(Metric("vllm:num_requests_waiting"),),
    running=(Metric("vllm:num_requests_running"),),
    kv_usage=(Metric("vllm:kv_cache_usage_perc"), Metric("vllm:gpu_cache_usage_perc")),
    capacity=Capacity(infos=("vllm:cache_config_info",)),
    computed=(Metric("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}), _VLLM_COMPUTED[1]),
    # The older one counts cached tokens, too: the most that a prompt can take.
    prompts=(_VLLM_COMPUTED, _sum_and_count("vllm:request_prompt_tokens")),
    prefills=((_VLLM_COMPUTED[1], Metric("vllm:request_prefill_time_seconds_sum")),),
    steps=(_sum_and_count("vllm:inter_token_latency_seconds"), _sum_and_count("vllm:time_per_output_token_seconds")),
    transfers=(
        (
            Metric("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
            Metric("vllm:nixl_xfer_time_seconds_sum"),
        ),
    ),
    adapters="vllm:lora_requests_info",
)

_SGLANG_COMPUTED = Metric("sglang:realtime_tokens_total", {"mode": "prefill_compute"})
SGLANG = MetricNames(
    prefix="sglang:",
    # With priorities there is a series for each, and one for all, whose priority is empty.
    waiting=(Metric("sglang:num_queue_reqs", {"priority": ""}),),
    running=(Metric("sglang:num_running_reqs", {"priority": ""}),),
    kv_usage=(Metric("sglang:token_usage"),),
    capacity=Capacity(tokens=(Metric("sglang:max_total_num_tokens"),), infos=("sglang:cache_config_info",)),
    computed=(_SGLANG_COMPUTED,),
    prompts=(
        _sum_and_count("sglang:uncached_prompt_tokens_histogram"),
        (Metric("sglang:num_requests_total"), Metric("sglang:prompt_tokens_total")),
    ),
    prefills=((_SGLANG_COMPUTED, Metric("sglang:forward_execution_seconds_total", {"category": "extend"})),),
    steps=(_sum_and_count("sglang:inter_token_latency_seconds"),),
)

TENSORRT_LLM = MetricNames(
    prefix="trtllm_",
    path="/prometheus/metrics",
    waiting=(Metric("trtllm_num_requests_waiting"),),
    running=(Metric("trtllm_num_requests_running"),),
    kv_usage=(Metric("trtllm_kv_cache_utilization"),),
    capacity=Capacity(
        blocks=Metric("trtllm_kv_cache_max_blocks"), block_size=Metric("trtllm_kv_cache_tokens_per_block")
    ),
)

_TRITON = "nv_trt_llm_request_metrics"
_OTHERS = (
    ("llamacpp:", Metric("llamacpp:requests_deferred"), Metric("llamacpp:requests_processing")),
    ("lmdeploy:", Metric("lmdeploy:num_requests_waiting"), Metric("lmdeploy:num_requests_running")),
    ("tgi_", Metric("tgi_queue_size"), Metric("tgi_batch_current_size")),
    ("nv_trt_llm_", Metric(_TRITON, {"request_type": "waiting"}), Metric(_TRITON, {"request_type": "scheduled"})),
)
"""Engines that report only waiting and running requests."""
KNOWN = (
    *(VLLM, SGLANG, TENSORRT_LLM),
    *(MetricNames(prefix, waiting=(waiting,), running=(running,)) for prefix, waiting, running in _OTHERS),
)
"""Names to look for where the type of the server is not known."""


class PageReader:
    """Reads the pages of one engine, or of one of its ranks, by the first of these names whose prefix is on them. A
    page on which nothing with that prefix has changed, as on an idle engine, is not parsed again, which takes a tenth
    of the time. Its length and its 64-bit hash decide that, and no engine can foresee the hash.
    """

    def __init__(self, candidates: Iterable[MetricNames], rank: int | None = None) -> None:
        self._candidates = tuple(candidates)
        self._rank = rank
        self._seen: tuple[MetricNames, int, int] | None = None
        self._said: ScrapedLoad | None = None

    def read(self, page: bytes) -> ScrapedLoad | None:
        """Return the load on the page; None if it has no counts of requests. O(page) at memory speed for each name."""
        for names in self._candidates:
            part = _part(page, names)
            if part is None:
                continue
            if self._rank is not None:
                part = _of_rank(part, b"%d" % self._rank)
            seen = names, len(part), hash(part)
            if seen != self._seen:
                self._seen, self._said = seen, _read(part, names)
            return self._said
        return None


def _part(page: bytes, names: MetricNames) -> bytes | None:
    """Return the page from the first to the last line with the prefix; None if there is no such line."""
    prefix = names.prefix.encode()
    first = 0 if page.startswith(prefix) else page.find(b"\n" + prefix) + 1
    if first == 0 and not page.startswith(prefix):
        return None
    last = page.rfind(b"\n" + prefix, first) + 1 or first
    end = page.find(b"\n", last)
    return page[first:] if end < 0 else page[first:end]


_RANK = re.compile(rb'[{,]engine="([0-9]+)"')
"""The rank of a series of vLLM, whose requests may name it."""


def _of_rank(page: bytes, rank: bytes) -> bytes:
    """Return the page without the series of other ranks."""
    lines = page.split(b"\n")
    return b"\n".join(line for line in lines if (found := _RANK.search(line)) is None or found[1] == rank)


def _read(page: bytes, names: MetricNames) -> ScrapedLoad | None:
    waiting, running = _first(page, names.waiting), _first(page, names.running)
    if waiting is None and running is None:
        return None
    used = next((found for metric in names.kv_usage if (found := _values(page, metric))), None)
    return ScrapedLoad(
        running=_requests(running),
        waiting=_requests(waiting),
        kv_usage=min(1.0, sum(used) / len(used)) if used else 0.0,  # ranks have equal shares of the memory
        tokens_total=_capacity(page, names.capacity),
        computed_tokens=_first(page, names.computed),
        prompts=_pair(page, names.prompts),
        prefills=_pair(page, names.prefills, seconds_of=_one_rank),
        steps=_pair(page, names.steps),
        transfers=_pair(page, names.transfers),
        adapters=_adapters(page, names.adapters) if names.adapters else None,
    )


def _adapters(page: bytes, name: str) -> frozenset[str] | None:
    """Return the names in the newest series; None where there is none."""
    told = (one for one in series(page, name.encode()) if 0.0 <= one.value <= MOST)
    newest = max(told, key=lambda one: one.value, default=None)
    return None if newest is None else frozenset(newest.labels.get("running_lora_adapters", "").split(",")) - {""}


def _values(page: bytes, metric: Metric) -> list[float]:
    """Return the value of each rank."""
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for one in series(page, metric.name.encode()):
        if not 0.0 <= one.value <= MOST or any(one.labels.get(k, "") != v for k, v in metric.labels.items()):
            continue
        rank = tuple(sorted(pair for pair in one.labels.items() if pair[0] not in _SHARDS))
        found[rank] = max(found.get(rank, 0.0), one.value)
    return list(found.values())


def _first(page: bytes, metrics: Iterable[Metric]) -> float | None:
    """Return the sum over all ranks of the first metric that is present."""
    return next((sum(found) for metric in metrics if (found := _values(page, metric))), None)


def _one_rank(seconds: list[float]) -> float:
    """Return the mean over ranks, which work at the same time: all their tokens ÷ it is the engine's speed."""
    return sum(seconds) / len(seconds)


def _pair(
    page: bytes, pairs: Iterable[tuple[Metric, Metric]], seconds_of: Callable[[list[float]], float] = sum
) -> Totals | None:
    for one, other in pairs:
        counts = _values(page, one)
        seconds = _values(page, other) if counts else []
        if counts and seconds:
            return sum(counts), seconds_of(seconds)
    return None


def _requests(value: float | None) -> int:
    return int(min(_MOST_REQUESTS, value or 0.0))


def _capacity(page: bytes, capacity: Capacity) -> int:
    """Return the tokens that the cache has room for; 0 where the page does not say."""
    told = _first(page, capacity.tokens)
    if told is None and capacity.blocks is not None and capacity.block_size is not None:
        blocks, sizes = _first(page, (capacity.blocks,)), _values(page, capacity.block_size)
        told = blocks * max(sizes) if blocks is not None and sizes else None
    if told is None:
        told = _from_labels([one.labels for name in capacity.infos for one in series(page, name.encode())])
    return int(told) if told <= MOST else 0


def _from_labels(infos: Sequence[Mapping[str, str]]) -> float:
    """Return the tokens from info labels. A series of vLLM has its own rank's tokens, but all ranks' blocks."""
    by_rank = sum(_count(labels, _TOKENS) for labels in infos)
    counts = [(_count(labels, blocks), _count(labels, size)) for labels in infos for blocks, size in _BLOCKS_AND_SIZES]
    return by_rank or max((blocks * size for blocks, size in counts), default=0.0)


def _count(labels: Mapping[str, str], name: str) -> float:
    text = labels.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0.0
