"""Small checkpoints of Gemma 3 and InternVL, made by transformers, and prompts with images for them."""

from __future__ import annotations

from typing import Any

import torch
from treeline_runtime.context import Context
from treeline_runtime.messages import MediaItem
from treeline_wire.media import item_ids

from support.runtime_media import FIRST, IMAGE, LAST, MediaRunner, Shown
from support.runtime_models import SIZES

TEXT = {**SIZES, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TEXT |= {"head_dim": 16, "max_position_embeddings": 512}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = TEXT | {"num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": 6, "query_pre_attn_scalar": 16}
"""Its window is shorter than an image."""
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SIGLIP |= {"image_size": 24, "patch_size": 4, "vision_use_head": False}
LARGE = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
"""As in the InternViT of six billion parameters."""
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("Gemma3", GEMMA, SIGLIP, {"mm_tokens_per_image": 9, "image_token_index": IMAGE}),
    "InternVL": (
        "InternVL",
        TEXT | {"model_type": "qwen3"},
        {**SIGLIP, "attention_bias": True, "image_size": 16},
        {"image_seq_length": 4, "image_token_id": IMAGE, "tie_word_embeddings": False},
    ),
    "InternVL of another size": (
        "InternVL",
        {key: value for key, value in TEXT.items() if key != "head_dim"} | {"model_type": "qwen2"},
        {**SIGLIP, **LARGE, "image_size": 16},
        {"image_seq_length": 4, "image_token_id": IMAGE, "tie_word_embeddings": False},
    ),
}
"""transformers' name; settings of decoder, of encoder and of the whole."""


def reference(family: str, vocab_size: int = 128, **changes: Any) -> Any:
    """Build transformers' model with random weights, none of which are as they begin."""
    import transformers

    torch.manual_seed(0)
    name, text, vision, rest = FAMILIES[family]
    vision = {key: value for key, value in vision.items() if key != "vision_use_head" or name == "Gemma3"}
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"vocab_size": vocab_size}, vision_config=vision, **(rest | changes)
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "norm" in part or part.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "projection_weight" in part or "cls_token" in part or "lambda" in part or "position" in part:
                parameter.add_(torch.randn_like(parameter) * 0.5)
            elif "vision" in part or "projector" in part:
                parameter.mul_(6)
    return model


class Prompt:
    """Text and images, in our form and in transformers'."""

    def __init__(self, family: str, *parts: int | tuple[int, int]) -> None:
        """parts: so many tokens of text, or an image: how many pictures it is made into, and its seed."""
        self.family = FAMILIES[family][0]
        text = torch.randint(0, FIRST, (400,), generator=torch.Generator().manual_seed(3)).tolist()
        self.ids: list[int] = []
        self.their_ids: list[int] = []
        self.items: list[Shown] = []
        for part in parts:
            if isinstance(part, int):
                self._say(text[len(self.ids) : len(self.ids) + part])
            else:
                self._say([FIRST])
                self._show(*part)
                self._say([LAST])

    def _say(self, ids: list[int]) -> None:
        self.ids += ids
        self.their_ids += ids

    def _show(self, pictures: int, seed: int) -> None:
        side, count = (24, 9) if self.family == "Gemma3" else (16, 4 * pictures)
        pixels = torch.randn(pictures, 3, side, side, generator=torch.Generator().manual_seed(seed))
        digest = seed.to_bytes(30, "big")
        item = MediaItem("image", len(self.ids), count, digest, (pictures, 1, 1), tuple(pixels.shape), "")
        self.items.append((item, pixels))
        self.ids += item_ids(digest, count)
        self.their_ids += [IMAGE] * count

    def for_transformers(self) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self.their_ids])
        found = {"input_ids": ids, "token_type_ids": (ids == IMAGE).long()}
        if self.family != "Gemma3":
            del found["token_type_ids"]
        if self.items:
            found["pixel_values"] = torch.cat([pixels for _, pixels in self.items])
        return found


class TowerRunner(MediaRunner):
    """Images are seen in both directions where the model does so."""

    def spans(self, positions: torch.Tensor) -> list[tuple[int, int]]:
        if not self.model.config.both_ways:
            return []
        inside = [(positions >= item.start) & (positions < item.start + item.count) for item, _ in self._encoded]
        return [(int(one.nonzero()[0]), int(one.nonzero()[-1]) + 1) for one in inside if one.any()]

    def embed(self, ids: list[int], positions: torch.Tensor, context: Context) -> torch.Tensor:
        x = super().embed(ids, positions, context)
        context.deep = None
        return x
