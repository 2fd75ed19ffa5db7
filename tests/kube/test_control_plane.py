"""The tests' control plane says how to build it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.control_plane import BUILD, ROOT

pytestmark = [pytest.mark.integration, pytest.mark.deep]


def run_build(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / BUILD), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )


def test_an_error_for_a_missing_program_names_the_command_that_builds_it(tmp_path: Path) -> None:
    done = run_build("--check", "etcd", TREELINE_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert f"run {BUILD} etcd" in done.stderr
    done = run_build("nothing")
    assert done.returncode == 1
    assert "no component 'nothing': there are " in done.stderr


def test_without_go_it_says_how_to_get_it(tmp_path: Path) -> None:
    for name in ("go", "gofmt"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\necho go1.19.8\n")
        fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_build("etcd", TREELINE_CACHE=str(tmp_path / "cache"), PATH=path, GO_FALLBACKS="")
    assert done.returncode == 1
    assert "no Go 1.26 or later here (found go1.19.8): install it with" in done.stderr
    assert not list((tmp_path / "cache" / "bin").glob("etcd*"))
