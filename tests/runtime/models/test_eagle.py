"""EAGLE-3 heads: their guesses are those of a plain computation over transformers' hidden states; what is not known is
refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle_heads import NEW, OLD, Plain, heard, write_head
from support.runtime_engine import Harness, prompt
from support.runtime_models import edit, reference, save
from treeline_runtime.config import ConfigError, SchedulerConfig
from treeline_runtime.models import ModelError
from treeline_runtime.models.config import read_config
from treeline_runtime.models.eagle_config import read_eagle
from treeline_runtime.models.loader import load_model
from treeline_runtime.models.offload import tensors_of
from treeline_runtime.scheduler import drafting

SIZES = {"vocab_size": 96, "num_hidden_layers": 6, "max_position_embeddings": 512, "tie_word_embeddings": False}
LAYERS = (1, 4, 5)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference("Qwen3", SIZES | {"head_dim": 16})


@pytest.fixture(scope="module")
def target(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs, tmp_path_factory.mktemp("target"))


def guessing(target: Path, head: Path, **settings: Any) -> Harness:
    return Harness(
        target,
        load_format="auto",
        dtype="float32",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(head),
        **settings,
    )


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (OLD, {}),
        (NEW, {}),
        (OLD, {"vocab": range(3, 96, 3)}),
        (NEW, {"vocab": [95, 1, 40, 41, 7], "norm_before_residual": False}),
        (OLD, {"norm_before_residual": True, "norm_output": True}),
        (NEW, {"norm_before_fc": True, "norm_output": True}),
        (OLD, {"fc_norm": True, "own_embedding": True}),
        (NEW, {"hidden": 32, "own_embedding": True, "vocab": range(96)}),
    ],
    ids=str,
)
def test_guesses_are_those_of_a_plain_computation(
    target: Path, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(drafting, "DEPTHS", ((1, ((0.0, 5),)),))
    head = write_head(tmp_path / "head", target, LAYERS, form=form, **options)
    engine = guessing(target, head, chunked_prefill_size=12)
    found, plain = heard(engine), Plain(head, target, LAYERS)
    engine.generate("a", prompt(1, 29), max_new_tokens=8)
    engine.generate("b", prompt(1, 29)[:17] + prompt(2, 9), max_new_tokens=4)
    assert len(found) >= 6
    for tokens, guesses in found.items():
        with torch.inference_mode():
            states = theirs(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            assert guesses == plain.guesses(tokens, [state[0] for state in states], len(guesses))


@pytest.mark.parametrize("form", [OLD, NEW])
def test_without_layers_it_reads_the_second_the_middle_and_the_third_last(
    target: Path, tmp_path: Path, form: str
) -> None:
    head = write_head(tmp_path / "head", target, LAYERS, form=form)
    assert read_eagle(head, read_config(target)).features == LAYERS
    edit(head, eagle_config=..., eagle_aux_hidden_state_layer_ids=...)
    assert read_eagle(head, read_config(target)).features == (2, 3, 3)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (OLD, {"num_hidden_layers": 2}, "2 layers; only one"),
    (OLD, {"hidden_size": 128}, "hidden states of 128, not 64"),
    (OLD, {"vocab_size": 95}, "95 tokens, the model's 96"),
    (OLD, {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM is no head"),
    (OLD, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    (OLD, {"eagle_config": {"mask_token_id": 3}}, "mask_token_id"),
    (OLD, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, "2, 3, 6 of 6"),
    (OLD, {"attention_kind": "mla"}, "attention_kind"),
    (OLD, {"draft_vocab_size": 32}, "d2t"),
    (NEW, {"speculators_model_type": "dflash"}, "'dflash'; only eagle3"),
    (NEW, {"block_size": 8}, "block_size"),
    (NEW, {"transformer_layer_config": {"model_type": "qwen3"}}, "model_type 'qwen3'"),
    (NEW, {"transformer_layer_config": {}}, "lacks"),
    (NEW, {"transformer_layer_config": ...}, "transformer_layer_config"),
    (OLD, {"eagle_config": ["norm_before_fc"]}, "eagle_config is not"),
    (OLD, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, math.inf]}}, "infinity"),
    (OLD, {"draft_vocab_size": math.inf}, "infinity"),
    (NEW, {"target_hidden_size": math.inf}, "infinity"),
    (OLD, {"rms_norm_eps": -1}, "rms_norm_eps must be above 0, not -1"),
]


@pytest.mark.parametrize(("form", "changes", "says"), REFUSED, ids=str)
def test_what_is_not_known_is_refused_by_name(
    target: Path, tmp_path: Path, form: str, changes: dict[str, Any], says: str
) -> None:
    head = edit(write_head(tmp_path / "head", target, LAYERS, form=form), **changes)
    with pytest.raises(ModelError, match=says) as error:
        guessing(target, head)
    assert str(head) in str(error.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"mask_hidden": torch.zeros(64)}, "parallel"),
        ({"midlayer.self_attn.q_norm.weight": torch.zeros(16)}, "q_norm"),
        ({"d2t": torch.full((96,), 50), "lm_head.weight": torch.zeros(96, 64)}, "does not have"),
        ({"fc.weight": torch.zeros(64, 64)}, "shape"),
    ],
    ids=str,
)
def test_other_tensors_are_refused(target: Path, tmp_path: Path, more: dict[str, Any], says: str) -> None:
    head = write_head(tmp_path / "head", target, LAYERS, draft_vocab_size=96 if "d2t" in more else None)
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | more, head / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        guessing(target, head)


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t"])
def test_a_head_with_a_vocabulary_of_its_own_says_which_and_computes_it(
    target: Path, tmp_path: Path, name: str
) -> None:
    """With the model's language-model head it would guess tokens that are not among its own."""
    head = write_head(tmp_path / "head", target, LAYERS, vocab=range(3, 96, 3))
    tensors = load_file(head / "model.safetensors")
    del tensors[name]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        guessing(target, head)


def test_all_tensors_of_a_head_are_found_where_it_sleeps(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", target, LAYERS, vocab=range(3, 96, 3), own_embedding=True)
    drafter = guessing(target, head).residence._model.drafter  # type: ignore[union-attr]
    held = {tuple(tensor.shape) for tensor in tensors_of(drafter)}
    assert {(31, 64), (96, 64), (64, 3 * 64), (31,)} <= held


def test_a_head_of_another_size_needs_its_own_embedding(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", target, LAYERS, hidden=32, vocab=range(96))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight"):
        guessing(target, head)


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "EAGLE3"},
        {"speculative_draft_model_path": "head"},
        {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head", "pp_size": 2},
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="EAGLE3"):
        SchedulerConfig(model="x", **settings)


def test_a_model_without_a_head_watches_no_layers(target: Path) -> None:
    model = load_model(SchedulerConfig(model=str(target)))
    assert (model.drafter, model.watched) == (None, ())
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 6
