"""Chat templates of a model: which one is used, and whose fault it is when one fails."""

from __future__ import annotations

from typing import Any

import pytest
from support.runtime_server import make_tokenizer
from treeline_runtime.server.http import ApiError
from treeline_runtime.server.prompts import Prompts
from treeline_wire.tokenizer import TokenizerBundle

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return (folder / "tokenizer.json").read_text()


def prompts(tokenizer: str, template: str | None, **more: Any) -> Prompts:
    return Prompts(TokenizerBundle.build(tokenizer, chat_template=template, **more))


async def text_of(made: Prompts, **body: Any) -> str:
    ids = await made.of_chat({"messages": HI} | body, 0)
    return made.decode(ids, skip_special_tokens=False)


async def test_tools_have_their_own_template_where_the_model_has_one(tokenizer: str) -> None:
    made = prompts(tokenizer, "plain", tool_template="{{ tools[0].name }}")
    assert await text_of(made) == "plain"
    assert await text_of(made, tools=[{"name": "look_up"}]) == "look_up"
    assert await text_of(made, tools=[{"name": "look_up"}], tool_choice="none") == "plain"
    assert made.template_reads("tools")


@pytest.mark.parametrize(
    ("template", "status", "message"),
    [
        ("{% for i in range(10 ** 9) %}x{% endfor %}", 500, "The model's chat template failed: "),
        ("{{ ''.__class__.__mro__ }}", 500, "The model's chat template failed: "),
        ("{{ raise_exception('roles must alternate') }}", 400, "roles must alternate"),
        (None, 400, "no chat template"),
    ],
)
async def test_a_template_that_fails(tokenizer: str, template: str | None, status: int, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        await text_of(prompts(tokenizer, template))
    error = caught.value
    assert error.status == status
    assert message in error.body["error"]["message"]
    assert error.body["error"]["type"] == ("server_error" if status == 500 else "invalid_request_error")
    assert error.body["error"]["param"] == (None if status == 500 else "messages")


async def test_fields_of_messages_are_known_where_the_template_reads_them(tokenizer: str) -> None:
    named = [{"role": "user", "content": "hi", "name": "ann"}]
    reads = prompts(tokenizer, "{{ messages[0].name }}: {{ messages[0].content }}")
    assert await text_of(reads, messages=named) == "ann: hi"
    with pytest.raises(ApiError) as caught:
        await text_of(prompts(tokenizer, "{{ messages[0].content }}"), messages=named)
    assert caught.value.body["error"]["param"] == "messages[0].name"
