"""vLLM and SGLang servers with a role, as the picker sees them: the pages that say how they hand over prompts."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from support.epp_io import FakeEngine

HANDED_OVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 1, 4]],
    "remote_engine_id": "b6e1c6e4-0f4f-4b0e-9d5e-a3c1a1d0f3c2",
    "remote_request_id": "cmpl-1-0",
    "remote_host": "10.1.2.3",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 1000,
    "transfer_mode": "pull",
}
"""What a vLLM 0.33 with a NixlConnector adds to its answer."""
_numbers = itertools.count()


def new_prompt(words: int = 1500) -> str:
    """Return a long prompt that is cached nowhere."""
    return f"{next(_numbers)} one two three four " * words


def vllm(name: str, role: str, *, block_size: int = 16, running: int = 0, nixl: bool = True) -> FakeEngine:
    """Return a vLLM. A prefill engine answers as a NixlConnector does."""
    lines = [
        f'vllm:num_requests_running{{engine="0"}} {running}.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        f'vllm:cache_config_info{{block_size="{block_size}",cache_dtype="auto",num_gpu_blocks="4096"}} 1.0',
        *(['vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.0'] if nixl else []),
    ]
    engine = FakeEngine(name, missing={"/kv_event_sources", "/server_info"}, role=role)
    engine.documents["/v1/models"] = {"data": [{"id": "tiny", "owned_by": "vllm", "root": "org/tiny"}]}
    engine.documents["/version"] = {"version": "0.33.0"}
    engine.documents["/metrics"] = "\n".join([*lines, ""]).encode()
    if role == "prefill":
        engine.reply_body = json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": HANDED_OVER}).encode()
    return engine


def sglang(name: str, mode: str, **facts: Any) -> FakeEngine:
    """Return an SGLang, whose role nobody needs to name."""
    engine = FakeEngine(name)
    engine.documents["/v1/models"] = {"data": [{"id": "tiny", "owned_by": "sglang"}]}
    said = {"kv_events": None, "disaggregation_mode": mode, "disaggregation_bootstrap_port": 9876, "page_size": 16}
    engine.documents["/server_info"] = said | facts
    return engine


@contextlib.asynccontextmanager
async def started(*engines: FakeEngine) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield list(engines)
