"""A real server with small models that read images, asked by the openai client, answers as transformers does."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image
from support.media import encoded, image_part, pixels, text_part
from support.media_models import make_model, tokens_of
from support.runtime_media import FAMILIES
from support.runtime_server import ServerProcess, running
from treeline_wire.tokenizer import TokenizerBundle

pytestmark = [pytest.mark.integration, pytest.mark.deep]
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path, ServerProcess]]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model = make_model(request.param, folder)
    with running(folder, "--dtype", "float32") as server:
        yield model, folder, server


def expected(model: Any, folder: Path, text: str, images: list[bytes], tokens: int) -> list[int]:
    """What transformers generates, with its own processor and positions."""
    names = tokens_of(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = processor(images=[Image.open(io.BytesIO(one)).convert("RGB") for one in images], return_tensors="pt")
    from tokenizers import Tokenizer

    ids = []
    counts = iter((made["image_grid_thw"].prod(-1) // 4).tolist())
    for token in Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids:
        ids += [token] * (next(counts) if token == names["<|image_pad|>"] else 1)
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=tensor,
            mm_token_type_ids=(tensor == names["<|image_pad|>"]).long(),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=names["<|im_end|>"],
            **made,
        )
    return out[0, len(ids) :].tolist()


def test_answers_to_images_are_those_of_transformers_cached_or_not(served: tuple[Any, Path, ServerProcess]) -> None:
    model, folder, server = served
    template = TokenizerBundle.from_dir(folder)
    assert template.media is not None
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pictures = [encoded(pixels(96, 64, seed)) for seed in range(3)]
    asked: list[tuple[list[int], str]] = [([0], "What is it?"), ([1], "What is it?"), ([0, 1, 2, 0], "And these?")]
    for images, question in [*asked, *asked]:
        parts = [*(image_part(pictures[i]) for i in images), text_part(question)]
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
            temperature=0,
            max_tokens=8,
            logprobs=True,
        )
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        text = f"<|im_start|>user\n{shown}{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = expected(model, folder, text, [pictures[i] for i in images], 8)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert answer.choices[0].message.content == tokenizer.decode(ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 20, "the images are cached"
