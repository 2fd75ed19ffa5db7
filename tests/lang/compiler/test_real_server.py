"""Compiled programs against a real server: the same words as interpreted. `treeline program` in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from lang.test_failures import http, said, scripted
from support.ports import free_port
from treeline_lang import (
    Compiled,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    gen_int,
    select,
    system,
    user,
)
from treeline_lang.command import main
from treeline_lang.compiler.passes import DEFAULT_PASSES


@pytest.fixture(scope="module")
def backend(tiny_url) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(tiny_url) as endpoint:
        yield endpoint


@function
def judge(s, essay, rules=("Be brief.",)):
    s += system("You judge essays. " + rules[0])
    s += user("Essay: " + essay)
    forks = s.fork(3)
    for fork, aspect in zip(forks, ("style", "facts", "length"), strict=True):
        fork += assistant("On " + aspect + ": " + gen("verdict", max_tokens=8))
    forks.join()
    with s.user():
        s += "All: " + s["verdict"][0] + "|" + s["verdict"][2]
    with s.assistant(), s.var_scope("all"):
        s += select("grade", ["good", "bad", essay]) + gen_int("points", max_tokens=4)
    return {"grade": s["grade"], "verdicts": s["verdict"]}


@function
def chain(s, word):
    s += "The " + word
    branches = s.fork(2)
    branches += lambda index: (" is", " was")[index] + gen("x", max_tokens=5)
    inner = branches[1].fork(2)
    inner += gen("deep", max_tokens=3)
    inner.join("concate_and_append")
    branches.join("concate_and_append")
    with s.copy() as copied:
        copied += gen("end", max_tokens=3, n=2)
    return s["end"][0][1]


def told(state):
    return state.text(), state.messages(), list(state.variables.items()), state.ret_value


@pytest.mark.parametrize(("program", "argument"), [(judge, {"essay": "Cats sleep."}), (chain, {"word": "sun"})])
def test_the_same_words_interpreted_compiled_and_from_a_file(backend, tmp_path, program, argument):
    expected = told(program.run(**argument, backend=backend, temperature=0))
    for passes in ((), DEFAULT_PASSES):
        compiled = program.compile(strict=True, passes=passes)
        assert told(compiled.run(**argument, backend=backend, temperature=0)) == expected
    compiled.save(tmp_path / "program.json")
    loaded = Compiled.load(tmp_path / "program.json")
    assert told(loaded.run(**argument, backend=backend, temperature=0)) == expected


def test_a_batch_of_compiled_programs(backend):
    items = [{"essay": text} for text in ("Dogs bark.", "Birds sing.", "Fish swim.")]
    interpreted = judge.run_batch(items, backend=backend, temperature=0)
    compiled = judge.compile(strict=True).run_batch(items, backend=backend, temperature=0)
    assert [told(state) for state in compiled] == [told(state) for state in interpreted]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip


def test_another_process_runs_a_file(tiny_url, backend, tmp_path):
    file = tmp_path / "judge.json"
    judge.compile(strict=True).save(file)
    expected = judge.run(essay="Cats sleep.", backend=backend, temperature=0)
    asked = ["--url", tiny_url, "--arg", "essay=Cats sleep.", "--json-arg", 'rules=["Be brief."]', "--temperature", "0"]
    answer = command("treeline_lang", "run", str(file), *asked)
    assert (answer.returncode, json.loads(answer.stdout)) == (0, expected.ret_value), answer.stderr
    answer = command("treeline", "program", "run", str(file), *asked, "--json")
    whole = json.loads(answer.stdout)
    assert (whole["returned"], answer.returncode) == (expected.ret_value, 0)
    assert (whole["text"], whole["messages"], whole["variables"]) == (
        expected.text(), expected.messages(), expected.variables
    )  # fmt: skip


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda s: s.set_var("x", "one"), "one\n"),
        (lambda s: [s.set_var("x", 1), s.set_var("y", "two"), None][-1], '{"x": 1, "y": "two"}\n'),
        (lambda s: [s.__iadd__("text"), None][-1], "text\n"),
        (lambda s: {"returned": [1, "ü"]}, '{"returned": [1, "ü"]}\n'),
        (lambda s: s, '"nothing"\n'),
    ],
)
def test_what_is_printed_is_what_the_program_has_come_to(tmp_path, capsys, act, told):
    @function
    def ends(s):
        s += ""
        return act(s)

    ends.compile(strict=True).save(tmp_path / "x")
    assert main(["run", str(tmp_path / "x"), "--url", "http://127.0.0.1:1"]) == 0
    assert capsys.readouterr().out == told.replace("nothing", "")


def test_show_prints_or_draws(tmp_path):
    file, picture = tmp_path / "judge.json", tmp_path / "judge.svg"
    judge.compile(strict=True).save(file)
    answer = command("treeline_lang", "show", str(file))
    assert answer.returncode == 0
    assert answer.stdout.startswith("judge(essay, rules=['Be brief.'])\n\nstream 0\n")
    assert command("treeline_lang", "show", str(file), "--svg", str(picture)).returncode == 0
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")


def test_a_reader_that_stops_gets_no_error_message(tmp_path):
    file = tmp_path / "judge.json"
    judge.compile(strict=True).save(file)
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "treeline_lang", "show", str(file)]
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=240, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_server_writes_no_control_characters_on_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function(lambda s: s.__iadd__("x" + gen("a"))).compile(strict=True).save("FILE")
    with scripted(lambda *_: http("400 Bad", b"no\x1b[2J")) as url:
        assert main(["run", "FILE", "--url", url], prog="p") == 1
    assert capsys.readouterr().err.endswith("answered 400: no\ufffd[2J\n")


def test_half_a_character_is_printed_as_one_that_is_not_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function(lambda s: s.__iadd__("x" + gen("a"))).compile(strict=True).save("FILE")
    with scripted(lambda *_: http("200 OK", json.dumps(said("\ud800")).encode())) as url:
        assert main(["run", "FILE", "--url", url]) == 0
    assert capsys.readouterr().out == '"x?"\n'  # the program returns its state


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["run", "FILE", "--arg", "esay=x"], 2, "missing a required argument: 'essay'"),
        (["run", "FILE", "--arg", "essay"], 2, "--arg essay: not NAME=VALUE"),
        (["run", "FILE", "--json-arg", "essay={"], 2, "--json-arg essay={: not JSON"),
        (["run", "FILE", "--arg", "essay=x", "--arg", "essay=y"], 2, "essay is given twice"),
        (["run", "FILE", "--json-arg", "essay=" + "[" * 100_000], 2, "not JSON: maximum recursion depth"),
        (["run", "FILE", "--arg", "essay=x", "--timeout", "nan"], 2, "a timeout is above 0 seconds"),
        (["run", "FILE", "--json-arg", "essay=5"], 2, "'essay' is added to a text, and it is 5"),
        (["run", "FILE", "--arg", "essay=x"], 1, "Unreachable: test_real_server.py:"),
        (["run", "FILE", "--arg", "essay=x", "--temperature", "-1"], 2, "temperature is between 0"),
        (["run", "NONE", "--arg", "essay=x"], 2, "NONE: No such file or directory"),
        (["run", "WRONG", "--arg", "essay=x"], 2, "WRONG: this is not JSON"),
        (["show", "WRONG"], 2, "WRONG: this is not JSON"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_status(tmp_path, monkeypatch, capsys, words, status, reason):
    monkeypatch.chdir(tmp_path)
    judge.compile(strict=True).save("FILE")
    Path("WRONG").write_text("not a program")
    nobody = ["--url", f"http://127.0.0.1:{free_port()}"] if words[0] == "run" else []
    assert main([*words, *nobody], prog="treeline program") == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("treeline program: error: ")
    assert reason in line
