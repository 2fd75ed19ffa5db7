"""A KV cache of fp8: half the memory, the same accounts, and answers that do not depend on cache hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import fp8
from support.runtime_engine import Harness, prompt, write_config
from support.runtime_models import IDS, Runner, ours, reference, save
from treeline_runtime.scheduler import resolve

pytestmark = pytest.mark.deep

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_the_cache_holds_four_times_as_many_tokens_as_one_of_float32(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_available_memory", lambda: 1 << 22)
    plain, small = (Harness(tiny, kv_cache_dtype=kind, max_total_tokens=None).limits for kind in ("auto", "fp8_e4m3"))
    assert small.kv_bytes_per_token * 4 == plain.kv_bytes_per_token
    assert small.num_pages // 4 == plain.num_pages
    assert small.as_dict()["kv_dtype"] == "float8_e4m3fn"
    assert plain.as_dict()["kv_dtype"] == plain.as_dict()["dtype"] == "float32"


def test_an_answer_does_not_depend_on_chunks_nor_on_the_cache(tiny: Path) -> None:
    ids = prompt(3, 60)
    engine = Harness(tiny, kv_cache_dtype="fp8_e4m3")
    first = engine.generate("a", ids, max_new_tokens=12)
    assert engine.generate("b", ids, max_new_tokens=12) == first
    assert engine.last("b").cached_tokens > 40
    chunked = Harness(tiny, kv_cache_dtype="fp8_e4m3", chunked_prefill_size=8)
    assert chunked.generate("a", ids, max_new_tokens=12) == first
    engine.assert_clean()
    chunked.assert_clean()


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """Return a checkpoint with fp8 weights, and scales for an fp8 cache."""
    path = save(reference("Llama", {}), tmp_path / "calibrated")
    layers = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([scale])
        for layer, kind, scale in ((0, "k", 0.03), (0, "v", 0.02), (1, "k", 0.05), (1, "v", 0.01))
    }
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": "static"}
    fp8.quantise_checkpoint(path, settings, "tensor", **layers)
    return path


def test_the_cache_uses_the_checkpoints_scales(calibrated: Path) -> None:
    model = ours(calibrated)
    assert model.kv_scales == [pytest.approx((0.03, 0.02)), pytest.approx((0.05, 0.01))]
    exact = Runner(model).feed(IDS)
    runner = Runner(model, E4M3)
    assert 1e-3 < float((runner.feed(IDS) - exact).norm() / exact.norm()) < 0.3
    pool = runner.attention.pool
    codes = pool.keys[1].view(torch.uint8)
    assert set(codes.unique().tolist()) <= set(range(256)) - {0x7F, 0xFF}
    # a scale that is taken: what is stored times it is the key, to within half a step
    plain = Runner(model)
    plain.feed(IDS)
    found = pool.gather(0, runner.pages[:3])[0]
    expected = plain.attention.pool.gather(0, plain.pages[:3])[0]
    torch.testing.assert_close(found, expected, rtol=1 / 15, atol=0.03 * 2**-9)


def test_scales_have_no_effect_on_a_cache_of_another_type(calibrated: Path) -> None:
    model = ours(calibrated)
    expected = Runner(model).feed(IDS)
    model.kv_scales = [(1.0, 1.0)] * 2
    assert torch.equal(Runner(model).feed(IDS), expected)


def test_an_engine_loads_the_scales_of_a_quantised_checkpoint(calibrated: Path) -> None:
    assert "model.layers.0.self_attn.k_scale" in load_file(calibrated / "model.safetensors")
    engine = Harness(calibrated, load_format="auto", kv_cache_dtype="fp8_e4m3")
    assert len(engine.generate("a", IDS, max_new_tokens=4)) == 4
    assert engine.executor.pool.key_scales == pytest.approx([0.03, 0.05])
