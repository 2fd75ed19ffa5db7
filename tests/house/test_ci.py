"""The forge's configuration runs the developers' own scripts, with pinned actions and minimal rights."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORDS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(path: Path) -> list[dict]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def unknown(command: str) -> list[str]:
    """Return the lines of a step that name an unknown make target or script."""
    found = []
    for line in command.splitlines():
        words = re.sub(r"^sudo \S+ env (\S+=\S+ )*", "", line).split()
        known = words[1] in WORDS if words[0] == "make" else os.access(ROOT / words[0], os.X_OK)
        found += [] if known else [line]
    return found


def test_unknown_make_targets_and_missing_scripts_are_found():
    assert unknown('make check\nsudo -E env "PATH=$PATH" CI=true .ci/run') == []
    assert unknown("make nonsense\nscripts/nonsense.sh") == ["make nonsense", "scripts/nonsense.sh"]


def test_there_is_a_workflow_for_changes_and_one_for_releases():
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]
    assert any(".ci/run" in step.get("run", "") for step in steps(WORKFLOWS[0]))
    assert any(step.get("run") == "make release" for step in steps(WORKFLOWS[1]))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_existing_scripts_and_pins_its_actions(path):
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    for step in steps(path):
        assert unknown(step.get("run", "")) == []
    uses = re.findall(r"uses: (.*)", text)
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []
