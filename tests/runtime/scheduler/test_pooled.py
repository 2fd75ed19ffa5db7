"""Vectors instead of text equal those of transformers, however the prompt is computed; endings, faults, limits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pooling_models import add_logit_score, classifier, embedder
from support.runtime_engine import Harness
from support.runtime_models import IDS, reference, save
from treeline_runtime.scheduler.launched import Launched, Sampled

pytest.importorskip("transformers")


def engine(path: Path, **settings: Any) -> Harness:
    return Harness(path, **({"load_format": "auto"} | settings))


def hidden(theirs: Any, ids: list[int]) -> torch.Tensor:
    """Return normalised hidden states (tokens, hidden), computed by transformers."""
    with torch.inference_mode():
        return (theirs if hasattr(theirs, "layers") else theirs.model)(torch.tensor([ids])).last_hidden_state[0]


def close(ours: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def ids(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 128), k=length)


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return embedder(tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="module")
def mean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return embedder(tmp_path_factory.mktemp("mean"), "mean", normalize=False)


# ---- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"chunked_prefill_size": 8}, {"overlap_depth": 1, "chunked_prefill_size": 12}]
)
def test_the_last_tokens_hidden_state_normalised(last: tuple[Any, Path], settings: dict[str, Any]) -> None:
    theirs, path = last
    found = engine(path, **settings).pool("a", IDS)
    close(found, torch.nn.functional.normalize(hidden(theirs, IDS)[-1], dim=0))
    assert abs(float(np.linalg.norm(found)) - 1) < 1e-5


@pytest.mark.parametrize(
    "settings", [{}, {"chunked_prefill_size": 8}, {"overlap_depth": 1, "chunked_prefill_size": 12}]
)
def test_the_mean_of_all_hidden_states(mean: tuple[Any, Path], settings: dict[str, Any]) -> None:
    theirs, path = mean
    close(engine(path, **settings).pool("a", IDS), hidden(theirs, IDS).mean(0))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_language_model_that_is_served_for_embeddings(tmp_path: Path, family: str) -> None:
    theirs, path = embedder(tmp_path / "with", family=family, kind="ForCausalLM")
    expected = torch.nn.functional.normalize(hidden(theirs, IDS)[-1], dim=0)
    close(engine(path).pool("a", IDS), expected)
    bare = save(theirs, tmp_path / "without")
    close(engine(bare, task="embed").pool("a", IDS), expected)
    assert "text, not vectors" in refused(engine(save(theirs, tmp_path / "text")), IDS)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classification_heads_outputs(tmp_path: Path, family: str, labels: int) -> None:
    theirs, path = classifier(tmp_path, labels, family)
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.abs().max() > 0.01
    close(engine(path, chunked_prefill_size=16).pool("a", IDS), expected)


@pytest.mark.parametrize(
    "prompt", [[5, 6, 0], [0, 5, 0, 6, 0, 0, 0], [*range(1, 17), *[0] * 17], [0, 0, 0], [0]], ids=len
)
def test_a_head_looks_past_padding_at_the_end(tmp_path: Path, prompt: list[int]) -> None:
    theirs, path = classifier(tmp_path, 2)
    assert theirs.config.pad_token_id == 0
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
    close(engine(path, chunked_prefill_size=16).pool("a", prompt), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("no", [7, None])
def test_the_log_odds_of_two_tokens(tmp_path: Path, tied: bool, no: int | None) -> None:
    theirs = reference("Qwen3", {"head_dim": 16, "tie_word_embeddings": tied})
    path = add_logit_score(save(theirs, tmp_path), 9, no)
    with torch.inference_mode():
        logits = theirs(torch.tensor([IDS])).logits[0, -1]
    close(engine(path).pool("a", IDS), (logits[9] - (0 if no is None else logits[no]))[None])


def test_the_logits_of_two_tokens_are_capped_as_all_are(tmp_path: Path) -> None:
    theirs = reference("Gemma2", {"head_dim": 16, "final_logit_softcapping": 0.5})
    path = add_logit_score(save(theirs, tmp_path), 9, 7)
    with torch.inference_mode():
        logits = theirs(torch.tensor([IDS])).logits[0, -1]
    close(engine(path).pool("a", IDS), (logits[9] - logits[7])[None])


# ---- the cache, and others ------------------------------------------------------------------------------------------


def test_a_cached_prefix_is_reused_for_the_last_token(last: tuple[Any, Path]) -> None:
    running = engine(last[1])
    alone = running.pool("a", IDS)
    np.testing.assert_allclose(running.pool("b", IDS), alone, rtol=1e-5, atol=1e-6)
    assert running.last("b").cached_tokens == 48
    assert running.pool("c", IDS, namespace="other") is not None
    assert running.last("c").cached_tokens == 0


def test_a_mean_always_covers_the_whole_prompt(mean: tuple[Any, Path]) -> None:
    running = engine(mean[1], chunked_prefill_size=16)
    alone = running.pool("a", IDS)
    running.submit("b", IDS, pools=True, max_new_tokens=0)
    close(running.pool("c", IDS[:40]), torch.from_numpy(engine(mean[1]).pool("c", IDS[:40]).copy()))
    close(running.vector("b"), torch.from_numpy(alone.copy()))
    assert [running.last(rid).cached_tokens for rid in "bc"] == [0, 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_many_requests_with_aborts_get_the_same_vectors_as_alone(
    kind: str, depth: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)[1]
    prompts = [ids(i, 1 + 7 * i % 90) for i in range(24)]
    quiet = engine(path)
    expected = [quiet.pool(str(i), prompt) for i, prompt in enumerate(prompts)]
    # less memory than the prompts need together, few rows, chunks that cut most prompts
    running = engine(path, overlap_depth=depth, chunked_prefill_size=16, max_total_tokens=160, max_running_requests=4)
    for i, prompt in enumerate(prompts):
        running.submit(str(i), prompt, pools=True, max_new_tokens=0)
    gone = {3, 8, 9, 17, 23}
    for i in sorted(gone):
        running.step()
        running.step()
        running.abort(str(i))
    running.run()
    for i in range(24):
        end = running.last(str(i))
        assert end.finish is not None
        if end.finish.type == "abort":
            assert i in gone
            assert end.vector is None
        else:
            close(running.vector(str(i)), torch.from_numpy(expected[i].copy()))
    assert sum(running.last(str(i)).vector is not None for i in range(24)) >= 19


def test_a_failed_batch_is_retried_without_counting_twice(
    mean: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [engine(mean[1]).pool("a", ids(i, 40)) for i in range(2)]
    running = engine(mean[1], chunked_prefill_size=64)
    launch, failures = running._compute, []

    def flaky(batch: Any) -> Launched:
        launched = launch(batch)
        if len(batch.reqs) > 1:
            failures.append(batch)
            raise RuntimeError("out of luck")
        return launched

    monkeypatch.setattr(running, "_compute", flaky)
    for i in range(2):
        running.submit(str(i), ids(i, 40), pools=True, max_new_tokens=0)
    running.run()
    assert failures
    for i in range(2):
        close(running.vector(str(i)), torch.from_numpy(expected[i].copy()))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_retracted_vector_request_begins_again(mean: tuple[Any, Path], depth: int) -> None:
    expected = engine(mean[1]).pool("a", ids(1, 90))
    running = engine(mean[1], chunked_prefill_size=16, max_total_tokens=96, overlap_depth=depth)
    running.submit("long", ids(1, 90), pools=True, max_new_tokens=0)
    for _ in range(3):
        running.step()
    running._process_all_but(0)
    assert running.prefill.chunked is not None
    running._retract(running.prefill.chunked)
    running.run()
    assert running.last("long").retractions == 1
    close(running.vector("long"), torch.from_numpy(expected.copy()))


def test_load_counts_requests_in_flight(last: tuple[Any, Path]) -> None:
    running = engine(last[1], overlap_depth=1)
    for i in range(3):
        running.submit(str(i), ids(i, 20), pools=True, max_new_tokens=0)
    running.step()
    assert (running.load().running, running.load().waiting) == (3, 0)
    running.run()
    assert running.load().running == 0


# ---- what is refused, and what fails --------------------------------------------------------------------------------


def refused(running: Harness, prompt: list[int], **options: Any) -> str:
    running.submit("refused", prompt, **({"pools": True, "max_new_tokens": 0} | options))
    running.run()
    end = running.last("refused")
    assert end.finish is not None
    assert end.vector is None
    assert (end.finish.type, end.finish.status) == ("error", 400)
    return end.finish.message or ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pools": False}, "not text"),
        ({"max_new_tokens": 1}, "max_new_tokens must be 0"),
        ({"return_logprob": True}, "no log probabilities"),
    ],
)
def test_an_embedding_model_generates_no_text(last: tuple[Any, Path], options: dict[str, Any], says: str) -> None:
    assert says in refused(engine(last[1]), IDS, **options)


def test_a_prompt_that_never_fits_is_refused_and_one_that_just_fits_is_served(last: tuple[Any, Path]) -> None:
    theirs, path = last
    whole = ids(1, 128)
    running = engine(path)
    close(running.pool("context", whole), torch.nn.functional.normalize(hidden(theirs, whole)[-1], dim=0))
    assert "at most 128 fit" in refused(running, ids(1, 129))
    assert "empty" in refused(engine(path), [])
    small = engine(path, max_total_tokens=64)
    small.submit("before", ids(2, 30), pools=True, max_new_tokens=0)
    close(small.pool("pool", whole[:64]), torch.nn.functional.normalize(hidden(theirs, whole[:64])[-1], dim=0))
    assert "at most 64 fit" in refused(small, whole[:65])


def test_a_vector_that_is_not_finite_is_an_error_and_is_not_cached(
    last: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(last[1])
    result = Launched.result

    def overflowing(launched: Launched) -> list[Sampled]:
        assert launched.pooled is not None
        launched.pooled._readback._copies[0][0, 0] = torch.inf  # type: ignore[union-attr]
        return result(launched)

    with monkeypatch.context() as patch:
        patch.setattr(Launched, "result", overflowing)
        running.submit("a", IDS, pools=True, max_new_tokens=0)
        running.run()
    end = running.last("a")
    assert end.finish is not None
    assert (end.finish.status, end.vector) == (500, None)
    running.pool("b", IDS)
    assert running.last("b").cached_tokens == 0


def test_vectors_of_every_position_store_and_use_no_pages(mean: tuple[Any, Path]) -> None:
    running = engine(mean[1], max_total_tokens=160, host_cache=1 << 20)
    prompts = [ids(seed, 60) for seed in range(4)]
    vectors = [running.pool(f"{again}-{i}", prompt) for again in range(3) for i, prompt in enumerate(prompts)]
    assert all((vectors[i] == vectors[i % 4]).all() for i in range(12))
    assert running.last("2-0").cached_tokens == 0
    assert running.cache.tiers is not None
    assert running.cache.tiers.store.host.num_pages == 0
    running.close()
