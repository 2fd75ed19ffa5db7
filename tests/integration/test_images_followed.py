"""Chats with images through a real Envoy and picker to two real runtimes: each turn goes where its image is cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.media import encoded, image_part, pixels, text_part
from support.stack import Stack, running_stack, until

pytest.importorskip("transformers")
from integration.test_media_server import make_model

pytestmark = [pytest.mark.integration, pytest.mark.deep]
TURNS, CHATS = 4, 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("vl") / "model"
    make_model("Qwen2_5_VL", folder)
    arguments = ("--dtype", "float32")
    with running_stack(folder.parent / "stack", replicas=2, model=str(folder), runtime_args=arguments) as made:
        yield made


def blocks(stack: Stack) -> list[int]:
    return [len(stack.tree(name)) for name in stack.runtimes]


def test_each_turn_of_a_chat_goes_where_its_image_is_cached(stack: Stack) -> None:
    """All chats have the same words and images of one size: the bytes of the image alone tell them apart. Their first
    turns were asked of the runtimes themselves, by turns.
    """
    chats: list[list[dict[str, Any]]] = [[] for _ in range(CHATS)]
    before = [0] * CHATS
    for turn in range(TURNS):
        for number, messages in enumerate(chats):
            home = stack.address(stack.runtimes[number % 2])
            question = text_part(f"Question {turn}: what do you see in it, and what is behind it?")
            parts = [image_part(encoded(pixels(192, 128, number))), question] if turn == 0 else [question]
            messages.append({"role": "user", "content": parts})
            held = sum(blocks(stack))
            body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
            url = stack.url if turn else f"http://{home}"
            answer = stack.http.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            said = answer.json()
            cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if turn:
                assert answer.headers["x-treeline-endpoint"] == home
                assert cached >= before[number] - 32, "at most the last page and the answer"
            else:
                assert cached < 24, "no other chat's image"
            before[number] = said["usage"]["prompt_tokens"]
            messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"] or "."})
            until(lambda held=held: sum(blocks(stack)) > held, "events of the turn", 20, lambda: blocks(stack))
