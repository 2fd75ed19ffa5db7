"""Positions of prompts with images and videos equal those of transformers, and never exceed a token's index."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.runtime_media import Grid, Prompt
from treeline_runtime.models.model_config import MRopeConfig
from treeline_runtime.models.mrope import MRope
from treeline_runtime.models.rope import rope_tables
from treeline_runtime.models.rope_config import RopeConfig

transformers = pytest.importorskip("transformers")

Part = int | tuple[str, Grid]
STEP = 2
"""Positions from a frame to the next in Qwen2.5-VL."""
THEIRS: dict[str, Any] = {
    "Qwen2_5_VL": transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel,
    "Qwen3VL": transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLModel,
}
SIDES = st.integers(1, 5).map(lambda tokens: 2 * tokens)
IMAGES = st.tuples(st.just("image"), st.tuples(st.just(1), SIDES, SIDES))
VIDEOS = st.tuples(st.just("video"), st.tuples(st.integers(1, 4), SIDES, SIDES))
PARTS = st.lists(st.integers(0, 9) | IMAGES | VIDEOS, max_size=8)


def mrope(step: int) -> MRope:
    rope = rope_tables(RopeConfig(), 16, 512, 512, torch.float32, torch.device("cpu"))
    return MRope(MRopeConfig((0, 0, 1, 1, 1, 2, 2, 2), 2, step), *(table[None] for table in rope))


def theirs(family: str, prompt: Prompt, **more: Any) -> tuple[torch.Tensor, int]:
    found = prompt.for_transformers()
    model = THEIRS[family]
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=STEP)
    stand_in = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stand_in.get_vision_position_ids = model.get_vision_position_ids.__get__(stand_in)
    grids = {name: found.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    positions, delta = model.get_rope_index(stand_in, found["input_ids"], found["mm_token_type_ids"], **grids, **more)
    return positions[:, 0], int(delta)


def ours(step: int, prompt: Prompt, more: int = 0) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    return mrope(step).positions(len(prompt.ids) + more, [item for item, _ in prompt.items])


def is_longer_than_wide(part: Part) -> bool:
    """Whether a video's frames reach further than its rows and columns: transformers 5 lets text begin before its last
    frame then, and puts generated text elsewhere than the same text in a prompt."""
    return not isinstance(part, int) and (part[1][0] - 1) * STEP >= max(part[1][1:]) // 2


@given(parts=PARTS.map(lambda parts: [part for part in parts if not is_longer_than_wide(part)]))
def test_positions_equal_transformers(parts: list[Part]) -> None:
    prompt = Prompt(2, *parts)
    positions, delta = ours(STEP, prompt)
    expected = theirs("Qwen2_5_VL", prompt)
    np.testing.assert_array_equal(positions, expected[0])
    assert delta == expected[1]


@given(parts=PARTS)
def test_positions_of_frames_that_stand_apart_equal_transformers(parts: list[Part]) -> None:
    prompt = Prompt(2, *parts, frames_apart=True)
    positions, delta = ours(1, prompt)
    expected = theirs("Qwen3VL", prompt)
    np.testing.assert_array_equal(positions, expected[0])
    assert delta == expected[1]


@given(parts=PARTS, step=st.integers(1, 20))
def test_text_continues_behind_an_item_and_no_position_is_above_its_index(parts: list[Part], step: int) -> None:
    prompt = Prompt(2, *parts)
    length = len(prompt.ids) + 3
    positions, delta = ours(step, prompt, more=3)
    assert (positions.max(axis=0) <= np.arange(length)).all()
    is_text = np.ones(length, dtype=bool)
    for item, _ in prompt.items:
        end = item.start + item.count
        is_text[item.start : end] = False
        assert positions[:, item.start].tolist() == [positions[0, item.start - 1] + 1] * 3
        assert positions[0, end] == positions[:, :end].max() + 1
    assert (positions[:, is_text] == positions[0, is_text]).all()
    last = max((item.start + item.count for item, _ in prompt.items), default=0)
    assert (positions[:, last:] == np.arange(last, length) + delta).all()


@given(
    data=st.data(),
    seconds=st.floats(1 / 64, 3, width=32),
    sides=st.tuples(SIDES, SIDES),
    before=st.integers(0, 3),
)
def test_frames_are_as_far_apart_as_their_time_says(
    data: st.DataObject, seconds: float, sides: tuple[int, int], before: int
) -> None:
    """The last one is not behind the width and height of a frame."""
    most = math.ceil(max(sides) // 2 / (STEP * seconds))
    grid = (data.draw(st.integers(1, min(most, 30)), "frames"), *sides)
    prompt = Prompt(2, *[("image", (1, 4, 4))] * before, ("video", grid), 5)
    *_, (video, _) = prompt.items
    items = [*(item for item, _ in prompt.items[:-1]), replace(video, seconds=seconds)]
    positions, delta = mrope(STEP).positions(len(prompt.ids), items)
    expected = theirs("Qwen2_5_VL", prompt, second_per_grid_ts=torch.tensor([seconds]))
    np.testing.assert_array_equal(positions, expected[0])
    assert delta == expected[1]
    assert (positions.max(axis=0) <= np.arange(len(prompt.ids))).all()


def test_a_video_of_tiny_frames_has_them_closer_together() -> None:
    positions, delta = ours(4, Prompt(("video", (3, 2, 2)), 2))
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert delta == 0


def test_tables_of_equal_positions_are_those_of_plain_positions() -> None:
    cos, sin = (table[None] for table in rope_tables(RopeConfig(), 16, 64, 64, torch.float32, torch.device("cpu")))
    places = torch.tensor([0, 5, 63, 5])
    found = MRope(MRopeConfig((0, 1, 2, 0, 1, 2, 0, 0), 2), cos, sin).tables(places.expand(3, -1))
    for table, one in zip((cos, sin), found, strict=True):
        assert torch.equal(one, table[:, places].unsqueeze(2))
