"""All features together: mixed chunks, priorities, time limits, hidden states, an fp8 cache, aborts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.eagle_heads import write_head
from support.runtime_engine import Harness, prompt, write_config
from treeline_runtime.messages import FlushReq, TokenOut
from treeline_runtime.scheduler import drafting, ngrams

pytestmark = pytest.mark.deep

SETTINGS: dict[str, Any] = {
    "schedule_policy": "priority",
    "enable_return_hidden_states": True,
    "chunked_prefill_size": 16,
    "max_running_requests": 5,
    "max_queued_requests": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "windows": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 12,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}


def states(out: TokenOut) -> Any:
    assert out.hidden_states is not None
    return np.frombuffer(out.hidden_states.data, "<f4").reshape(-1, out.hidden_states.size)


@pytest.mark.parametrize(
    ("model", "kv", "mixed", "depth", "guesses"),
    [
        ("dense", "auto", True, 1, "off"),
        ("gpt-oss", "fp8_e4m3", True, 1, "off"),
        ("windows", "fp8_e4m3", True, 1, "off"),
        ("moe", "fp8_e4m3", True, 0, "off"),
        ("moe", "auto", False, 1, "off"),
        ("dense", "auto", True, 1, "NGRAM"),
        ("windows", "fp8_e4m3", False, 1, "NGRAM"),
        ("gpt-oss", "auto", True, 0, "NGRAM"),
        ("windows", "fp8_e4m3", True, 1, "EAGLE3"),
        ("moe", "auto", False, 0, "EAGLE3"),
    ],
)
def test_surviving_requests_get_the_tokens_that_they_get_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kv: str, mixed: bool, depth: int, guesses: str
) -> None:
    monkeypatch.setattr(ngrams, "LENGTHS", (2, 1))  # many guesses, most of them wrong
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 3),)),))
    monkeypatch.setattr(drafting, "WAIT", -1.0)
    path = write_config(tmp_path, **MODELS[model])
    head = None
    if guesses == "EAGLE3":
        head = str(write_head(tmp_path / "head", path, (0, 1), vocab=range(96), own_embedding=True))
    rng, now = random.Random(f"{model} {kv} {mixed} {depth}"), [0.0]
    engine = Harness(
        path,
        clock=lambda: now[0],
        kv_cache_dtype=kv,
        mixed_chunk=mixed,
        overlap_depth=depth,
        speculative_algorithm=guesses,
        speculative_draft_model_path=head,
        max_total_tokens=200,
        waiting_timeout=40.0,
        request_timeout=90.0,
        starvation_bound=25.0,
        **SETTINGS,
    )
    engine.ratio.initial = engine.ratio.minimum = engine.ratio.value = 0.1
    calm = Harness(path, kv_cache_dtype=kv, enable_return_hidden_states=True, max_total_tokens=2048)
    families = [prompt(seed, 60) for seed in range(3)]
    asked: dict[str, tuple[list[int], int, bool]] = {}
    for _ in range(150):
        now[0] += rng.random()
        if rng.random() < 0.35:
            ids = rng.choice(families)[: rng.randint(1, 60)] + prompt(rng.randint(0, 99), rng.randint(1, 8))
            rid, hidden = str(len(asked)), rng.random() < 0.5
            asked[rid] = ids, rng.choice([0, 1, 6, 25]), hidden
            engine.submit(
                rid, ids, max_new_tokens=asked[rid][1], priority=rng.randint(-3, 3), return_hidden_states=hidden,
                return_logprob=rng.random() < 0.2, logprob_start_len=rng.choice([-1, 0]),
            )  # fmt: skip
        elif rng.random() < 0.1 and asked:
            engine.abort(rng.choice(list(asked)))
        elif rng.random() < 0.03:
            engine.inbox.append(FlushReq("f"))
        elif rng.random() < 0.1:
            engine.retract_one(rng)
        engine.step()
    engine.run()
    ends = {rid: engine.last(rid) for rid in asked}
    kept = [rid for rid, out in ends.items() if out.finish is not None and out.finish.type == "length"]
    assert len(kept) > 10
    assert any(ends[rid].retractions for rid in kept)
    assert guesses == "off" or engine.stats.total_draft_tokens > 100
    for rid in kept:
        ids, tokens, hidden = asked[rid]
        calm.cache.flush()
        assert engine.tokens(rid) == calm.generate(rid, ids, max_new_tokens=tokens, return_hidden_states=hidden), rid
        if hidden:
            first = ends[rid].hidden_states.first  # type: ignore[union-attr]
            np.testing.assert_allclose(states(ends[rid]), states(calm.last(rid))[first:], atol=1e-3)
