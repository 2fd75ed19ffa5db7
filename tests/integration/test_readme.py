"""The README, as a new user follows it: its programs run, its commands are known, and it stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.stack import Stack

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONVERSATION, PROGRAM = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def printed(program: str, stack: Stack) -> str:
    assert "http://127.0.0.1:8080" in program
    program = program.replace("http://127.0.0.1:8080", stack.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_second_turn_hits_the_cache_of_the_first(stack: Stack) -> None:
    first, second = printed(CONVERSATION, stack).splitlines()
    assert "Paris" in first
    assert first.endswith("| cached: 0")
    assert "Rome" in second
    assert int(second.rpartition(" ")[2]) > 0


def test_the_readmes_program_asks_for_two_capitals_at_once(stack: Stack) -> None:
    said = printed(PROGRAM, stack)
    assert "Paris" in said
    assert "Rome" in said


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[0] == "treeline"], ids=" ".join)
def test_every_flag_in_the_readme_exists(command: list[str]) -> None:
    own, _, passed_on = " ".join(command).partition(" -- ")
    for word, flags in ((command[1], own), ("pick", passed_on)):  # after `--`: the picker's, where engines run already
        given = [flag for flag in flags.split() if flag.startswith("--")]
        if given:
            line = [sys.executable, "-m", "treeline", word, "--help"]
            helped = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
            assert [flag for flag in given if flag not in helped] == []


def test_every_make_target_in_the_readme_exists() -> None:
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|[`(])make(?: -s)? ([a-z][a-z0-9-]+)", README, re.MULTILINE))
    assert {"run", "test"} <= named
    assert named <= known


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
