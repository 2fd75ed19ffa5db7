"""Small real processes stand in for runtimes: the supervisor starts, watches and stops any child in the same way."""

import asyncio
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.ports import free_port
from treeline.up.plan import ChildSpec
from treeline.up.progress import _row, show
from treeline.up.supervisor import Child, ChildFailed, Phase, Supervisor
from treeline_epp.endpoints.spec import EndpointSpec

ENDLESS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 16))
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PICKER = """
import http.server, json, sys
answers = json.loads(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        page = json.dumps({"pools": {"default": {"models": [], "endpoints": [{"name": "a", **answer}]}}}).encode()
        self.send_response(200); self.send_header("content-length", len(page)); self.end_headers()
        self.wfile.write(page)
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SERVER = """
import http.server, signal, sys, threading
port, mode = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
        if mode == "dies-when-ready":
            print("a last word", flush=True)
            threading.Timer(0.05, __import__("os")._exit, [7]).start()
    def log_message(self, *a): pass
if mode == "dies":
    print("cannot load the model", flush=True); sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
if mode == "parent":
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("grandchild", child.pid, flush=True)
    signal.signal(signal.SIGTERM, lambda *a: __import__("os")._exit(0))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def spec(name, mode="good", after=()):
    port = free_port()
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", SERVER, str(port), mode),
        ready_url=f"http://127.0.0.1:{port}/",
        ports={},
        after=after,
    )


def behind(*answers):
    """A picker that says one after the other of engine a, and the engine."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/endpoints"
    picker = ChildSpec("picker", (sys.executable, "-c", PICKER, str(port), json.dumps(answers)), url, {})
    engine = ChildSpec("engine a", (), url, {}, ("picker",), engine=EndpointSpec("a", "127.0.0.1:1"))
    return picker, engine


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def nothing_left(supervisor):
    return all(child.process is None or not psutil.pid_exists(child.process.pid) for child in supervisor.children)


async def test_a_signal_after_readiness_stops_everything_and_run_returns(tmp_path: Path):
    supervisor = Supervisor([spec("a"), spec("b", after=("a",))], tmp_path)
    await supervisor.run(on_ready=interrupt)
    assert all(child.ready.is_set() and child.phase is Phase.EXITED for child in supervisor.children)
    assert nothing_left(supervisor)


async def test_a_child_that_waits_is_started_only_when_the_other_is_ready(tmp_path: Path):
    supervisor = Supervisor([spec("first"), spec("second", after=("first",))], tmp_path)
    first, second = supervisor.children
    started_early = []

    async def watch():
        while not first.ready.is_set():
            started_early.append(second.process is not None)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await supervisor.run(on_ready=interrupt)
    await watching
    assert started_early
    assert not any(started_early)


async def test_a_child_that_dies_while_loading_is_named_with_its_last_words(tmp_path: Path):
    supervisor = Supervisor([spec("good"), spec("runtime-1", "dies")], tmp_path)
    with pytest.raises(
        ChildFailed, match=r"(?s)runtime-1 exited with status 3 before it was ready.*cannot load the model"
    ):
        await supervisor.run(on_ready=lambda: None)
    assert nothing_left(supervisor)


async def test_a_child_that_dies_later_stops_the_others(tmp_path: Path):
    supervisor = Supervisor([spec("good"), spec("runtime-0", "dies-when-ready")], tmp_path)
    with pytest.raises(ChildFailed, match=r"(?s)runtime-0 exited with status 7.*a last word"):
        await supervisor.run(on_ready=lambda: None)
    assert nothing_left(supervisor)


async def test_a_killed_child_is_named_with_its_signal(tmp_path: Path):
    supervisor = Supervisor([spec("good"), spec("runtime-0")], tmp_path)
    with pytest.raises(ChildFailed, match="runtime-0 was ended by SIGKILL"):
        await supervisor.run(on_ready=lambda: supervisor.children[1].process.kill())
    assert nothing_left(supervisor)


async def test_a_child_that_ignores_the_request_to_stop_is_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("treeline.up.supervisor.STOP_TIMEOUT_S", 0.5)
    supervisor = Supervisor([spec("stubborn", "stubborn")], tmp_path)
    await supervisor.run(on_ready=interrupt)
    assert nothing_left(supervisor)


async def test_grandchildren_that_were_left_behind_are_killed_too(tmp_path: Path):
    supervisor = Supervisor([spec("parent", "parent")], tmp_path)
    await supervisor.run(on_ready=interrupt)
    grandchild = int(supervisor.children[0].log_path.read_text().split()[1])
    deadline = time.monotonic() + 30
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the grandchild lives on"
        await asyncio.sleep(0.01)


async def test_interrupting_while_things_load_is_a_clean_stop(tmp_path: Path):
    never_ready = ChildSpec("slow", (sys.executable, "-c", "import time; time.sleep(600)"), "http://127.0.0.1:1/", {})
    supervisor = Supervisor([never_ready], tmp_path)
    asyncio.get_running_loop().call_later(0.3, interrupt)
    await supervisor.run(on_ready=lambda: pytest.fail("it was never ready"))
    assert nothing_left(supervisor)


REFUSED = {"ready": False, "problem": "http://127.0.0.1:1: Connection refused", "lasting": False}
USELESS = {"ready": False, "problem": "http://127.0.0.1:1 has no /v1/models", "lasting": True}
READY = {"ready": True, "problem": None, "lasting": False}


async def test_an_engine_is_ready_when_the_picker_says_so_and_its_problem_is_shown_until_then(tmp_path: Path):
    supervisor, said = Supervisor(behind(REFUSED, REFUSED, USELESS, READY), tmp_path), io.StringIO()
    showing = asyncio.create_task(show(supervisor.children, Console(file=said)))
    await supervisor.run(on_ready=interrupt)
    showing.cancel()
    assert "engine a: not ready: http://127.0.0.1:1: Connection refused" in said.getvalue()
    assert nothing_left(supervisor)


async def test_an_engine_for_which_waiting_is_in_vain_ends_the_run_with_the_reason(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("treeline.up.supervisor.LASTING_S", 0.3)
    supervisor = Supervisor(behind(REFUSED, USELESS), tmp_path)
    with pytest.raises(ChildFailed, match=r"no request can go to engine a: .* has no /v1/models\. Give"):
        await supervisor.run(on_ready=lambda: pytest.fail("it was never ready"))
    assert nothing_left(supervisor)


async def test_a_ready_page_without_an_end_is_not_read_to_its_end(tmp_path: Path):
    port = free_port()
    endless = ChildSpec("e", (sys.executable, "-c", ENDLESS, str(port)), f"http://127.0.0.1:{port}/", {})
    supervisor = Supervisor([endless], tmp_path)
    await supervisor.run(on_ready=interrupt)
    assert supervisor.children[0].ready.is_set()


def test_names_and_problems_are_not_taken_for_markup_and_move_no_cursor(tmp_path: Path):
    engine = EndpointSpec("[red]x\x1b[2J", "127.0.0.1:1")
    child = Child(ChildSpec("engine [red]x\x1b[2J", (), "http://p/endpoints", {}, engine=engine), tmp_path / "log")
    child.enter(Phase.STARTING)
    child.problem = "[/nothing] is [bold]here"
    _, name, state = _row(child, None)
    assert name.plain == "engine [red]x\N{REPLACEMENT CHARACTER}[2J"
    assert state.plain.endswith("[/nothing] is [bold]here")
