"""Hidden states equal those of transformers, for any caching, chunking and retraction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.runtime_engine import Harness
from support.runtime_models import IDS, reference, save
from treeline_runtime import Engine, GenerationError, SamplingParams
from treeline_runtime.messages import MAX_HIDDEN_STATES_BYTES

transformers = pytest.importorskip("transformers")

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
WANTED: dict[str, Any] = {"return_hidden_states": True}
SETTINGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 512, "threads": 1, "enable_return_hidden_states": True}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference("Qwen3", {"head_dim": 16})


@pytest.fixture(scope="module")
def path(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs, tmp_path_factory.mktemp("qwen3"))


def expected(theirs: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    """Return transformers' hidden states of all positions but the last."""
    with torch.no_grad():
        states = theirs(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    found: npt.NDArray[np.float32] = states.numpy()
    return found


@pytest.mark.parametrize("chunk", [8, 1024])
def test_hidden_states_equal_transformers_except_cached_positions(path: Path, theirs: Any, chunk: int) -> None:
    with Engine(path, **SETTINGS, chunked_prefill_size=chunk) as engine:
        cold, other = engine.generate([IDS, IDS[5:]], GREEDY, **WANTED)
        whole = expected(theirs, IDS + cold.token_ids)
        assert cold.hidden_states is not None
        assert cold.hidden_states.shape == (len(IDS) + 5, 64)
        np.testing.assert_allclose(cold.hidden_states, whole, atol=2e-5)
        np.testing.assert_allclose(other.hidden_states, expected(theirs, IDS[5:] + other.token_ids), atol=2e-5)
        warm = engine.generate(IDS, GREEDY, **WANTED)
        assert warm.cached_tokens >= 48
        assert warm.hidden_states is not None
        np.testing.assert_allclose(warm.hidden_states, whole[warm.cached_tokens :], atol=2e-5)
        prompt_alone = engine.generate(IDS[::-1], SamplingParams(max_new_tokens=0), **WANTED)
        assert prompt_alone.hidden_states is not None
        assert len(prompt_alone.hidden_states) == len(IDS)
        assert engine.generate(IDS, GREEDY).hidden_states is None
        *_, (_, last) = engine.stream(IDS, GREEDY, **WANTED)
        assert last.hidden_states is not None


@pytest.mark.parametrize("depth", [0, 1])
def test_a_retraction_causes_no_gap_and_no_repetition(path: Path, theirs: Any, depth: int) -> None:
    settings = {"load_format": "auto", "max_total_tokens": 96, "enable_return_hidden_states": True}
    engine = Harness(path, **settings, overlap_depth=depth, schedule_conservativeness=0.1)
    prompts = [[seed, *IDS[:9]] for seed in range(6)]
    for i, ids in enumerate(prompts):
        engine.submit(str(i), ids, max_new_tokens=24, return_hidden_states=True)
    engine.run()
    assert any(engine.last(str(i)).retractions for i in range(6))
    for i, ids in enumerate(prompts):
        states = engine.last(str(i)).hidden_states
        assert states is not None
        rows = np.frombuffer(states.data, dtype="<f4").reshape(-1, states.size)
        whole = expected(theirs, ids + engine.tokens(str(i)))
        np.testing.assert_allclose(rows, whole[states.first :], atol=2e-5)


def test_hidden_states_need_the_setting_and_are_bounded(path: Path) -> None:
    with (
        Engine(path, **SETTINGS | {"enable_return_hidden_states": False}) as engine,
        pytest.raises(GenerationError, match="enable_return_hidden_states"),
    ):
        engine.generate(IDS, GREEDY, **WANTED)
    with Engine(path, **SETTINGS) as engine:
        most = MAX_HIDDEN_STATES_BYTES // (4 * 64)
        assert most > 128, "else this would be refused"
        assert engine.generate(IDS, SamplingParams(max_new_tokens=10**9), **WANTED).hidden_states is not None
