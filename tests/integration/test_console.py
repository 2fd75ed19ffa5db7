"""The console as a user of `treeline up` sees it: in a browser, through a real Envoy, with two real runtimes.

Each test leaves pictures of what it saw in `SCREENSHOTS`, for people to look at.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest
from support.browser import Tab, browser_tab
from support.stack import Stack, running_stack
from treeline_wire import headers as names

pytestmark = [pytest.mark.integration, pytest.mark.deep]

SCREENSHOTS = Path(os.environ.get("TREELINE_SCREENSHOTS", ".cache/screenshots"))
SYSTEM = "You answer questions about countries in one short sentence, and you say nothing else whatever is asked."
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


async def picture(tab: Tab, name: str) -> None:
    found = await tab.screenshot()

    def keep() -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        (SCREENSHOTS / f"{name}.png").write_bytes(found)

    await asyncio.to_thread(keep)


async def ask(tab: Tab, text: str, answers: int) -> str:
    """Ask in the playground. Return the figures shown beside the last answer."""
    await tab.run("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.until(f"document.querySelectorAll('#turns .figures a').length === {answers}")
    return str(await tab.run("[...document.querySelectorAll('#turns .figures')].at(-1).innerText")).replace("\n", " ")


async def opened(tab: Tab, stack: Stack) -> None:
    """Open the gateway's own address, which leads to the playground."""
    await tab.look()
    assert (await asyncio.to_thread(stack.http.get, stack.url)).headers["location"] == "/console/"
    await tab.go(f"{stack.url}/console/")
    await tab.until("document.querySelector('#model').value === 'tiny'")
    for name, value in (("system", SYSTEM), ("temperature", "0"), ("max_tokens", "32")):
        await tab.run(f"document.querySelector('#{name}').value = {value!r}")


async def test_the_second_turn_of_a_chat_visibly_hits_and_its_decision_says_why(stack: Stack, tmp_path: Path) -> None:
    async with browser_tab(tmp_path) as tab:
        await opened(tab, stack)
        first = await ask(tab, "What is the capital of France?", 1)
        second = await ask(tab, "And of Italy?", 2)
        await picture(tab, "playground")
        served = [line.split(" by ")[1].split()[0] for line in (first, second)]
        assert served[0] == served[1]
        assert served[0] in stack.runtimes
        assert await tab.run("[...document.querySelectorAll('#turns .figures')].at(-1).querySelector('.hit') !== null")
        assert "tokens/s" in second
        assert "first token" in second
        await tab.run("[...document.querySelectorAll('#turns .figures a')].at(-1).click()")
        await tab.until("document.querySelectorAll('#rows > tr').length === 1")
        row = await tab.text("#rows > tr")
        assert served[1] in row
        assert "cost_s" in row, "the terms of the score"
        await picture(tab, "decision")
        await tab.run("location.hash = 'load'")
        told = "[...document.querySelectorAll('figcaption')].map(one => one.innerText).join(' ')"
        await tab.until(f"document.querySelectorAll('#charts .c0, #charts .c1').length > 8 && {told}.includes(' %')")
        assert "runtime-0" in await tab.run(told)
        await picture(tab, "load")
        await tab.look(400, 800, "dark")
        assert await tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        await picture(tab, "load-dark-narrow")
        assert tab.troubles == []


async def test_an_answer_follows_a_json_schema(stack: Stack, tmp_path: Path) -> None:
    async with browser_tab(tmp_path) as tab:
        await opened(tab, stack)
        await tab.run(f"document.querySelector('#schema').value = {json.dumps(SCHEMA)!r}")
        await ask(tab, "What is the capital of France?", 1)
        answer = json.loads(await tab.text("#turns li:last-child .said:not(.thought)"))
        assert answer["city"] in ("Paris", "Rome")
        assert tab.troubles == []


async def test_a_browser_never_treats_an_engines_answer_as_a_page_of_the_console(stack: Stack, tmp_path: Path) -> None:
    async with browser_tab(tmp_path) as tab:
        await tab.go(f"{stack.url}/v1/models")
        assert await tab.run("self.origin") == "null"


def test_foreign_pages_and_other_paths_of_the_console_reach_nothing(stack: Stack) -> None:
    with httpx.Client(trust_env=False, timeout=60) as http:
        for headers in ({"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
            assert http.get(f"{stack.url}/console/data", headers=headers).status_code == 403, headers
        for path in ("/console/../debug/tree", "/console/%2e%2e/debug/tree", "/debug/tree", "/debug/decisions"):
            assert http.get(stack.url + path).status_code == 404, path


def test_remote_users_chat_with_a_key_and_see_nothing_else(tmp_path: Path) -> None:
    keys = {"ada": "sk-of-ada"}
    with running_stack(tmp_path, replicas=1, host="0.0.0.0", api_keys=keys) as stack:
        get = stack.http.get
        assert get(f"{stack.url}/").status_code == 302
        for path in ("", "main.js", "console.css"):
            assert get(f"{stack.url}/console/{path}", headers={"Host": "models.example"}).status_code == 200
        for forged in ({}, {"Host": "127.0.0.1"}, {"Host": "localhost", names.EDGE: "false"}):
            refused = get(f"{stack.url}/console/data", headers=forged)
            assert refused.status_code == 403
            assert "through a gateway" in refused.json()["error"]
        assert get(f"{stack.url}/v1/models").status_code == 401
        assert get(f"{stack.url}/v1/models", headers={"Authorization": "Bearer sk-of-ada"}).status_code == 200
