"""Models that read images: encoders and logits equal those of transformers, for any images, chunks and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runtime_engine import Harness
from support.runtime_media import FAMILIES, MediaRunner, Prompt, fed_in_pieces, reference, renamed, shown
from support.runtime_models import IDS, Runner, ours, save
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.model_config import MoeConfig
from treeline_runtime.models.moe import take_experts
from treeline_runtime.models.offload import Offloaded, size_of
from treeline_runtime.models.shards import WHOLE, Rank
from treeline_runtime.models.weights import Checkpoint

pytest.importorskip("transformers")

PROMPTS: dict[str, tuple[Any, ...]] = {
    "one image": (5, ("image", (1, 6, 10)), 9),
    "one image first": (("image", (1, 4, 4)), 3),
    "one token": (2, ("image", (1, 2, 2)), 4),
    "two images of one size": (3, ("image", (1, 4, 6)), 4, ("image", (1, 4, 6)), 8),
    "five images": (
        1,
        ("image", (1, 4, 6)),
        ("image", (1, 10, 4)),
        2,
        ("image", (1, 2, 8)),
        3,
        ("image", (1, 8, 8)),
        ("image", (1, 4, 4)),
        7,
    ),
    "a video": (4, ("video", (3, 4, 10)), 6),
    "a video between images": (2, ("image", (1, 6, 6)), 1, ("video", (2, 6, 8)), 2, ("image", (1, 4, 2)), 5),
}
Models = tuple[str, Any, Decoder]


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A family, its model in transformers, and ours of the same weights."""
    family = request.param
    theirs = reference(family)
    return family, theirs, ours(save(theirs, tmp_path_factory.mktemp(family)))


def expected_of(theirs: Any, prompt: Prompt) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = theirs(**prompt.for_transformers()).logits[0]
    assert logits.std() > 0.1
    return logits


@pytest.mark.parametrize("case", PROMPTS)
def test_logits_equal_transformers(case: str, models: Models) -> None:
    family, theirs, model = models
    prompt = Prompt(*PROMPTS[case], frames_apart=family.startswith("Qwen3"))
    expected = expected_of(theirs, prompt)
    whole = MediaRunner(model, prompt.items).feed(prompt.ids)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-4)
    # chunks end before, in and behind images; then one token at a time
    np.testing.assert_allclose(fed_in_pieces(model, prompt, [7, 1, 11]), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(fed_in_pieces(model, prompt, [1]), expected, rtol=1e-4, atol=1e-4)


def test_images_matter_by_content_and_size(models: Models) -> None:
    _, _, model = models
    prompts = [Prompt(4, ("image", grid), 4) for grid in ((1, 4, 8), (1, 8, 4))]
    first, turned = (MediaRunner(model, prompt.items).feed(prompt.ids)[-1] for prompt in prompts)
    assert not torch.allclose(first, turned, atol=0.01)
    other = [shown("image", item.start, item.grid, seed=99) for item, _ in prompts[0].items]
    assert not torch.allclose(first, MediaRunner(model, other).feed(prompts[0].ids)[-1], atol=0.01)


@pytest.mark.parametrize("grids", [[(1, 4, 6)], [(1, 6, 10), (1, 4, 14), (3, 8, 6), (1, 6, 10)]], ids=["one", "many"])
@torch.inference_mode()
def test_encoders_equal_transformers(grids: list[tuple[int, int, int]], models: Models) -> None:
    _, theirs, model = models
    assert model.media is not None
    items = [shown("image", 0, grid, seed) for seed, grid in enumerate(grids)]
    encoded = model.media.encode(items)
    found = theirs.model.visual(torch.cat([pixels for _, pixels in items]), grid_thw=torch.tensor(grids))
    expected = torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)
    assert expected.std() > 0.1
    np.testing.assert_allclose(torch.cat(encoded), expected, rtol=1e-4, atol=1e-4)
    for item, one in zip(items, encoded, strict=True):
        assert one.shape == (item[0].count, (1 + model.media.depth) * model.config.hidden_size)
        np.testing.assert_allclose(model.media.encode([item])[0], one, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_an_encoder_can_be_moved_to_the_host_and_back(models: Models) -> None:
    _, theirs, model = models
    assert model.media is not None
    item = shown("image", 0, (1, 4, 6), 0)
    expected = model.media.encode([item])[0].clone()
    parameters = sum(tensor.nbytes for tensor in theirs.model.visual.parameters())
    assert parameters < size_of(model.media) < parameters + 100  # the angles' frequencies
    moved = Offloaded(model.media)
    assert size_of(model.media) == 0
    moved.restore()
    assert torch.equal(model.media.encode([item])[0], expected)


def test_text_alone_is_computed_as_without_an_encoder(models: Models) -> None:
    _, theirs, model = models
    ids = [token % 120 for token in IDS]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    found = Runner(model).feed(ids)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(MediaRunner(model, [shown("image", 60, (1, 4, 4), 0)]).feed(ids), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_generates_text_as_transformers_do(family: str, tmp_path: Path) -> None:
    theirs = reference(family)
    path = save(theirs, tmp_path)
    ids = [token % 120 for token in IDS]
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert Harness(path, load_format="auto", chunked_prefill_size=16).generate("a", ids, max_new_tokens=20) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("decoder", "encoder"), [("model.", "visual."), ("model.language_model.", "model.visual.")])
def test_names_of_older_and_newer_checkpoints_are_known(
    family: str, decoder: str, encoder: str, tmp_path: Path
) -> None:
    theirs = reference(family, {"tie_word_embeddings": True})
    path = save(theirs, tmp_path)
    new = family.startswith("Qwen3")  # so it was saved
    saved = [("model.language_model." if new else "model.", "A."), ("model.visual." if new else "visual.", "B.")]
    renamed(path, [*reversed(saved), ("A.", decoder), ("B.", encoder)])
    prompt = Prompt(*PROMPTS["one image"])
    found = MediaRunner(ours(path), prompt.items).feed(prompt.ids)
    np.testing.assert_allclose(found, expected_of(theirs, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_scaled_rope_has_three_axes_too(family: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    theirs = reference(family, {"rope_parameters": rope | {"mrope_section": [2, 3, 3]}})
    prompt = Prompt(*PROMPTS["one image"])
    found = MediaRunner(ours(save(theirs, tmp_path)), prompt.items).feed(prompt.ids)
    np.testing.assert_allclose(found, expected_of(theirs, prompt), rtol=1e-4, atol=1e-4)


def test_experts_may_have_their_inputs_first(tmp_path: Path) -> None:
    theirs = reference("Qwen3VLMoe")
    paths = [save(theirs, tmp_path / name) for name in ("outputs", "inputs")]
    tensors = load_file(paths[1] / "model.safetensors")
    turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
    assert len(turned) == 4
    save_file(tensors | turned, paths[1] / "model.safetensors", {"format": "pt"})
    ids = [token % 120 for token in IDS]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(Runner(ours(paths[1])).feed(ids), expected, rtol=1e-4, atol=1e-4)
    moe = MoeConfig(num_experts=4, top_k=2, intermediate_size=24, layers=frozenset())
    for ranks in ((Rank(1, 2), WHOLE), (WHOLE, Rank(1, 2))):
        found = []
        for path in paths:
            with Checkpoint(path, torch.float32, torch.device("cpu"), None, *ranks) as weights:
                found.append(take_experts(weights, "model.layers.0.mlp.experts.", moe, 64))
        assert torch.equal(found[0].gate_up, found[1].gate_up)
        assert torch.equal(found[0].down, found[1].down)
        assert found[0].down.numel() == 4 * 64 * 24 / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_are_close(family: str, tmp_path: Path) -> None:
    theirs = reference(family)
    model = ours(save(theirs, tmp_path), dtype="bfloat16")
    assert model.media is not None
    item = shown("image", 0, (1, 6, 10), 0)
    with torch.inference_mode():
        found = model.media.encode([item])[0]
        expected = theirs.model.visual(item[1], grid_thw=torch.tensor([item[0].grid])).pooler_output
    assert found.dtype == torch.bfloat16
    difference = found[:, : expected.shape[1]].float() - expected
    assert difference.pow(2).mean().sqrt() < 0.05 * expected.std()
