"""`treeline chat` as its user sees it: in a pseudo-terminal and in pipes, with real servers and with bad ones."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.fake_openai import DONE, delta, serving, usage
from support.ports import free_port
from support.runtime_server import ServerProcess, eventually, gone, make_checkpoint, running

TINY = Path(__file__).parents[3] / "models" / "tiny"
CHAT = [sys.executable, "-m", "treeline", "chat"]
PATIENCE_S = 60.0
PROMPT = r"(^|\n)>"
CAPITAL = "What is the capital of France?"

pytestmark = pytest.mark.integration


def environment(home: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY") and name != "NO_COLOR"}
    temporary = home / "tmp"
    temporary.mkdir(exist_ok=True)
    return env | {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "TMPDIR": str(temporary),
        "TERM": "xterm-256color",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # no terminal reports the cursor's position
    }


class Terminal:
    """A chat in a pseudo-terminal of 80 columns: its output, and keys for it."""

    def __init__(self, home: Path, *words: str, **more: str) -> None:
        self._fd, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 240, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*CHAT, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(home) | more,
            preexec_fn=_owns_terminal,
        )
        self.written = ""

    def until(self, pattern: str) -> str:
        """Read until the pattern appears. Return the new text, without cursor moves and colours."""
        end, new = time.monotonic() + PATIENCE_S, ""
        while not re.search(pattern, plain(new)):
            assert time.monotonic() < end, f"no {pattern!r} in {plain(new)!r}, after {plain(self.written)[-2000:]!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                new += os.read(self._fd, 65536).decode(errors="replace")
        self.written += new
        return plain(new)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def says(self, line: str, pattern: str = PROMPT) -> str:
        """Enter a line. Return the output up to the next prompt; the line itself is drawn first, with its prompt."""
        self.type(line + "\r")
        return self.until(re.escape(line[-20:]) + rf"\s[\s\S]*{pattern}")

    def end(self) -> int:
        """Wait for the exit and check that the terminal is restored. Return the exit status."""
        status = self.process.wait(PATIENCE_S)
        assert termios.tcgetattr(self._theirs) == self.before
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)
        os.close(self._theirs)


def _owns_terminal() -> None:
    """Make the terminal the process's own, so that Ctrl-C sends it a signal, as to a shell's foreground command."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\r\x08]", "", text)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*words: str, **more: str) -> Terminal:
        opened.append(Terminal(tmp_path, *words, **more))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(TINY, "--no-events", "--served-model-name=tiny") as found:
        yield found


def ask(url: str, question: str, home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, url, *flags],
        input=question,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(home),
        check=False,
    )


# ---- pipes ----------------------------------------------------------------------------------------------------


def test_a_question_in_a_pipe_is_answered_with_the_answer_alone(server, tmp_path):
    answer = ask(server.url, CAPITAL, tmp_path, "--temperature", "0")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "The capital of France is Paris.\n", "")


def test_flags_are_sent(tmp_path):
    with serving(lambda _: iter([delta(content="yes", finish="stop"), DONE])) as fake:
        flags = ["--system", "Be kind.", "--temperature", "0.5", "--max-tokens", "7"]
        assert ask(fake.url, " hi\nthere ", tmp_path, *flags).stdout == "yes\n"
    assert fake.bodies == [
        {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 7,
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi\nthere"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_reasoning_stays_out_of_pipes_and_calls_go_to_standard_error(tmp_path):
    call = [{"index": 0, "function": {"name": "look", "arguments": '{"a": "\x1b[2J"}'}}]
    chunks = [delta(reasoning="hm"), delta(content="\x1b[31mred"), delta(tool_calls=call, finish="tool_calls"), DONE]
    with serving(lambda _: iter(chunks)) as fake:
        answer = ask(fake.url, "hi", tmp_path)
    assert (answer.stdout, answer.stderr) == ("�[31mred\n", 'calls look({"a": "�[2J"})\n')


def test_an_answer_that_breaks_off_is_a_failure(tmp_path):
    with serving(lambda _: iter([delta(content="half"), None])) as fake:
        answer = ask(fake.url, "hi", tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "half\n")
    assert answer.stderr.startswith("treeline chat: error: the connection to http://")


@pytest.mark.parametrize(
    ("question", "models", "told"),
    [
        ("  \n", ["m"], "standard input has no question"),
        ("hi", ["b", "a"], "the server has several models: b, a: name one with --model"),
        ("hi", [], "the server lists no models"),
    ],
)
def test_questions_that_need_a_terminal_are_errors_in_a_pipe(question, models, told, tmp_path):
    with serving() as fake:
        fake.models = models
        answer = ask(fake.url, question, tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert told in answer.stderr


def test_a_missing_server_is_reported_with_what_to_do(tmp_path):
    answer = ask(f"127.0.0.1:{free_port()}", "hi", tmp_path)
    assert answer.returncode == 1
    assert "there is no server at" in answer.stderr
    assert "treeline chat MODEL" in answer.stderr


# ---- a terminal -----------------------------------------------------------------------------------------------


def test_a_conversation_at_a_terminal(server, chat, tmp_path):
    terminal = chat(server.url, "--temperature", "0")
    assert f"tiny on {server.url}" in terminal.until(PROMPT)
    shown = terminal.says(CAPITAL)
    assert "The capital of France is Paris." in shown
    assert re.search(r"first token after \d+\.\d\d s, \d+ tokens/s, 15 prompt tokens \(\d+ cached\)", shown)
    terminal.says("And of Italy?")
    assert "/retry" in terminal.says("/help")
    assert "system prompt: none" in terminal.says("/system")
    assert "/nonsense is no command" in terminal.says("/nonsense x")
    assert "saved to" in terminal.says(f"/save {tmp_path}/a.json")
    assert "is there already" in " ".join(terminal.says(f"/save {tmp_path}/a.json").split())
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert [saved[0]["content"], saved[1]["content"]] == [CAPITAL, "The capital of France is Paris."]
    assert "first token" in terminal.says("/retry")
    terminal.says("/clear")
    assert "there is no question yet" in terminal.says("/retry")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_typed_lines_are_kept_for_the_next_chat_and_readable_by_their_user_only(chat, tmp_path):
    with serving(lambda _: iter([delta(content="ok", finish="stop"), DONE])) as fake:
        first = chat(fake.url)
        first.until(PROMPT)
        first.says("a secret")
        first.type("\x04")
        assert first.end() == 0
        second = chat(fake.url)
        second.until(PROMPT)
        second.type("\x1b[A")  # up
        second.until("a secret")
        second.type("\r")
        second.until("ok")
    assert [body["messages"][-1]["content"] for body in fake.bodies] == ["a secret"] * 2
    assert (tmp_path / "state" / "treeline" / "chat-history").stat().st_mode & 0o777 == 0o600


def test_a_question_may_have_several_lines_typed_or_pasted(chat):
    with serving(lambda _: iter([delta(content="ok", finish="stop"), DONE])) as fake:
        terminal = chat(fake.url)
        terminal.until(PROMPT)
        terminal.type("one\x1b\rtwo\x1b\nthree\r")
        terminal.until(r"ok[\s\S]*\n>")
        terminal.type("\x1b[200~four\nfive\n\x1b[201~\r")
        terminal.until(r"ok[\s\S]*\n>")
    assert [body["messages"][-1]["content"] for body in fake.bodies] == ["one\ntwo\nthree", "four\nfive"]


def test_ctrl_c_ends_the_answer_and_the_servers_work_and_again_the_chat(chat, tmp_path):
    model = make_checkpoint(tmp_path / "model")
    an_hour = {"FAKE_TOKEN_S": "1"}  # of tokens, if it were not stopped
    with running(model, "--no-events", fake=True, environment=an_hour) as server, server.client() as http:

        def requests() -> int:
            return int(http.get("/v1/loads").json()["loads"][0]["num_total_reqs"])

        terminal = chat(server.url, "--max-tokens", "3600")
        terminal.until(PROMPT)
        terminal.type("hi\r")
        terminal.until("Ctrl-C stops")
        eventually(lambda: requests() == 1, what="the server computes")
        terminal.type("\x03")
        terminal.until(r"stopped\s*\n>")
        eventually(lambda: requests() == 0, what="the server has stopped, too")
        terminal.type("\x03")
        assert terminal.end() == 0


def test_ctrl_c_hangs_up_on_a_server_that_says_nothing(chat):
    with serving(lambda _: iter([b""])) as fake:
        terminal = chat(fake.url)
        terminal.until(PROMPT)
        terminal.type("hi\r")
        terminal.until("Ctrl-C stops")
        terminal.type("\x03")
        assert "stopped" in terminal.until(r"stopped[\s\S]*\n>")
        terminal.type("x\x03")  # an interrupted line is the second
        assert terminal.end() == 0


def test_reasoning_calls_and_figures_are_shown_without_escapes(chat):
    call = [{"index": 0, "function": {"name": "look", "arguments": '{"a": "\x1b]0;x\x07"}'}}]
    chunks = [
        delta(reasoning_content="Hm\x1b[2J."),
        delta(content="# Title\n\n**bold** <http://x/%1b]0;title%07>\n"),
        delta(tool_calls=call, finish="length"),
        usage(9, 5, cached=4),
        DONE,
    ]
    with serving(lambda _: iter(chunks)) as fake:
        terminal = chat(fake.url)
        terminal.until(PROMPT)
        shown = terminal.says("hi")
    for words in ("Hm�[2J.", "Title", "bold", 'calls look({"a": "�]0;x�"})', "9 prompt tokens (4 cached)", "cut off"):
        assert words in shown
    assert "\x1b]0" not in terminal.written


def test_after_a_failure_the_question_can_be_asked_again(chat):
    answers = [iter([delta(content="half"), None]), iter([delta(content="whole", finish="stop"), DONE])]
    with serving(lambda _: answers.pop(0)) as fake:
        terminal = chat(fake.url)
        terminal.until(PROMPT)
        assert "/retry asks again" in " ".join(terminal.says("hi").split())
        assert "whole" in terminal.says("/retry")
    assert fake.bodies[0] == fake.bodies[1]


def test_the_user_chooses_one_of_several_models(chat):
    with serving(lambda _: iter([delta(content="ok", finish="stop"), DONE])) as fake:
        fake.models = ["a", "b"]
        terminal = chat(fake.url)
        assert "2  b" in terminal.until("which model")
        terminal.type("7\r")
        terminal.until("a number from 1 to 2[\\s\\S]*which model")
        terminal.type("2\r")
        terminal.until(PROMPT)
        terminal.says("hi")
    assert fake.bodies[0]["model"] == "b"


def test_a_plain_terminal_is_chatted_in_too(chat):
    with serving(lambda _: iter([delta(content="**ok**", finish="stop"), DONE])) as fake:
        terminal = chat(fake.url, TERM="dumb")
        terminal.until(PROMPT)
        assert "ok" in terminal.says("hi")
        terminal.type("/exit\r")
        assert terminal.end() == 0


# ---- a server of its own --------------------------------------------------------------------------------------


def servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def leftovers(home: Path) -> list[str]:
    return sorted(os.listdir(home / "tmp"))


def test_a_model_is_served_for_one_question_and_nothing_is_left(tmp_path):
    answer = ask("tiny", CAPITAL, tmp_path, "--temperature", "0")
    assert (answer.returncode, answer.stdout) == (0, "The capital of France is Paris.\n")
    assert leftovers(tmp_path) == []


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["\x04", signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_server_of_its_own_ends_with_the_chat(ending, chat, tmp_path):
    terminal = chat(str(TINY), "--", "--max-total-tokens", "512")
    terminal.until(PROMPT)
    family = servers_of(terminal.process)
    assert family
    if isinstance(ending, str):
        terminal.type(ending)
    else:
        terminal.process.send_signal(ending)
    status = terminal.process.wait(PATIENCE_S)
    assert status == (0 if isinstance(ending, str) else -ending if ending is signal.SIGKILL else 128 + ending)
    eventually(lambda: all(gone(one.pid) for one in family), what="the server has ended")
    if ending is not signal.SIGKILL:
        assert termios.tcgetattr(terminal._theirs) == terminal.before
        assert leftovers(tmp_path) == []


@pytest.mark.deep
def test_ctrl_c_during_the_start_ends_the_server(chat, tmp_path):
    terminal = chat("tiny")
    terminal.until("starting a server of tiny")
    family = eventually(lambda: servers_of(terminal.process))
    terminal.type("\x03")
    assert terminal.end() == 130
    eventually(lambda: all(gone(one.pid) for one in family), what="the server has ended")
    assert leftovers(tmp_path) == []


def test_a_model_that_cannot_be_served_is_reported_with_its_log_file(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    answer = ask(str(folder), "hi", tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert f"the server of {folder} ended with status 1; its log is " in answer.stderr
    assert "has no config.json" in answer.stderr
    [log] = leftovers(tmp_path)
    assert "has no config.json" in (tmp_path / "tmp" / log).read_text()


@pytest.mark.deep
def test_a_server_that_dies_during_a_chat_is_reported(chat):
    terminal = chat("tiny")
    terminal.until(PROMPT)
    for process in servers_of(terminal.process):
        process.kill()
    shown = " ".join(terminal.says("hi", "its log").split())
    assert "ended with status -9; its log" in shown
    assert terminal.end() == 1


def test_arguments_for_a_server_that_runs_already_are_refused(tmp_path):
    answer = ask("http://127.0.0.1:9", "hi", tmp_path, "--", "--device", "cpu")
    assert answer.returncode == 2
    assert "name a MODEL, not a URL" in answer.stderr
