"""A real server with small models that read videos, asked by the openai client, answers as transformers does."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from support.media import data_url, encoded, image_part, pixels, text_part
from support.media_models import make_model, tokens_of
from support.runtime_media import FAMILIES
from support.runtime_server import ServerProcess, running
from support.videos import decoded, video, video_part
from tokenizers import Tokenizer
from treeline_runtime.media.videos import Videos

pytestmark = [pytest.mark.integration, pytest.mark.deep]
transformers = pytest.importorskip("transformers")
Served = tuple[str, Any, Path, ServerProcess]
PICTURE = encoded(pixels(96, 64, 1))
FILMS = {3: video(8, rate=3), 4: video(7, rate=4), 9: video(26, rate=9, form="webm", codec="libvpx", size=(192, 64))}
"""By frames per second. None is longer than wide in positions, where transformers lets text begin in between."""


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model = make_model(request.param, folder)
    with running(folder, "--dtype", "float32", "--chunked-prefill-size", "32") as server:
        yield request.param, model, folder, server


def inputs(served: Served, text: str, rates: Sequence[int], pictures: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """What transformers' processor makes of a text with films and pictures, as far as it runs without torchvision:
    frames are those of our decoder; other tests compare them with transformers'."""
    family, _, folder, _ = served
    names, made = tokens_of(folder), dict[str, Any]()
    kind = getattr(transformers, f"{'Qwen3VL' if family.startswith('Qwen3VL') else family}Processor")
    shown, metadata, grids, values = [], [], [], []
    ours = Videos(str(folder), 1 << 20, 60)
    for rate in rates:
        read, patches = ours.read(FILMS[rate], 1 << 20)
        total = len(decoded(FILMS[rate]))
        metadata.append(
            transformers.video_utils.VideoMetadata(
                total_num_frames=total, fps=float(rate), frames_indices=ours.sampled(total, rate)
            )
        )
        grids.append(read.grid)
        values.append(torch.from_numpy(patches))
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        image_token="<|image_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        all_special_multimodal_tokens=["<|video_pad|>"],
    )
    if kind is transformers.Qwen3VLProcessor:
        processor._calculate_timestamps = kind._calculate_timestamps.__get__(processor)
    if rates:
        made["video_grid_thw"] = torch.tensor(grids)
        made["pixel_values_videos"] = torch.cat(values)
        if family == "Qwen2_5_VL":
            made["second_per_grid_ts"] = torch.tensor([2 / one.sampled_fps for one in metadata])
        given = {"video_grid_thw": made["video_grid_thw"], "video_metadata": metadata}
        shown = [kind.replace_video_token(processor, given, number) for number in range(len(rates))]
    images = []
    if pictures:
        image = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        made |= image(images=[Image.open(io.BytesIO(PICTURE)).convert("RGB")] * pictures, return_tensors="pt")
        images = ["<|image_pad|>" * int(grid.prod() // 4) for grid in made["image_grid_thw"]]
    (text,), _ = kind.get_text_with_replacements(processor, [text], images, shown)
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids])
    made["mm_token_type_ids"] = (ids == names["<|image_pad|>"]) + 2 * (ids == names["<|video_pad|>"])
    return ids, made


def test_prompts_and_answers_are_those_of_transformers_cached_or_not(served: Served) -> None:
    _, model, folder, server = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked: list[tuple[list[int], str]] = [([3], "What is it?"), ([4], "What is it?"), ([3, 0, 4, 3], "And these?")]
    for films, question in [*asked, *asked, ([0, 9], "What moves?")]:
        parts = [*(video_part(FILMS[rate]) if rate else image_part(PICTURE) for rate in films), text_part(question)]
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
            temperature=0,
            max_tokens=8,
            extra_body={"return_token_ids": True},
        )
        shown = "".join(f"<|vision_start|><|{'video' if rate else 'image'}_pad|><|vision_end|>" for rate in films)
        text = f"<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"
        ids, made = inputs(served, text, [rate for rate in films if rate], films.count(0))
        assert answer.prompt_token_ids == ids[0].tolist()  # type: ignore[attr-defined]
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=tokens_of(folder)["<|im_end|>"],
                **made,
            )
        assert answer.choices[0].message.content == tokenizer.decode(out[0, ids.shape[1] :].tolist())
    text = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What is it?"
    asked_natively = {"text": text, "video_data": data_url(FILMS[3]), "sampling_params": {"max_new_tokens": 2}}
    with server.client() as http:
        again = http.post("/generate", json=asked_natively).json()["meta_info"]
    assert again["cached_tokens"] > again["prompt_tokens"] - 17, "all but the last page is cached"
