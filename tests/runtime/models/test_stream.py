"""Tensors streamed to a device equal those in the files, whichever are requested, and when."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import fp8
from support.runtime_models import IDS, Runner, ours, reference, save
from treeline_runtime.models import ModelError, stream, weights
from treeline_runtime.models.stream import Entry, Streamed, read_header, reading_order

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool]


def threads() -> int:
    return sum(thread.name == "weights" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return tensors of several pieces, more pieces than buffers."""
    monkeypatch.setattr(stream, "BUFFER_BYTES", 64)
    monkeypatch.setattr(stream, "BUFFERS", 3)


def entries_of(paths: list[Path]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in paths:
        found |= read_header(path)
    return {name: found[name] for name in reading_order(found, ())}


@given(data=st.data())
def test_tensors_are_right_in_any_order_of_requests(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    shapes = st.lists(st.integers(0, 9), max_size=3)
    tensors: dict[str, torch.Tensor] = {}
    for shard in range(data.draw(st.integers(1, 3))):
        part = {}
        for i in range(data.draw(st.integers(0, 4))):
            shape, dtype = data.draw(shapes), data.draw(st.sampled_from(DTYPES))
            part[f"{shard}.{i}"] = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        save_file(part, folder / f"{shard}.safetensors")
        tensors |= part
    order = data.draw(st.permutations(sorted(tensors)))
    asked = order[: data.draw(st.integers(0, len(order)))]
    streamed = Streamed(entries_of(sorted(folder.iterdir())), CPU)
    try:
        for name in asked:
            found = streamed.read(name)
            assert (found.dtype, found.shape) == (tensors[name].dtype, tensors[name].shape)
            assert torch.equal(found.view(-1).view(torch.uint8), tensors[name].view(-1).view(torch.uint8))
    finally:
        streamed.close()
    assert threads() == 0
    shutil.rmtree(folder)


def test_layers_are_read_in_order_of_use() -> None:
    names = ["model.layers.10.a", "model.norm", "model.layers.2.b", "lm_head", "model.layers.2.a", "model.embed"]
    expected = ["model.embed", "lm_head", "model.layers.2.a", "model.layers.2.b", "model.layers.10.a", "model.norm"]
    assert reading_order(names, ("model.embed", "lm_head")) == expected


def test_skipped_tensors_are_not_awaited_and_the_rest_arrives(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100), "b": torch.ones(1000), "c": torch.full((100,), 3.0)}, path)
    streamed = Streamed(entries_of([path]), CPU)
    assert torch.equal(streamed.read("a"), torch.ones(100))
    streamed.skip("b")
    assert torch.equal(streamed.read("c"), torch.full((100,), 3.0))
    streamed.close()
    assert threads() == 0


def test_a_file_that_ends_early_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(1000)}, path)
    entries = entries_of([path])
    os.truncate(path, path.stat().st_size - 100)  # after it was opened: safetensors itself refuses it otherwise
    streamed = Streamed(entries, CPU)
    try:
        assert torch.equal(streamed.read("a"), torch.ones(100))
        for thread in streamed._threads:  # what went wrong is known before the tensor beside it is asked for
            thread.join(0.05)
        assert torch.equal(streamed.read("b"), torch.ones(100))
        with pytest.raises(ModelError, match=rf"cannot read tensor c of {path}: the file ends before it does"):
            streamed.read("c")
    finally:
        streamed.close()
    assert threads() == 0


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(ModelError, match=r"tensor a of .*model.safetensors is F4, which is not supported"):
        read_header(path)


# ---- checkpoints, streamed --------------------------------------------------------------------------------


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAPPED", ())
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1000)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    path = save(reference("Qwen3", {"head_dim": 16}), tmp_path / "shards", max_shard_size="60KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def logits(path: Path, **settings: Any) -> torch.Tensor:
    return Runner(ours(path, **settings)).feed(IDS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_streamed_model_equals_the_mapped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: None, tied: bool, quantization: str
) -> None:
    changes = {"head_dim": 16, "tie_word_embeddings": tied}
    path = save(reference("Qwen3", changes).to(torch.bfloat16), tmp_path, max_shard_size="40KB")
    streamed = logits(path, quantization=quantization)
    assert threads() == 0
    monkeypatch.setattr(weights, "MAPPED", ("cpu",))
    assert torch.equal(streamed, logits(path, quantization=quantization))


def test_a_checkpoint_in_fp8_is_streamed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: None) -> None:
    path = save(reference("Qwen3", {"head_dim": 16}), tmp_path)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    fp8.quantise_checkpoint(path, settings, "block", "weight_scale_inv")
    streamed = logits(path)
    monkeypatch.setattr(weights, "MAPPED", ("cpu",))
    assert torch.equal(streamed, logits(path))


def test_problems_of_streamed_checkpoints_are_named_and_leave_no_thread(shards: Path, streaming: None) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    path = shards / index[name]
    good = load_file(path)
    for changed, message in (
        ({name: good[name][:3].clone()}, rf"tensor {name} has shape \(3, 64\), config.json asks for \(96, 64\)"),
        ({name: good[name].to(torch.int8)}, f"tensor {name} is torch.int8; quantised"),
        ({"model.norm.weight": torch.ones(64)}, "model.norm.weight"),  # twice: in this shard and in its own
    ):
        save_file(good | changed, path)
        with pytest.raises(ModelError, match=message):
            ours(shards)
        assert threads() == 0
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match=f"cannot read {path}"):
        ours(shards)
    save_file({key: tensor for key, tensor in good.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"tensor {name} is not in it"):
        ours(shards)
    del index[name]
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        ours(shards)
    assert threads() == 0


def test_a_tensor_that_is_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    path = save(reference("Qwen3", {"head_dim": 16}), tmp_path)
    twice = [f'"a": {{"dtype": "U8", "shape": [1], "data_offsets": [{i}, {i + 1}]}}' for i in (0, 1)]
    header = f"{{{', '.join(twice)}}}".encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xy")
    with pytest.raises(ModelError, match=r"cannot read .*model.safetensors"):
        ours(path)


def test_the_log_shows_the_progress_of_loading(
    shards: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PROGRESS_S", 0.0)
    with caplog.at_level("INFO", "treeline_runtime"):
        ours(shards)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("weights: ")]
    assert all(line.endswith(" of 0.0 GB") for line in told[:-1])
    assert len(told) > 10
    assert told[-1].startswith("weights: 0.00 GB in ")
