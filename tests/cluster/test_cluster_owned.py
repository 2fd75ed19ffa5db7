"""Processes of a cluster: recorded before they run, and ended by pid and start time; others are left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.owned import Process, Registry, parse_stat, until
from e2e.cluster.place import ClusterError, Home

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    home = Home(tmp_path)
    home.make()
    return Registry(home)


def test_a_name_with_blanks_and_parentheses_does_not_confuse_the_stat() -> None:
    fields = " ".join(str(n) for n in range(5, 53))
    stat = parse_stat(f"42 (a) b (c) S 7 {fields}")
    assert (stat.state, stat.parent, stat.started) == ("S", 7, 22)


def test_a_program_is_written_down_before_it_begins(registry: Registry, tmp_path: Path) -> None:
    started = registry.start("one", ["cat", str(tmp_path / "pids/one")])
    started.wait(60)
    pid, start = registry.log("one").split()
    assert int(pid) == started.pid
    assert registry.get("one") == Process(started.pid, int(start))
    assert not registry.alive("one")


def test_arguments_reach_the_program_as_they_are(registry: Registry) -> None:
    registry.start("one", ["printf", "%s|", "a b", "*", "$HOME", ""]).wait(60)
    assert registry.log("one") == "a b|*|$HOME||"


def test_started_programs_are_ended_and_forgotten(registry: Registry) -> None:
    started = registry.start("one", ["sleep", "60"])
    until(lambda: registry.alive("one"), "the record")
    registry.end("one")
    assert started.wait(60) == -9
    assert registry.names() == []


def test_a_program_that_was_never_started_has_not_ended(registry: Registry) -> None:
    assert not registry.ended("one")
    registry.start("one", ["true"]).wait(60)
    assert registry.ended("one")


def test_a_program_whose_record_is_being_written_has_not_ended(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as running:
        stat = parse_stat(Path(f"/proc/{running.pid}/stat").read_text())
        readings = iter([None, Process(running.pid, stat.started)])
        monkeypatch.setattr(registry, "get", lambda name: next(readings))
        assert not registry.ended("one")
        running.kill()


def test_a_reused_pid_is_left_alone(registry: Registry, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "pids/one").write_text(f"{other.pid} 1\n")
        registry.end("one")
        assert other.poll() is None
        other.kill()
    assert registry.names() == []


@pytest.mark.parametrize("record", ["", "12", "not a number"])
def test_an_incomplete_record_names_no_process(registry: Registry, tmp_path: Path, record: str) -> None:
    (tmp_path / "pids/one").write_text(record)
    assert registry.get("one") is None
    registry.end("one")


def test_a_process_that_has_ended_can_be_ended_again() -> None:
    with subprocess.Popen(["true"]) as done:
        done.wait()
    Process(done.pid, 1).end()
    assert not Process(os.getpid(), 1).alive()


def test_an_expired_wait_says_what_it_waited_for() -> None:
    with pytest.raises(ClusterError, match="waited 0 s for the moon"):
        until(lambda: False, "the moon", 0)
