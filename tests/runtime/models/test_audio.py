"""Qwen3-ASR: its encoder and logits equal those of transformers, for any sounds and chunks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from support.runtime_media import MediaRunner
from support.runtime_models import SIZES, ours, save
from treeline_runtime.messages import MediaItem
from treeline_runtime.models import audio
from treeline_runtime.models.audio import count_of
from treeline_runtime.models.config import parse_config
from treeline_runtime.models.decoder import Decoder
from treeline_runtime.models.settings import ModelError
from treeline_runtime.models.sizes import parts_of
from treeline_wire.media import item_ids

pytest.importorskip("transformers")

BINS, CHUNK, SOUND = 16, 100, 122
TEXT = {
    **SIZES,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 128,
}
ENCODER = {
    "num_mel_bins": BINS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "n_window": CHUNK // 2,
    "n_window_infer": 2 * CHUNK,
    "downsample_hidden_size": 8,
    "output_dim": 64,
    "max_position_embeddings": 13,
}
CASES: dict[str, tuple[int, ...]] = {
    "less than a chunk": (13,),
    "whole chunks": (2 * CHUNK,),
    "a chunk and one frame": (CHUNK + 1,),
    "several windows": (5 * CHUNK + 17,),
    "several sounds": (CHUNK + 9, 3, 3 * CHUNK, 4 * CHUNK + 1),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """The model of transformers, and ours of the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3ASRConfig(
        text_config=TEXT, audio_config=ENCODER, audio_token_id=SOUND, tie_word_embeddings=False
    )
    theirs = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "ln_post" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "audio_tower" in name or "projector" in name:
                parameter.mul_(6)
    return theirs, ours(save(theirs, tmp_path_factory.mktemp("asr")))


def sound(start: int, frames: int) -> tuple[MediaItem, torch.Tensor]:
    """An item of noise, with silence up to whole chunks."""
    padded = torch.zeros(BINS, -(-frames // CHUNK) * CHUNK)
    padded[:, :frames] = torch.randn(BINS, frames, generator=torch.Generator().manual_seed(frames))
    digest = frames.to_bytes(30, "big")
    return MediaItem("audio", start, count_of(frames, CHUNK), digest, (frames, 1, 1), tuple(padded.shape), ""), padded


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, models: tuple[Any, Decoder]) -> None:
    theirs, model = models
    ids, their_ids, items = [1, 2, 3], [1, 2, 3], []
    for frames in CASES[case]:
        items.append(sound(len(ids), frames))
        item = items[-1][0]
        ids += [*item_ids(item.digest, item.count), 5, 6]
        their_ids += [*[SOUND] * item.count, 5, 6]
    longest = max(frames.shape[1] for _, frames in items)
    features, mask = torch.zeros(len(items), BINS, longest), torch.zeros(len(items), longest, dtype=torch.long)
    for row, (item, frames) in enumerate(items):
        features[row, :, : frames.shape[1]] = frames
        mask[row, : item.grid[0]] = 1
    with torch.inference_mode():
        expected = theirs(
            input_ids=torch.tensor([their_ids]), input_features=features, input_features_mask=mask
        ).logits[0]
    assert expected.std() > 0.1
    np.testing.assert_allclose(MediaRunner(model, items).feed(ids), expected, rtol=1e-4, atol=1e-4)
    runner = MediaRunner(model, items)
    pieces = torch.cat([runner.feed(ids[start : start + 3]) for start in range(0, len(ids), 3)])
    np.testing.assert_allclose(pieces, expected, rtol=1e-4, atol=1e-4)


def test_few_chunks_are_convolved_at_once(models: tuple[Any, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = models[1].media
    items = [sound(0, frames) for frames in CASES["several sounds"]]
    with torch.inference_mode():
        together = encoder.encode(items)
        given, convolved = list[torch.Tensor](), encoder._convolved

        def watched(x: torch.Tensor) -> Any:
            given.append(x)
            return convolved(x)

        monkeypatch.setattr(audio, "AT_ONCE", 3)
        monkeypatch.setattr(encoder, "_convolved", watched)
        apart = encoder.encode(items)
    assert [len(x) for x in given] == [3, 3, 3, 2]
    for one, same in zip(together, apart, strict=True):
        torch.testing.assert_close(one, same)


def test_the_encoders_parameters_are_counted(models: tuple[Any, Decoder]) -> None:
    theirs, model = models
    names = ("model.audio_tower.", "model.multi_modal_projector.")
    size = sum(p.numel() for name, p in theirs.named_parameters() if name.startswith(names))
    (counted,) = [part.parameters for part in parts_of(model.config, 4) if part.name == "audio encoder"]
    assert counted == size


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"n_window_infer": 50}, "n_window_infer"),
        ({"output_dim": 32}, "output_dim"),
        ({"d_model": 33}, "d_model"),
        ({"encoder_layers": 0}, "encoder_layers"),
        ({"something": 1}, "something"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(
    change: dict[str, Any], named: str, models: tuple[Any, Decoder]
) -> None:
    config = json.loads(models[0].config.to_json_string()) | {"architectures": ["Qwen3ASRForConditionalGeneration"]}
    with pytest.raises(ModelError, match=named):
        parse_config({**config, "audio_config": config["audio_config"] | change}, {})
