"""The ranks of a group compute together what one computes alone; each reads and keeps its part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import fp8
from support.mxfp4 import packed
from support.ranks import on_ranks
from support.runtime_models import IDS, Runner, config_of, reference, save
from treeline_runtime.collectives import Ranks
from treeline_runtime.config import EngineConfig
from treeline_runtime.models import ModelError, read_config, stream, weights
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.loader import load_model
from treeline_runtime.models.moe import Exchange
from treeline_runtime.models.offload import size_of, tensors_of
from treeline_runtime.models.quantization.scheme import Scheme
from treeline_runtime.models.shards import Cut, Rank, check_ranks, own
from treeline_runtime.models.stream import Streamed, read_header

transformers = pytest.importorskip("transformers")

FULL, SLIDING = "full_attention", "sliding_attention"
COUNTS = (2, 8)
HEADS = {"num_attention_heads": 8, "vocab_size": 131}
"""Key/value heads are two, which more ranks have to share; the vocabulary has no equal parts."""
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 10}
GPT_OSS = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9}
QWEN_MOE = {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 3}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama, biases, tied": ("Llama", BIASES | TIED | {"num_key_value_heads": 8}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}, {}),
    "mistral, one key/value head": ("Mistral", {"sliding_window": 13, "num_key_value_heads": 1}, {}),
    "gemma2, caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}, {}),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": [SLIDING, FULL], "num_key_value_heads": 4}, {}),
    "phi3": ("Phi3", {}, {}),
    "phi3, tied": ("Phi3", TIED | {"num_key_value_heads": 8}, {}),
    "olmo2": ("Olmo2", {}, {}),
    "olmo2, all heads, biases": ("Olmo2", {"num_key_value_heads": 8, "attention_bias": True}, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, {}),
    "qwen2 moe, shared expert": (
        "Qwen2Moe",
        QWEN_MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        {},
    ),
    "qwen3 moe, dense layer": ("Qwen3Moe", QWEN_MOE | {"head_dim": 16, "mlp_only_layers": [0]}, {}),
    "qwen3 moe, stacked": ("Qwen3Moe", QWEN_MOE | {"head_dim": 16}, {"save_original_format": False}),
    "gpt-oss": ("GptOss", GPT_OSS, {}),
}
WHOLE_EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral, whole experts": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 95}, {}),
    "qwen2 moe, whole experts": (
        "Qwen2Moe",
        QWEN_MOE | {"shared_expert_intermediate_size": 40, "moe_intermediate_size": 21, "decoder_sparse_step": 2},
        {},
    ),
    "qwen3 moe, whole experts": ("Qwen3Moe", QWEN_MOE | {"head_dim": 16, "moe_intermediate_size": 21}, {}),
    "qwen3 moe, stacked whole experts": (
        "Qwen3Moe",
        QWEN_MOE | {"head_dim": 16, "moe_intermediate_size": 21},
        {"save_original_format": False},
    ),
    "gpt-oss, whole experts": ("GptOss", GPT_OSS | {"intermediate_size": 95}, {}),
}
"""With experts of a size that ranks do not divide."""


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a case's checkpoint, written once."""
    written: dict[str, Path] = {}

    def path(case: str) -> Path:
        if case not in written:
            family, changes, options = (CASES | WHOLE_EXPERTS)[case]
            theirs = reference(family, HEADS | changes)
            written[case] = save(theirs, tmp_path_factory.mktemp("checkpoint"), **options)
        return written[case]

    return path


def load(path: Path, ranks: Ranks | None = None, **settings: Any) -> Decoder:
    config = EngineConfig(model=str(path), device="cpu", **settings)
    return load_model(config) if ranks is None else load_model(config, ranks)


def logits(model: Decoder) -> torch.Tensor:
    """Of a prompt, a continued one and a single token."""
    runner = Runner(model)
    return torch.cat([runner.feed(IDS[:20]), runner.feed(IDS[20:29]), runner.feed(IDS[29:30])])


def of_ranks(path: Path, count: int, stages: int = 1, **settings: Any) -> torch.Tensor:
    return on_ranks(count, lambda ranks: logits(load(path, ranks, **settings)), stages)[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def assert_same(found: torch.Tensor, alone: torch.Tensor) -> None:
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.argmax(1), alone.argmax(1))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_computes_alone(case: str, count: int, path_of: Callable[[str], Path]) -> None:
    path = path_of(case)
    assert_same(of_ranks(path, count), logits(load(path)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_one_rank_computes_alone(case: str, count: int, path_of: Callable[[str], Path]) -> None:
    path = path_of(case)
    assert_same(of_ranks(path, count, 2), logits(load(path)))


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages_may_have_unequal_numbers_of_layers(stages: int, tmp_path: Path) -> None:
    kinds = [SLIDING, FULL, SLIDING, SLIDING, FULL]
    path = save(reference("Gemma3", HEADS | GEMMA | {"layer_types": kinds, "num_hidden_layers": 5}), tmp_path)
    assert_same(of_ranks(path, 1, stages), logits(load(path)))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", WHOLE_EXPERTS)
def test_ranks_with_whole_experts_compute_what_one_computes_alone(
    case: str, count: int, path_of: Callable[[str], Path]
) -> None:
    path = path_of(case)
    assert_same(of_ranks(path, count, tp_size=count, ep_size=count), logits(load(path)))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", WHOLE_EXPERTS)
def test_experts_of_other_ranks_compute_the_tokens_of_each(
    case: str, count: int, path_of: Callable[[str], Path]
) -> None:
    """Each rank has other tokens, and more of them than the one before."""
    path = path_of(case)

    def own_logits(ranks: Ranks) -> torch.Tensor:
        exchange = Exchange(ranks)
        exchange.rows = 10 + 4 * count
        model = load_model(EngineConfig(model=str(path), device="cpu"), exchange=exchange)
        return Runner(model).feed(IDS[: 10 + 4 * ranks.rank.index])

    alone = load(path)
    for index, found in enumerate(on_ranks(count, own_logits)):
        assert_same(found, Runner(alone).feed(IDS[: 10 + 4 * index]))


def test_mxfp4_experts_stay_whole(tmp_path: Path) -> None:
    path = packed(tmp_path, reference("GptOss", HEADS | GPT_OSS))
    assert_same(of_ranks(path, 2, tp_size=2, ep_size=2), logits(load(path)))


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_may_begin_within_a_block_of_mxfp4(count: int, tmp_path: Path) -> None:
    path = packed(tmp_path, reference("GptOss", HEADS | GPT_OSS))
    assert_same(of_ranks(path, count), logits(load(path)))


@pytest.mark.parametrize("case", ["llama, biases, tied", "olmo2", "qwen2 moe, shared expert", "gpt-oss"])
def test_ranks_have_parts_of_the_same_random_weights(case: str, path_of: Callable[[str], Path]) -> None:
    path = path_of(case)
    alone = logits(load(path, load_format="dummy"))
    assert_same(of_ranks(path, 4, load_format="dummy"), alone)
    assert_same(of_ranks(path, 1, 2, load_format="dummy"), alone)
    if "llama" not in case and "olmo2" not in case:
        assert_same(of_ranks(path, 4, load_format="dummy", tp_size=4, ep_size=4), alone)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", fp8.FORMATS)
def test_ranks_compute_in_fp8_what_one_computes_alone(name: str, count: int, tmp_path: Path) -> None:
    settings, kind, suffix, more, _ = fp8.FORMATS[name]
    path = save(reference("Qwen3", HEADS | {"head_dim": 128, "intermediate_size": 1024}), tmp_path)
    fp8.quantise_checkpoint(path, settings, kind, suffix, **more)
    alone, models = load(path), on_ranks(count, lambda ranks: load(path, ranks))
    for whole, *parts in zip(feed_forwards(alone), *map(feed_forwards, models), strict=True):
        for dim, expected, *of_each in zip((0, 0, 1), whole, *parts, strict=True):
            assert torch.equal(torch.cat(of_each, dim), expected)
    # where an activation's scale is a whole row's, a rank takes that of its own part
    is_row_wise = kind != "block" and not more
    assert distance(of_ranks(path, count), logits(alone)) < (0.2 if is_row_wise else 0.01)


def feed_forwards(model: Decoder) -> list[tuple[torch.Tensor, ...]]:
    """Return each layer's gate, up and down, as they are multiplied."""
    found = []
    for layer in model._layers:
        both, down = (getattr(layer._feed_forward, name)._product._plain.weight for name in ("_gate_up", "_down"))
        found.append((*both.to_dense().chunk(2), down.to_dense()))
    return found


def test_ranks_quantise_their_parts_as_they_load_them(path_of: Callable[[str], Path]) -> None:
    path = path_of("phi3")
    alone = logits(load(path, quantization="fp8"))
    assert distance(of_ranks(path, 4, quantization="fp8"), alone) < 0.2


def test_logits_of_ranks_may_be_put_in_a_given_place(path_of: Callable[[str], Path]) -> None:
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    def put(ranks: Ranks) -> bool:
        model, out = load(path_of("gemma2, caps"), ranks), torch.empty(3, 131)
        with torch.inference_mode():
            given, new = model.logits(hidden.clone(), out), model.logits(hidden)
            return given is out and (ranks.rank.index > 0 or torch.equal(out, new))

    assert on_ranks(2, put) == [True, True]


def test_what_is_false_on_one_stage_is_false_everywhere() -> None:
    def agree(ranks: Ranks) -> list[bool]:
        return ranks.everywhere(torch.tensor([True, ranks.rank.stage != 1])).tolist()

    assert on_ranks(2, agree, stages=2) == [[True, False]] * 4


def test_only_rank_0_gets_what_the_last_stage_has() -> None:
    def hidden(ranks: Ranks) -> float:
        mine = torch.full((2, 3), float(ranks.rank.stage))
        return ranks.home(mine).sum().item() + mine.sum().item()

    assert on_ranks(1, hidden, stages=3)[0] == 12, "and its own stays as it was"


def test_two_matrices_where_one_is_declared_are_both_in_parts(tmp_path: Path) -> None:
    path = save(reference("Llama", HEADS), tmp_path)
    config = json.loads((path / "config.json").read_text()) | TIED
    (path / "config.json").write_text(json.dumps(config))
    assert_same(of_ranks(path, 2), logits(load(path)))
    assert_same(of_ranks(path, 1, 2), logits(load(path)))


# ---- reading and memory -----------------------------------------------------------------------------------


def own_bytes(path: Path, count: int) -> int:
    """What a rank has of a Llama with two key/value heads and a vocabulary in equal parts."""
    total = 0
    for name, entry in read_header(path / "model.safetensors").items():
        shared = 1 if "norm" in name else min(count, 2) if "k_proj" in name or "v_proj" in name else count
        total += entry.size // shared
    return total


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(reference("Llama", HEADS | {"vocab_size": 128, "num_hidden_layers": 4}), tmp_path)


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_reads_no_more_than_its_part(llama: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes_read(llama, count, monkeypatch) == count * own_bytes(llama, count)


def bytes_read(path: Path, count: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Return what all ranks read of a checkpoint, other than its headers."""
    monkeypatch.setattr(weights, "MAPPED", ())
    monkeypatch.setattr(stream, "SHORT_BYTES", 0)
    read: list[int] = []

    def counted(*args: Any) -> int:
        read.append(preadv(*args))
        return read[-1]

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    on_ranks(count, lambda ranks: load(path, ranks, **settings))
    return sum(read)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", [*WHOLE_EXPERTS, "mxfp4"])
def test_a_rank_reads_no_more_experts_than_its_own(
    case: str, count: int, path_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path, reference("GptOss", HEADS | GPT_OSS)) if case == "mxfp4" else path_of(case)
    expected = 0
    for name, entry in read_header(path / "model.safetensors").items():
        is_whole = any(word in name for word in ("norm", "gate.weight", "router", "o_proj.bias"))
        is_shared = "k_proj" in name or "v_proj" in name
        expected += entry.size * (count if is_whole or "shared_expert_gate" in name else count // 2 if is_shared else 1)
    assert bytes_read(path, count, monkeypatch, tp_size=count, ep_size=count) == expected


def test_a_stage_reads_and_keeps_no_more_than_its_layers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: entry.size for name, entry in read_header(llama / "model.safetensors").items()}
    of_layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    first, last = (sizes[name] for name in (weights.EMBEDDING, weights.HEAD))
    expected = [2 * of_layer + first, of_layer, of_layer + sizes["model.norm.weight"] + last]
    monkeypatch.setattr(weights, "MAPPED", ())
    monkeypatch.setattr(stream, "SHORT_BYTES", 0)
    read: list[int] = []

    def counted(*args: Any) -> int:
        read.append(preadv(*args))
        return read[-1]

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counted)
    models = on_ranks(1, lambda ranks: load(llama, ranks), 3)
    assert [size_of(model) - sum(table.nbytes for table in model.rope) for model in models] == expected
    assert sum(read) == sum(expected) == sum(sizes.values())


@pytest.mark.parametrize("short", [0, 4096])
@pytest.mark.parametrize("case", ["llama", "phi3", "qwen3 moe, stacked", "mixtral", "gpt-oss"])
def test_streamed_parts_equal_mapped_ones(
    case: str, short: int, path_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(case)
    mapped = of_ranks(path, 4)
    monkeypatch.setattr(weights, "MAPPED", ())
    monkeypatch.setattr(stream, "SHORT_BYTES", short)
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1000)
    assert torch.equal(of_ranks(path, 4), mapped)


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_keeps_its_part_in_memory(llama: Path, count: int) -> None:
    for model in on_ranks(count, lambda ranks: load(llama, ranks)):
        tables = sum(table.nbytes for table in model.rope)
        assert size_of(model) == own_bytes(llama, count) + tables


def test_a_connections_memory_is_none_of_the_models() -> None:
    class Buffered:
        buffer = torch.zeros(8)

        def __init__(self) -> None:
            self.memory = torch.zeros(8)

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Buffered.__module__ = "treeline_runtime.collectives"
    connection = Buffered()
    assert tensors_of({"ranks": connection, "sum": connection.sum}) == []


@given(data=st.data())
def test_parts_are_read_as_they_are_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("parts")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    ends = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    cut = Cut(dim, tuple(zip(ends[::2], ends[1::2], strict=False)))
    tensors = {f"layers.{i}.w": torch.randn(shape, dtype=torch.float16) for i in range(5)} | {"other": torch.ones(3)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "BUFFER_BYTES", 10)
        patch.setattr(stream, "SHORT_BYTES", data.draw(st.sampled_from([0, 5, 4096])))
        streamed = Streamed(read_header(folder / "model.safetensors"), torch.device("cpu"), in_parts=True)
        try:
            for name in data.draw(st.permutations(list(tensors))):
                expected = weights.cut_from(tensors[name], cut) if name != "other" else tensors[name]
                assert torch.equal(streamed.read(name, cut if name != "other" else None), expected)
        finally:
            streamed.close()


# ---- division ---------------------------------------------------------------------------------------------


@given(count=st.integers(1, 9), units=st.lists(st.integers(1, 5), min_size=1, max_size=3), unit=st.integers(1, 4))
def test_the_parts_of_ranks_are_the_whole(count: int, units: list[int], unit: int) -> None:
    sizes = [size * count * unit for size in units]
    numbers = torch.arange(sum(sizes))
    cuts = [Rank(index, count).cut(0, *sizes, unit=unit) for index in range(count)]
    parts = [numbers if cut is None else weights.cut_from(numbers, cut) for cut in cuts]
    each = [part.split([size // count for size in sizes]) for part in parts]
    assert torch.equal(torch.cat([section for sections in zip(*each, strict=True) for section in sections]), numbers)


def test_more_ranks_than_heads_share_each_head_with_their_neighbours() -> None:
    assert [Rank(index, 8).part(2) for index in range(8)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert [Rank(index, 4).rows(5) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@given(layers=st.integers(1, 40), data=st.data())
def test_the_layers_of_stages_are_all_layers_as_equally_as_possible(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    each = [Rank(0, 1, stage, stages).layers(layers) for stage in range(stages)]
    assert [layer for of_stage in each for layer in of_stage] == list(range(layers))
    sizes = [len(of_stage) for of_stage in each]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_stage_has_its_own_windows_and_experts(tmp_path: Path) -> None:
    moe = read_config(config_of(tmp_path / "moe", "Qwen3Moe", num_hidden_layers=5, mlp_only_layers=[0, 3]))
    stages = [own(moe, Rank(0, 1, stage, 2)) for stage in range(2)]
    assert [stage.num_layers for stage in stages] == [3, 2]
    assert [stage.moe and sorted(stage.moe.layers) for stage in stages] == [[1, 2], [1]]
    gemma = read_config(config_of(tmp_path / "gemma", "Gemma2", num_hidden_layers=5, layer_types=...))
    both = [own(gemma, Rank(0, 1, stage, 2)).scoring.windows for stage in range(2)]
    assert (*both[0], *both[1]) == gemma.scoring.windows


def test_a_ranks_sizes_are_its_parts(tmp_path: Path) -> None:
    model = read_config(config_of(tmp_path, "Qwen2Moe", num_attention_heads=16, num_key_value_heads=2))
    mine = own(model, Rank(3, 4))
    assert (mine.num_heads, mine.num_kv_heads) == (4, 1)
    assert mine.moe is not None
    assert model.moe is not None
    assert mine.moe.intermediate_size * 4 == model.moe.intermediate_size
    assert mine.moe.shared_intermediate_size * 4 == model.moe.shared_intermediate_size
    assert (mine.vocab_size, mine.hidden_size) == (model.vocab_size, model.hidden_size)


@pytest.mark.parametrize(
    ("family", "changes", "count", "message"),
    [
        ("Llama", {}, 3, "LlamaForCausalLM has 32 attention heads, which --tp-size 3 does not divide"),
        ("Llama", {"num_key_value_heads": 8}, 64, "32 attention heads, which --tp-size 64"),
        ("Llama", {"intermediate_size": 11009}, 2, r"11009 elements of the feed-forward \(intermediate_size\), which"),
        (
            "Llama",
            {"num_attention_heads": 24, "num_key_value_heads": 6},
            4,
            "has 6 key/value heads: --tp-size must divide them or be a multiple of them, and 4 is neither",
        ),
        ("Qwen3Moe", {"moe_intermediate_size": 770}, 4, "770 elements of an expert, which --tp-size 4"),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 5634}, 4, "5634 elements of the shared expert"),
    ],
)
def test_what_ranks_cannot_share_is_named(
    tmp_path: Path, family: str, changes: dict[str, Any], count: int, message: str
) -> None:
    model = read_config(config_of(tmp_path, family, **changes))
    with pytest.raises(ModelError, match=message):
        check_ranks(model, count)
    check_ranks(model, 1)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    model = read_config(config_of(tmp_path, "Llama", num_hidden_layers=3))
    check_ranks(model, 1, 3)
    with pytest.raises(ModelError, match="LlamaForCausalLM has 3 layers: --pp-size 4 leaves a stage without one"):
        check_ranks(model, 1, 4)


def test_whole_experts_may_have_any_size_but_must_be_equally_many(tmp_path: Path) -> None:
    model = read_config(config_of(tmp_path, "Qwen3Moe", moe_intermediate_size=770))
    check_ranks(model, 4, ep_size=4)
    mine = own(model, Rank(0, 4), 4).moe
    assert mine is not None
    assert mine.intermediate_size == 770
    model = read_config(config_of(tmp_path, "Qwen3Moe", num_experts=126, num_local_experts=126))
    with pytest.raises(ModelError, match="has 126 experts, which --ep-size 4 does not divide"):
        check_ranks(model, 4, ep_size=4)
    with pytest.raises(ModelError, match="LlamaForCausalLM has no experts: leave --ep-size out"):
        check_ranks(read_config(config_of(tmp_path, "Llama")), 4, ep_size=4)


def test_block_wise_fp8_is_shared_in_whole_blocks(tmp_path: Path) -> None:
    model = replace(read_config(config_of(tmp_path, "Llama", intermediate_size=11264)), quantization=Scheme("blocks"))
    check_ranks(model, 8)
    with pytest.raises(ModelError, match=r"--tp-size 16 gives a rank 704 of the feed-forward's 11264 elements"):
        check_ranks(model, 16)
    check_ranks(replace(model, quantization=Scheme()), 16)


def test_a_feed_forward_that_no_layer_has_may_have_any_size(tmp_path: Path) -> None:
    check_ranks(read_config(config_of(tmp_path, "Qwen3Moe", intermediate_size=6145)), 4)


def test_a_model_that_ranks_cannot_share_is_refused_before_its_weights_are_read(llama: Path) -> None:
    def refused(ranks: Ranks) -> str:
        with pytest.raises(ModelError) as error:
            load(llama, ranks)
        return str(error.value)

    assert set(on_ranks(3, refused)) == {"LlamaForCausalLM has 8 attention heads, which --tp-size 3 does not divide"}
