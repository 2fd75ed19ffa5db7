"""Many grammars at once through the real server: some are hostile, some clients leave while theirs is compiled. Free
requests are served meanwhile, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from support.runtime_server import ServerProcess, eventually, make_checkpoint, running

pytestmark = [pytest.mark.integration, pytest.mark.deep]

TINY = Path(__file__).parents[3] / "models" / "tiny"
HOSTILE: list[dict[str, Any]] = [
    {"regex": "((((a+)+)+)+)+b"},
    {"regex": "(a|b)*a" + "(a|b)" * 40},
    {"json_schema": '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000},
    {"json_schema": json.dumps({"description": "x" * (1 << 20)})},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY) as server:
        yield server


def body(tokens: int = 24, **sampling: Any) -> dict[str, Any]:
    return {"text": "The", "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling}}


def number(i: int) -> dict[str, Any]:
    return {"regex": f"{i}-[0-9]{{3}}"}


def test_the_first_grammar_does_not_wait_for_warming(tmp_path: Path) -> None:
    """A large vocabulary is read, and a process started, in the background, before any request."""
    config = json.loads((make_checkpoint(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 40_000}))
    with running(tmp_path, "--load-format=dummy") as server, server.client() as http:
        server.wait_for_log("grammars are ready")
        before = processes(server)
        assert any("grammar.worker" in name for name in before.values())
        assert http.post("/generate", json=body(**number(77))).status_code == 200
        assert processes(server) == before, "nothing had to be started for it"


def processes(server: ServerProcess) -> dict[int, str]:
    """Return the server's live processes: id and command line."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return {one.pid: " ".join(one.cmdline()) for one in found if one.status() != psutil.STATUS_ZOMBIE}


async def free_ones(http: httpx.AsyncClient, others: asyncio.Future[Any]) -> int:
    """Count the requests answered until the others are."""
    count = 0
    while not others.done():
        answer = await http.post("/generate", json=body(4, ignore_eos=True))
        assert (answer.status_code, len(answer.json()["output_ids"])) == (200, 4)
        count += 1
    return count


async def leaves(http: httpx.AsyncClient, i: int) -> None:
    """Send a request whose grammar no other has, and leave while it waits or is compiled."""
    asking = asyncio.create_task(http.post("/generate", json=body(**number(10_000 + i))))
    for _ in range(i % 7):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_unconstrained_requests_complete_during_grammar_load(
    server: ServerProcess,
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        wanted = asyncio.gather(*(http.post("/generate", json=body(**number(i))) for i in range(200)))
        hostile = asyncio.gather(*(http.post("/generate", json=body(**one)) for one in HOSTILE))
        gone = asyncio.gather(*(leaves(http, i) for i in range(50)))
        served = await free_ones(http, asyncio.gather(wanted, hostile, gone))
        assert served
        for i, answer in enumerate(await wanted):
            assert answer.status_code == 200, answer.text
            assert re.fullmatch(number(i)["regex"], answer.json()["text"])
        assert {answer.status_code for answer in await hostile} <= {200, 400}
    eventually(server.idle, 60, "nothing is left")


UNIQUE = {"type": "array", "uniqueItems": True}
UNIQUE_TOOL = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]}
FUNCTION = {"name": "f", "strict": True, "parameters": UNIQUE_TOOL}
FORMAT = {"type": "json_schema", "name": "n", "schema": UNIQUE}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE}}


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", {"response_format": CHAT_FORMAT}, "response_format"),
        ("/v1/chat/completions", {"guided_json": UNIQUE, "stream": True}, "guided_json"),
        ("/v1/chat/completions", {"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": FUNCTION}]}, "tools"),
        ("/v1/completions", {"prompt": ["a", "b"], "json_schema": UNIQUE}, "json_schema"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "(?=a)b"}}, "sampling_params.regex"),
        ("/v1/responses", {"input": "hi", "text": {"format": FORMAT}}, "text.format"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "stream": True}, "tools"),
    ],
    ids=str,
)
def test_an_impossible_grammar_is_blamed_on_its_field(
    server: ServerProcess, path: str, asked: dict[str, Any], param: str
) -> None:
    needed = {"messages": [{"role": "user", "content": "hi"}]} if path.endswith("/chat/completions") else {}
    with (
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.post(path, body=needed | asked, cast_to=object)
    assert (refused.value.param, refused.value.code) == (param, "invalid_value")
    assert refused.value.type == "invalid_request_error"
    assert f"Invalid value for {param!r}: " in refused.value.message


def test_an_impossible_grammar_is_named_to_anthropics_client(server: ServerProcess) -> None:
    said: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    format = {"type": "json_schema", "schema": UNIQUE}
    tool = {"name": "f", "strict": True, "input_schema": UNIQUE_TOOL}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for asked, param in (
            ({"output_config": {"format": format}}, "output_config.format"),
            ({"tools": [tool]}, "tools"),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                client.messages.create(**said, **asked)
            assert refused.value.body["type"] == "error"
            error = refused.value.body["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"Invalid value for {param!r}: ")
            assert "uniqueItems" in error["message"]
