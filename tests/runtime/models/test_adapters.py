"""What an adapter must not be, where it may be, and many of them in one step."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.adapters import ATTENTION, shapes_of, write_adapter
from support.runtime_engine import write_config
from treeline_runtime.config import ConfigError, EngineConfig
from treeline_runtime.models import adapters
from treeline_runtime.models.adapters import CONFIG, WEIGHTS, Adapter, Site, find_adapter, read_adapter
from treeline_runtime.models.config import ModelError
from treeline_runtime.models.loader import load_model
from treeline_runtime.models.lora import AdapterPool

QKV = Site(("layers.0.q", "layers.0.v"), (8, 4), 8, (None, None))
DOWN = Site(("layers.0.down",), (8,), 12, (None,))
SITES = [QKV, DOWN]
SHAPES = shapes_of(SITES)
A = "base_model.model.model.layers.0.down.lora_A.weight"
B = "base_model.model.model.layers.0.down.lora_B.weight"


def read(folder: Path, sites: list[Site] = SITES, most: int = 64, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(folder, sites, 1, most, dtype)


NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "no LoRA": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "DoRA": ({"use_dora": True}, "DoRA"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    "QALoRA": ({"use_qalora": True}, "QALoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "biases": ({"bias": "lora_only"}, "bias 'lora_only'"),
    "biases of B": ({"lora_bias": True}, "lora_bias"),
    "layers twice": ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
    "fused experts": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "new tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "has changed the base model"),
    "what comes one day": ({"use_hyper_lora": {"x": 1}}, "use_hyper_lora"),
    "a module without tensors": ({"target_modules": ["q", "v", "down", "experts"]}, "'experts' in target_modules"),
    "a regular expression": ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern"),
    "no pattern": ({"alpha_pattern": [1]}, "alpha_pattern"),
    "no rank": ({"r": None}, "r is not a whole number"),
    "true as a rank": ({"r": True}, "r is not a whole number"),
    "a huge rank": ({"r": 10**300}, "r is not a whole number"),
    "a rank without room": ({"r": 128}, "--max-lora-rank 128"),
    "a module's rank without room": ({"rank_pattern": {"down": 128}}, "ask for (128, 12)"),
    "a huge scale": ({"lora_alpha": 10**400}, "lora_alpha"),
    "a scale that is none": ({"lora_alpha": float("nan")}, "lora_alpha"),
    "a scale in words": ({"alpha_pattern": {"down": "much"}}, "alpha_pattern"),
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(what: str, tmp_path: Path) -> None:
    changes, problem = NOT_SERVED[what]
    with pytest.raises(ModelError) as refused:
        read(write_adapter(tmp_path, SHAPES, **changes))
    assert problem in str(refused.value)


WRONG_TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "inputs": ({A: torch.ones(8, 6)}, "ask for (8, 12)"),
    "outputs": ({B: torch.ones(9, 8)}, "(8, 8)"),
    "rank": ({A: torch.ones(4, 12), B: torch.ones(8, 4)}, "ask for (8, 12)"),
    "one dimension": ({A: torch.ones(96)}, "ask for (8, 12)"),
    "NaN": ({A: torch.full((8, 12), torch.nan)}, "not finite"),
    "infinity": ({B: torch.full((8, 8), torch.inf)}, "not finite"),
    "integers": ({A: torch.ones(8, 12, dtype=torch.int32)}, "int32"),
    "a half": ({B: None}, "one matrix without the other"),
    "DoRA": ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(8)}, "lora_magnitude_vector"),
    "the head": (
        {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(8, 8) for side in "AB"}, "changes lm_head"
    ),
    "an embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 9)}, "embed_tokens"),
    "a layer too many": (
        {f"base_model.model.model.layers.1.down.lora_{side}.weight": torch.ones(8, 8) for side in "AB"},
        "changes layers.1.down",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(what: str, tmp_path: Path) -> None:
    edit, problem = WRONG_TENSORS[what]
    with pytest.raises(ModelError) as refused:
        read(write_adapter(tmp_path, SHAPES, edit=edit))
    assert problem in str(refused.value)


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


WRONG_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "is not a file"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), "is not a file"),
    "pickles": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "is not a file"),
    "a pipe": (lambda folder: (folder / WEIGHTS).unlink() or os.mkfifo(folder / WEIGHTS), "is not a file"),
    "half a file": (spoil(WEIGHTS, lambda data: data[: len(data) // 2]), "no whole file"),
    "three bytes": (spoil(WEIGHTS, lambda data: data[:3]), "no whole file"),
    "a huge header": (spoil(WEIGHTS, lambda data: b"\xff" * 8 + data[8:]), "no whole file"),
    "an empty file": (spoil(WEIGHTS, lambda data: b""), "no whole file"),
    "a huge file": (lambda folder: os.truncate(folder / WEIGHTS, 1 << 40), "more than"),
    "half an object": (spoil(CONFIG, lambda data: data[:-2]), "cannot read"),
    "a list": (spoil(CONFIG, lambda data: b"[1]"), "not a JSON object"),
    "a deep bomb": (spoil(CONFIG, lambda data: b"[" * 100_000), "cannot read"),
    "a long bomb": (spoil(CONFIG, lambda data: b" " * (2 << 20) + data), "more than"),
    "a long number": (spoil(CONFIG, lambda data: b'{"r": ' + b"9" * 100_000 + b"}"), "cannot read"),
    "half a character": (spoil(CONFIG, lambda data: b"\xff" + data), "cannot read"),
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_broken_files_are_refused_by_name(what: str, tmp_path: Path) -> None:
    spoiled, problem = WRONG_FILES[what]
    spoiled(write_adapter(tmp_path, SHAPES))
    with pytest.raises(ModelError) as refused:
        read(tmp_path)
    assert problem in str(refused.value)


def test_many_names_of_targets_and_many_modules_are_not_compared_each_with_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[str]()
    monkeypatch.setattr(adapters, "_is", lambda _, name: compared.append(name) is None)
    modules = {f"layers.0.many.{i}": (1, 1) for i in range(100)}
    with pytest.raises(ModelError, match=r"changes layers\.0\.many"):
        read(write_adapter(tmp_path / "modules", modules, target_modules=["99"] * 10_000))
    read(write_adapter(tmp_path / "targets", SHAPES, target_modules=[next(reversed(SHAPES))] * 10_000))
    assert len(compared) < 100


@given(data=st.data())
def test_no_bytes_bring_the_reader_down(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"), SHAPES)
    for name in (CONFIG, WEIGHTS):
        whole = bytearray((folder / name).read_bytes())
        for at, byte in data.draw(
            st.dictionaries(st.integers(0, min(len(whole), 600) - 1), st.integers(0, 255))
        ).items():
            whole[at] = byte
        (folder / name).write_bytes(whole)
    with contextlib.suppress(ModelError):
        assert all(part.isfinite().all() for pair in read(folder).parts.values() for part in pair)


def test_numbers_that_only_a_smaller_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, SHAPES, edit={A: torch.full((8, 12), 1e5)})
    read(folder)
    with pytest.raises(ModelError, match="float16"):
        read(folder, dtype=torch.float16)


def test_experts_are_refused_and_attention_beside_them_is_not(tmp_path: Path) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    moe |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1}
    base = write_config(tmp_path / "base", **moe, mlp_only_layers=[])
    model = load_model(EngineConfig(model=str(base), device="cpu", load_format="dummy"))
    read_adapter(write_adapter(tmp_path / "a", shapes_of(model.sites, ATTENTION)), model.sites, 2, 64, torch.float32)
    expert = {"layers.0.mlp.experts.0.gate_proj": (16, 32)}
    with pytest.raises(ModelError, match=r"changes layers.0.mlp.experts.0.gate_proj: only attention"):
        read_adapter(write_adapter(tmp_path / "b", expert), model.sites, 2, 64, torch.float32)


def test_adapters_are_added_to_what_fp8_products_give(tmp_path: Path) -> None:
    base = write_config(tmp_path / "base")
    model = load_model(EngineConfig(model=str(base), device="cpu", load_format="dummy", quantization="fp8"))
    folder = write_adapter(tmp_path / "a", shapes_of(model.sites))
    adapter = read_adapter(folder, model.sites, 2, 64, torch.float32)
    pool = AdapterPool(model.sites, 1, 8, torch.float32, torch.device("cpu"))
    pool.write(0, adapter)
    linear: Any = model._layers[0].sublayers[0].compute
    x = torch.randn(3, linear._o.site.inputs)
    a, b = adapter.parts[linear._o.site.name]
    added = linear._o(x, pool.step([0], [3])) - linear._o(x)
    torch.testing.assert_close(added, x @ a[:, 0].t() @ b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", ["", "model.", "model.language_model.", "language_model.model."])
def test_names_may_be_those_of_any_layout_of_checkpoints(place: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, SHAPES)
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {name.replace("_model.model.model.", f"_model.model.{place}"): one for name, one in tensors.items()},
        folder / WEIGHTS,
    )
    assert read(folder).parts.keys() == {QKV.name, DOWN.name}


def test_an_identity_is_of_content_and_not_of_place_or_name(tmp_path: Path) -> None:
    one = read(write_adapter(tmp_path / "one", SHAPES, base_model_name_or_path="/here", lora_dropout=0.1))
    assert read(write_adapter(tmp_path / "two", SHAPES)).digest == one.digest
    others = [{"seed": 1}, {"alpha": 17.0}, {"use_rslora": True}, {"alpha_pattern": {"down": 3}}]
    digests = {read(write_adapter(tmp_path / str(i), SHAPES, **other)).digest for i, other in enumerate(others)}
    assert len(digests | {one.digest}) == len(others) + 1


# ---- paths ------------------------------------------------------------------------------------------------------


def test_adapters_below_the_root_are_found_by_either_kind_of_path(tmp_path: Path) -> None:
    there = write_adapter(tmp_path / "root/team/sql", SHAPES)
    root = tmp_path / "root"
    (root / "latest").symlink_to(there)
    for path in ("team/sql", "team/../team/sql", "latest", str(there)):
        assert find_adapter(path, str(root)) == there.resolve()


@pytest.mark.parametrize("path", ["../away", "/etc", "team/../../away", "link", "files", "loop"])
def test_no_path_leads_out_of_the_root(path: str, tmp_path: Path) -> None:
    root, away = tmp_path / "root", write_adapter(tmp_path / "away", SHAPES)
    (root / "files").mkdir(parents=True)
    (root / "link").symlink_to(away)
    (root / "files" / CONFIG).symlink_to(away / CONFIG)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(ModelError, match="--lora-root"):
        find_adapter(path, str(root))


# ---- many in one step ---------------------------------------------------------------------------------------------


@functools.cache
def full_pool() -> tuple[AdapterPool, list[Adapter]]:
    """A pool with an adapter of another rank in each slot."""
    some = {"layers.0.down": SHAPES["layers.0.down"]}
    shapes, ranks = [SHAPES, some, SHAPES, SHAPES], [8, 1, 64, 12]
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_adapter(Path(folder, f"{i}"), shapes[i], seed=i, rank=ranks[i]) for i in range(4)]
        adapters = list(map(read, paths))
    made = AdapterPool(SITES, 4, 64, torch.float32, torch.device("cpu"))
    for slot in range(4):
        made.write(slot, adapters[2])  # whatever was there before leaves nothing
        made.write(slot, adapters[slot])
    return made, adapters


def applied(pool: AdapterPool, site: Site, slots: list[int], q_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs, and what the adapters make of them."""
    x = torch.randn(sum(q_lens), site.inputs, generator=torch.Generator().manual_seed(5))
    y = torch.zeros(len(x), sum(site.outputs))
    if (step := pool.step(slots, q_lens)) is not None:
        step.add(site, x, y)
    return x, y


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), min_size=1, max_size=12))
def test_a_mixed_batch_is_each_row_alone(rows: list[tuple[int, int]]) -> None:
    made, adapters = full_pool()
    slots, q_lens = map(list, zip(*rows, strict=True))
    for site in SITES:
        x, y = applied(made, site, slots, q_lens)
        expected, at = torch.zeros_like(y), 0
        for slot, n in rows:
            if slot >= 0 and (pair := adapters[slot].parts.get(site.name)) is not None:
                parts = zip(expected[at : at + n].split(site.outputs, 1), pair[1].split(site.outputs, 1), strict=True)
                for number, (out, b) in enumerate(parts):
                    out += x[at : at + n] @ pair[0][:, number].t() @ b
            at += n
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        base = [row for row, slot in enumerate(torch.tensor(slots).repeat_interleave(torch.tensor(q_lens))) if slot < 0]
        assert not y[base].any(), "rows without an adapter are not touched"


def test_a_step_without_adapters_is_none() -> None:
    assert full_pool()[0].step([-1, -1], [3, 1]) is None


def test_the_first_step_that_uses_a_slot_waits_for_its_upload_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of a GPU are replaced by ones that write down what is asked of them."""
    (_, adapters), log = full_pool(), list[str]()
    pool = AdapterPool(SITES, 4, 64, torch.float32, torch.device("cpu"))
    filled = pool._stacks[SITES[0].name].a.count_nonzero

    class Uploads:
        def record_event(self) -> SimpleNamespace:
            log.append("recorded")
            return SimpleNamespace(wait=lambda: log.append("waited"))

    @contextlib.contextmanager
    def stream(of: Uploads) -> Iterator[None]:
        before = filled()
        yield
        log.append("written" if of is pool._uploads and filled() > before else "nothing")

    monkeypatch.setattr(pool, "_uploads", Uploads())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    for slot in (0, 1):
        pool.write(slot, adapters[0])
    assert log == ["written", "recorded"] * 2
    del log[:]
    pool.step([-1, 2], [1, 1])
    assert log == []
    pool.step([1, -1, 1], [1, 1, 1])
    assert log == ["waited"]
    pool.step([1, 0], [1, 1])
    assert log == ["waited"] * 2
    pool.step([0, 1], [1, 1])
    assert log == ["waited"] * 2


def test_devices_and_widths_without_grouped_products_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        AdapterPool(SITES, 1, 8, torch.float16, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"layers.0.o, which has 5 inputs and 8 outputs"):
        AdapterPool([Site(("layers.0.o",), (8,), 5, (None,))], 1, 8, torch.float32, torch.device("cpu"))


def test_configurations_of_peft_itself_are_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q", "v", "down"], task_type="CAUSAL_LM")
    write_adapter(tmp_path, SHAPES)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["peft_version"]
    assert read(tmp_path).rank == 8
