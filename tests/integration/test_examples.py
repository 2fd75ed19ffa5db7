"""Each file of `examples/` prints what its last comment promises, on a real server with the tiny model.

Its answers are silly, so a promise may leave out what depends on the model: "…" stands for any text.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runtime_server import running
from support.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.deep]

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CLIENTS = {"langchain_chain": "langchain", "dspy_program": "dspy"}
"""Examples that need another project's library: `make clients ARGS=NAME` installs it."""


@pytest.fixture(scope="module")
def embedder() -> Iterator[str]:
    with running(ROOT / "models" / "tiny", "--no-events", "--task", "embed") as server:
        yield server.url


def interpreter(script: Path) -> str:
    if (client := CLIENTS.get(script.stem)) is None:
        return sys.executable
    python = ROOT / ".cache" / "clients" / client / "venv" / "bin" / "python"
    if (
        not python.is_file()
        or subprocess.run([python, "-c", f"import {client}"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{client} is not installed: make clients ARGS={client}")
    return str(python)


def comment(text: str, title: str) -> list[str]:
    """Return the lines of the comment below "# TITLE:"."""
    found = re.search(rf"^# {title}:\n((?:#.*\n)+?)(?=# \w+:\n|\Z)", text, re.MULTILINE)
    return [line.removeprefix("#").removeprefix(" ") for line in found[1].splitlines()] if found else []


def fits(promised: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, promised.split("…"))), line) is not None


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_last_comment_says(
    script: Path, stack: Stack, request: pytest.FixtureRequest
) -> None:
    text = script.read_text()
    python, promised = interpreter(script), comment(text, "Prints")
    url = request.getfixturevalue("embedder") if "--task embed" in text else stack.url
    arguments = ["--url", url] if '"--url"' in text else []
    done = subprocess.run(
        [python, str(script), *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
        input="".join(f"{line}\n" for line in comment(text, "Reads")), env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == len(promised) > 0, done.stdout
    for line, promise in zip(printed, promised, strict=True):
        assert fits(promise, line), f"{line!r} is not {promise!r}"


def test_the_second_turn_of_a_chat_finds_the_first_in_the_cache(stack: Stack) -> None:
    command = [sys.executable, str(ROOT / "examples" / "chat.py"), "--url", stack.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    turns = [(int(hit), int(prompt)) for hit, prompt in re.findall(r"(\d+) of (\d+) prompt tokens", done.stdout)]
    (_, first), (hit, _) = turns
    assert hit >= first // 16 * 16 > 0


def test_the_notebooks_cells_run_in_order(stack: Stack) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code"), "clear its outputs"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"TREELINE_URL": stack.url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
