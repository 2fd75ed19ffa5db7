"""Small checkpoints of models that read images, made by transformers, and prompts with images through our model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from treeline_runtime.context import Context
from treeline_runtime.messages import MediaItem
from treeline_runtime.models.adapters import Adapter
from treeline_runtime.models.decoder import Decoder
from treeline_wire.media import item_ids

from support.runtime_models import SIZES, Runner

Grid = tuple[int, int, int]
Shown = tuple[MediaItem, torch.Tensor]
"""An item and the processor's output."""
TEXT = {**SIZES, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
ENCODER = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
ENCODER["out_hidden_size"] = 64
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
"""A window has 2 x 2 tokens."""
DEEPSTACK = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": (TEXT, ENCODER | WINDOWS),
    "Qwen3VL": (TEXT | {"head_dim": 16}, ENCODER | DEEPSTACK),
    "Qwen3VLMoe": (TEXT | EXPERTS, ENCODER | DEEPSTACK),
}
"""Settings of decoder and encoder."""
FIRST, LAST, IMAGE, VIDEO = 120, 121, 122, 123
"""Ids of tokens in transformers' prompts."""
PATCH = 3 * 2 * 4 * 4
"""Numbers of a patch: colours, pictures, pixels."""


def reference(family: str, text: dict[str, Any] | None = None) -> Any:
    """Build transformers' model with random weights, none of which are as they begin."""
    import transformers

    torch.manual_seed(0)
    decoder, encoder = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=decoder | (text or {}),
        vision_config=encoder,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=FIRST,
        vision_end_token_id=LAST,
        tie_word_embeddings=bool(text and text.get("tie_word_embeddings")),
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "visual" in name:
                parameter.mul_(6)
    return model


def shown(kind: str, start: int, grid: Grid, seed: int) -> Shown:
    """Make an item of noise."""
    frames, rows, columns = grid
    pixels = torch.randn(frames * rows * columns, PATCH, generator=torch.Generator().manual_seed(seed))
    digest = seed.to_bytes(30, "big")
    count = frames * rows * columns // 4
    return MediaItem(kind, start, count, digest, grid, tuple(pixels.shape), ""), pixels  # type: ignore[arg-type]


class Prompt:
    """Text and items, in our form and in transformers'."""

    def __init__(self, *parts: int | tuple[str, Grid], frames_apart: bool = False) -> None:
        """parts: so many tokens of text, or an item's kind and grid. frames_apart: each frame of a video is an item
        behind text of its own, as in Qwen3-VL."""
        text = torch.randint(0, FIRST, (400,), generator=torch.Generator().manual_seed(3)).tolist()
        self.ids: list[int] = []
        self.their_ids: list[int] = []
        self.items: list[Shown] = []
        self.grids: dict[str, list[Grid]] = {"image": [], "video": []}
        for part in parts:
            if isinstance(part, int):
                self._say(text[len(self.ids) : len(self.ids) + part])
                continue
            kind, grid = part
            self.grids[kind].append(grid)
            for number in range(grid[0] if frames_apart else 1):
                self._say(text[:2] if number else [FIRST])
                self._show(kind, (1, *grid[1:]) if frames_apart else grid)
                self._say([LAST])

    def _say(self, ids: list[int]) -> None:
        self.ids += ids
        self.their_ids += ids

    def _show(self, kind: str, grid: Grid) -> None:
        item = shown(kind, len(self.ids), grid, len(self.items))
        self.items.append(item)
        self.ids += item_ids(item[0].digest, item[0].count)
        self.their_ids += [IMAGE if kind == "image" else VIDEO] * item[0].count

    def for_transformers(self) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self.their_ids])
        found = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE) + 2 * (ids == VIDEO)}
        for kind, ending in (("image", ""), ("video", "_videos")):
            if pixels := [output for item, output in self.items if item.kind == kind]:
                found[f"pixel_values{ending}"] = torch.cat(pixels)
                found[f"{kind}_grid_thw"] = torch.tensor(self.grids[kind])
        return found


class MediaRunner(Runner):
    """Feeds a prompt with items in pieces, with embeddings in place of those of the items' tokens."""

    def __init__(self, model: Decoder, items: Sequence[Shown], adapter: Adapter | None = None) -> None:
        super().__init__(model, adapter=adapter)
        assert model.media is not None
        with torch.inference_mode():
            self._encoded = list(zip((item for item, _ in items), model.media.encode(items), strict=True))
        if model.mrope is not None:
            self._positions = torch.from_numpy(model.mrope.positions(128, [item for item, _ in items])[0])

    def embed(self, ids: list[int], positions: torch.Tensor, context: Context) -> torch.Tensor:
        assert self.model.media is not None
        x = self.model.embed(torch.tensor(ids).clamp(max=IMAGE))
        if self.model.mrope is not None:
            context.cos, context.sin = self.model.mrope.tables(self._positions[:, positions])
        deep = torch.zeros(self.model.media.depth, *x.shape)
        for item, encoded in self._encoded:
            there = (positions >= item.start) & (positions < item.start + item.count)
            embedding, *features = encoded[positions[there] - item.start].split(x.shape[1], dim=1)
            x[there] = embedding
            for layer, feature in zip(deep, features, strict=True):
                layer[there] = feature
        context.deep = deep
        return x


def fed_in_pieces(model: Decoder, prompt: Prompt, sizes: Sequence[int]) -> torch.Tensor:
    """Return the logits of all positions, from pieces of these sizes in turn."""
    runner, found, start = MediaRunner(model, prompt.items), [], 0
    for size in itertools.cycle(sizes):
        if start >= len(prompt.ids):
            return torch.cat(found)
        found.append(runner.feed(prompt.ids[start : start + size]))
        start += size
    raise AssertionError


def renamed(path: Path, names: Sequence[tuple[str, str]]) -> None:
    """Change the beginnings of tensors' names in a checkpoint's file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for old, new in names:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
