"""LoRA adapters of an `Engine`: loaded, asked for by name and unloaded, by SGLang's names."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from support.adapters import shapes_of, write_adapter
from support.runtime_engine import prompt
from support.runtime_server import make_checkpoint
from treeline_runtime import Engine, SamplingParams

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
IDS = prompt(1, 40)


async def test_adapters_come_answer_and_go(tmp_path: Path) -> None:
    root = tmp_path / "root"
    settings = {"page_size": 4, "max_total_tokens": 512, "device": "cpu", "threads": 1, "max_lora_rank": 8}
    with Engine(make_checkpoint(tmp_path / "model"), lora_root=str(root), **settings) as engine:
        shapes = shapes_of(engine.scheduler.residence._sites)
        for seed, name in enumerate(("sql", "law")):
            write_adapter(root / name, shapes, seed=seed)
        base = engine.generate(IDS, GREEDY).token_ids
        engine.load_lora_adapter("sql", "sql")
        engine.load_lora_adapter("law", root / "law")
        sql, law = (engine.generate(IDS, GREEDY, lora_path=name).token_ids for name in ("sql", "law"))
        assert len({tuple(answer) for answer in (base, sql, law)}) == 3
        both = engine.generate([IDS, IDS[:9]], GREEDY, lora_path="sql", namespace="salt")
        assert both[0].token_ids == sql
        assert both[0].cached_tokens == 0, "another salt"
        assert (await engine.async_generate(IDS, GREEDY, lora_path="law")).token_ids == law
        assert [out.token_ids for _, out in engine.stream(IDS, GREEDY, lora_path="sql")][-1] == sql
        assert engine.generate(IDS, GREEDY).token_ids == base
        with pytest.raises(RuntimeError, match="--lora-root"):
            engine.load_lora_adapter("other", tmp_path)
        engine.unload_lora_adapter("sql")
        with pytest.raises(ValueError, match="no LoRA adapter is loaded as 'sql'"):
            engine.generate(IDS, GREEDY, lora_path="sql")
        with pytest.raises(RuntimeError, match="another adapter is loaded as 'law'"):
            engine.load_lora_adapter("law", "sql")


def test_a_load_that_is_overtaken_by_an_unload_ends(tmp_path: Path) -> None:
    settings = {"page_size": 4, "max_total_tokens": 512, "device": "cpu", "threads": 1, "max_lora_rank": 8}
    with Engine(make_checkpoint(tmp_path / "model"), lora_root=str(tmp_path / "root"), **settings) as engine:
        write_adapter(tmp_path / "root/sql", shapes_of(engine.scheduler.residence._sites))
        for _ in range(20):
            loads = threading.Thread(target=_loaded, args=(engine,), daemon=True)
            loads.start()
            engine.unload_lora_adapter("sql")
            loads.join(60.0)
            assert not loads.is_alive(), "it waits for ever"
            engine.unload_lora_adapter("sql")
            assert engine.scheduler.adapters.names == {}


def _loaded(engine: Engine) -> None:
    with contextlib.suppress(RuntimeError):  # it was unloaded meanwhile
        engine.load_lora_adapter("sql", "sql")
