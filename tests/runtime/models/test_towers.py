"""Gemma 3 and InternVL: encoders and logits equal those of transformers, for any images and chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_media import renamed
from support.runtime_models import IDS, Runner, edit, ours, save
from support.runtime_towers import FAMILIES, Prompt, TowerRunner, reference
from treeline_runtime.models.config import ModelError, read_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.sizes import parts_of

pytest.importorskip("transformers")

PROMPTS: dict[str, tuple[int | tuple[int, int], ...]] = {
    "one image": (5, (1, 1), 9),
    "one image first": ((1, 1), 3),
    "two images": (3, (1, 1), 4, (1, 2), 8),
    "five images, one of them twice": (1, (1, 1), (1, 2), 2, (1, 3), 3, (1, 1), (1, 4), 7),
}
Models = tuple[str, Any, Decoder]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A family, its model in transformers, and ours of the same weights."""
    theirs = reference(request.param)
    return request.param, theirs, ours(save(theirs, tmp_path_factory.mktemp("model")))


def expected_of(theirs: Any, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = theirs(**prompt.for_transformers()).logits[0]
    assert logits.std() > 0.1
    return logits


def fed(model: Decoder, prompt: Prompt, size: int) -> torch.Tensor:
    """Return the logits of all positions, from pieces of about this size that cut no image of Gemma 3's."""
    runner, found, start = TowerRunner(model, prompt.items), [], 0
    while start < len(prompt.ids):
        end = start + size
        for item, _ in prompt.items if model.config.both_ways else ():
            if item.start < end < item.start + item.count:
                end = item.start + item.count
        found.append(runner.feed(prompt.ids[start:end]))
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("case", PROMPTS)
def test_logits_equal_transformers(case: str, models: Models) -> None:
    family, theirs, model = models
    parts = PROMPTS[case]
    if family != "Gemma3":  # some images become several pictures
        parts = tuple((part[1], part[1]) if isinstance(part, tuple) else part for part in parts)
    prompt = Prompt(family, *parts)
    expected = expected_of(theirs, prompt)
    for size in (400, 7, 1):
        np.testing.assert_allclose(fed(model, prompt, size), expected, rtol=1e-4, atol=1e-4)


def test_the_tokens_of_gemmas_images_see_later_ones(tmp_path: Path) -> None:
    model = ours(save(reference("Gemma3"), tmp_path))
    prompt = Prompt("Gemma3", 5, (1, 1), 2)
    ((item, _),) = prompt.items
    both = TowerRunner(model, prompt.items).feed(prompt.ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TowerRunner, "spans", Runner.spans)
        onwards = TowerRunner(model, prompt.items).feed(prompt.ids)
    same = torch.isclose(both, onwards, atol=1e-5).all(dim=1)
    assert same[: item.start].all()
    assert not same[item.start :].any()


@torch.inference_mode()
def test_encoders_equal_transformers(models: Models) -> None:
    family, theirs, model = models
    assert model.media is not None
    prompt = Prompt(family, (1, 1), (1 if family == "Gemma3" else 3, 2), (1, 3))
    encoded = model.media.encode(prompt.items)
    pixels = prompt.for_transformers()["pixel_values"]
    expected = theirs.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    assert expected.std() > 0.1
    np.testing.assert_allclose(torch.cat(encoded), expected, rtol=1e-4, atol=1e-4)
    for item, one in zip(prompt.items, encoded, strict=True):
        assert one.shape == (item[0].count, model.config.hidden_size)
        np.testing.assert_allclose(model.media.encode([item])[0], one, rtol=1e-4, atol=1e-4)


def test_text_alone_is_computed_as_without_an_encoder(models: Models) -> None:
    _, theirs, model = models
    ids = [token % 120 for token in IDS]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(Runner(model).feed(ids), expected, rtol=1e-4, atol=1e-4)


def test_parameters_are_counted(models: Models) -> None:
    _, theirs, model = models
    assert sum(part.parameters for part in parts_of(model.config, 2)) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Gemma3", [("vision_tower.", "vision_tower.vision_model.")]),
        ("Gemma3", [("language_model.model.", "model.language_model."), ("vision_tower.", "model.vision_tower.")]),
        ("InternVL", [("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")]),
    ],
)
def test_names_of_older_and_newer_checkpoints_are_known(
    family: str, names: list[tuple[str, str]], tmp_path: Path
) -> None:
    theirs = reference(family)
    path = save(theirs, tmp_path)
    if any(new.startswith("model.") for _, new in names):
        names = [
            *names,
            ("multi_modal_projector.", "model.multi_modal_projector."),
            ("vision_tower.", "model.vision_tower."),
        ]
    renamed(path, names)
    prompt = Prompt(family, *PROMPTS["one image"])
    np.testing.assert_allclose(fed(ours(path), prompt, 7), expected_of(theirs, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("Gemma3", {"mm_tokens_per_image": 10}, "mm_tokens_per_image 10 does not fit 6 patches a side"),
        ("Gemma3", {"vision_config": 3}, "vision_config must be an object"),
        ("InternVL", {"vision_feature_layer": -2}, "vision_feature_layer = -2"),
        ("InternVL", {"downsample_ratio": 0.25}, "image_seq_length 4 does not fit 4 patches a side"),
        ("InternVL", {"text_config": {"model_type": "llama"}}, "model_type 'llama' is not supported"),
    ],
)
def test_other_forms_are_refused_by_name(family: str, changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = edit(save(reference(family), tmp_path), **changes)
    with pytest.raises(ModelError, match=why):
        read_config(path)


@pytest.mark.parametrize(
    ("family", "key", "value", "why"),
    [
        ("Gemma3", "hidden_act", "gelu", "hidden_act 'gelu' of vision_config is not supported"),
        ("Gemma3", "num_scales", 2, "settings that are not known here: num_scales = 2"),
        ("InternVL", "use_mean_pooling", False, "use_mean_pooling False"),
        ("InternVL", "norm_type", "none", "norm_type 'none'"),
        ("InternVL", "num_attention_heads", 3, "hidden_size must be a multiple"),
    ],
)
def test_other_encoders_are_refused_by_name(family: str, key: str, value: Any, why: str, tmp_path: Path) -> None:
    path = save(reference(family), tmp_path)
    given = json.loads((path / "config.json").read_text())["vision_config"]
    edit(path, vision_config=given | {key: value})
    with pytest.raises(ModelError, match=why):
        read_config(path)
