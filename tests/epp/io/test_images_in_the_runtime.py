"""The picker's key of a request with images is that of the ids which our runtime makes of it, at every door."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.media import data_url, encoded, image_part, make_media_checkpoint, pixels, text_part
from support.runtime_server import running
from treeline_epp.keyers import prompt_keyer
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import Body, RouteRequest
from treeline_epp.requests.content import hash_contents
from treeline_epp.requests.model_registry import Adapters, ModelRegistry
from treeline_epp.requests.outline import Outline
from treeline_epp.requests.parse import parse
from treeline_runtime.messages import GenerateReq
from treeline_wire.media import counts_in
from treeline_wire.tokenizer import TokenizerBundle

A, B = encoded(pixels(320, 320, 1)), encoded(pixels(448, 256, 2))
SEE = "<|im_start|>user\nsee <|vision_start|><|image_pad|><|vision_end|>?<|im_end|>\n"


class World:
    """A server with a scheduler that notes its requests, and a picker's registry of its model."""

    def __init__(self, http: Any, seen: Path, model: Path) -> None:
        self._http, self._seen = http, seen
        self.registry = ModelRegistry()
        self.keyer = self.registry.add_keyer(TokenizerBundle.from_dir(model))
        self.registry.set_endpoint("e", "default", (), self.keyer.fingerprint, adapters=Adapters("treeline"))

    def ids(self, path: str, body: dict[str, Any]) -> list[int]:
        self._seen.unlink(missing_ok=True)
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (line,) = self._seen.read_bytes().splitlines()
        return list(msgspec.json.decode(line, type=GenerateReq).input_ids)

    def key(self, path: str, body: dict[str, Any], *, large: bool) -> bytes | None:
        data: bytes | Body = json.dumps(body).encode()
        outline = None
        if large:
            data, outline = Body([data]), Outline()
            for piece in data.pieces():
                outline.feed(piece)
            outline.finish(data)
            for _ in hash_contents(data, outline):
                pass
        found = parse(RouteRequest({":path": path, ":method": "POST"}, data, None), self.registry, outline=outline)
        assert isinstance(found, Request), found
        return found.key


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("media")
    model, seen = make_media_checkpoint(folder / "model"), folder / "seen"
    environment = {"FAKE_ITEMS": str(seen)}
    with running(model, "--no-events", fake=True, environment=environment) as server, server.client() as http:
        yield World(http, seen, model)


def bare(data: bytes) -> str:
    return base64.b64encode(data).decode()


ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": bare(A)}}
INPUT = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": data_url(B)}]
ASKED = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [text_part("see "), image_part(A)]}]}),
    "two": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [image_part(A), text_part("or"), image_part(B), image_part(A)]}]},
    ),
    "turns": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [image_part(B), text_part("what?")]},
                {"role": "assistant", "content": "noise"},
                {"role": "user", "content": [text_part("and"), image_part(A)]},
            ]
        },
    ),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 4, "messages": [{"role": "user", "content": [text_part("see "), ANTHROPIC]}]},
    ),
    "responses": ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": INPUT}]}),
    "generate": ("/generate", {"text": SEE, "image_data": data_url(A)}),
    "bare": ("/generate", {"text": SEE * 2, "image_data": [bare(A), bare(B)]}),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_key_of_a_request_is_that_of_the_runtimes_ids(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_keyer, "RENDER_SECONDS", 60.0)
    path, body = ASKED[name]
    ids = world.ids(path, body)
    assert world.keyer.media is not None
    assert world.keyer.keys is not None
    for digest, count in counts_in(ids).items():
        world.keyer.media.learn(digest, count)
    assert counts_in(ids)
    for large in (False, True):
        assert world.key(path, body, large=large) == world.keyer.keys.block_key(ids)
