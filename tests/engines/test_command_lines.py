"""Pools' command lines, read by the engines' own parsers: they know every flag and understand it as intended. No other
setting changes."""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_parsers import read_by_sglang, read_by_vllm
from support.engine_wheels import COMMAND_LINES, is_there
from support.pool_world import runtime
from support.real_engines.vllm import INSTALLATION
from treeline_bench.context import BenchmarkError
from treeline_operator.api.engine import FLAGS, SETTINGS
from treeline_operator.plan.engines import SGLANG_IMAGE, SGLANG_PAGE_SIZE

pytestmark = pytest.mark.deep

SOURCE: dict[str, Any] = {"uri": "hf://org/weights@v1", "name": "a-name"}
GPUS: dict[str, Any] = {"accelerator": {"type": "nvidia", "count": 4}, "drain": {"timeoutSeconds": 77}}
EVERYTHING: dict[str, Any] = {
    "model": {**SOURCE, "tokenizer": "hf://org/words", "chatTemplateRef": {"name": "template"}},
    **GPUS,
}
ENGINE: dict[str, Any] = {
    "port": 8123,
    "dtype": "bfloat16",
    "quantization": "fp8",
    "kvCacheDtype": "fp8_e4m3",
    "contextLength": 8192,
    "pageSize": 64,
    "memoryFraction": 0.85,
    "maxRunningRequests": 48,
    "chunkedPrefillSize": 2048,
    "schedulePolicy": "priority",
    "dataParallel": 2,
    "adapters": [{"name": "one", "uri": "hf://org/one"}, {"name": "two", "uri": "pvc://claim/two"}],
}
MORE: dict[str, dict[str, Any]] = {
    "vllm": {},
    "sglang": {"maxQueuedRequests": 12, "maxTotalTokens": 65536, "evictionPolicy": "lfu", "schedulePolicy": "lpm"},
}
"""Settings that only one of the two has, or names differently."""
TEMPLATE = "/etc/treeline/chat-template/chat_template.jinja"
PATHS = {"one": "/models/org--one", "two": "/mnt/models/claim/two"}
EVENTS = {
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5657",
    "topic": "",
}


def lines(engine: str) -> list[list[str]]:
    """Return three lists of flags: none, those of a minimal pool, and those of a pool with every field."""
    plain = runtime(model=SOURCE, accelerator={"type": "nvidia"}, engine={"type": engine})
    full = runtime(**EVERYTHING, engine={"type": engine, **ENGINE, **MORE[engine]})
    return [[], list(plain["args"]), list(full["args"])]


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if value != before[name]}


@pytest.mark.parametrize("engine", MORE)
def test_the_full_pool_sets_every_field(engine: str) -> None:
    assert {name for name, engines in SETTINGS.items() if engine in engines} <= {*ENGINE, *MORE[engine]}
    words = {word.partition("=")[0] for word in lines(engine)[2]}
    assert {flags[engine] for flags in FLAGS.values() if engine in flags} <= words


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_vllm_understands_every_flag_as_intended() -> None:
    try:
        python = INSTALLATION.interpreter()
    except BenchmarkError as error:
        pytest.skip(str(error))
    nothing, plain, full = read_by_vllm(python, *lines("vllm"))
    published = {"enable_kv_cache_events": True, **EVENTS}
    for found in (plain, full):
        assert published.items() <= found.pop("kv_events_config").items()
    always = {"host": "0.0.0.0", "served_model_name": ["a-name"], "enable_prompt_tokens_details": True}
    assert changed(nothing, plain) == {
        **always,
        "model_tag": "/models/org--weights--v1",
        "shutdown_timeout": 60,
    }
    adapters = [
        {"name": name, "path": path, "base_model_name": None, "is_3d_lora_weight": False}
        for name, path in PATHS.items()
    ]
    assert changed(nothing, full) == {
        **always,
        "model_tag": "/models/org--weights--v1",
        "port": 8123,
        "tokenizer": "/models/org--words",
        "chat_template": TEMPLATE,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "max_model_len": 8192,
        "block_size": 64,
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 2048,
        "scheduling_policy": "priority",
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_lora": True,
        "lora_modules": adapters,
        "shutdown_timeout": 77,
    }


def test_sglang_understands_every_flag_as_intended() -> None:
    assert SGLANG_IMAGE.endswith(f":v{COMMAND_LINES.version}")
    if not is_there(COMMAND_LINES):
        pytest.skip("not there: SGLang's parser (`make engine-wheels` fetches it)")
    without, *others = lines("sglang")
    nothing, plain, full = read_by_sglang(COMMAND_LINES.folder, [*without, "--model-path=none"], *others)
    for found in (plain, full):
        assert EVENTS.items() <= found.pop("kv_events_config").items()
    always = {
        "host": "0.0.0.0",
        "model_path": "/models/org--weights--v1",
        "served_model_name": "a-name",
        "enable_metrics": True,
        "enable_cache_report": True,
        "load_publish_endpoint": "tcp://*:5757",
        "admin_api_key": "$(SGLANG_ADMIN_API_KEY)",  # what the kubelet replaces
    }
    assert changed(nothing, plain) == {**always, "port": 8000, "page_size": SGLANG_PAGE_SIZE}
    assert changed(nothing, full) == {
        **always,
        "port": 8123,
        "tokenizer_path": "/models/org--words",
        "chat_template": TEMPLATE,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": 8192,
        "page_size": 64,
        "max_total_tokens": 65536,
        "mem_fraction_static": 0.85,
        "max_running_requests": 48,
        "max_queued_requests": 12,
        "chunked_prefill_size": 2048,
        "schedule_policy": "lpm",
        "radix_eviction_policy": "lfu",
        "tp_size": 2,
        "dp_size": 2,
        "lora_paths": [f"{name}={path}" for name, path in PATHS.items()],
    }
