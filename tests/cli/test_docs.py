"""The commands of docs/chat.md and docs/capacity.md print what the pages show."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_hub import FakeRepo, running_hub
from treeline.chat.command import HELP, parser
from treeline.size.estimate import BUSY, FLOP_SHARE, STEP_S, Speed, fit
from treeline.size.gpus import GPUS
from treeline.size.source import INDEX
from treeline_runtime.config import SchedulerConfig
from treeline_runtime.models.config import parse_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "runtime" / "models" / "configs"
PAGES = [ROOT / "docs" / name for name in ("chat.md", "capacity.md")]
EXAMPLES = [
    (page.name, command, output)
    for page in PAGES
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]

SHAPES = {"llama8b": "Llama-3.1-8B", "qwen3_0_6b": "Qwen3-0.6B", "qwen3_30b_a3b": "Qwen3-30B-A3B"}


@contextlib.contextmanager
def hub_of_the_pages() -> Iterator[dict[str, str]]:
    """Run a Hub with the examples' model, as it is published. Yields the variables that lead to it."""
    repo = FakeRepo(
        {
            "config.json": (CONFIGS / "Llama-3.1-70B.json").read_bytes(),
            INDEX: json.dumps({"metadata": {"total_size": 141_107_412_992}, "weight_map": {}}).encode(),
        }
    )
    with running_hub() as hub:
        hub.repos["meta-llama/Llama-3.1-70B-Instruct"] = repo
        yield {"HF_ENDPOINT": hub.url}


def run(command: str, variables: dict[str, str], home: Path) -> str:
    """Run a command with this environment's `treeline`. Return its output without trailing spaces."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    env |= {"PATH": path, "HF_HOME": str(home), "COLUMNS": "80", **variables}
    answer = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=240, env=env, check=False
    )
    assert answer.stderr == ""
    return re.sub(" +$", "", answer.stdout, flags=re.MULTILINE)


@pytest.mark.integration
@pytest.mark.parametrize(("page", "command", "output"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(page, command, output, tmp_path):
    with hub_of_the_pages() as variables:
        assert run(command, variables, tmp_path) == output


def test_every_page_has_examples():
    assert [page for page, _, _ in EXAMPLES] == ["chat.md", "capacity.md", "capacity.md"]


def error_rows() -> list[str]:
    """Return the rows of the table of docs/capacity.md: the errors of the estimates against measurements."""
    results = json.loads((ROOT / "bench" / "results" / "engine.json").read_text())
    measured = {row["metric"]: row["value"] for row in results["rows"]}
    speeds = {}
    for short, name in SHAPES.items():
        model = parse_config(json.loads((CONFIGS / f"{name}.json").read_text()), {})
        speeds[short] = Speed(model, fit(model, SchedulerConfig(model="m"), GPUS["h200"]))
    rows = []
    for batch, context in ((1, 512), (64, 1024), (256, 1024)):
        figure = f"b{batch}.ctx{context}"
        cells = [
            f"{1000 * speed.step_s(batch, context + 80):.1f} / {measured[f'engine.decode.{short}.{figure}']:.1f}"
            for short, speed in speeds.items()
        ]
        many = "one sequence" if batch == 1 else f"{batch} sequences"
        rows.append(f"| a decode step of {many} of {context:,} tokens, ms | {' | '.join(cells)} |")
    cells = [
        f"{4096 / speed.prefill_s(4096) / 1000:.0f} / {measured[f'engine.prefill.{short}.4096'] / 1000:.0f}"
        for short, speed in speeds.items()
    ]
    return [*rows, f"| a prompt of 4,096 tokens, thousand tokens/s | {' | '.join(cells)} |"]


def test_the_page_shows_the_errors_of_the_estimates():
    page = PAGES[1].read_text()
    assert all(row in page for row in error_rows())
    for said in (f"{FLOP_SHARE:.0%}".replace("%", " %"), f"{BUSY:.0%}".replace("%", " %"), f"{STEP_S * 1000:g} ms"):
        assert said in page


def test_the_page_of_the_chat_has_its_commands_and_flags():
    page = PAGES[0].read_text()
    flags = re.findall(r"--[a-z-]+", parser().format_usage() + parser().format_help())
    for word in [*re.findall(r"^/\w+", HELP, re.MULTILINE), *(set(flags) - {"--help"})]:
        assert word in page
