"""Grammars in numbers through the real server: many at once, some hostile, clients gone while theirs is compiled.
Whoever is free is served meanwhile, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.runtime_server import ServerProcess, eventually, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

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


def idle(server: ServerProcess) -> bool:
    with server.client() as http:
        load = http.get("/v1/loads").json()["loads"][0]
    return bool(load["num_total_reqs"] == 0 and load["pages_used"] == 0)


async def free_ones(http: httpx.AsyncClient, others: asyncio.Future[Any]) -> int:
    """How many were answered until the others were."""
    count = 0
    while not others.done():
        answer = await http.post("/generate", json=body(4, ignore_eos=True))
        assert (answer.status_code, len(answer.json()["output_ids"])) == (200, 4)
        count += 1
    return count


async def leaves(http: httpx.AsyncClient, i: int) -> None:
    """While its grammar, which nobody else has, waits or is compiled."""
    asking = asyncio.create_task(http.post("/generate", json=body(**number(10_000 + i))))
    for _ in range(i % 7):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_who_is_free_is_served_beside_two_hundred_grammars_hostile_ones_and_clients_that_leave(
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
    eventually(lambda: idle(server), 20, "nothing is left")
