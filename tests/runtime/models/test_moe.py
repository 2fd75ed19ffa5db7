"""Mixtures of experts: logits equal those of transformers, from either layout of weights; other settings are
refused."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.runtime_engine import Harness, assert_generates_the_same
from support.runtime_models import IDS, Runner, config_of, fed_in_pieces, logits_of, ours, reference, save
from treeline_runtime.memory import StepLimits, reserved_bytes
from treeline_runtime.models import ModelError, read_config
from treeline_runtime.models.model_config import ClampedGate, MoeConfig
from treeline_runtime.models.moe import MoeDecoder, take_experts
from treeline_runtime.models.weights import WHOLE
from treeline_runtime.ops import Experts
from treeline_runtime.ops.torch_ops import TorchOps

transformers = pytest.importorskip("transformers")

MIXTRAL = {"num_local_experts": 4}
QWEN2 = {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "initializer_range": 0.2}
QWEN3 = {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-top1-tied": ("Mixtral", MIXTRAL | {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "mixtral-all-experts": ("Mixtral", MIXTRAL | {"num_experts_per_tok": 4, "head_dim": 24}),
    "mixtral-one-expert": ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2-normalised": ("Qwen2Moe", QWEN2 | {"norm_topk_prob": True, "num_experts_per_tok": 2}),
    "qwen2-step-2": ("Qwen2Moe", QWEN2 | {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen2-no-bias": ("Qwen2Moe", QWEN2 | {"qkv_bias": False, "num_experts_per_tok": 1}),
    "qwen3": ("Qwen3Moe", QWEN3 | {"num_experts_per_tok": 3}),
    "qwen3-normalised": ("Qwen3Moe", QWEN3 | {"norm_topk_prob": True, "num_experts_per_tok": 4}),
    "qwen3-dense-among-sparse": ("Qwen3Moe", QWEN3 | {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}),
    "qwen3-step-2-bias": (
        "Qwen3Moe",
        QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4, "attention_bias": True},
    ),
    "mixtral-window": ("Mixtral", MIXTRAL | {"sliding_window": 9}),
    "qwen2-windows": (
        "Qwen2Moe",
        QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3, "num_hidden_layers": 5},
    ),
    "qwen3-window": ("Qwen3Moe", QWEN3 | {"use_sliding_window": True, "sliding_window": 11}),
    "qwen3-all-dense": ("Qwen3Moe", QWEN3 | {"mlp_only_layers": [0, 1]}),
}


def assert_close(found: torch.Tensor, logits: torch.Tensor) -> None:
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    theirs = reference(*CASES[case])
    model = ours(save(theirs, tmp_path))
    assert isinstance(model, MoeDecoder)
    logits = logits_of(theirs)
    assert_close(Runner(model).feed(IDS), logits)
    assert_close(fed_in_pieces(model), logits)


@pytest.mark.parametrize("case", ["mixtral", "qwen2-step-2", "qwen3-dense-among-sparse"])
def test_stacked_experts_equal_those_that_are_named_one_by_one(case: str, tmp_path: Path) -> None:
    theirs = reference(*CASES[case])
    one_by_one = save(theirs, tmp_path / "one", max_shard_size="40KB")
    stacked = save(theirs, tmp_path / "stacked", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(stacked / "model.safetensors"))
    logits = Runner(ours(one_by_one)).feed(IDS)
    assert torch.equal(Runner(ours(stacked)).feed(IDS), logits)
    assert_close(logits, logits_of(theirs))


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "qwen3"])
def test_all_tokens_may_go_to_the_same_experts(case: str, tmp_path: Path) -> None:
    theirs = reference(*CASES[case])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
    assert_close(Runner(ours(save(theirs, tmp_path))).feed(IDS), logits_of(theirs))


def test_many_sequences_at_once_equal_transformers(tmp_path: Path) -> None:
    theirs = reference(*CASES["qwen3-dense-among-sparse"])
    assert_generates_the_same(Harness(save(theirs, tmp_path), load_format="auto", chunked_prefill_size=16), theirs)


def test_a_nonfinite_expert_ends_only_requests_that_used_it(tmp_path: Path) -> None:
    theirs = reference("Mixtral", MIXTRAL | {"num_experts_per_tok": 1})
    healthy, broken = save(theirs, tmp_path / "healthy"), save(theirs, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.2.w2.weight"].fill_(torch.nan)
    save_file(tensors, broken / "model.safetensors")

    def answers(path: Path) -> list[list[int] | None]:
        """Return each request's tokens; None if it ended with an error."""
        engine = Harness(path, load_format="auto")
        for token in range(24):
            engine.submit(str(token), [token, token + 1], max_new_tokens=2)
        engine.run()
        lasts = [engine.last(str(token)).finish for token in range(24)]
        assert all(last is not None for last in lasts)
        failed = [last is not None and last.type == "error" for last in lasts]
        return [None if wrong else engine.tokens(str(token)) for token, wrong in enumerate(failed)]

    expected, found = answers(healthy), answers(broken)
    assert None not in expected
    assert 3 < found.count(None) < 21
    assert all(answer in (None, right) for answer, right in zip(found, expected, strict=True))


# ---- operations -------------------------------------------------------------------------------------------


def token_by_token(x: torch.Tensor, experts: Experts, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for score, expert in zip(scores[token], ids[token].tolist(), strict=True):
            in_bias, out_bias = (bias[expert] for bias in experts.biases) if experts.biases else (0, 0)
            gate, up = (experts.gate_up[expert] @ x[token] + in_bias).chunk(2)
            if experts.clamped is None:
                inner = gate * gate.sigmoid() * up
            else:
                gate, up = (
                    gate.clamp(max=experts.clamped.limit),
                    up.clamp(-experts.clamped.limit, experts.clamped.limit),
                )
                inner = gate * (experts.clamped.alpha * gate).sigmoid() * (up + 1)
            out[token] += score * (experts.down[expert] @ inner + out_bias)
    return out


@given(tokens=st.integers(1, 12), count=st.integers(1, 6), data=st.data(), seed=st.integers(0, 1000))
def test_sorted_products_are_those_of_each_token(tokens: int, count: int, data: st.DataObject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    chosen = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    first = data.draw(chosen)
    same_size = st.permutations(range(count)).map(lambda order: list(order[: len(first)]))
    ids = torch.tensor([first] + [data.draw(st.one_of(st.just(first), same_size)) for _ in range(tokens - 1)])
    experts = Experts(noise(count, 10, 6), noise(count, 6, 5))
    if seed % 2:
        experts = replace(experts, biases=(noise(count, 10), noise(count, 6)), clamped=ClampedGate(1.5, 0.7))
    x, scores = noise(tokens, 6), noise(*ids.shape)
    found = TorchOps().experts(x, experts, scores, ids)
    torch.testing.assert_close(found, token_by_token(x, experts, scores, ids), rtol=1e-4, atol=1e-4)
    x[0] = torch.nan
    broken = TorchOps().experts(x, experts, scores, ids)
    assert broken[0].isnan().all()
    torch.testing.assert_close(broken[1:], found[1:])


def test_a_non_finite_router_still_chooses_experts() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2, 5] = torch.nan, torch.inf
    for normalise in (True, False):
        scores, ids = TorchOps().route(logits, 3, normalise=normalise)
        assert scores.isnan().all(1).tolist() == [False, True, True, False]
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


# ---- weights ----------------------------------------------------------------------------------------------


class Counted:
    """Weights that record how many of their tensors were in memory at once."""

    rank = experts = WHOLE

    def __init__(self) -> None:
        self._given: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def has(self, name: str) -> bool:
        return "experts.0.gate_proj" in name

    def take(self, name: str, *shape: int, cut: None) -> torch.Tensor:
        tensor = torch.zeros(shape)
        self._given.append(weakref.ref(tensor))
        self.most = max(self.most, sum(given() is not None for given in self._given))
        return tensor


def test_experts_are_stacked_one_after_another() -> None:
    moe = MoeConfig(
        num_experts=7, top_k=2, intermediate_size=4, normalise=True, shared_intermediate_size=0, layers=frozenset({0})
    )
    weights = Counted()
    take_experts(weights, "experts.", moe, 8)
    assert weights.most == 2  # the first, which says what the stack is made of, and another


def test_random_weights_are_repeatable_and_of_the_right_sizes(tmp_path: Path) -> None:
    path = save(reference(*CASES["qwen2-step-2"]), tmp_path)
    first, second = (Runner(ours(path, load_format="dummy")).feed(IDS) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10


def test_memory_is_reserved_for_a_chunk_with_all_its_experts(tmp_path: Path) -> None:
    moe = read_config(config_of(tmp_path / "moe", "Qwen3Moe"))
    dense = replace(moe, moe=None)
    kept = [reserved_bytes(StepLimits(64, 8192, 64, 0), 4096, model, 2) for model in (moe, dense)]
    assert kept[0] - kept[1] == 8192 * 8 * (768 + 2048) * 2


def test_memory_is_reserved_for_captured_prompt_steps(tmp_path: Path) -> None:
    moe = replace(read_config(config_of(tmp_path, "Qwen3Moe")), hidden_size=2048, intermediate_size=6144)
    for model, widest in ((moe, 8 * (768 + 2048)), (replace(moe, moe=None), 3 * 6144)):
        kept = [reserved_bytes(StepLimits(64, 8192, 64, tokens), 4096, model, 2) for tokens in (0, 1024)]
        assert kept[1] - kept[0] == 1024 * (2 * 2048 + widest) * 2


def test_experts_are_not_quantised_as_they_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--quantization fp8 is not supported for MixtralForCausalLM"):
        ours(save(reference(*CASES["mixtral"]), tmp_path), quantization="fp8")


UP = "model.layers.1.mlp.experts.5.up_proj.weight"


def test_checkpoints_whose_experts_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    path = save(reference(*CASES["qwen3"]), tmp_path)
    file = path / "model.safetensors"
    good = load_file(file)
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    for tensors, message in (
        ({k: v for k, v in good.items() if k != UP}, f"tensor {UP} is missing"),
        (good | {UP: torch.zeros(24, 65)}, rf"tensor {UP} has shape \(24, 65\), config.json asks for \(24, 64\)"),
        (good | {UP: torch.zeros(24, 64, dtype=torch.int8)}, f"tensor {UP} is torch.int8; quantised"),
        (good | {UP.replace("5", "8"): torch.zeros(24, 64)}, "1 tensors that this model does not have"),
        (good | {stacked: torch.zeros(8, 64, 40)}, rf"tensor {stacked} has shape \(8, 64, 40\)"),
        (good | {stacked: torch.zeros(8, 48, 64)}, "tensor model.layers.1.mlp.experts.down_proj is missing"),
        (
            good | {stacked: torch.zeros(8, 48, 64), "model.layers.1.mlp.experts.down_proj": torch.zeros(8, 64, 24)},
            "24 tensors that this model does not have",
        ),
        (good | {"model.layers.1.mlp.shared_expert_gate.weight": torch.zeros(1, 64)}, "that this model does not have"),
    ):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            ours(path)


# ---- config.json ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_transformers_own_configurations_are_accepted_with_its_defaults(family: str, tmp_path: Path) -> None:
    whole = read_config(config_of(tmp_path, family))
    assert whole.architecture == f"{family}ForCausalLM"
    names = (
        "num_key_value_heads num_experts_per_tok rms_norm_eps norm_topk_prob decoder_sparse_step mlp_only_layers "
        "qkv_bias eos_token_id rope_parameters tie_word_embeddings output_router_logits router_jitter_noise"
    )
    missing = read_config(config_of(tmp_path, family, **dict.fromkeys(names.split(), ...)))
    assert missing == whole


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Mixtral", {"num_local_experts": ...}, "lacks 'num_local_experts'"),
        ("Mixtral", {"num_local_experts": 8, "num_experts": 4}, "num_local_experts and num_experts differ"),
        ("Mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 experts, but there are 8"),
        ("Mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a whole number of at least 1, not 0"),
        ("Mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok must be a whole number"),
        ("Mixtral", {"sliding_window": 0}, "sliding_window must be a whole number of at least 1"),
        ("Mixtral", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("Mixtral", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("Mixtral", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ("Mixtral", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("Qwen2Moe", {"num_experts": "60"}, "num_experts must be a whole number of at least 1, not '60'"),
        ("Qwen2Moe", {"num_experts": 0}, "num_experts must be a whole number of at least 1, not 0"),
        ("Qwen2Moe", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ("Qwen2Moe", {"moe_intermediate_size": ...}, "lacks 'moe_intermediate_size'"),
        (
            "Qwen2Moe",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 24},
            "chunked_attention are not",
        ),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
        ("Qwen3Moe", {"decoder_sparse_step": 1.5}, "decoder_sparse_step must be a whole number"),
        ("Qwen3Moe", {"mlp_only_layers": "0,1"}, "mlp_only_layers must be a list"),
        ("Qwen3Moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list"),
        ("Qwen3Moe", {"norm_topk_prob": "true"}, "norm_topk_prob must be true or false"),
        ("Qwen3Moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ("Qwen3Moe", {"n_group": 4}, "n_group = 4"),
        ("Qwen3Moe", {"model_type": "qwen3"}, "architecture Qwen3MoeForCausalLM, but model_type 'qwen3'"),
        (
            "Qwen3Moe",
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "fp8 weights are not supported for Qwen3MoeForCausalLM",
        ),
        ("DeepseekV3", {}, "architecture DeepseekV3ForCausalLM is not supported"),
    ],
    ids=str,
)
def test_unsupported_settings_are_named(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(config_of(tmp_path, family, **changes))
