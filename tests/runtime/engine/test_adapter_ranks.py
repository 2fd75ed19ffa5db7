"""Adapters of a model whose ranks are several processes: all have the same ones, and read the same ones again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked_ranks
from support.adapter_engine import of
from support.adapters import shapes_of, write_adapter
from support.runtime_engine import prompt
from support.runtime_server import make_checkpoint
from treeline_runtime import Engine, GenerationError, SamplingParams
from treeline_runtime.scheduler.ranks import group

pytestmark = pytest.mark.deep

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
IDS = prompt(1, 40)
SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "max_total_tokens": 512,
    "device": "cpu",
    "threads": 1,
    "max_loras": 1,
    "max_lora_rank": 8,
}


@pytest.fixture(autouse=True)
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_ranks.prepare()
    monkeypatch.setattr(group, "spawn", forked_ranks.Forked)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def modules(model: Path, tmp_path: Path) -> tuple[str, ...]:
    with Engine(model, **SETTINGS) as engine:
        shapes = shapes_of(engine.scheduler.residence._sites)
    return tuple(f"{name}={write_adapter(tmp_path / name, shapes, seed=seed)}" for seed, name in enumerate("abc"))


def answers(engine: Engine, names: str) -> Iterator[list[int]]:
    for name in names:
        namespace = of(engine.scheduler.adapters.names[name])
        yield engine.generate(IDS, GREEDY, namespace=namespace).token_ids


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_ranks_read_again_what_rank_0_decides(
    model: Path, modules: tuple[str, ...], sizes: dict[str, int], tmp_path: Path
) -> None:
    with Engine(model, lora_modules=modules, **SETTINGS) as engine:
        expected = list(answers(engine, "abc"))
        size = max(adapter.num_bytes for adapter in engine.scheduler.residence.adapters.values())
    assert len(set(map(tuple, expected))) == 3
    with Engine(model, lora_modules=modules, max_lora_memory=size, **SETTINGS, **sizes) as engine:
        for names in ("abc", "cba", "bca"):
            found = dict(zip(names, answers(engine, names), strict=True))
            assert [found[name] for name in "abc"] == expected
        assert engine.scheduler.cache.slots.away
        write_adapter(tmp_path / "b", {"layers.0.self_attn.q_proj": (1, 1)})
        list(answers(engine, "c"))
        engine.flush_cache()
        with pytest.raises(GenerationError, match="files have changed"):
            list(answers(engine, "b"))
        assert list(answers(engine, "ac")) == [expected[0], expected[2]]
