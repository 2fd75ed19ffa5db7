"""The console: what it shows, to whom, and what it keeps to itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from pathlib import Path

import httpx
import pytest
from support.browser import browser_tab
from support.epp_io import FakeEngine, RunningPicker, engines, running_picker
from support.epp_kube import asked
from support.http import client
from support.ports import free_ports
from treeline_epp.admin import Page, PageServer
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.decision_log import KEPT, PROMPT_BYTES, DecisionLog

SECRET = "The launch code is 0000"
BEGINNING = "You are the assistant of a bank. " * 8
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@contextlib.asynccontextmanager
async def picker(*flags: str, models: tuple[str, ...] = ("tiny",)) -> AsyncIterator[tuple[RunningPicker, FakeEngine]]:
    async with engines(2, models=models) as fakes:
        words = [word for fake in fakes for word in ("--endpoint", f"{fake.name}={fake.address}")]
        async with running_picker(*words, *flags) as running:
            yield running, fakes[0]


async def token_of(running: RunningPicker) -> str:
    """What the page tells its script."""
    page = (await running.get("/debug/console")).text
    found = re.search(r'name="console-token" content="([\w-]{20,})"', page)
    assert found is not None
    return found[1]


async def fetch(running: RunningPicker, query: str = "", headers: Mapping[str, str] | None = None) -> httpx.Response:
    async with client(timeout=60) as http:
        url = f"http://127.0.0.1:{running.options.admin_port}/debug/console.json?{query}"
        return await http.get(url, headers=headers)


async def test_decisions_are_told_with_their_reasons_and_prompts_only_if_the_flag_allows() -> None:
    async with picker() as (running, _):
        assert (await fetch(running)).json()["decisions"] == {"count": 0, "next": 0, "shown": []}
        for turn in range(3):
            await asked(running, "tiny", prompt=f"{BEGINNING}{SECRET}{turn}", request_id=f"r{turn}", answered=True)
        answer = await fetch(running, "prefixes=1")
        shown = answer.json()
        assert [one["request_id"] for one in shown["decisions"]["shown"]] == ["r2", "r1", "r0"], "the newest first"
        newest = shown["decisions"]["shown"][0]
        assert newest["endpoint"] in newest["terms"]
        assert newest["terms"][newest["endpoint"]]["cost_s"] >= 0
        assert newest["cached_tokens"] > 0, "its beginning went there before"
        (group,) = shown["prefixes"]
        (prefix,) = group["prefixes"]
        assert (group["model"], group["requests"], prefix["requests"]) == ("tiny", 3, 3)
        assert prefix["bytes"] >= len(BEGINNING + SECRET)
        assert [held["name"] for held in prefix["held_by"]] == [newest["endpoint"]]
        assert prefix["held_by"][0]["bytes"] == prefix["bytes"]
        assert SECRET not in answer.text
        assert "bank" not in answer.text
        assert [one["request_id"] for one in (await fetch(running, "after=2")).json()["decisions"]["shown"]] == ["r2"]
        refused = await fetch(running, "texts=1&prefixes=1")
        assert refused.status_code == 403
        assert "--show-prompts" in refused.json()["error"]
        for wrong in ("after=-1", "after=x", "after=" + "9" * 20, "after=²"):
            assert (await fetch(running, wrong)).status_code == 400


async def test_prompts_are_told_where_the_flag_allows_and_somebody_asks() -> None:
    async with picker("--show-prompts") as (running, _):
        long = BEGINNING + "and so on " * 2000 + SECRET
        for prompt in (long, long, "é" * 3000):
            await asked(running, "tiny", prompt=prompt)
        assert SECRET not in (quiet := (await fetch(running, "prefixes=1")).text)
        assert "bank" not in quiet
        shown = (await fetch(running, "texts=1&prefixes=1")).json()
        texts = [one["text"] for one in shown["decisions"]["shown"]]
        assert all(len(text) < 400 for text in texts), "a beginning, however long the prompt"
        assert [BEGINNING[:100] in text for text in texts] == [False, True, True]
        assert BEGINNING[:100] in shown["prefixes"][0]["prefixes"][0]["text"]


def test_what_clients_choose_is_kept_only_up_to_a_length() -> None:
    spec = EndpointSpec("e0", "127.0.0.1:1")
    picker = Picker()
    picker.add_endpoint(spec)
    log = DecisionLog(wall=lambda: 7.0)
    for space in (None, "salt", "s" * 100_000):
        log.add(picker.pick(Request("r" * 100_000, namespace=space, key=b"k" * 100_000), 0.0))
    for number in range(2 * KEPT):
        log.add(picker.pick(Request(str(number)), 0.0))
        if number == 0:
            first, second, third, fourth = log.all()
    assert (first.at, first.number, first.key_bytes) == (7.0, 1, 100_000)
    assert [len(kept.key) for kept in (first, second, third, fourth)] == [PROMPT_BYTES, PROMPT_BYTES, 0, 0]
    assert [kept.namespace for kept in (first, second, third, fourth)] == [None, "salt", None, None]
    assert all(len(kept.told["request_id"]) <= 256 for kept in (first, second, third))
    assert len(log.all()) == KEPT
    assert (log.count, log.all()[-1].number) == (2 * KEPT + 3,) * 2
    assert [kept.number for kept in log.since(log.count - 2, 100)] == [log.count, log.count - 1]
    assert [kept.number for kept in log.since(0, 3)] == [log.count, log.count - 1, log.count - 2]


async def test_endpoints_are_told_with_their_load() -> None:
    async with picker() as (running, fake):
        shown = (await fetch(running)).json()["endpoints"]
        assert shown["count"] == 2
        (found,) = [one for one in shown["shown"] if one["name"] == fake.name]
        told = {key: found[key] for key in ("state", "selectable", "in_flight", "queued_tokens", "cached_tokens")}
        assert told == {
            "state": "ready",
            "selectable": True,
            "in_flight": None,
            "queued_tokens": 0,
            "cached_tokens": 0,
        }


async def test_only_the_pages_own_script_and_clients_on_this_machine_are_answered() -> None:
    async with picker() as (running, _):
        token = {"x-treeline-console": await token_of(running)}
        own = {"Sec-Fetch-Site": "same-origin", **token}
        assert (await fetch(running, headers=own)).status_code == 200
        assert (await fetch(running)).status_code == 200, "curl"
        for headers in (
            {"Sec-Fetch-Site": "same-origin"},
            {"Sec-Fetch-Site": "same-origin", "x-treeline-console": "guessed"},
            {"Sec-Fetch-Site": "same-origin", "x-treeline-console": "é"},
            {"Sec-Fetch-Site": "cross-site", **token},
            {"Sec-Fetch-Site": "same-site", **token},
            {**own, "Origin": "http://evil.example"},
            {**own, "Host": "evil.example"},
        ):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            async with client(timeout=60) as http:
                url = f"http://127.0.0.1:{running.options.admin_port}/debug/console.json"
                assert (await http.get(url, headers=raw)).status_code == 403, headers
        async with client(timeout=60) as http:  # whose script could read the token
            url = f"http://127.0.0.1:{running.options.admin_port}/debug/console"
            assert (await http.get(url, headers=own | {"x-treeline-console": ""})).status_code == 403


async def test_the_page_may_load_nothing_and_be_in_no_frame() -> None:
    async with picker() as (running, _):
        answer = await running.get("/debug/console")
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
        assert policy["connect-src"] == "'self'"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    html = (resources.files("treeline_epp.console") / "page.html").read_text()
    assert not re.search(r"https?:|<link|<iframe|\ssrc=|\shref=|\son\w+=|\sstyle=|innerHTML|insertAdjacent", html)


# In a browser


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_decisions_come_live_and_what_others_say_is_only_text(tmp_path: Path) -> None:
    async with picker("--show-prompts", models=("tiny", HOSTILE)) as (running, _), browser_tab(tmp_path) as tab:
        await tab.go(f"http://127.0.0.1:{running.options.admin_port}/debug/console")
        await tab.until("document.querySelectorAll('#endpoints tr').length === 2")
        for turn in range(2):
            await asked(
                running, HOSTILE, prompt=f"{BEGINNING}{HOSTILE} {SECRET}", request_id=f"{HOSTILE}{turn}", answered=True
            )
        await tab.until("document.querySelectorAll('#decisions > tr').length === 2")
        row = await tab.text("#decisions > tr")
        assert f"{HOSTILE}1" in row, "the newest comes first"
        assert SECRET not in await tab.text("body")
        await tab.run("document.querySelector('#texts').click()")
        await tab.until("document.querySelector('#decisions > tr code') !== null")
        assert SECRET in await tab.text("#decisions > tr code")
        await tab.until("document.querySelector('#prefixes li code') !== null")
        assert "2 requests" in await tab.text("#prefixes li")
        assert "held by e" in await tab.text("#prefixes li")
        await tab.run("document.querySelector('#texts').click()")
        await tab.until("document.querySelector('#decisions > tr') && !document.querySelector('#decisions > tr code')")
        await tab.run("document.querySelector('#decisions summary').click()")
        assert "cost_s" in await tab.text("#decisions details table")
        assert await tab.run("document.querySelectorAll('body img, body > :not(:last-child) script').length") == 0
        assert await tab.run("window.hacked") is None
        assert tab.troubles == []
        await running.stop()
        await tab.until("document.querySelector('#trouble').innerText === 'The picker does not answer.'")


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_prompts_cannot_be_asked_for_without_the_flag_and_other_pages_learn_nothing(
    tmp_path: Path,
) -> None:
    async with picker() as (running, _), browser_tab(tmp_path) as tab:
        console = f"http://127.0.0.1:{running.options.admin_port}/debug/console"
        (port,) = free_ports(1)
        elsewhere = f"http://127.0.0.1:{port}/"
        stranger = PageServer({"/": lambda _query: Page(b"<p>hello</p>", content_type="text/html")})
        await stranger.start("127.0.0.1", port)
        try:
            await tab.go(console)
            await tab.until("document.querySelectorAll('#endpoints tr').length === 2")
            assert await tab.run("document.querySelector('#texts').disabled")
            assert "--show-prompts" in await tab.text("#texts-why")
            assert tab.troubles == []
            # A script that got into the page could tell nobody what it sees, and load nothing.
            assert await tab.run(f"fetch({elsewhere!r}, {{mode: 'no-cors'}}).then(() => 'sent', () => 'refused')") == (
                "refused"
            )
            smuggled = "const made = document.createElement('script'); made.textContent = 'window.hacked = 1';"
            assert await tab.run(f"{smuggled} document.body.append(made); window.hacked") is None
            assert len(tab.troubles) >= 2, "the policy was named"
            await tab.go(elsewhere)
            for asks in (
                f"fetch({console!r}).then(answer => answer.text(), () => 'refused')",
                f"fetch({console + '.json'!r}).then(answer => answer.text(), () => 'refused')",
            ):
                assert await tab.run(asks) == "refused"
            framed = await tab.run(
                "new Promise(done => { const frame = document.createElement('iframe');"
                f"frame.onload = () => done(frame.contentDocument === null); frame.src = {console!r};"
                "document.body.append(frame); })"
            )
            assert framed, "what is in the frame is an error of the browser's own"
        finally:
            await stranger.stop()
