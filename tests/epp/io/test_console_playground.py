"""The console's playground in a real browser, with a scripted gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.browser import Tab, browser_tab
from support.ports import free_ports
from treeline_epp.console.pages import files

pytestmark = [pytest.mark.integration, pytest.mark.deep]

HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}


@dataclass
class Gateway:
    """A scripted gateway. `asked` are its requests; each of `answers` is a list of `choices[0].delta` and of the last
    event's members. `hold` delays an answer after its first event until `cut` is set; `left` is set when the client
    goes away."""

    models: tuple[str, ...] = ("tiny",)
    key: str = ""
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    hold: bool = False
    finish: str | None = "stop"
    done: bool = True
    cut_line: bool = False
    private: bool = True
    data_asked: int = 0
    status: int = 200
    url: str = ""

    def _admits(self, request: web.Request) -> bool:
        return not self.key or request.headers.get("authorization") == f"Bearer {self.key}"

    async def list_models(self, request: web.Request) -> web.Response:
        if not self._admits(request):
            return web.json_response({"error": {"message": "Missing or unknown API key."}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": f"refused {HOSTILE}"}}, status=self.status)
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "x-treeline-endpoint": "10.0.0.1:8000" + HOSTILE}
        )
        await response.prepare(request)
        for delta in self.answers.pop(0):
            await self._say(response, {"choices": [{"delta": delta}]})
            try:
                if self.hold:
                    await self.cut.wait()
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            except asyncio.CancelledError:
                self.left.set()
                raise
        if self.cut_line:
            await response.write(b'data: {"choices": [{"delta": {"content": "o')
            return response
        if self.finish is not None:
            await self._say(response, {"choices": [{"delta": {}, "finish_reason": self.finish}]})
        await self._say(response, {"choices": [], "usage": USAGE})
        if self.done:
            await response.write(b"data: [DONE]\r\n\r\n")
        return response

    async def data(self, _request: web.Request) -> web.Response:
        self.data_asked += 1
        if self.private:
            return web.json_response({"error": "only for clients on this machine: a proxy passed it on"}, status=403)
        shown: dict[str, Any] = {"run": "r", "now": 1000.0, "texts_allowed": False, "series": [], "prefixes": []}
        shown |= {"decisions": {"count": 0, "shown": []}, "endpoints": {"count": 0, "shown": []}}
        return web.json_response(shown)

    async def _say(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        # In two pieces, cut within a character where there is a long one.
        data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            await response.write(piece)

    async def console(self, request: web.Request) -> web.Response:
        page = files()[request.path]({})
        assert not asyncio.iscoroutine(page)
        return web.Response(body=page.body, headers={**page.headers, "Content-Type": page.content_type})  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def playground(folder: Path, gateway: Gateway) -> AsyncIterator[Tab]:
    app = web.Application(handler_args={"handler_cancellation": True})
    app.router.add_get("/v1/models", gateway.list_models)
    app.router.add_post("/v1/chat/completions", gateway.chat)
    app.router.add_get("/console/data", gateway.data)
    app.router.add_get("/console/{file:.*}", gateway.console)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gateway.url = f"http://127.0.0.1:{port}"
    try:
        async with browser_tab(folder) as tab:
            await tab.go(f"{gateway.url}/console/")
            yield tab
    finally:
        await runner.cleanup()


async def listed(tab: Tab) -> None:
    await tab.until("document.querySelector('#model').value !== ''")


async def fill(tab: Tab, name: str, text: str) -> None:
    await tab.run(f"document.querySelector('#{name}').value = {text!r}")


async def send(tab: Tab, text: str, answers: int) -> None:
    """Type a question, press Enter, and wait until there are `count` answers."""
    await tab.run("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.until(f"document.querySelectorAll('#turns .figures a').length === {answers}")


async def test_foreign_answers_models_tools_and_errors_are_shown_as_text(tmp_path: Path) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": HOSTILE, "arguments": json.dumps({"at": HOSTILE})}}
    said = [{"reasoning_content": f"Hm {HOSTILE}"}, {"content": f"Grüße 👋 {HOSTILE}"}, {"tool_calls": [call]}]
    gateway = Gateway(models=(HOSTILE,), answers=[said])
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        await send(tab, f"Hello {HOSTILE}", 1)
        for text in (f"Hello {HOSTILE}", f"Hm {HOSTILE}", f"Grüße 👋 {HOSTILE}", f"10.0.0.1:8000{HOSTILE}"):
            assert text in await tab.run("document.querySelector('#turns').textContent")
        assert HOSTILE in await tab.run("document.querySelector('.call b').textContent")
        gateway.status = 400
        await tab.run("document.querySelector('#retry').click()")
        await tab.until("document.querySelector('#turns .trouble') !== null")
        assert await tab.run("document.querySelector('#turns .trouble').textContent") == f"refused {HOSTILE}"
        await tab.run("document.querySelector('#as-python').click()")
        assert await tab.run("document.querySelectorAll('main img, main script, dialog img').length") == 0
        assert await tab.run("window.hacked") is None


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


async def choose(tab: Tab, name: str, kind: str = "image/png") -> None:
    """Choose a picture of one pixel, as a user would with the button."""
    await tab.run(f"""(() => {{
        const bytes = Uint8Array.from(atob("{PIXEL}"), one => one.charCodeAt(0)), given = new DataTransfer();
        given.items.add(new File([bytes], {name!r}, {{type: {kind!r}}}));
        document.querySelector('#pictures').files = given.files;
        document.querySelector('#pictures').dispatchEvent(new Event('change'));
    }})()""")


async def test_pictures_are_shown_sent_before_the_text_and_can_be_left_out(tmp_path: Path) -> None:
    gateway = Gateway(answers=[[{"content": "A dot."}], [{"content": "Still a dot."}]])
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        await choose(tab, HOSTILE)
        await choose(tab, "two.png")
        await choose(tab, "paper.pdf", "application/pdf")
        assert await tab.run("document.querySelectorAll('#attached img').length") == 2
        await tab.until("document.querySelector('#attached img').naturalWidth === 1")
        await tab.run("document.querySelectorAll('#attached button')[1].click()")
        await send(tab, "What is it?", 1)
        assert await tab.run("document.querySelectorAll('#attached img').length") == 0
        assert await tab.run("document.querySelector('#turns .pictures img').alt") == HOSTILE
        await send(tab, "Sure?", 2)
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        first = {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}
        assert gateway.asked[0]["messages"] == [first]
        answered = {"role": "assistant", "content": "A dot."}
        assert gateway.asked[1]["messages"] == [first, answered, {"role": "user", "content": "Sure?"}]


async def test_settings_are_sent_and_errors_in_them_are_named_before(tmp_path: Path) -> None:
    gateway = Gateway(answers=[[{"content": '{"city": "Rome"}'}]])
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        for name, wrong, named in (
            ("schema", "{", "The JSON schema is not JSON"),
            ("schema", "[]", "must be an object"),
            ("tools", '{"type": "function"}', "must be a list"),
            ("temperature", "3", "temperature:"),
        ):
            await fill(tab, name, wrong)
            await fill(tab, "message", "Which city?")
            await tab.run("document.querySelector('#send').click()")
            await tab.until("document.querySelector('#ask-trouble').textContent !== ''")
            assert named in await tab.text("#ask-trouble")
            assert await tab.run("document.querySelector('#message').value") == "Which city?", "it is not lost"
            await fill(tab, name, "")
        assert gateway.asked == []
        await fill(tab, "message", "")
        for name, text in (
            *(("system", "Be brief."), ("temperature", "0"), ("top_p", "0.9"), ("max_tokens", "20"), ("seed", "7")),
            *(("stops", "END\\nSTOP"), ("schema", json.dumps(SCHEMA)), ("tools", json.dumps(TOOLS))),
        ):
            await tab.run(f"document.querySelector('#{name}').value = {text!r}.replace('\\\\n', '\\n')")
        await send(tab, "Which city?", 1)
        assert gateway.asked == [
            {
                "model": "tiny",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which city?"}],
                "temperature": 0,
                "top_p": 0.9,
                "max_tokens": 20,
                "seed": 7,
                "stop": ["END", "STOP"],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                },
                "tools": TOOLS,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]
        figures = await tab.text("#turns .figures")
        assert "cached 64 (64 %)" in figures.replace("\n", " ")
        assert "by 10.0.0.1:8000" in figures


async def test_calls_of_tools_are_answered_and_the_chat_goes_on(tmp_path: Path) -> None:
    pieces = [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "Rome"}'}}]},
    ]
    gateway = Gateway(answers=[pieces, [{"content": "It rains."}]])
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        await fill(tab, "tools", json.dumps(TOOLS))
        await send(tab, "And the weather?", 1)
        assert "weather" in await tab.text(".call")
        assert '{"city": "Rome"}' in await tab.text(".call code")
        await tab.run("document.querySelector('.call textarea').focus()")
        await tab.type("rain")
        await tab.run("document.querySelector('.call + button').click()")
        await tab.until("document.querySelectorAll('#turns .figures a').length === 2")
        assert "It rains." in await tab.text("#turns")
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        assert gateway.asked[1]["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]


async def test_an_answer_is_stopped_and_asked_for_again_by_keys_alone(tmp_path: Path) -> None:
    gateway = Gateway(hold=True)
    gateway.answers = [[{"content": "Once upon"}, {"content": " a time"}], [{"content": "The end."}]]
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        await tab.press("/", "/")
        assert await tab.run("document.activeElement.id") == "message"
        await tab.type("Tell me a story")
        await tab.press("Enter")
        await tab.until("document.querySelector('#turns').textContent.includes('Once upon')")
        assert await tab.run("document.querySelector('#turns').getAttribute('aria-busy')") == "true"
        await tab.press("Escape")
        await tab.until("document.querySelectorAll('#turns .figures a').length === 1")
        await asyncio.wait_for(gateway.left.wait(), 60)
        assert "you stopped it" in await tab.text("#turns")
        gateway.hold = False
        seen = []
        for _ in range(40):
            await tab.press("Tab")
            seen.append(await tab.run("document.activeElement.id || document.activeElement.textContent"))
            if seen[-1] == "retry":
                break
        assert seen[:1] == ["send"]
        assert await tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
        await tab.press("Enter")
        await tab.until("document.querySelector('#turns').textContent.includes('The end.')")
        assert "Once upon" not in await tab.text("#turns")
        assert [one["messages"] for one in gateway.asked] == [[{"role": "user", "content": "Tell me a story"}]] * 2
        await tab.until("!document.querySelector('#clear').disabled")
        await tab.run("document.activeElement.blur()")
        for key, view in (("2", "load"), ("3", "prefixes"), ("4", "decisions"), ("1", "playground")):
            await tab.press(key, key)
            await tab.until(f"document.querySelector('[aria-current]').hash === '#{view}'")
            assert await tab.run("document.querySelector('#private').hidden") == (view == "playground")


async def test_a_key_is_asked_for_and_leaves_no_trace(tmp_path: Path) -> None:
    gateway = Gateway(key="sk-1", answers=[[{"content": "Hello."}]])
    async with playground(tmp_path, gateway) as tab:
        await tab.until("!document.querySelector('#key-label').hidden")
        assert "asks for an API key" in await tab.text("#no-model")
        for key in ("sk-wrong", "sk-1"):
            await tab.run("document.querySelector('#key').value = ''; document.querySelector('#key').focus()")
            await tab.type(key)
            await tab.press("Tab")
            if key == "sk-wrong":
                await tab.until("document.querySelector('#no-model').textContent.includes('does not know')")
        await listed(tab)
        await send(tab, "Hello", 1)
        await tab.run("document.querySelector('#as-curl').click()")
        assert "$TREELINE_API_KEY" in await tab.run("document.querySelector('#snippet-text').value")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "sk-1" not in await tab.run(kept)
        assert "sk-1" not in await tab.run("document.documentElement.outerHTML")
        assert "sk-1" not in await tab.run("document.querySelector('#snippet-text').value")


async def test_snippets_are_a_command_and_a_program_that_ask_the_same(tmp_path: Path) -> None:
    said = 'It\'s $HOME "quoted" \\ and ünï \n twice'
    async with playground(tmp_path, gateway := Gateway()) as tab:
        await listed(tab)
        await tab.run(f"document.querySelector('#message').value = {json.dumps(said)}")
        await fill(tab, "schema", json.dumps(SCHEMA | {"additionalProperties": False}))
        await tab.run("document.querySelector('#as-curl').click()")
        words = shlex.split((await tab.run("document.querySelector('#snippet-text').value")).replace("\\\n", " "))
        assert words[:2] == ["curl", f"{gateway.url}/v1/chat/completions"]
        body = json.loads(words[words.index("-d") + 1])
        assert body["messages"] == [{"role": "user", "content": said.strip()}]
        await tab.run("document.querySelector('#close').click(); document.querySelector('#as-python').click()")
        program = await tab.run("document.querySelector('#snippet-text').value")
        called: dict[str, Any] = {}

        class OpenAI:
            def __init__(self, **_: Any) -> None:
                self.chat = self.completions = self

            def create(self, **asked: Any) -> list[Any]:
                called.update(asked)
                return []

        exec(program.replace("from openai import OpenAI", ""), {"OpenAI": OpenAI})
        assert called == {name: value for name, value in body.items() if name != "stream_options"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_on_a_narrow_screen_nothing_is_cut_off_and_colours_follow_the_system(tmp_path: Path, scheme: str) -> None:
    gateway = Gateway(answers=[[{"content": "word " * 200 + "x" * 500}]])
    async with playground(tmp_path, gateway) as tab:
        await tab.look(400, 800, scheme)
        await listed(tab)
        await send(tab, "Hello", 1)
        assert await tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        back, front = await tab.run(
            "['backgroundColor', 'color'].map(name => Number(getComputedStyle(document.body)[name].match(/\\d+/)[0]))"
        )
        assert (back < 100 < front) == (scheme == "dark")


async def test_an_unreachable_gateway_is_named_and_the_question_can_be_repeated(tmp_path: Path) -> None:
    gateway = Gateway(answers=[[{"content": "Half"}]], hold=True)
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        await fill(tab, "message", "Hello")
        await tab.run("document.querySelector('#send').click()")
        await tab.until("document.querySelector('#turns').textContent.includes('Half')")
        gateway.cut.set()
        await tab.until("document.querySelector('#turns .trouble') !== null")
        assert "broke off" in await tab.text("#turns .trouble")
        assert "Half" in await tab.text("#turns"), "what had come stays"
        gateway.hold, gateway.answers = False, [[{"content": "Whole"}]]
        await tab.run("document.querySelector('#retry').click()")
        await tab.until("document.querySelectorAll('#turns .figures a').length === 1")
        assert "Whole" in await tab.text("#turns")
        assert "Half" not in await tab.text("#turns")


@pytest.mark.parametrize(("finish", "done"), [("stop", False), (None, True), (None, False)])
async def test_a_stream_that_ends_without_saying_so_is_shown_as_broken(
    tmp_path: Path, finish: str | None, done: bool
) -> None:
    gateway = Gateway(answers=[[{"content": "Half"}], [{"content": "Whole"}]], finish=finish, done=done)
    async with playground(tmp_path, gateway) as tab:
        await listed(tab)
        if finish or done:
            await send(tab, "Hello", 1)
            assert await tab.run("document.querySelector('#turns .trouble')") is None
            return
        await fill(tab, "message", "Hello")
        await tab.run("document.querySelector('#send').click()")
        await tab.until("document.querySelector('#turns .trouble') !== null")
        assert "broke off" in await tab.text("#turns .trouble")
        await tab.until("document.querySelector('#turns').textContent.includes('Half')")
        gateway.done = True
        await tab.run("document.querySelector('#retry').click()")
        await tab.until("document.querySelectorAll('#turns .figures a').length === 1")
        assert [one["messages"] for one in gateway.asked] == [[{"role": "user", "content": "Hello"}]] * 2


async def test_a_stream_that_ends_within_a_line_is_shown_as_broken(tmp_path: Path) -> None:
    async with playground(tmp_path, Gateway(answers=[[{"content": "Half"}]], cut_line=True)) as tab:
        await listed(tab)
        await fill(tab, "message", "Hello")
        await tab.run("document.querySelector('#send').click()")
        await tab.until("document.querySelector('#turns .trouble') !== null")
        assert "broke off" in await tab.text("#turns .trouble")


@pytest.mark.parametrize("index", [-1, 128, 1_000_000_000, 0.5, "__proto__"])
async def test_a_number_of_a_call_that_no_engine_should_send_ends_the_answer_with_its_reason(
    tmp_path: Path, index: object
) -> None:
    call = {"index": index, "id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    async with playground(tmp_path, Gateway(answers=[[{"tool_calls": [call]}]])) as tab:
        await listed(tab)
        await fill(tab, "message", "Hello")
        await tab.run("document.querySelector('#send').click()")
        await tab.until("document.querySelector('#turns .trouble') !== null")
        assert f"numbers a call of a tool {index}, which is not 0 to 127" in await tab.text("#turns .trouble")


async def test_a_page_that_is_refused_asks_no_more_says_why_and_tries_again_when_told(tmp_path: Path) -> None:
    gateway = Gateway()
    async with playground(tmp_path, gateway) as tab:
        await tab.run("location.hash = 'load'")
        await tab.until("document.querySelector('#private-why').textContent !== ''")
        assert "a proxy passed it on" in await tab.text("#private")
        asked = gateway.data_asked
        # A page that is looked at again asks at once, and the question after it is answered later.
        for _ in range(3):
            await tab.run("document.dispatchEvent(new Event('visibilitychange')); fetch('/v1/models').then(() => 0)")
        assert gateway.data_asked == asked == 1
        await tab.run("document.querySelector('#try-again').click()")
        await tab.until(
            "performance.getEntriesByType('resource').filter(one => one.name.includes('data?')).length === 2"
        )
        assert gateway.data_asked == 2
        gateway.private = False
        await tab.run("document.querySelector('#try-again').click()")
        await tab.until("document.querySelector('#private').hidden && !document.querySelector('#load').hidden")
        await tab.until("performance.getEntriesByType('resource').filter(one => one.name.includes('data?')).length > 4")


async def test_charts_add_up_the_pickers_counts_by_replica_and_in_total(tmp_path: Path) -> None:
    cells = [
        [999, "a", 2, 1, 10, 5, [0.1]],
        [998, "a", 1, 0, 4, 0, []],
        [940, "b", 4, 0, 10, 5, []],
        [700, "a", 9, 9, 9, 9, []],
        [999, "", 3, 3, 0, 0, []],
    ]
    async with playground(tmp_path, Gateway()) as tab:

        async def bins(range_s: int, each: str) -> dict[str, Any]:
            state = (
                f"{{now: 1000.4, endpoints: {{shown: [{{name: 'a'}}, {{name: 'b'}}]}}, cells: {json.dumps(cells)},"
                "speeds: new Map([[999, {a: 5, b: 7}]])}"
            )
            found = await tab.run(f"import('/console/charts.js').then(made => made.bins({state}, {range_s}, {each}))")
            return dict(found)

        parts = await bins(60, "true")
        assert {name: len(points) for name, points in parts.items()} == {"a": 60, "b": 60}
        assert [points[-1]["requests"] for points in parts.values()] == [2, 0]
        assert [points[-1]["speed"] for points in parts.values()] == [5, 7]
        assert parts["a"][-1] | {"ttfts": []} == {
            "width_s": 1,
            "requests": 2,
            "errors": 1,
            "prompt": 10,
            "cached": 5,
            "ttfts": [],
            "speed": 5,
            "speeds": 1,
        }
        assert parts["b"][0]["requests"] == 4, "the oldest second that is drawn"
        whole = (await bins(300, "false"))["all replicas"]
        assert (whole[-1]["requests"], whole[-1]["errors"], whole[-1]["speed"]) == (6, 4, 12)
        assert whole[0]["requests"] == 9
