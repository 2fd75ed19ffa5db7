"""The load is read from engines' own metric names, on pages as they write them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from support.cpu import reference_s
from treeline_epp.endpoints import model_server_metrics, prometheus_text
from treeline_epp.endpoints.model_server_metrics import (
    KNOWN,
    TENSORRT_LLM,
    VLLM,
    Metric,
    MetricNames,
    PageReader,
)
from treeline_epp.endpoints.scraped import ScrapedLoad


def read(page: bytes, names: Sequence[MetricNames]) -> ScrapedLoad | None:
    """Read the load from one page."""
    return PageReader(names).read(page)


REAL = b"""\
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 530649.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 133337.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 397312.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 0.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",\
source="local_compute"} 1.795402791596313e+09
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",\
source="local_cache_hit"} 1.7954027915963185e+09
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",\
source="external_kv_transfer"} 1.7954027915963604e+09
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4831.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 4831.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 172.19350064700848
vllm:inter_token_latency_seconds_created{engine="0",model_name="tiny"} 1.7954027915967534e+09
vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 260.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 260.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 131.7357109900404
vllm:request_prefill_time_seconds_created{engine="0",model_name="tiny"} 1.7954027915969548e+09
vllm:request_prefill_kv_computed_tokens_bucket{engine="0",le="+Inf",model_name="tiny"} 260.0
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="tiny"} 260.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny"} 133337.0
vllm:request_prefill_kv_computed_tokens_created{engine="0",model_name="tiny"} 1.7954027916011908e+09
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="0",\
hash_block_size="None",kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="5.5625",\
kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="22784",num_cpu_blocks="None",num_gpu_blocks="712",\
num_gpu_blocks_override="712"} 1.0
"""
"""Lines of a page of vLLM 0.32 on a CPU, after 260 requests; histograms without their inner buckets."""


class Page:
    """A page under construction, written by the library that vLLM and SGLang use."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[str, Gauge | Counter | Histogram] = {}

    def gauge(self, name: str, value: float, **labels: str) -> Page:
        metric = self._made.setdefault(name, Gauge(name, "text", list(labels), registry=None))
        assert isinstance(metric, Gauge)
        (metric.labels(**labels) if labels else metric).set(value)
        return self

    def counter(self, name: str, value: float, **labels: str) -> Page:
        metric = self._made.setdefault(name, Counter(name, "text", list(labels), registry=None))
        assert isinstance(metric, Counter)
        metric.labels(**labels).inc(value)
        return self

    def histogram(self, name: str, values: Sequence[float], **labels: str) -> Page:
        metric = self._made.setdefault(name, Histogram(name, "text", list(labels), registry=None))
        assert isinstance(metric, Histogram)
        for value in values:
            metric.labels(**labels).observe(value)
        return self

    def bytes(self) -> bytes:
        for metric in self._made.values():
            self.registry.register(metric)
        return generate_latest(self.registry)


def vllm(page: Page, engine: str, running: int, waiting: int, usage: float) -> Page:
    """The names of 0.33, one rank."""
    own = {"model_name": 'org/"model"\\1', "engine": engine}
    page.gauge("vllm:num_requests_running", running, **own).gauge("vllm:num_requests_waiting", waiting, **own)
    for reason in ("capacity", "deferred"):
        page.gauge("vllm:num_requests_waiting_by_reason", 77, **own, reason=reason)
    page.gauge("vllm:kv_cache_usage_perc", usage, **own)
    page.gauge("vllm:cache_config_info", 1, block_size="16", num_gpu_blocks="1000", cache_dtype="auto", engine=engine)
    page.counter("vllm:prompt_tokens", 900, **own)
    for source, tokens in (("local_compute", 500), ("local_cache_hit", 400), ("external_kv_transfer", 300)):
        page.counter("vllm:prompt_tokens_by_source", tokens, **own, source=source)
    page.histogram("vllm:request_prefill_kv_computed_tokens", [100, 300], **own)
    page.histogram("vllm:nixl_xfer_time_seconds", [0.5], **own)
    page.histogram("vllm:request_prefill_time_seconds", [0.5, 1.5], **own)
    page.histogram("vllm:inter_token_latency_seconds", [0.25, 0.25, 0.5, 1], **own)
    return page.histogram("vllm:request_prompt_tokens", [600], **own)


def test_vllm() -> None:
    assert read(vllm(Page(), "0", 3, 2, 0.25).bytes(), (VLLM,)) == ScrapedLoad(
        running=3,
        waiting=2,
        kv_usage=0.25,
        tokens_total=16_000,
        computed_tokens=500.0,
        prompts=(2.0, 400.0),
        prefills=(400.0, 2.0),
        steps=(4.0, 2.0),
        transfers=(300.0, 0.5),
    )


def test_a_page_that_a_real_vllm_has_written() -> None:
    assert read(REAL, KNOWN) == ScrapedLoad(
        tokens_total=22_784,
        computed_tokens=133_337.0,
        prompts=(260.0, 133_337.0),
        prefills=(133_337.0, 131.7357109900404),
        steps=(4831.0, 172.19350064700848),
    )


def test_the_loads_of_ranks_are_added_but_their_shared_memory_is_not() -> None:
    page = vllm(vllm(Page(), "0", 3, 2, 0.25), "1", 10, 0, 0.75).bytes()
    assert read(page, KNOWN) == ScrapedLoad(
        running=13,
        waiting=2,
        kv_usage=0.5,
        tokens_total=16_000,
        computed_tokens=1000.0,
        prompts=(4.0, 800.0),
        prefills=(800.0, 2.0),  # the two work at the same time
        steps=(8.0, 4.0),
        transfers=(600.0, 1.0),
    )


def test_a_vllms_own_cache_size_is_used() -> None:
    page = Page().gauge("vllm:num_requests_running", 1)
    for engine in "01":
        labels = {"block_size": "16", "num_gpu_blocks": "1000", "kv_cache_size_tokens": "5000", "engine": engine}
        page.gauge("vllm:cache_config_info", 1, **labels)
    assert read(page.bytes(), (VLLM,)) == ScrapedLoad(running=1, tokens_total=10_000)


def test_an_old_vllm() -> None:
    own = {"model_name": "m"}
    page = Page().gauge("vllm:num_requests_running", 1, **own).gauge("vllm:num_requests_waiting", 4, **own)
    page.gauge("vllm:gpu_cache_usage_perc", 0.5, **own).gauge("vllm:cpu_cache_usage_perc", 1.0, **own)
    page.gauge("vllm:cache_config_info", 1, block_size="32", num_gpu_blocks="None")
    page.histogram("vllm:request_prompt_tokens", [600, 200], **own)
    page.histogram("vllm:time_per_output_token_seconds", [0.5], **own)
    expected = ScrapedLoad(running=1, waiting=4, kv_usage=0.5, prompts=(2.0, 800.0), steps=(1.0, 0.5))
    assert read(page.bytes(), (VLLM,)) == expected


def sglang(page: Page, tp_rank: str, dp_rank: str, running: int, waiting: int) -> Page:
    """The names of 0.5.23, one scheduler."""
    own = {"model_name": "m", "engine_type": "unified", "tp_rank": tp_rank, "pp_rank": "0", "moe_ep_rank": tp_rank}
    own |= {"dp_rank": dp_rank}
    for priority, share in (("", 1.0), ("0", 0.5), ("5", 0.5)):
        page.gauge("sglang:num_running_reqs", running * share, **own, priority=priority)
        page.gauge("sglang:num_queue_reqs", waiting * share, **own, priority=priority)
    page.gauge("sglang:token_usage", 0.5, **own).gauge("sglang:max_total_num_tokens", 1000, **own)
    for mode in ("prefill_compute", "prefill_cache", "decode"):
        page.counter("sglang:realtime_tokens", 600, **own, mode=mode)
    for category in ("extend", "decode"):
        page.counter("sglang:forward_execution_seconds", 2, **own, category=category)
    return page


def test_sglang_counts_its_ranks_once_each_however_many_schedulers_report() -> None:
    page = sglang(sglang(sglang(Page(), "0", "0", 2, 4), "1", "0", 2, 4), "2", "1", 6, 0)
    for streaming in ("true", "false"):
        page.counter("sglang:prompt_tokens", 150, model_name="m", is_streaming=streaming)
        page.counter("sglang:num_requests", 2, model_name="m", is_streaming=streaming)
    page.histogram("sglang:inter_token_latency_seconds", [0.5, 0.25], model_name="m")
    assert read(page.bytes(), KNOWN) == ScrapedLoad(
        running=8,
        waiting=4,
        kv_usage=0.5,
        tokens_total=2000,
        computed_tokens=1200.0,
        prompts=(4.0, 300.0),
        prefills=(1200.0, 2.0),
        steps=(2.0, 0.75),
    )


def test_an_old_sglang_and_tensorrt_llm() -> None:
    page = Page().gauge("sglang:num_running_reqs", 1).gauge("sglang:num_queue_reqs", 2)
    assert read(page.bytes(), KNOWN) == ScrapedLoad(running=1, waiting=2)
    page = Page().gauge("trtllm_num_requests_running", 1, model_name="m", engine_type="trtllm")
    page.gauge("trtllm_num_requests_waiting", 2, model_name="m", engine_type="trtllm")
    page.gauge("trtllm_kv_cache_utilization", 0.5).gauge("trtllm_kv_cache_max_blocks", 100)
    page.gauge("trtllm_kv_cache_tokens_per_block", 32)
    expected = ScrapedLoad(running=1, waiting=2, kv_usage=0.5, tokens_total=3200)
    assert read(page.bytes(), KNOWN) == expected
    assert TENSORRT_LLM.path == "/prometheus/metrics"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "many"])
def test_impossible_values_are_not_counted(value: str) -> None:
    page = f'vllm:num_requests_waiting{{engine="0"}} {value}\nvllm:num_requests_waiting{{engine="1"}} 3\n'
    page += f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"
    page += f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{value}"}} 1\n'
    assert read(page.encode(), (VLLM,)) == ScrapedLoad(waiting=3)
    assert read(b"vllm:num_requests_waiting " + value.encode(), (VLLM,)) is None


def test_huge_values_are_clamped() -> None:
    page = b"vllm:num_requests_waiting 1e15\nvllm:kv_cache_usage_perc 7\n"
    page += b'vllm:cache_config_info{block_size="999999999999999",num_gpu_blocks="999999999999999"} 1\n'
    assert read(page, (VLLM,)) == ScrapedLoad(waiting=10**9, kv_usage=1.0)


def test_pages_of_other_programs_give_no_load() -> None:
    for page in (
        b"",
        b'{"engine": "vllm:num_requests_waiting 3"}',
        b"<html>\nvllm: 1\n</html>",
        b"up 1\n",
        b"\x00" * 99,
    ):
        assert read(page, KNOWN) is None


def test_a_page_full_of_matching_lines_is_read_in_bounded_time() -> None:
    names = [metric.name for metric in (*VLLM.waiting, *VLLM.running, *VLLM.kv_usage, *VLLM.computed)]
    names += [metric.name for pair in (*VLLM.prompts, *VLLM.prefills, *VLLM.steps) for metric in pair]
    labels = ",".join(f'label_{n}="\\\\{n}"' for n in range(100))
    lines = "".join(f'{name}{{{labels},n="{n}"}} 1\n' for name in dict.fromkeys(names) for n in range(160))
    began = time.thread_time()
    found = read(lines.encode(), (VLLM,))
    assert time.thread_time() - began < 150 * reference_s()
    assert found is not None
    assert 64 <= found.running == found.waiting < 128, "not all of it"
    assert len(lines) > 1 << 21


def test_the_cache_size_is_computed_from_pages_and_page_size() -> None:
    page = b'sglang:num_running_reqs 1\nsglang:cache_config_info{page_size="16",num_pages="10"} 1\n'
    assert read(page, KNOWN) == ScrapedLoad(running=1, tokens_total=160)


_LINES = (
    b"process_cpu_seconds_total 7.0",
    b"process_cpu_seconds_total 8.0",
    b"vllm:num_requests_running 1",
    b"vllm:num_requests_running 2",
    b"vllm:num_requests_waiting 1",
    b"vllm:kv_cache_usage_perc 0.5",
    b"sglang:num_queue_reqs 4",
    b"mine 3",
    b"mine 4",
)


@settings(derandomize=True, max_examples=300)
@given(
    st.lists(st.lists(st.sampled_from(_LINES), max_size=6), min_size=1, max_size=8),
    st.sampled_from([KNOWN, (*KNOWN, MetricNames(running=(Metric("mine"),)))]),
)
def test_successive_pages_are_read_independently(pages: list[list[bytes]], names: tuple[MetricNames, ...]) -> None:
    reader = PageReader(names)
    for lines in pages:
        page = b"\n".join(lines)
        assert reader.read(page) == read(page, names)


def test_an_unchanged_page_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bytes] = []
    monkeypatch.setattr(
        model_server_metrics, "series", lambda page, name: (reads.append(name), prometheus_text.series(page, name))[1]
    )
    reader = PageReader(KNOWN)
    first = reader.read(b"up 1\nvllm:num_requests_running 1\nhttp_requests 5\n")
    assert reads
    reads.clear()
    assert reader.read(b"up 2\nvllm:num_requests_running 1\nhttp_requests 77\n") == first
    assert reads == []
    assert reader.read(b"up 2\nvllm:num_requests_running 2\nhttp_requests 77\n") == ScrapedLoad(running=2)


@pytest.mark.parametrize(
    ("waiting", "running"),
    [
        ("llamacpp:requests_deferred", "llamacpp:requests_processing"),
        ("lmdeploy:num_requests_waiting", "lmdeploy:num_requests_running"),
        ("tgi_queue_size", "tgi_batch_current_size"),
        ('nv_trt_llm_request_metrics{request_type="waiting"}', 'nv_trt_llm_request_metrics{request_type="scheduled"}'),
    ],
)
def test_engines_are_recognised_by_the_names_of_their_metrics(waiting: str, running: str) -> None:
    assert read(f"{waiting} 3\n{running} 4\n".encode(), KNOWN) == ScrapedLoad(running=4, waiting=3)


def test_a_rank_that_is_an_endpoint_reads_its_own_series() -> None:
    other = REAL.replace(b'engine="0"', b'engine="12"').replace(b'model_name="tiny"} 0.0', b'model_name="tiny"} 1.0')
    page = other + REAL + other.replace(b"12", b"1").replace(b"} 1.0", b"} 3.0")
    loads = [PageReader((VLLM,), rank).read(page) for rank in (0, 1, 12)]
    assert [load and (load.running, load.waiting) for load in loads] == [(0, 0), (3, 3), (1, 1)]
    assert loads[0] == read(REAL, (VLLM,))
    assert PageReader((VLLM,), 2).read(page) is None


def test_running_adapters_are_those_of_vllms_newest_sample() -> None:
    """It keeps a series for each list that there ever was."""
    page = b"""\
vllm:num_requests_running 2
vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql,law",waiting_lora_adapters=""} 1.795402791e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="law",waiting_lora_adapters="sql"} 1.795402793e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters="sql"} 1.795402792e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="x",waiting_lora_adapters=""} NaN
"""
    for order in (page, b"".join(reversed(page.splitlines(keepends=True)))):
        load = read(order, [VLLM])
        assert load is not None
        assert load.adapters == {"law"}
    idle = read(page.replace(b"793e", b"791e"), [VLLM])
    assert idle is not None
    assert idle.adapters == frozenset()
    silent = read(REAL, [VLLM])
    assert silent is not None
    assert silent.adapters is None, "it serves none"
