"""Programs report errors when servers die, hang, are busy or send nonsense, and at Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.lang_backend import PATIENCE_S, FakeBackend
from support.ports import free_port
from support.runtime_server import ServerProcess, eventually, make_checkpoint, running
from treeline_lang import (
    BackendError,
    Cancelled,
    ProgramError,
    Refused,
    RuntimeEndpoint,
    Unreachable,
    assistant,
    function,
    gen,
    select,
    user,
)

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lang") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with running(model, "--no-events", fake=True) as process:
        yield process


@function
def short_then_long(s: Any, word: str = "hello") -> None:
    s += word + gen("short", max_tokens=2)
    s += " and" + gen("long", max_tokens=800)


@function
def one(s: Any, word: str, tokens: int = 2) -> None:
    s += word + gen("a", max_tokens=tokens)


def requests_running(server: ServerProcess) -> int:
    """Return the server's running requests, by its metrics."""
    with server.metrics() as client:
        found = re.search(r"^\S*num_running_reqs\{?[^\n]* (\d+)", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@function
def fails_and_returns(s: Any) -> int:
    s += "a" + gen("answer")
    return 42


@function
def calls_one_that_fails(s: Any) -> int:
    called = fails_and_returns()
    assert str(called.error()).endswith("no answer")
    return int(called.ret_value)


READERS: dict[str, Callable[[Any], Any]] = {
    "ret_value": lambda state: state.ret_value,
    "variable": lambda state: state["answer"],
    "variables": lambda state: state.variables,
    "meta": lambda state: state.get_meta_info("answer"),
    "text": lambda state: state.text(),
    "messages": lambda state: state.messages(),
    "stream": lambda state: list(state.text_iter()),
    "stream of a variable": lambda state: list(state.text_iter("answer")),
}
RUNS: dict[str, Callable[[FakeBackend], Any]] = {
    "run": lambda backend: fails_and_returns.run(backend=backend),
    "stream": lambda backend: fails_and_returns.run(backend=backend, stream=True),
    "not parallel": lambda backend: fails_and_returns.run(backend=backend, parallel=False),
    "batch": lambda backend: fails_and_returns.run_batch([{}], backend=backend)[0],
    "compiled": lambda backend: fails_and_returns.compile(strict=True).run(backend=backend),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_reading_a_program_whose_call_failed_raises_why(run: Callable[..., Any], read: Any) -> None:
    backend = FakeBackend()
    backend.fails = lambda _: Refused("no answer")
    state = run(backend)
    with pytest.raises(Refused, match="no answer"):
        read(state)
    assert str(state.error()).endswith("no answer")


def test_a_called_program_whose_request_failed_returns_nothing() -> None:
    backend = FakeBackend()
    backend.fails = lambda _: Refused("no answer")
    with pytest.raises(Refused, match="no answer"):
        calls_one_that_fails.run(backend=backend)


# ---- a server that dies -----------------------------------------------------------------------------------------


@pytest.mark.deep
def test_a_server_that_is_killed_ends_runs_streams_and_batches_by_an_error_of_their_step(model: Path) -> None:
    with running(model, "--no-events", fake=True) as doomed, RuntimeEndpoint(doomed.url) as backend:
        plain = short_then_long.run(backend=backend)
        streamed = short_then_long.run(backend=backend, stream=True)
        items = [{"word": "done", "tokens": 2}, *({"word": f"word {i}", "tokens": 800} for i in range(6))]
        with ThreadPoolExecutor(1) as pool:
            batch = one.run_batch(items, backend=backend, generator_style=True)
            finished = next(batch)
            rest = pool.submit(list, batch)
            assert plain["short"]
            pieces = streamed.text_iter("long")
            seen = next(pieces)
            eventually(lambda: requests_running(doomed) == 8)
            for pid in (doomed.process.pid, *doomed.children().values()):
                os.kill(pid, signal.SIGKILL)
            states = rest.result(60)
        with pytest.raises(Unreachable, match=r"test_failures.py:\d+ in short_then_long: gen\('long'\): the server at"):
            plain["long"]
        assert plain["short"], "what was there stays"
        with pytest.raises(Unreachable, match=r"gen\('long'\)"):
            seen += "".join(pieces)
        with pytest.raises(Unreachable):
            "".join(streamed.text_iter())
        assert finished["a"]
        assert len(states) == 6
        for state in states:
            error = state.error()
            assert isinstance(error, Unreachable)
            assert error.where is not None
            assert (error.step, error.where.function) == ("gen('a')", "one")
        later = one.run(word="again", backend=backend)
        with pytest.raises(Unreachable, match="cannot be reached"):
            later["a"]


@pytest.mark.deep
def test_a_server_may_restart_between_two_runs(model: Path) -> None:
    """Kept connections are dead, and a run replaces them."""
    port = free_port()
    with RuntimeEndpoint(f"http://127.0.0.1:{port}") as backend:
        for _ in range(2):
            with running(model, "--no-events", f"--port={port}", fake=True):
                states = one.run_batch([{"word": f"word {i}"} for i in range(4)], backend=backend)
                assert [state.error() for state in states] == [None] * 4


# ---- a scripted server ------------------------------------------------------------------------------------------

Script = Callable[[str, dict[str, Any], int], bytes | None]
"""(path, body, number of the request) → the bytes of the answer, after which the connection ends; None: no answer
ever."""


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    over, count, lock = threading.Event(), iter(range(1 << 20)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            with lock:
                number = next(count)
            answer = script(self.path, body, number)
            if answer is None:
                over.wait(PATIENCE_S)
            else:
                self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        thread.join(PATIENCE_S)
        server.server_close()


def http(status: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = (f"HTTP/1.1 {status}", *headers, f"content-length: {len(body) if length is None else length}", "", "")
    return "\r\n".join(lines).encode() + body


def said(text: str, finish: str | None = "stop") -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": finish and {"type": finish}, "prompt_tokens": 1}}


def good(text: str = " fine") -> bytes:
    return http("200 OK", json.dumps(said(text)).encode())


def events(*data: Any) -> bytes:
    frames = b"".join(
        b"data: " + (one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n\n" for one in data
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + frames


@function
def asks(s: Any) -> None:
    s += "x" + gen("a")


@function
def chooses(s: Any) -> None:
    s += "x" + select("a", ["y", "z"])


@function
def talks(s: Any) -> None:
    s += user("x") + assistant(gen("a"))


_SILENT = "sent nothing for too long|cannot be reached: no answer"
"""On a busy machine even connecting may take longer than the timeout."""


def test_a_silent_server_is_given_up() -> None:
    with scripted(lambda *_: None) as url, RuntimeEndpoint(url, timeout_s=0.3) as backend:
        for program in (asks, chooses, talks):
            state = program.run(backend=backend)
            with pytest.raises(Unreachable, match=_SILENT):
                state.get_var("a", timeout=PATIENCE_S)
        streamed = asks.run(backend=backend, stream=True)
        with pytest.raises(Unreachable, match=_SILENT):
            "".join(streamed.text_iter())


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_to_a_busy_server_is_retried_after_the_given_delay(status: str, streaming: bool) -> None:
    def script(_path: str, _body: Any, number: int) -> bytes:
        if number < 2:
            return http(status, b"busy", "retry-after: 0")
        return events(said(" fi", None), said(" fine"), b"[DONE]") if streaming else good()

    with scripted(script) as url, RuntimeEndpoint(url) as backend:
        assert asks.run(backend=backend, stream=streaming)["a"] == " fine"


def test_a_server_that_stays_busy_is_an_error_after_a_while() -> None:
    with scripted(lambda *_: http("503 Busy", b'{"error": {"message": "full"}}', "retry-after: 0.06")) as url:
        backend = RuntimeEndpoint(url)
        backend._http._busy_s = 0.2
        with backend, pytest.raises(BackendError, match=r"answered 503: full"):
            asks.run(backend=backend)["a"]


GARBAGE = {
    "not JSON": http("200 OK", b"<html>"),
    "a list": http("200 OK", b"[1]"),
    "null": http("200 OK", b"null"),
    "no text": http("200 OK", b'{"meta_info": {}}'),
    "text that is none": http("200 OK", b'{"text": 7, "meta_info": {}}'),
    "meta that is none": http("200 OK", b'{"text": "x", "meta_info": 5}'),
    "two texts": http("200 OK", json.dumps([said("a"), said("b")]).encode()),
    "given up": http("200 OK", json.dumps(said("x", "abort")).encode()),
    "broken off": http("200 OK", b'{"text": "x', length=1000),
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
    "nothing": b"",
    "an error": http("500 Oops", b"it broke"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_invalid_answer_is_an_error_of_the_backend(kind: str) -> None:
    with scripted(lambda *_: GARBAGE[kind]) as url, RuntimeEndpoint(url) as backend:
        for program in (asks, chooses, talks):
            if kind == "two texts" and program is not asks:
                continue
            state = program.run(backend=backend)
            with pytest.raises(BackendError, match=rf"in {program.__name__}: "):
                state.get_var("a", timeout=PATIENCE_S)


BROKEN = {
    "no event": (events(), ""),
    "no end": (events(said(" fi", None)), " fi"),
    "not JSON": (events(said(" fi", None), b"{"), " fi"),
    "another form": (events({"x": 1}), ""),
    "an error": (events(said(" fi", None), {"error": {"message": "no"}}), " fi"),
    "done too early": (events(said(" fi", None), b"[DONE]"), " fi"),
    "given up": (events(said(" fi", None), said(" fi", "abort")), " fi"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_stream_is_an_error_after_its_text(kind: str) -> None:
    answer, came = BROKEN[kind]
    with scripted(lambda *_: answer) as url, RuntimeEndpoint(url) as backend:
        state = asks.run(backend=backend, stream=True)
        pieces: list[str] = []
        with pytest.raises(BackendError, match=r"gen\('a'\)"):
            pieces.extend(state.text_iter("a"))
        assert "".join(pieces) == came


def test_an_invalid_request_is_refused_and_not_retried() -> None:
    seen: list[str] = []

    def script(path: str, _body: Any, _number: int) -> bytes:
        seen.append(path)
        return http("400 Bad Request", b'{"error": {"message": "temperature is too high"}}')

    with scripted(script) as url, RuntimeEndpoint(url) as backend:
        with pytest.raises(Refused, match=r"gen\('a'\): .*/generate answered 400: temperature is too high"):
            asks.run(backend=backend)["a"]
        assert seen == ["/generate"]
        with pytest.raises(Refused, match="renders no chats needs a chat_template"):
            talks.run(backend=backend)["a"]


def test_each_program_that_waits_for_a_template_names_its_own_line() -> None:
    @function
    def other(s: Any) -> None:
        s += user("y")

    go = threading.Event()

    def script(*_: Any) -> bytes:
        assert go.wait(PATIENCE_S)
        return http("500 Oops", b"no")

    with scripted(script) as url, RuntimeEndpoint(url) as backend:
        states = [program.run(backend=backend) for program in (talks, other)]
        go.set()
        for state, name in zip(states, ("talks", "other"), strict=True):
            assert f" in {name}: user()" in str(state.error())


# ---- Ctrl-C -----------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys, threading
from treeline_lang import RuntimeEndpoint, function, gen

@function
def one(s, word):
    forks = s.fork(2)
    forks += word + gen("a", max_tokens=800)
    forks.join()
    s["a"]

try:
    WHAT
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
print("not interrupted")
"""


@pytest.mark.parametrize(
    "what",
    [
        "one.run_batch([{'word': str(i)} for i in range(40)], num_threads=4, backend=RuntimeEndpoint(sys.argv[1]))",
        "one.run(word='x', backend=RuntimeEndpoint(sys.argv[1]))",
        "print(''.join(one.run(word='x', stream=True, backend=RuntimeEndpoint(sys.argv[1])).text_iter()))",
    ],
    ids=["run_batch", "run", "stream"],
)
def test_ctrl_c_ends_the_process_and_its_requests(server: ServerProcess, what: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED.replace("WHAT", what), server.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: requests_running(server) == (8 if "batch" in what else 2), 30)
        process.send_signal(signal.SIGINT)
        ended = process.communicate(timeout=240)
    finally:
        process.kill()
    assert (*ended, process.returncode) == ("interrupted\n", "", 7)
    eventually(lambda: requests_running(server) == 0)


def test_leaving_a_batch_early_ends_the_rest() -> None:
    backend = FakeBackend()
    backend.holds = lambda request: request.text != "0"
    batch = one.run_batch([{"word": str(i)} for i in range(8)], backend=backend, generator_style=True, num_threads=4)
    first = next(batch)
    backend.wait_for(lambda me: me.running == 4)
    batch.close()
    backend.wait_running(0)
    assert backend.cancelled == 4
    assert first["a"]
    assert len(backend.requests) == 5, "those that had not begun do not begin"


def test_a_body_that_ends_its_thread_does_not_end_the_batch() -> None:
    @function
    def leaves(s: Any, how: Any) -> None:
        s += "x" + gen("a")
        if how is not None:
            raise how

    items = [{"how": how} for how in (None, SystemExit(3), KeyboardInterrupt(), RuntimeError("no"), GeneratorExit())]
    states = leaves.run_batch(items, backend=FakeBackend())
    assert states[0].error() is None
    assert [type(state.error()) for state in states[1:]] == [Cancelled, Cancelled, ProgramError, Cancelled]
