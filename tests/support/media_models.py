"""Models that read images and videos, with tokenizer, template and processor, for real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.media import PROCESSOR, make_media_checkpoint
from support.runtime_media import FAMILIES
from support.runtime_models import save


def make_model(family: str, folder: Path) -> Any:
    """Write a model of this family with a tokenizer, and return transformers' model of the same weights."""
    make_media_checkpoint(folder)
    ids = tokens_of(folder)
    text, encoder = FAMILIES[family]
    patch = PROCESSOR["patch_size"]
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        text_config=text | {"vocab_size": len(vocabulary(folder)), "max_position_embeddings": 2048},
        vision_config=encoder
        | {"patch_size": patch}
        | ({"window_size": 4 * patch} if "window_size" in encoder else {}),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.mul_(6)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    processor, template = (
        (folder / "preprocessor_config.json").read_text(),
        (folder / "chat_template.jinja").read_text(),
    )
    save(model, folder)
    (folder / "preprocessor_config.json").write_text(processor)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    return model


def vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    found: dict[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return found


def tokens_of(folder: Path) -> dict[str, int]:
    return {name: token for name, token in vocabulary(folder).items() if name.startswith("<|")}
