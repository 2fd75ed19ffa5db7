"""Greedy output does not depend on the cache, the batch, the chunks or retraction; sampled output on its seed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.runtime_engine import VOCAB, Harness, prompt
from treeline_runtime.config import ConfigError
from treeline_runtime.messages import FinishReason

N = 12


def alone(tiny: Path, ids: list[int], **options: Any) -> list[int]:
    return Harness(tiny).generate("alone", ids, **({"max_new_tokens": N} | options))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("backend", ["torch_sdpa", "dense"])
def test_cold_and_warm_cache_agree(tiny: Path, page_size: int, backend: str) -> None:
    engine = Harness(tiny, page_size=page_size, attention_backend=backend)
    ids = prompt(1, 37)
    cold = engine.generate("cold", ids, max_new_tokens=N)
    warm = engine.generate("warm", ids, max_new_tokens=N)
    assert cold == warm == alone(tiny, ids)
    assert engine.last("cold").cached_tokens == 0
    assert engine.last("warm").cached_tokens == 36 // page_size * page_size
    assert engine.last("warm").prompt_tokens == 37
    assert engine.last("warm").completion_tokens == N


@pytest.mark.parametrize("chunk", [4, 8, 20])
def test_chunked_and_whole_prompts_agree(tiny: Path, chunk: int) -> None:
    ids = prompt(3, 71)
    engine = Harness(tiny, chunked_prefill_size=chunk)
    assert engine.generate("a", ids, max_new_tokens=N) == alone(tiny, ids)


def test_after_a_retraction_the_output_is_the_same(tiny: Path) -> None:
    prompts = [prompt(10 + i, 9) for i in range(6)]
    engine = Harness(tiny, max_total_tokens=96)
    engine.ratio.value = engine.ratio.initial = 0.0  # expect nothing, admit everything
    for i, ids in enumerate(prompts):
        engine.submit(str(i), ids, max_new_tokens=40, seed=5, temperature=0.9 if i == 3 else 0.0, return_logprob=True)
    engine.run()
    assert sum(engine.last(str(i)).retractions for i in range(6)) > 0
    calm = Harness(tiny)
    for i, ids in enumerate(prompts):
        options: dict[str, Any] = {"max_new_tokens": 40, "seed": 5, "return_logprob": True}
        calm.generate(str(i), ids, temperature=0.9 if i == 3 else 0.0, **options)
        assert engine.tokens(str(i)) == calm.tokens(str(i))
        assert [p for p, _ in engine.logprobs(str(i))] == pytest.approx([p for p, _ in calm.logprobs(str(i))], abs=1e-4)


def test_namespaces_do_not_share_pages(tiny: Path) -> None:
    engine = Harness(tiny)
    ids = prompt(5, 30)
    plain = engine.generate("plain", ids)
    assert engine.generate("salted", ids, namespace="s") == plain
    assert engine.last("salted").cached_tokens == 0
    assert engine.generate("again", ids, namespace="s") == plain
    assert engine.last("again").cached_tokens == 28


def test_a_seed_gives_the_same_tokens_alone_and_in_company(tiny: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "seed": 42, "max_new_tokens": N}
    single = alone(tiny, prompt(6, 20), **options)
    engine = Harness(tiny)
    for i in range(5):
        engine.submit(f"other{i}", prompt(50 + i, 10 + i), temperature=1.0)
    engine.submit("seeded", prompt(6, 20), **options)
    engine.run()
    assert engine.tokens("seeded") == single
    assert alone(tiny, prompt(6, 20), **(options | {"seed": 43})) != single


def test_requests_without_a_seed_differ(tiny: Path) -> None:
    engine = Harness(tiny)
    answers = {tuple(engine.generate(str(i), prompt(6, 20), temperature=2.0, max_new_tokens=N)) for i in range(4)}
    assert len(answers) == 4


def test_finish_reasons(tiny: Path) -> None:
    ids = prompt(7, 15)
    free = alone(tiny, ids)
    engine = Harness(tiny)
    engine.generate("length", ids, max_new_tokens=3)
    assert engine.last("length").finish == FinishReason("length")
    stop = free[4]
    cut = free.index(stop) + 1
    assert engine.generate("stop", ids, max_new_tokens=N, stop_token_ids=(stop,)) == free[:cut]
    assert engine.last("stop").finish == FinishReason("stop", matched=stop)
    longer = engine.generate("minimum", ids, max_new_tokens=N, stop_token_ids=(stop,), min_new_tokens=cut + 2)
    assert len(longer) >= cut + 2
    assert stop not in longer[: cut + 2]
    assert engine.generate("nothing", ids, max_new_tokens=0) == []
    assert engine.last("nothing").finish == FinishReason("length")
    assert engine.generate("one", ids, max_new_tokens=1) == free[:1]


def test_every_eos_id_ends_a_text_unless_ignored(tiny: Path, tmp_path: Path) -> None:
    from support.runtime_engine import write_config

    ids = prompt(7, 15)
    free = alone(tiny, ids)
    path = write_config(tmp_path, eos_token_id=[free[2], free[5]])
    engine = Harness(path)
    first = min(free.index(free[2]), free.index(free[5]))
    assert engine.generate("eos", ids, max_new_tokens=N) == free[: first + 1]
    assert engine.last("eos").finish == FinishReason("stop", matched=free[first])
    assert engine.generate("ignored", ids, max_new_tokens=N, ignore_eos=True) == free


def test_penalties_and_bias_reach_the_sampler(tiny: Path) -> None:
    ids = prompt(8, 12)
    engine = Harness(tiny)
    biased = engine.generate("bias", ids, logit_bias={17: 100.0}, max_new_tokens=5)
    assert biased == [17] * 5
    penalised = engine.generate(
        "penalty", ids, logit_bias={17: 50.0, 18: 50.0}, presence_penalty=20.0, max_new_tokens=2
    )
    assert sorted(penalised) == [17, 18]


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 8}, {"overlap_depth": 1}])
def test_logprobs_agree_between_prefill_and_decode(tiny: Path, settings: dict[str, Any]) -> None:
    """A sampled token has the same probability as part of a prompt."""
    engine = Harness(tiny, **settings)
    ids = prompt(9, 19)
    out = engine.generate("gen", ids, max_new_tokens=N, return_logprob=True, top_logprobs_num=3)
    pairs = engine.logprobs("gen")
    assert [token for _, token in pairs] == out
    tops = [top for o in engine.outs["gen"] for top in o.output_top_logprobs or ()]
    assert [top[0] for top in tops] == [pytest.approx(p) for p in pairs], "greedy takes the likeliest"
    assert all(len(top) == 3 for top in tops)
    assert engine.outs["gen"][0].input_token_logprobs is None

    engine.generate("score", ids + out, max_new_tokens=0, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    first = engine.outs["score"][0]
    assert first.input_token_logprobs is not None
    assert first.input_top_logprobs is not None
    assert [token for _, token in first.input_token_logprobs] == ids + out
    assert first.input_token_logprobs[0][0] is None
    assert first.input_top_logprobs[0] is None
    assert all(len(top or ()) == 2 for top in first.input_top_logprobs[1:])
    scored = [p for p, _ in first.input_token_logprobs[len(ids) :]]
    assert scored == pytest.approx([p for p, _ in pairs], abs=1e-4)
    assert first.cached_tokens == 0


@pytest.mark.parametrize("start", [0, 1, 7, 18, 19, -1])
def test_prompt_logprobs_start_where_asked_and_limit_the_cache(tiny: Path, start: int) -> None:
    engine = Harness(tiny, chunked_prefill_size=8)
    ids = prompt(9, 19)
    full = Harness(tiny)
    full.generate("x", ids, return_logprob=True, logprob_start_len=0)
    everything = full.outs["x"][0].input_token_logprobs
    assert everything is not None
    engine.generate("warm", ids)
    engine.generate("x", ids, return_logprob=True, logprob_start_len=start)
    first, *later = engine.outs["x"]
    assert all(out.input_token_logprobs is None for out in later)
    if start == -1:
        assert first.input_token_logprobs is None
        assert first.cached_tokens == 16
        return
    assert first.input_token_logprobs is not None
    assert [t for _, t in first.input_token_logprobs] == ids[start:]
    for (found, _), (expected, _) in zip(first.input_token_logprobs, everything[start:], strict=True):
        assert found == (None if expected is None else pytest.approx(expected, abs=1e-4))
    assert first.cached_tokens <= max(start - 1, 0)


def test_the_distribution_in_logprobs_is_the_models_own(tiny: Path) -> None:
    engine = Harness(tiny)
    ids = prompt(9, 19)
    options: dict[str, Any] = {"max_new_tokens": 1, "return_logprob": True, "top_logprobs_num": VOCAB}
    engine.generate("plain", ids, **options)
    engine.generate("bent", ids, temperature=2.0, top_k=3, logit_bias={3: 90.0}, seed=1, **options)
    plain, bent = ({t: p for p, t in engine.last(rid).output_top_logprobs[0]} for rid in ("plain", "bent"))
    assert plain == pytest.approx(bent, abs=1e-5)
    assert engine.tokens("bent") == [3]


def test_a_warm_up_leaves_nothing_behind(tiny: Path) -> None:
    cold, warm = Harness(tiny), Harness(tiny)
    warm.residence.warm_up()
    warm.assert_clean()
    assert warm.load().pages_used == 0
    assert warm.generate("a", prompt(1, 20), max_new_tokens=5) == cold.generate("a", prompt(1, 20), max_new_tokens=5)


def test_a_step_without_memory_is_reported_at_the_warm_up(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(tiny)

    def fail(_: list[int]) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(engine.executor, "warm_up", fail)
    with pytest.raises(ConfigError, match=r"lower mem_fraction.*chunked_prefill_size.*9 GiB"):
        engine.residence.warm_up()
