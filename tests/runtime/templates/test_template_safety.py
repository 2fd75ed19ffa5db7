"""Hostile chat templates reach nothing and delay no other request; honest ones with large requests are rendered."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest
from support.cpu import reference_s
from treeline_runtime.templates.pool import PoolLimits, TemplatePool
from treeline_wire import chat, template_inline
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateBusyError, TemplateError
from treeline_wire.prompt import MAX_KWARGS_DEPTH, PromptError, prompt_of_chat
from treeline_wire.template_inline import MAX_INPUT_CHARS

from .template_bombs import BOMBS, LIMITS, least_seconds, thread_seconds
from .template_escapes import ESCAPES

pytestmark = pytest.mark.integration

TEMPLATES = sorted((Path(__file__).parents[2] / "wire" / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CANARY = "canary-7f3a91"
SECRET = "text of a prompt {0.__class__.__mro__}"
HELLO = [{"role": "user", "content": "hello"}]
#: What Python's own objects print, and what is in the environment.
_LEAK = re.compile(
    rf"{CANARY}|<class|<module|<function [a-z_]|<bound method|<slot wrapper|<frame|<code object|object at 0x"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    with contextlib.closing(TemplatePool()) as pool:
        yield pool


def large() -> dict[str, str]:
    """Return template arguments that make a request too large to be rendered inline."""
    return {"padding": "x" * MAX_INPUT_CHARS}


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


# ---- escapes ---------------------------------------------------------------------------------------------------------


def test_the_corpora_are_large() -> None:
    assert len(ESCAPES) >= 100
    assert len(BOMBS) >= 100


def said_by(source: str, pool: TemplatePool | None, messages: list[dict[str, Any]], arguments: Any) -> str:
    """Return the text that a client sees: the rendered one, or the error's."""
    try:
        return ChatTemplate(source, special_tokens={}, pool=pool).render(messages, **arguments)
    except TemplateError as error:
        return str(error)
    except NeedsWorkerError:
        return ""


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_reaches_nothing(name: str, pool: TemplatePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREELINE_CANARY", CANARY)
    messages = [{"role": "user", "content": SECRET}]
    for where, arguments in ((None, {}), (pool, {"template_kwargs": large()})):
        said = said_by(ESCAPES[name], where, messages, arguments)
        assert not _LEAK.search(said), said
    assert messages == [{"role": "user", "content": SECRET}], "and changes nothing"


def test_an_unguarded_jinja_leaks_to_most_of_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It proves that the corpus attacks, and that the check above would see it."""
    monkeypatch.setenv("TREELINE_CANARY", CANARY)

    def raise_exception(message: Any) -> None:
        raise ValueError(message)

    environment = jinja2.Environment()
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": time.strftime}
    leaks = 0
    for source in ESCAPES.values():
        try:
            said = environment.from_string(source).render(messages=[{"role": "user", "content": SECRET}])
        except Exception as error:
            said = str(error)
        leaks += bool(_LEAK.search(said))
    assert leaks >= 100


# ---- bombs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], dict[str, Any]]:
    """Render each bomb in a process of its own. Return the outcomes, by name and place."""
    script = str(Path(__file__).parent / "template_bombs.py")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600, check=False, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = map(json.loads, run.stdout.splitlines())
    return {(row["name"], row.get("where", "")): row for row in rows}


@pytest.mark.deep
@pytest.mark.timeout(660)  # of which the fixture, which the first of them waits for, takes nearly all
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_in_time_inline_and_in_a_worker(
    name: str, outcomes: dict[tuple[str, str], dict[str, Any]]
) -> None:
    inline, worker = outcomes[name, "inline"], outcomes[name, "worker"]
    assert not inline["result"].startswith("rendered"), inline
    assert inline["references"] < 15, "an event loop waits for it"
    assert worker["result"] != "stopped", "its worker says what became of it"


@pytest.mark.deep
@pytest.mark.timeout(660)
def test_bombs_stay_within_the_memory_limit(outcomes: dict[tuple[str, str], dict[str, Any]]) -> None:
    memory = outcomes["memory", ""]
    assert memory["inline_growth_bytes"] < 64 << 20
    assert memory["worker_peak_bytes"] > 20 << 20, "it was measured"
    assert memory["worker_peak_bytes"] < LIMITS.memory_bytes + (64 << 20)


@pytest.mark.parametrize(
    ("operation", "content"),
    [
        ("{{ c.split('x')|length }}", "x" * 99_999),
        ("{{ c|tojson|length }}", '"\n' * 60_000),
        ("{{ c|upper|length }}", "ΐ" * 120_000),
        ("{{ c.replace('x', 'yy')|length }}", "x" * 120_000),
        ("{{ ('ab' in c) }}{{ c.find(c[:250]) }}{{ c.count('xxy') }}", "x" * 120_000),
        ("{{ c.strip()|length }}{{ c.title()|length }}{{ c|trim|length }}", " x" * 60_000),
        ("{{ messages == messages[:] }}{{ messages|tojson|length }}", "y" * 120_000),
        ("{{ m|tojson|length }}{{ m == n }}", [[[1], {"a": "b"}]] * 900),
        ("{{ (m|string)|length }}{{ m }}", [[[1], {"a": "b"}]] * 900),
    ],
)
def test_no_single_operation_holds_an_event_loop(operation: str, content: Any) -> None:
    template = ChatTemplate(
        "{% set c = messages[0].content %}{% set m = messages[0].x %}{% set n = messages[1].x %}{% for i in range(9) %}"
        + operation
        + "{% endfor %}",
        special_tokens={},
    )
    assert template.not_inline is None
    text = content if isinstance(content, str) else ""
    messages = [
        {"role": "user", "content": text, "x": content},
        {"role": "user", "content": "", "x": content},
    ]
    assert least_seconds(template, messages)[1] < 15 * reference_s()


def test_time_of_other_processes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the clock runs on while the thread waits for a processor."""
    template = ChatTemplate("{% for i in range(100) %}x{% endfor %}", special_tokens={})
    jumping = iter(range(10**9))
    monkeypatch.setattr("treeline_wire.template_inline.time.perf_counter", lambda: float(next(jumping)))
    assert template.render(HELLO) == "x" * 100


# ---- the worker ------------------------------------------------------------------------------------------------------


def test_a_worker_has_no_secrets_and_can_open_nothing(pool: TemplatePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREELINE_CANARY", CANARY)
    with contextlib.closing(TemplatePool()) as own, open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        ChatTemplate("x", special_tokens={}, pool=own).render(HELLO, template_kwargs=large())
        (pid,) = own.pids()
        proc = Path(f"/proc/{pid}")
        assert (proc / "environ").read_bytes() == b""
        assert {path.name for path in (proc / "fd").iterdir()} == {"0", "1", "2"}
        assert os.readlink(proc / "cwd") == "/"
        limits = (proc / "limits").read_text()
        for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
            assert re.search(rf"{name} +0 +0 ", limits), limits
        assert not re.search(r"Max address space +unlimited", limits)
        assert (proc / "oom_score_adj").read_text().strip() == "1000"


def test_a_worker_that_dies_is_replaced(pool: TemplatePool) -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={}, pool=pool)
    assert template.render(HELLO, template_kwargs=large()) == "hello"
    before = pool.pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(HELLO, template_kwargs=large()) == "hello"
    assert not set(before) & set(pool.pids())


@pytest.mark.parametrize("source", [ENDLESS, "{{ ('x' * 10**10)|length }}"])
def test_a_rendering_that_passes_a_limit_ends_its_worker_only(source: str) -> None:
    with contextlib.closing(TemplatePool(PoolLimits(seconds=0.2))) as pool:
        good = ChatTemplate("{{ messages[0].content }}", special_tokens={}, pool=pool)
        bad = ChatTemplate(source, special_tokens={}, pool=pool)
        for _ in range(2):
            assert good.render(HELLO, template_kwargs=large()) == "hello"
            (pid,) = pool.pids()
            with pytest.raises(TemplateError, match=r"needs more than 0\.2 s or 256 MiB") as caught:
                bad.render(HELLO)
            assert caught.value.user_error, "a request must not count against the endpoint"
            wait_until_gone(pid)


def test_a_template_is_compiled_once_in_a_worker() -> None:
    statements = "{% if messages[0].role == 'x' %}{{ messages }}{% endif %}" * 200  # takes long to compile
    seconds = []
    with contextlib.closing(TemplatePool(PoolLimits(seconds=60))) as pool:
        template = ChatTemplate(statements, special_tokens={}, pool=pool)
        ChatTemplate("x", special_tokens={}, pool=pool).render(HELLO, template_kwargs=large())
        worker = psutil.Process(*pool.pids())
        for _ in range(6):
            before = sum(worker.cpu_times()[:2])
            template.render(HELLO, template_kwargs=large())
            seconds.append(sum(worker.cpu_times()[:2]) - before)
    assert min(seconds[1:]) < seconds[0] / 3


def test_renderings_that_must_wait_are_bounded() -> None:
    with contextlib.closing(TemplatePool(PoolLimits(seconds=20, workers=1, waiting=0))) as pool:
        slow = ChatTemplate(ENDLESS, special_tokens={}, pool=pool)
        errors: list[TemplateError] = []

        def render() -> None:
            try:
                slow.render(HELLO)
            except TemplateError as error:
                errors.append(error)

        thread = threading.Thread(target=render)
        thread.start()
        while not pool.pids():
            time.sleep(0.01)
        with pytest.raises(TemplateBusyError):
            slow.render(HELLO)
        (pid,) = pool.pids()
        pool.close()
        thread.join(timeout=60)
        assert len(errors) == 1, "closing ends what is being rendered"
        wait_until_gone(pid)
    with pytest.raises(TemplateBusyError):
        slow.render(HELLO)


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", ENDLESS])
def test_no_worker_outlives_a_process_that_is_killed(source: str) -> None:
    script = f"""
import threading
from treeline_wire.chat import ChatTemplate
from treeline_runtime.templates.pool import PoolLimits, TemplatePool
pool = TemplatePool(PoolLimits(seconds=1))
template = ChatTemplate({source!r}, special_tokens={{}}, pool=pool)
arguments = {{"padding": "x" * {MAX_INPUT_CHARS}}}
messages = [{{"role": "user", "content": ""}}]
thread = threading.Thread(target=template.render, args=(messages,), kwargs={{"template_kwargs": arguments}})
thread.start()
while not pool.pids():
    thread.join(0.01)
print(*pool.pids(), flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_gone(pid)


async def test_an_event_loop_never_waits_for_a_worker() -> None:
    with contextlib.closing(TemplatePool(PoolLimits(seconds=0.2))) as pool:
        template = ChatTemplate(ENDLESS, special_tokens={}, pool=pool)
        outcomes = [thread_seconds(template, HELLO) for _ in range(3)]
        assert {result for result, _ in outcomes} == {"stopped"}
        assert min(seconds for _, seconds in outcomes) < 15 * reference_s()
        with pytest.raises(TemplateError, match="needs more than"):
            await asyncio.to_thread(template.render, HELLO)


# ---- honest templates, and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_long_conversations_and_messages_are_within_the_limits(path: Path) -> None:
    many = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " + "word " * 20} for i in range(601)]
    long = [{"role": "system", "content": "s " * 99_999}, {"role": "user", "content": "日本語 x\n" * 300_000}]
    tools = [{"function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}] * 50
    with contextlib.closing(TemplatePool(PoolLimits(seconds=60))) as pool:
        template = ChatTemplate(path.read_text(), special_tokens=SPECIAL, pool=pool)
        assert "turn" in template.render(many, tools=tools)
        assert "日本語" in template.render(long, tools=tools)


def test_messages_are_data_and_never_a_template() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}", special_tokens={}, inline_seconds=60.0
    )
    evil = "{{ 1 + 1 }}{% for x in range(9) %}{% endfor %}{# c #}{{ ''.__class__ }}"
    assert template.render([{"role": "user", "content": evil}]) == evil


def test_a_template_sees_no_objects_of_ours() -> None:
    class Leak:
        secret = "s"

    template = ChatTemplate(
        "{{ messages[0].content }}{{ messages[0].content.secret }}", special_tokens={}, inline_seconds=60.0
    )
    assert template.render([{"role": "user", "content": Leak()}]) == "<Leak>"


@pytest.mark.parametrize("kwargs", [{}, large()])
def test_errors_show_the_authors_constant_words_or_ours(
    kwargs: dict[str, str], pool: TemplatePool, caplog: pytest.LogCaptureFixture
) -> None:
    def error_of(source: str) -> TemplateError:
        template = ChatTemplate(source, special_tokens={}, pool=pool)
        with pytest.raises(TemplateError) as caught:
            template.render([{"role": "user", "content": SECRET}], template_kwargs=kwargs)
        return caught.value

    caplog.set_level("DEBUG")
    assert str(error_of("{{ raise_exception('roles must alternate') }}")) == "roles must alternate"
    assert str(error_of("{{ raise_exception('a ' ~ messages[0].content) }}")) == chat._REFUSES
    assert str(error_of("{% set x = 'constant' %}{{ raise_exception(x) }}")) == chat._REFUSES
    assert str(error_of("{{ messages[0].missing.field }}")) == chat._CANNOT
    assert str(error_of("\n{{ messages[0].content|int(base=99) + 'x' }}")) == chat._CANNOT
    assert str(error_of("{{ {}[messages[0].content].a }}")) == chat._CANNOT
    assert "TypeError at line 2" in caplog.text or "ValueError at line 2" in caplog.text
    assert "text of a prompt" not in caplog.text


def test_errors_distinguish_client_and_template(pool: TemplatePool) -> None:
    def at_fault(source: str, **options: Any) -> bool:
        with pytest.raises(TemplateError) as caught:
            ChatTemplate(source, special_tokens={}, pool=pool).render(HELLO, **options)
        return caught.value.user_error

    assert at_fault("{{ raise_exception('no') }}")
    assert at_fault("{{ messages[0].missing.field }}")
    assert at_fault("{{ messages[0].content + 1 }}")
    assert at_fault("x", continue_final_message=True)
    assert not at_fault("{% for %}")
    assert not at_fault("{{ 'x'|no_such_filter }}")
    assert not at_fault("{% include 'x' %}")
    assert not at_fault("{# " + "x" * template_inline.MAX_SOURCE_CHARS + " #}{% for %}")


def test_an_empty_chat_is_a_client_error() -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate("x", special_tokens={}).render([])
    assert caught.value.user_error


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": nested(900)}, "chat_template_kwargs"),
        ({"chat_template_kwargs": nested(MAX_KWARGS_DEPTH + 1)}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [0] * 1001}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 0 for i in range(1001)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a" * 70_000: 0}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": ["a" * 70_000]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": 2**64}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, None),
        ({"tools": [nested(900)]}, "tools"),
        ({"documents": [nested(900)]}, "documents"),
        ({"messages": [{"role": "user", "content": "", "x": nested(900)}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": "", "x": [0] * 300_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800" * MAX_INPUT_CHARS}]}, "messages"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_a_request_that_is_deep_or_wide_is_refused_by_name(
    body: dict[str, Any], param: str | None, pool: TemplatePool
) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ a.b }}{{ x }}", special_tokens={}, pool=pool)
    if param is None:
        assert prompt_of_chat({"messages": HELLO, **body}, template).text == "hello"
        return
    with pytest.raises(PromptError) as caught:
        prompt_of_chat({"messages": HELLO, **body}, template)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["self", "source", "variables", "loop", "range", "namespace", "context", "a-b", ""])
def test_any_name_may_be_a_template_argument(name: str, pool: TemplatePool) -> None:
    """Names of Python's and Jinja's own arguments once failed a request with a TypeError."""
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={}, pool=pool)
    body = {"messages": HELLO, "chat_template_kwargs": {name: 1}}
    assert prompt_of_chat(body, template).text == "hello"
