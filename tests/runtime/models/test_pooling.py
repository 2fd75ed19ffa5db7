"""A checkpoint's files decide its task; unsupported ones are refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.pooling_models import TRANSFORMER, add_logit_score, add_modules
from treeline_runtime.config import EngineConfig
from treeline_runtime.models.config import ModelError, read_config
from treeline_runtime.models.loader import load_model
from treeline_runtime.models.pooling import Pooling, pooling_of

LAST = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
ONE = {"id2label": {"0": "LABEL_0"}}


def checkpoint(path: Path, architecture: str = "Qwen3ForCausalLM", **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]} | config))
    return path


# ---- what the files say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("Qwen3ForCausalLM", {}, None),
        ("Qwen3Model", {}, Pooling("embed", normalize=True)),
        ("LlamaModel", {"is_matryoshka": True}, Pooling("embed", normalize=True, shorter=None)),
        ("Qwen2Model", {"matryoshka_dimensions": [64, 32]}, Pooling("embed", normalize=True, shorter=(64, 32))),
        ("Qwen3ForSequenceClassification", ONE, Pooling("score", labels=("LABEL_0",), activation="sigmoid")),
        (
            "LlamaForSequenceClassification",
            {"num_labels": 1},
            Pooling("score", labels=("LABEL_0",), activation="sigmoid"),
        ),
        ("Qwen2ForSequenceClassification", {}, Pooling("reward", labels=("LABEL_0", "LABEL_1"), activation="softmax")),
        (
            "Qwen2ForSequenceClassification",
            {"id2label": {"1": "bad", "0": "good"}, "problem_type": "multi_label_classification"},
            Pooling("reward", labels=("good", "bad"), activation="sigmoid"),
        ),
        (
            "Qwen3ForSequenceClassification",
            ONE | {"problem_type": "regression"},
            Pooling("score", labels=("LABEL_0",), activation="identity"),
        ),
        (
            "Qwen3ForSequenceClassification",
            ONE | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}},
            Pooling("score", labels=("LABEL_0",), activation="identity"),
        ),
        (
            "Qwen3ForSequenceClassification",
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            Pooling("reward", labels=("LABEL_0", "LABEL_1"), activation="sigmoid"),
        ),
    ],
)
def test_config_json_decides(tmp_path: Path, architecture: str, config: dict[str, Any], expected: Any) -> None:
    assert pooling_of(checkpoint(tmp_path, architecture, **config)) == expected


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        (LAST, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_modules_of_sentence_transformers_make_an_embedding_model(
    tmp_path: Path, pooling: dict[str, Any], method: Any, normalize: bool
) -> None:
    path = add_modules(checkpoint(tmp_path), pooling, normalize=normalize)
    found = pooling_of(path)
    assert found == Pooling("embed", method, normalize=normalize)
    assert found.needs_all == (method == "mean")
    assert pooling_of(path, "generate") is None
    assert pooling_of(path, "embed", matryoshka=True) == Pooling("embed", method, normalize=normalize, shorter=None)


def test_a_logit_score_makes_a_reranker_of_a_language_model(tmp_path: Path) -> None:
    path = add_logit_score(checkpoint(tmp_path), 9693, 2152)
    assert pooling_of(path) == Pooling("score", answers=(9693, 2152), activation="sigmoid")
    add_logit_score(path, 9454, None)
    assert pooling_of(path) == Pooling("score", answers=(9454,), activation="sigmoid")


def test_a_requested_task_is_served_if_the_checkpoint_supports_it(tmp_path: Path) -> None:
    assert pooling_of(checkpoint(tmp_path), "embed") == Pooling("embed", normalize=True)
    single = checkpoint(tmp_path / "single", "Qwen3ForSequenceClassification", **ONE)
    assert pooling_of(single, "reward") == Pooling("reward", labels=("LABEL_0",), activation="sigmoid")


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "asked", "says"),
    [
        ("Qwen3ForCausalLM", "score", "made for generate; score needs .*LogitScore"),
        ("Qwen3ForCausalLM", "reward", r"made for generate; reward needs a \*ForSequenceClassification"),
        ("Qwen3Model", "score", "made for embed"),
        ("Qwen3Model", "generate", "Qwen3Model has no language-model head"),
        ("Qwen3ForSequenceClassification", "generate", "no language-model head"),
        ("Qwen3ForSequenceClassification", "embed", "made for reward; embed needs a decoder"),
        ("Qwen3ForSequenceClassification", "score", "with one label"),
    ],
)
def test_an_unsupported_task_of_a_checkpoint_is_refused(
    tmp_path: Path, architecture: str, asked: Any, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        pooling_of(checkpoint(tmp_path, architecture), asked)


@pytest.mark.parametrize(
    ("pooling", "says"),
    [
        ({"pooling_mode_cls_token": True}, "pooling by cls is not supported; lasttoken and mean are"),
        ({"pooling_mode_max_tokens": True}, "by max "),
        ({"pooling_mode_weightedmean_tokens": True}, "by weightedmean "),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "by mean, lasttoken"),
        ({"pooling_mode": "cls"}, "by cls "),
        ({"pooling_mode": 5}, "by 5 "),
        ({}, "by none"),
    ],
)
def test_other_ways_to_pool_are_refused_by_name(tmp_path: Path, pooling: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        pooling_of(add_modules(checkpoint(tmp_path), pooling))


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ([TRANSFORMER, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "models.Dense"),
        ([TRANSFORMER, {"type": "custom.Thing", "path": ""}], "custom.Thing"),
        ([TRANSFORMER, {"type": "x.Normalize", "path": "1_Normalize"}], "Transformer, then Normalize"),
        ([{"type": "x.Pooling", "path": "1_Pooling"}], "has Pooling: that is not supported"),
        ([], "has nothing"),
        ([TRANSFORMER, TRANSFORMER], "Transformer that is not supported"),
        ([TRANSFORMER | {"path": "0_Transformer"}], "own folder"),
        ([TRANSFORMER, {"type": "x.Pooling", "path": "../1_Pooling"}], "not a list of modules"),
        ([TRANSFORMER, {"type": "x.Pooling", "path": "/1_Pooling"}], "not a list of modules"),
        ([None], "not a list of modules"),
        ({}, "not a list of modules"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path: Path, modules: Any, says: str) -> None:
    path = checkpoint(tmp_path)
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=says):
        pooling_of(path)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("1_Pooling/config.json", "{", "cannot read"),
        ("1_Pooling/config.json", "[]", "not a JSON object"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', "default_prompt_name 'query'"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
    ],
)
def test_files_of_sentence_transformers_that_say_more(tmp_path: Path, file: str, content: str, says: str) -> None:
    path = add_modules(checkpoint(tmp_path), LAST)
    (path / file).write_text(content)
    with pytest.raises(ModelError, match=says):
        pooling_of(path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "labels 0, 1, 2"),
        ({"id2label": {"x": "a"}}, "labels 0, 1, 2"),
        ({"num_labels": 0}, "num_labels must be a number from 1"),
        ({"num_labels": 1 << 70}, "num_labels must be a number from 1"),
        ({"num_labels": True}, "num_labels must be a number from 1"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "torch.nn.Tanh is not supported"),
        ({"matryoshka_dimensions": "64"}, "list of sizes"),
        ({"matryoshka_dimensions": [0]}, "list of sizes"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        pooling_of(checkpoint(tmp_path, "Qwen3ForSequenceClassification", **config))


@pytest.mark.parametrize("asked", ["auto", "generate", "embed", "score", "reward"])
def test_any_value_of_a_key_is_read_or_refused_with_a_message(tmp_path: Path, asked: Any) -> None:
    values = (None, True, -1, 2.5, float("inf"), float("nan"), "x", [], {}, [1], [[]], ["x", None], {"a": 1}, {"0": []})
    keys = [
        "architectures",
        "id2label",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "sentence_transformers",
        "hidden_size",
        "is_matryoshka",
        "sbert_ce_default_activation_function",
        "matryoshka_dimensions",
    ]
    for architecture in ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3Model"):
        for key in keys:
            for value in values:
                path = checkpoint(tmp_path, architecture, **{key: value})
                with contextlib.suppress(ModelError):
                    pooling_of(path, asked)
    path = checkpoint(tmp_path, architectures=5)
    with pytest.raises(ModelError, match="not iterable"):
        pooling_of(path, asked)


@pytest.mark.parametrize("mode", [5, {}, [{}], [[]], {"a": 1}, ["mean", "cls"]], ids=str)
def test_unsupported_pooling_modules_are_refused_in_words(tmp_path: Path, mode: Any) -> None:
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "p"}]
    path = checkpoint(tmp_path)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "p").mkdir()
    (path / "p" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    with pytest.raises(ModelError):
        pooling_of(path)


@pytest.mark.parametrize("tokens", [(-1, 5), ("yes", "no"), (None, 5), (True, 2)])
def test_a_logit_score_names_tokens(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(ModelError, match="must be token ids"):
        pooling_of(add_logit_score(checkpoint(tmp_path), *tokens))


def test_a_token_beyond_the_vocabulary_and_a_head_of_another_size(tmp_path: Path) -> None:
    from support.pooling_models import classifier
    from support.runtime_models import reference, save

    path = add_logit_score(save(reference("Qwen3", {"head_dim": 16}), tmp_path / "a"), 128, 5)
    with pytest.raises(ModelError, match="LogitScore names token 128; the vocabulary has 128"):
        load_model(EngineConfig(model=str(path), device="cpu"))
    _, path = classifier(tmp_path / "b", 1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(ModelError, match=r"score.weight has shape \(1, 64\), config.json asks for \(2, 64\)"):
        load_model(EngineConfig(model=str(path), device="cpu"))


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("BertModel", "Qwen2ForRewardModel", "BertForSequenceClassification", "Model"):
        with pytest.raises(ModelError, match=f"architecture {name} is not supported"):
            read_config(checkpoint(tmp_path, name))
