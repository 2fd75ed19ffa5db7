"""Images through every door of a server: the scheduler gets items and the ids that spell them."""

from __future__ import annotations

import base64
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import numpy as np
import openai
import pytest
from PIL import Image
from support.media import IMAGE, data_url, encoded, image_part, pixels, text_part
from support.runtime_server import ServerProcess, running
from tokenizers import Tokenizer
from transformers import AutoImageProcessor
from treeline_runtime.messages import GenerateReq
from treeline_wire.media import counts_in, item_digest, item_ids
from treeline_wire.tokenizer import TokenizerBundle

A, B = encoded(pixels(64, 64, 1)), encoded(pixels(96, 64, 2))
LARGE = encoded(pixels(300, 200, 3))
"""Larger than bodies that are read in the event loop."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seen") / "items"


@pytest.fixture(scope="module")
def server(media_model: Path, seen: Path) -> Iterator[ServerProcess]:
    environment = {"FAKE_ITEMS": str(seen)}
    with running(media_model, "--no-events", "--max-images=3", fake=True, environment=environment) as made:
        yield made


class Door:
    """Sends requests, and says what the scheduler got."""

    def __init__(self, http: httpx.Client, seen: Path, model: Path) -> None:
        self.http = http
        self._seen = seen
        self._spec = TokenizerBundle.from_dir(model).media
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._processor = AutoImageProcessor.from_pretrained(model, backend="pil")

    def ask(self, path: str, body: dict[str, Any], *, stream: bool = False) -> tuple[Any, GenerateReq]:
        self._seen.unlink(missing_ok=True)
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (line,) = self._seen.read_bytes().splitlines()
        return answer.text if stream else answer.json(), msgspec.json.decode(line, type=GenerateReq)

    def refused(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert 400 <= answer.status_code < 500, answer.text
        return dict(answer.json()["error"])

    def expect(self, got: GenerateReq, text: str, *images: bytes) -> None:
        """The prompt is `text` with these images at its placeholders."""
        assert self._spec is not None
        ids, items = list[int](), iter(got.items)
        rest = iter(images)
        for id in self._tokenizer.encode(text, add_special_tokens=False).ids:
            if self._tokenizer.id_to_token(id) != IMAGE:
                ids.append(id)
                continue
            data, item = next(rest), next(items)
            made = self._processor(images=[Image.open(io.BytesIO(data))], return_tensors="np")
            count = int(made["image_grid_thw"].prod()) // 4
            assert item.digest == item_digest("image", data, self._spec.fingerprint)
            assert (item.start, item.count, list(item.grid)) == (len(ids), count, made["image_grid_thw"][0].tolist())
            np.testing.assert_array_equal(np.fromfile(item.path, np.float32).reshape(item.shape), made["pixel_values"])
            ids += item_ids(item.digest, count)
        assert got.input_ids == ids
        assert [*rest, *items] == []


@pytest.fixture(scope="module")
def door(server: ServerProcess, seen: Path, media_model: Path) -> Iterator[Door]:
    with server.client() as http:
        yield Door(http, seen, media_model)


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 4, **more}


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


VISION = f"<|vision_start|>{IMAGE}<|vision_end|>"
ANSWER = "<|im_start|>assistant\n"


def test_a_chat(door: Door) -> None:
    answer, got = door.ask("/v1/chat/completions", chat(image_part(A), text_part("what?")))
    door.expect(got, user(VISION + "what?") + ANSWER, A)
    assert answer["usage"]["prompt_tokens"] == len(got.input_ids)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert got.sampling.max_new_tokens == 4


def test_order_is_that_of_the_conversation(door: Door) -> None:
    body = chat(text_part("a"), image_part(A), image_part(LARGE))
    body["messages"] += [{"role": "assistant", "content": "b"}, {"role": "user", "content": [image_part(A)]}]
    _, got = door.ask("/v1/chat/completions", body)
    said = user(f"a{VISION}{VISION}") + "<|im_start|>assistant\nb<|im_end|>\n" + user(VISION) + ANSWER
    door.expect(got, said, A, LARGE, A)
    assert len({item.digest for item in got.items}) == 2
    assert counts_in(got.input_ids) == {got.items[1].digest: got.items[1].count}, "the larger one has a whole cycle"


def test_streams_and_short_forms(door: Door) -> None:
    part = {"image_url": data_url(B), "detail": "high", "uuid": "mine"}
    text, got = door.ask("/v1/chat/completions", chat(part, stream=True, n=1), stream=True)
    door.expect(got, user(VISION) + ANSWER, B)
    assert text.endswith("data: [DONE]\n\n")


def test_ignored_names_of_images_are_told(door: Door) -> None:
    answer = door.http.post("/v1/chat/completions", json=chat({**image_part(A), "uuid": "mine"}))
    assert "uuid" in answer.headers["x-treeline-ignored"]


def test_token_ids_are_shown_with_placeholders(door: Door) -> None:
    answer, got = door.ask("/v1/chat/completions", chat(image_part(A), return_token_ids=True))
    (item,) = got.items
    shown = answer["prompt_token_ids"]
    assert len(shown) == len(got.input_ids)
    assert len(set(shown[item.start : item.start + item.count])) == 1
    assert max(shown) < 1 << 31


def test_responses(door: Door) -> None:
    said = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(A), "detail": "auto"}]}
    result = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": data_url(B)}],
    }
    answer, got = door.ask("/v1/responses", {"input": [said, result], "max_output_tokens": 4})
    assert answer["usage"]["input_tokens"] == len(got.input_ids)
    door.expect(
        got,
        user(VISION) + f"<|im_start|>tool\n{VISION}<|im_end|>\n" + ANSWER,
        A,
        B,
    )


def test_messages(door: Door) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(A).decode()}
    said = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    answer, got = door.ask("/v1/messages", {"messages": said, "max_tokens": 100_000})
    door.expect(got, user(VISION + "?") + ANSWER, A)
    assert got.sampling.max_new_tokens == 4096 - len(got.input_ids), "the rest of the context, with the image in it"
    assert answer["usage"]["output_tokens"] == got.sampling.max_new_tokens


@pytest.mark.parametrize("image", [data_url(A), base64.b64encode(A).decode(), [data_url(A)]])
def test_generate(door: Door, image: Any) -> None:
    body = {"text": f"see {VISION}", "image_data": image, "sampling_params": {"max_new_tokens": 2}}
    answer, got = door.ask("/generate", body)
    door.expect(got, f"see {VISION}", A)
    assert len(answer["output_ids"]) == 2


def test_a_batch(door: Door, seen: Path) -> None:
    seen.unlink(missing_ok=True)
    texts = [f"a {VISION}", "b", f"c {VISION}{VISION}"]
    images = [data_url(A), None, [data_url(B), data_url(A)]]
    params = {"max_new_tokens": 2}
    answer = door.http.post("/generate", json={"text": texts, "image_data": images, "sampling_params": params})
    assert [len(one["output_ids"]) for one in answer.json()] == [2, 2, 2]
    one, two = (msgspec.json.decode(line, type=GenerateReq) for line in seen.read_bytes().splitlines())
    door.expect(one, texts[0], A)
    door.expect(two, texts[2], B, A)


def test_equal_images_are_decoded_once(door: Door) -> None:
    data = encoded(pixels(70, 70, 77))
    (one,) = door.ask("/v1/chat/completions", chat(image_part(data)))[1].items
    (two,) = door.ask("/v1/chat/completions", chat(text_part("x"), image_part(data)))[1].items
    assert one.path == two.path


def test_the_model_says_that_it_sees(door: Door) -> None:
    assert door.http.get("/get_model_info").json()["has_image_understanding"] is True


def test_text_needs_no_decoder(door: Door) -> None:
    answer = door.http.post("/v1/chat/completions", json=chat(text_part("hello")))
    assert answer.status_code == 200


# ---- official clients -----------------------------------------------------------------------------------------------


def test_the_client_of_openai(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    part: Any = {"type": "image_url", "image_url": {"url": data_url(LARGE), "detail": "auto"}}
    said: Any = [{"role": "user", "content": [{"type": "text", "text": "see "}, part]}]
    chat = client.chat.completions.create(model="media", messages=said, max_tokens=4)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens > 54
    shown: Any = {"type": "input_image", "image_url": data_url(LARGE), "detail": "auto"}
    response = client.responses.create(
        model="media", input=[{"role": "user", "content": [shown]}], max_output_tokens=16
    )
    assert response.usage is not None
    assert response.usage.input_tokens > 54
    with pytest.raises(openai.BadRequestError, match="no image in a known format"):
        client.responses.create(
            model="media", input=[{"role": "user", "content": [shown | {"image_url": data_url(b"x")}]}]
        )


def test_the_client_of_anthropic(server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(LARGE).decode()}
    said: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    message = client.messages.create(model="media", messages=said, max_tokens=4)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 54
    said[0]["content"][0]["source"] = source | {"data": base64.b64encode(b"x").decode()}
    with pytest.raises(anthropic.BadRequestError, match="no image in a known format"):
        client.messages.create(model="media", messages=said, max_tokens=4)


# ---- what is refused ------------------------------------------------------------------------------------------------

PART = "messages[0].content[0]"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", chat(text_part(f"I spell {IMAGE}")), "messages"),
    ("/v1/chat/completions", chat(text_part(f"I spell {IMAGE}"), image_part(A)), "messages"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "https://e.org/x.png"}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "/etc/passwd"}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": data_url(b"no image")}}), PART),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": None}), PART),
    (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": {"url": data_url(A), "max_pixels": 9}}),
        f"{PART}.image_url.max_pixels",
    ),
    ("/v1/chat/completions", chat({"type": "image_embeds", "image_embeds": "gASV"}), PART),
    ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": data_url(A)}}), PART),
    ("/v1/chat/completions", chat({"type": "image", "image": "x"}), PART),
    ("/v1/chat/completions", chat(*[image_part(A)] * 4), PART),
    ("/v1/chat/completions", chat(image_part(A), mm_processor_kwargs={"max_pixels": 5}), "mm_processor_kwargs"),
    ("/v1/chat/completions", chat(image_part(A), prompt_logprobs=1), PART),
    ("/v1/chat/completions", chat(image_part(A), max_tokens=4082), PART),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [image_part(A)]}]}, "messages[0].content"),
    ("/v1/completions", {"prompt": f"x {IMAGE}"}, "prompt"),
    ("/generate", {"text": IMAGE}, "text"),
    ("/generate", {"text": "x", "image_data": data_url(A)}, "text"),
    ("/generate", {"text": IMAGE, "image_data": "/etc/passwd"}, "image_data"),
    ("/generate", {"text": IMAGE, "image_data": "file:///etc/passwd"}, "image_data"),
    ("/generate", {"text": IMAGE, "image_data": {"format": "processor_output"}}, "image_data"),
    ("/generate", {"text": IMAGE, "image_data": [{"format": "precomputed_embedding"}]}, "image_data"),
    ("/generate", {"text": [IMAGE, "x"], "image_data": data_url(A)}, "image_data"),
    ("/generate", {"text": [IMAGE, "x"], "image_data": [data_url(A)]}, "image_data"),
    ("/generate", {"text": IMAGE, "image_data": data_url(A), "return_logprob": True, "logprob_start_len": 0},
     "image_data"),
    ("/generate", {"text": "<|video_pad|>", "video_data": data_url(A)}, "video_data"),
    ("/tokenize", chat(image_part(A)) | {"max_tokens": None}, PART),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].file_id"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(b"x")}]}]},
     "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_is_named(door: Door, path: str, body: dict[str, Any], param: str) -> None:
    error = door.refused(path, body)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image", "source": {"type": "url", "url": "https://e.org/x"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}},
        {"type": "document", "source": {}},
    ],
)
def test_messages_refuse_what_they_cannot_read(door: Door, block: Any) -> None:
    body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 4}
    assert door.http.post("/v1/messages", json=body).status_code == 400


def test_hostile_images_take_nobody_elses_answer(door: Door) -> None:
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    assert "more than 67108864 pixels" in door.refused("/v1/chat/completions", chat(image_part(bomb)))["message"]
    door.ask("/v1/chat/completions", chat(image_part(A)))


def test_what_a_client_left_behind_is_freed(door: Door, server: ServerProcess) -> None:
    """Requests that end in the middle release what they held."""
    data = image_part(encoded(pixels(512, 512, 5)))
    for _ in range(3):
        with door.http.stream("POST", "/v1/chat/completions", json=chat(data, stream=True, max_tokens=500)) as answer:
            next(answer.iter_lines())
    door.ask("/v1/chat/completions", chat(data))
    assert json.loads(door.http.get("/v1/loads").text)["loads"]


def test_allowed_names_inside_the_network_are_not_fetched(media_model: Path, tmp_path: Path) -> None:
    """The operator allowed the name; its address is this machine's all the same."""
    asked = list[str]()

    class Inside(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    inside = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Inside)
    threading.Thread(target=inside.serve_forever, daemon=True).start()
    place = f"http://localhost:{inside.server_port}"
    flags = ("--no-events", "--allowed-media-domains", place)
    with (
        running(media_model, *flags, fake=True, environment={"FAKE_ITEMS": str(tmp_path / "items")}) as server,
        server.client() as client,
    ):
        for url, why in (
            (f"{place}/secret", "not public"),
            (f"http://127.0.0.1:{inside.server_port}/secret", "domain"),
        ):
            part = {"type": "image_url", "image_url": {"url": url}}
            refused = client.post("/v1/chat/completions", json=chat(part))
            assert refused.status_code == 400
            assert why in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == PART
    inside.shutdown()
    inside.server_close()
    assert asked == []


def test_the_server_says_what_to_install(media_model: Path, tmp_path: Path) -> None:
    """Without the libraries text works."""
    hidden = {"MEDIA_LIBRARIES_HIDDEN": "1", "FAKE_ITEMS": str(tmp_path / "items")}
    with (
        running(media_model, "--no-events", fake=True, environment=hidden) as server,
        server.client() as client,
    ):
        refused = client.post("/v1/chat/completions", json=chat(image_part(A)))
        assert refused.status_code == 400
        assert "treeline-runtime[media]" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=chat(text_part("x"))).status_code == 200
        assert client.get("/get_model_info").json()["has_image_understanding"] is False
