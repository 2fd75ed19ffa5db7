"""The console: its data, its access rules, and what it does not show."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.browser import browser_tab
from support.epp_io import FakeEngine, RunningPicker, engines, running_picker
from support.epp_kube import asked
from support.http import client
from support.ports import free_ports
from treeline_epp.admin import Page, PageServer
from treeline_epp.console.series import KEPT_S, MOST_CELLS, MOST_ENDPOINTS, MOST_TTFTS, Series
from treeline_epp.console.turns import MOST_WAITING, PAUSE, Turns
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.picking.picker import Picker
from treeline_epp.picking.request import Request
from treeline_epp.requests.decision_log import KEPT, PROMPT_BYTES, DecisionLog
from treeline_epp.requests.exchange import Exchange
from treeline_epp.requests.usage import Usage
from treeline_wire import headers as names

SECRET = "The launch code is 0000"
BEGINNING = "You are the assistant of a bank. " * 8
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@contextlib.asynccontextmanager
async def picker(*flags: str, models: tuple[str, ...] = ("tiny",)) -> AsyncIterator[tuple[RunningPicker, FakeEngine]]:
    async with engines(2, models=models) as fakes:
        words = [word for fake in fakes for word in ("--endpoint", f"{fake.name}={fake.address}")]
        async with running_picker(*words, *flags) as running:
            yield running, fakes[0]


async def fetch(running: RunningPicker, query: str = "", headers: Mapping[str, str] | None = None) -> httpx.Response:
    async with client(timeout=60) as http:
        url = f"http://127.0.0.1:{running.options.admin_port}/console/data?{query}"
        return await http.get(url, headers=headers)


async def test_decisions_are_shown_with_reasons_and_prompts_only_if_the_flag_allows() -> None:
    async with picker() as (running, _):
        assert (await fetch(running)).json()["decisions"] == {"count": 0, "shown": []}
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
        for wrong in ("after=-1", "after=x", "after=" + "9" * 20, "after=²", "since=x"):
            assert (await fetch(running, wrong)).status_code == 400


async def test_prompts_are_shown_if_the_flag_allows_and_the_client_asks() -> None:
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


def test_texts_of_clients_are_kept_up_to_a_length() -> None:
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


async def test_endpoints_are_shown_with_their_load() -> None:
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


async def test_data_is_for_the_pages_own_script_and_clients_on_this_machine() -> None:
    async with picker() as (running, _):
        own = {"Sec-Fetch-Site": "same-origin"}
        here = f"127.0.0.1:{running.options.admin_port}"
        assert (await fetch(running, headers=own)).status_code == 200
        assert (await fetch(running, headers={**own, "Origin": f"http://{here}"})).status_code == 200
        assert (await fetch(running)).status_code == 200, "curl"
        async with client(timeout=60) as http:
            assert (await http.get(f"http://{here}/debug/tree", headers=own)).status_code == 403
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {**own, "Origin": "http://evil.example"},
            {**own, "Host": "evil.example"},
            {**own, "Host": "evil.example", "Origin": "http://evil.example"},
            {names.EDGE: "true"},
            {**own, names.EDGE.upper(): "true"},
        ):
            assert (await fetch(running, headers=headers)).status_code == 403, headers


async def test_a_gateway_exposes_only_the_consoles_files() -> None:
    async with picker() as (running, _), client(timeout=60) as http:
        through = {names.EDGE: "true", "Host": "models.example", "Sec-Fetch-Site": "same-origin"}
        at = f"http://127.0.0.1:{running.options.admin_port}"
        for path in ("/console/", "/console/main.js", "/console/console.css"):
            assert (await http.get(at + path, headers=through)).status_code == 200
            for headers in ({"Host": "models.example"}, {"Origin": "https://models.example"}):
                assert (await http.get(at + path, headers=headers)).status_code == 200, "by a proxy, or a link"
        for path in ("/console/data", "/debug/tree", "/debug/decisions", "/endpoints"):
            assert (await http.get(at + path, headers=through)).status_code == 403


async def test_private_pages_are_not_shown_to_what_a_proxy_says_that_it_passed_on() -> None:
    async with picker() as (running, _), client(timeout=60) as http:
        at = f"http://127.0.0.1:{running.options.admin_port}"
        passed_on = {"X-Forwarded-For": "203.0.113.9, 127.0.0.1"}, {"x-real-ip": "203.0.113.9"}, {"VIA": "1.1 proxy"}
        for headers in passed_on:
            for path in ("/console/data", "/debug/tree"):
                refused = await http.get(at + path, headers=headers)
                assert refused.status_code == 403, (path, headers)
                assert "a proxy passed it on" in refused.json()["error"]
            assert (await http.get(f"{at}/console/", headers=headers)).status_code == 200
            assert (await http.get(f"{at}/endpoints", headers=headers)).status_code == 200, "it is not private"
        envoys = {"X-Forwarded-For": "10.0.0.7", "X-Forwarded-Proto": "http"}
        assert (await http.get(f"{at}/console/data", headers=envoys)).status_code == 200, "our own Envoy sets them"


async def test_the_addresses_above_the_page_lead_to_it() -> None:
    async with picker() as (running, _):
        for path in ("/", "/console"):
            led = await running.get(path)
            assert (led.status_code, led.headers["location"]) == (302, "/console/")


class Work:
    """Takes `seconds` of a clock that nothing else moves but the pauses between."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.done: list[int] = []

    def make(self, number: int) -> int:
        self.now += self.seconds
        self.done.append(number)
        return number


async def test_answers_take_a_tenth_of_the_pickers_time_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(0.04)
    turns = Turns(clock=lambda: work.now)
    real_sleep = asyncio.sleep

    async def sleep(delay: float) -> None:
        work.now += delay
        await real_sleep(0)

    monkeypatch.setattr("treeline_epp.console.turns.asyncio.sleep", sleep)
    asked = [turns.take(functools.partial(work.make, number)) for number in range(MOST_WAITING + 3)]
    answers = await asyncio.gather(*asked)
    assert answers == [*range(MOST_WAITING), None, None, None], "others are told at once to ask again"
    assert work.done == [*range(MOST_WAITING)]
    held = MOST_WAITING * work.seconds
    assert work.now == pytest.approx(held + (MOST_WAITING - 1) * PAUSE * work.seconds)
    with pytest.raises(ZeroDivisionError):
        await turns.take(lambda: 1 // 0)
    assert await turns.take(lambda: 7) == 7, "one that fails keeps nobody from their turn"


async def test_many_who_ask_at_once_are_answered_or_asked_to_come_again_and_probes_are_answered() -> None:
    async with picker() as (running, _):
        for turn in range(20):
            await asked(running, "tiny", prompt=f"{BEGINNING}{turn}", answered=True)
        answers = await asyncio.gather(
            *(fetch(running, "prefixes=1") for _ in range(4 * MOST_WAITING)), running.get("/ready")
        )
        statuses = Counter(answer.status_code for answer in answers[:-1])
        assert {*statuses} == {200, 503}
        assert statuses[200] >= MOST_WAITING
        assert answers[-1].status_code == 200
        (refused, *_) = [answer for answer in answers if answer.status_code == 503]
        assert "ask again" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"


async def test_without_the_debug_pages_only_the_console_is_served() -> None:
    async with engines(1) as fakes:
        endpoint = f"{fakes[0].name}={fakes[0].address}"
        async with running_picker("--endpoint", endpoint, "--console", debug=False) as running:
            assert (await fetch(running)).status_code == 200
            assert (await running.get("/console/")).status_code == 200
            assert (await running.get("/debug/decisions")).status_code == 404
        async with running_picker("--endpoint", endpoint, debug=False) as running:
            assert (await running.get("/console/")).status_code == 404
            assert (await fetch(running)).status_code == 404


async def test_the_page_may_load_nothing_from_elsewhere_and_be_in_no_frame() -> None:
    async with picker() as (running, _):
        for path, kind in (("", "text/html"), ("main.js", "text/javascript"), ("console.css", "text/css")):
            answer = await running.get(f"/console/{path}")
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert {policy[f"{what}-src"] for what in ("script", "style", "connect")} == {"'self'"}
            assert policy["img-src"] == "'self' blob:", "pictures that the user chose, and no URL"
            assert policy["require-trusted-types-for"] == "'script'"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    loads = r"""(?:src|href|from|url)\s*[=(]?\s*["']?(?:https?:)?//"""
    elsewhere = re.compile(loads + r"|\son\w+=|\sstyle=|innerHTML|insertAdjacent")
    for file in (resources.files("treeline_epp.console")).iterdir():
        if file.name.endswith((".html", ".js", ".css")):
            assert not elsewhere.search(file.read_text()), file.name


async def test_results_of_requests_are_kept_by_second_and_endpoint() -> None:
    now = 1000.5
    series = Series(wall=lambda: now)
    for _ in range(MOST_TTFTS + 4):
        series.ended(exchange("e0", ttft_s=0.25, prompt=100, cached=60))
    series.ended(exchange("e1", status=503))
    series.ended(exchange(None, status=429))
    assert series.since(0) == [], "the second is not over"
    now = 1001.5
    first, second, third = series.since(0)
    assert first == [1000, "e0", 20, 0, 2000, 1200, [0.25] * MOST_TTFTS]
    assert second == [1000, "e1", 1, 1, 0, 0, []]
    assert third == [1000, "", 1, 1, 0, 0, []]
    assert series.since(1000) == []
    for number in range(2 * MOST_ENDPOINTS):
        series.ended(exchange(f"e{number}"))
    now = 1000.0 + KEPT_S
    names_of_it = [cell[1] for cell in series.since(0)]
    assert len(names_of_it) == MOST_ENDPOINTS + 1
    assert "" in names_of_it
    now += 2
    assert series.since(0) == [], "they are too old"


async def test_one_answer_has_a_bounded_number_of_cells_and_the_next_goes_on_from_it() -> None:
    now = 1000.5
    series = Series(wall=lambda: now)
    for _ in range(100):
        for number in range(MOST_ENDPOINTS):
            series.ended(exchange(f"e{number}"))
        now += 1
    got: list[Any] = []
    while cells := series.since(got[-1][0] if got else 0):
        assert len(cells) < MOST_CELLS + MOST_ENDPOINTS
        got += cells
    assert [(cell[0], cell[1]) for cell in got] == [
        (1000 + second, f"e{number}") for second in range(100) for number in range(MOST_ENDPOINTS)
    ]


def exchange(
    endpoint: str | None,
    *,
    ttft_s: float = 0.0,
    status: int = 200,
    prompt: int | None = None,
    cached: int | None = None,
) -> Exchange:
    """Return an exchange that has ended."""
    made = Exchange("r", "/v1/completions", None, "", 0, False, False, started_at=1.0)
    if endpoint is not None:
        picker = Picker()
        picker.add_endpoint(EndpointSpec(endpoint, "127.0.0.1:1"))
        made.decision = picker.pick(Request("r"), 0.0)
    kind = {"content-type": "text/event-stream"} if ttft_s else {}
    made.answered({":status": str(status), **kind}, None, Usage(prompt, cached), 1.0 + ttft_s)
    return made


# In a browser


def console_of(running: RunningPicker, view: str) -> str:
    return f"http://127.0.0.1:{running.options.admin_port}/console/#{view}"


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_decisions_appear_live_and_foreign_text_is_escaped(tmp_path: Path) -> None:
    async with picker("--show-prompts", models=("tiny", HOSTILE)) as (running, _), browser_tab(tmp_path) as tab:
        await tab.go(console_of(running, "load"))
        await tab.until("document.querySelectorAll('#endpoints tr').length === 2")
        for turn in range(2):
            await asked(
                running, HOSTILE, prompt=f"{BEGINNING}{HOSTILE} {SECRET}", request_id=f"{HOSTILE}{turn}", answered=True
            )
        await tab.run("location.hash = 'decisions'")
        await tab.until("document.querySelectorAll('#rows > tr').length === 2")
        row = await tab.text("#rows > tr")
        assert f"{HOSTILE}1" in row, "the newest comes first"
        assert SECRET not in await tab.text("body")
        await tab.run("document.querySelector('#texts').click()")
        await tab.until("document.querySelector('#rows > tr code') !== null")
        assert SECRET in await tab.text("#rows > tr code")
        await tab.run("document.querySelector('#rows summary').click()")
        assert "cost_s" in await tab.text("#rows details table")
        await tab.run("location.hash = 'prefixes'")
        await tab.until("document.querySelector('#tree li code') !== null")
        assert "2 requests" in await tab.text("#tree li")
        assert "held by e" in await tab.text("#tree li")
        await tab.run("document.querySelector('#texts').click()")
        await tab.until("document.querySelector('#tree li') && !document.querySelector('#tree li code')")
        await tab.run("location.hash = 'load'")
        await tab.until("document.querySelectorAll('#charts figure').length === 4")
        assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
        assert await tab.run("window.hacked") is None
        assert tab.troubles == PLAYGROUND_ALONE
        await running.stop()
        await tab.until("document.querySelector('#trouble').innerText === 'The picker does not answer.'")


PLAYGROUND_ALONE = ["Failed to load resource: the server responded with a status of 403 (Forbidden)"]
"""On its own port a picker has no models to chat with."""


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_search_finds_requests_models_and_prompts_and_a_link_its_decision(tmp_path: Path) -> None:
    async with picker("--show-prompts", models=("tiny", "other")) as (running, _), browser_tab(tmp_path) as tab:
        for number in range(3):
            await asked(running, "tiny", prompt=f"{BEGINNING} of fish", request_id=f"r{number}", answered=True)
            await asked(running, "other", prompt=f"{BEGINNING} of birds", request_id=f"s{number}", answered=True)
        await tab.go(console_of(running, "decisions=r1"))
        await tab.until("document.querySelectorAll('#rows > tr').length === 1")
        assert "cost_s" in await tab.text("#rows details[open] table"), "its terms are shown at once"

        async def search(text: str) -> None:
            await tab.run(
                f"document.querySelector('#search').value = {text!r};"
                "document.querySelector('#search').dispatchEvent(new Event('input'))"
            )

        for text, found in (("OTHER", 3), ("s2", 1), ("", 6), ("birds", 0)):
            await search(text)
            assert await tab.run("document.querySelectorAll('#rows > tr').length") == found, text
        await tab.run("location.hash = 'decisions=%'")
        await tab.until("document.querySelector('#decisions-count').innerText.includes('none of request %')")
        await tab.run("location.hash = 'decisions'")
        await search("birds")
        await tab.run("document.querySelector('#texts').click()")
        await tab.until("document.querySelectorAll('#rows > tr').length === 3")
        await tab.run("location.hash = 'prefixes'")
        await tab.until("document.querySelector('#tree code') !== null")
        assert await tab.run("document.querySelectorAll('#tree > details').length") == 1
        assert "fish" not in await tab.text("#tree")
        await search("nothing like it")
        assert "Nothing is found" in await tab.text("#tree")


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_a_restarted_picker_is_followed(tmp_path: Path) -> None:
    async with engines(1) as fakes, browser_tab(tmp_path) as tab:
        (port,) = free_ports(1)
        words = ("--endpoint", f"{fakes[0].name}={fakes[0].address}", "--admin-port", str(port))
        async with running_picker(*words) as running:
            for number in range(3):
                await asked(running, "tiny", request_id=f"before{number}", answered=True)
            await tab.go(console_of(running, "decisions"))
            await tab.until("document.querySelectorAll('#rows > tr').length === 3")
        await tab.until("document.querySelector('#trouble').innerText === 'The picker does not answer.'")
        async with running_picker(*words) as running:
            await asked(running, "tiny", request_id="after", answered=True)
            await tab.until("document.querySelectorAll('#rows > tr').length === 4")
            assert "after" in await tab.text("#rows > tr")
            assert await tab.text("#trouble") == ""


@pytest.mark.integration
@pytest.mark.deep
async def test_in_a_browser_prompts_need_the_flag_and_other_pages_learn_nothing(
    tmp_path: Path,
) -> None:
    async with picker() as (running, _), browser_tab(tmp_path) as tab:
        console = console_of(running, "load")
        data = f"http://127.0.0.1:{running.options.admin_port}/console/data"
        (port,) = free_ports(1)
        elsewhere = f"http://127.0.0.1:{port}/"
        stranger = PageServer({"/": lambda _query: Page(b"<p>hello</p>", content_type="text/html")})
        await stranger.start("127.0.0.1", port)
        try:
            await tab.go(console)
            await tab.until("document.querySelectorAll('#endpoints tr').length === 2")
            assert await tab.run("document.querySelector('#texts').disabled")
            assert "--show-prompts" in await tab.text("#texts-why")
            assert tab.troubles == PLAYGROUND_ALONE
            # An injected script could send nothing to others, and load nothing.
            assert await tab.run(f"fetch({elsewhere!r}, {{mode: 'no-cors'}}).then(() => 'sent', () => 'refused')") == (
                "refused"
            )
            smuggled = (
                "const made = document.createElement('script');"
                "try { made.textContent = 'window.hacked = 1'; } catch { made.append('window.hacked = 1'); }"
            )
            assert await tab.run(f"{smuggled} document.body.append(made); window.hacked") is None
            markup = "try { document.body.innerHTML = '<b>hello</b>'; 'made' } catch { 'refused' }"
            assert await tab.run(markup) == "refused"
            assert len(tab.troubles) >= 3, "the policy was named"
            await tab.go(elsewhere)
            for asks in (
                f"fetch({console!r}).then(answer => answer.text(), () => 'refused')",
                f"fetch({data!r}).then(answer => answer.text(), () => 'refused')",
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
