"""Requests of Ollama's clients have the keys of the prompts that our runtime makes of them, and its names of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import data_plane, engines, small_bundle
from treeline_epp.keyers import prompt_keyer
from treeline_epp.picking.request import Request
from treeline_epp.requests.body import RouteRequest
from treeline_epp.requests.model_registry import Adapters, ModelRegistry
from treeline_epp.requests.parse import parse
from treeline_wire.tokenizer import TokenizerBundle

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a rendering long enough for a garbage collection: these tests compare texts."""
    monkeypatch.setattr(prompt_keyer, "RENDER_SECONDS", 60.0)


def registry(engine: str) -> ModelRegistry:
    made = ModelRegistry()
    bundle = TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=TEMPLATE)
    fingerprint = made.add_keyer(bundle).fingerprint
    for pool, model in (("default", "tiny"), ("big", "huge")):
        made.set_endpoint(pool, pool, (model,), fingerprint, adapters=Adapters(engine))
    return made


def routed(path: str, engine: str = "treeline", model: str = "tiny", **body: Any) -> Any:
    data = json.dumps({"model": model, **body}).encode()
    return parse(RouteRequest({":path": path, ":method": "POST"}, data, None), registry(engine))


def key(path: str, engine: str = "treeline", **body: Any) -> str | None:
    found = routed(path, engine, **body)
    assert isinstance(found, Request), found
    return None if found.key is None else found.key.decode()


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_ollamas_doors_have_the_keys_of_chats_and_texts() -> None:
    chat = key("/v1/chat/completions", messages=[user("hi")])
    assert chat == "user:hi;a:"
    assert key("/api/chat", messages=[user("hi")], options={"num_ctx": 5}) == chat
    assert key("/api/generate", prompt="hi") == chat
    assert key("/api/generate", prompt="hi", raw=False) == chat
    assert key("/api/generate", prompt="hi", system="S") == "system:S;user:hi;a:"
    assert key("/api/generate", prompt="hi", raw=True) == "hi"
    assert key("/api/chat", messages=[user("one"), user("two", images=["aGk="])]) == "user:one"
    for engine in ("vllm", "sglang"):
        assert key("/api/chat", engine, messages=[user("hi")]) is None, "its conversion is unknown"


@pytest.mark.parametrize(
    ("path", "tagged"), [("/api/chat", True), ("/api/show", True), ("/v1/chat/completions", False)]
)
def test_ollamas_clients_may_name_a_model_with_the_tag_latest(path: str, tagged: bool) -> None:
    found = routed(path, model="huge:latest", messages=[])
    named = isinstance(found, Request) and (found.model, found.pool) == ("huge", "big")
    assert named is tagged
    assert not isinstance(routed("/api/chat", model="huge:7b", messages=[]), Request)


@pytest.mark.integration
@pytest.mark.deep
async def test_ollamas_client_reads_the_errors_of_picker_and_envoy(tmp_path: Path) -> None:
    import ollama  # takes long

    async with (
        engines(1) as (engine,),
        data_plane(
            tmp_path, [engine], "--max-body-bytes", "100000", fail_open=False, api_keys={"a": "sk-ada-1"}
        ) as plane,
    ):

        async def told(status: int, text: str = "hi", model: str = "tiny", key: str = "sk-ada-1") -> str:
            headers = {"Authorization": f"Bearer {key}"}
            async with ollama.AsyncClient(host=plane.envoy.url, headers=headers) as client:
                with pytest.raises(ollama.ResponseError) as raised:
                    await client.chat(model, [user(text)])
            assert raised.value.status_code == status
            assert isinstance(raised.value.error, str)
            return raised.value.error

        assert "gpt-9" in await told(404, model="gpt-9:latest")
        assert "too large" in await told(413, "x" * 200_000)
        assert await told(401, key="sk-eve-1") == "Missing or unknown API key."
        await plane.picker.stop()
        assert await told(503) == "The picker does not answer; try again."
