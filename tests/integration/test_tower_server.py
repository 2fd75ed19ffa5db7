"""A real server of Gemma 3 or InternVL, asked by the openai client and natively, answers as transformers does."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from support.media import data_url, encoded, image_part, pixels, text_part
from support.runtime_server import ServerProcess, running
from support.tower_media import make_checkpoint
from transformers import AutoModelForImageTextToText

pytestmark = [pytest.mark.integration, pytest.mark.deep]
Served = tuple[str, Any, Any, ServerProcess]


@pytest.fixture(scope="module", params=["Gemma3", "InternVL"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A family, transformers' processor and model, and our server of the same files."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    processor = make_checkpoint(request.param, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with running(folder, "--dtype", "float32", "--chunked-prefill-size", "16") as server:
        yield request.param, processor, model, server


def expected(served: Served, text: str, images: list[Any]) -> str:
    """Return what transformers generates."""
    _, processor, model, _ = served
    made = processor(images=images, text=text, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**made, max_new_tokens=8, do_sample=False)
    answer: str = processor.tokenizer.decode(out[0, made["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def test_answers_to_images_are_those_of_transformers_cached_or_not(served: Served) -> None:
    _, processor, _, server = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pictures = [pixels(40, 30 + 10 * seed, seed) for seed in range(3)]
    asked = [([0], "What is it?"), ([1], "What is it?"), ([0, 1, 2, 0], "And these?")]
    for images, question in [*asked, *asked]:
        parts = [*(image_part(encoded(pictures[i])) for i in images), text_part(question)]
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
            temperature=0,
            max_tokens=8,
        )
        shown = [*({"type": "image"} for _ in images), text_part(question)]
        text = processor.apply_chat_template([{"role": "user", "content": shown}], add_generation_prompt=True)
        assert answer.choices[0].message.content == expected(served, text, [pictures[i] for i in images])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


def test_native_prompts_have_what_the_template_writes(served: Served) -> None:
    _, processor, _, server = served
    picture = pixels(40, 30)
    text = f"See {processor.image_token} and tell"
    body = {"text": text, "image_data": data_url(encoded(picture)), "sampling_params": {"temperature": 0}}
    body["sampling_params"]["max_new_tokens"] = 8  # type: ignore[index]
    asked = urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked) as answer:
        assert json.loads(answer.read())["text"] == expected(served, text, [picture])
