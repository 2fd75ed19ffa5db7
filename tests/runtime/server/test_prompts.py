"""Chat templates of a model: which one is used, and whose fault its failure is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from support.cpu import reference_s
from support.runtime_server import make_tokenizer
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.prompts import Prompts
from treeline_wire.chat import NeedsWorkerError
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
    """Render a chat as a server does: in the loop if that is certain to be quick, else in a thread."""
    asked = {"messages": HI} | body
    try:
        ids = made.of_chat(asked)
    except NeedsWorkerError:
        ids = await asyncio.to_thread(made.of_chat, asked)
    return made.decode(ids, skip_special_tokens=False)


async def test_tools_use_the_models_own_tool_template(tokenizer: str) -> None:
    made = prompts(tokenizer, "plain", tool_template="{{ tools[0].name }}")
    assert await text_of(made) == "plain"
    assert await text_of(made, tools=[{"name": "look_up"}]) == "look_up"
    assert await text_of(made, tools=[{"name": "look_up"}], tool_choice="none") == "plain"
    assert made.template_reads("tools")


@pytest.mark.parametrize(
    ("template", "status", "message"),
    [
        ("{% for i in range(10 ** 9) %}x{% endfor %}", 400, "cannot render this request"),
        ("{{ ('x' * 10 ** 10)|length }}", 400, "needs more than 2 s or 256 MiB"),
        ("{{ ''.__class__.__mro__ }}", 400, "cannot render this request"),
        ("{{ messages[0].content + 1 }}", 400, "cannot render this request"),
        ("{# " + "long" * 9999 + " #}{% for %}", 500, "The model's chat template failed: "),
        ("{{ raise_exception('roles must alternate') }}", 400, "roles must alternate"),
        (None, 400, "no chat template"),
    ],
)
async def test_a_failing_template_is_an_error_of_its_request(
    tokenizer: str, template: str | None, status: int, message: str
) -> None:
    with contextlib.closing(prompts(tokenizer, template)) as made, pytest.raises(ApiError) as caught:
        await text_of(made)
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


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ messages[0].name }}", True),
        ("{{ messages[0]['name'] }}", True),
        ("{% if 'name' in messages[0] %}x{% endif %}", True),
        ("{{ messages[0].get('name') }}", True),
        ("{{ messages | map(attribute='name') | join }}", True),
        ("say your name {{ messages[0].content }}", False),
        ("{{ 'your name' }}{# name #}{{ messages[0].nickname }}", False),
        ("{% set name = 'x' %}{{ messages[0].content }}", False),
    ],
)
def test_only_names_in_a_template_count_as_fields_not_its_texts(tokenizer: str, template: str, reads: bool) -> None:
    assert prompts(tokenizer, template).template_reads("name") is reads


RECURSIVE = "{% for m in messages recursive %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


async def test_without_a_worker_the_client_may_try_again(tokenizer: str) -> None:
    made = prompts(tokenizer, RECURSIVE)
    made.close()
    with pytest.raises(ApiError) as caught:
        await text_of(made)
    assert caught.value.status == 503


async def test_the_event_loop_runs_while_hostile_templates_are_rendered(tokenizer: str) -> None:
    """The loop's own processor time for them stays small; it is measured so because other processes use this machine
    too."""
    with contextlib.closing(prompts(tokenizer, ENDLESS)) as made:
        renderings = [asyncio.create_task(text_of(made)) for _ in range(4)]
        turns, longest_s = 0, 0.0
        while not all(task.done() for task in renderings):
            begin = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - begin)
            turns += 1
        assert [type(task.exception()) for task in renderings] == [ApiError] * 4
    assert turns > 100
    # all four have their first few milliseconds in one turn of the loop
    assert longest_s < 60 * reference_s()
