import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.ports import free_port
from treeline_bench.processes import Child, ChildFailed, answers, child

PRINT_AND_DIE = "print('the reason'); raise SystemExit(3)"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
# Its child ignores SIGTERM, as a stuck worker would.
PARENT = """
import subprocess, sys, time
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
worker = subprocess.Popen([sys.executable, "-c", stubborn])
print(worker.pid, flush=True)
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def said(process: Child, text: str) -> bool:
    return text in process.log_path.read_text()


def gone(pid: int, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_child_that_dies_is_quoted(tmp_path: Path) -> None:
    with child("brief", python(PRINT_AND_DIE), tmp_path) as brief, pytest.raises(ChildFailed) as failure:
        brief.wait_ready(f"http://127.0.0.1:{free_port()}/", timeout_s=60)
    assert "brief exited with status 3" in str(failure.value)
    assert "the reason" in str(failure.value)


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with child("slow", python(SLEEP), tmp_path) as slow, pytest.raises(ChildFailed, match="becoming ready"):
        slow.wait_ready(f"http://127.0.0.1:{free_port()}/", timeout_s=0.2)


def interrupted_parent(folder: Path) -> Iterator[int]:
    """Start a parent and its child and yield their pids; Ctrl-C then interrupts the parent."""
    with child("parent", python(PARENT), folder) as parent:
        parent.wait_until(lambda: said(parent, "deaf"), "starting", 60)
        assert parent.cpu_seconds() > 0
        yield parent.process.pid
        yield int(next(word for word in parent.log_path.read_text().split() if word.isdecimal()))
        raise KeyboardInterrupt


def test_leaving_the_block_stops_the_child_and_its_children(tmp_path: Path) -> None:
    steps = interrupted_parent(tmp_path)
    parent, worker = next(steps), next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert gone(parent)
    assert gone(worker)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pinning is Linux's")
def test_a_child_runs_in_the_given_folder(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    with child("pinned", python(SLEEP), tmp_path, [core]) as pinned:
        pinned.wait_until(lambda: said(pinned, "up"), "starting", 60)
        assert os.sched_getaffinity(pinned.process.pid) == {core}


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is a signal on Linux only")
def test_children_end_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, time, sys; from treeline_bench.processes import child\n"
        f"with child('x', [sys.executable, '-c', {SLEEP!r}], pathlib.Path({str(tmp_path)!r})) as x:\n"
        "    print(x.process.pid, flush=True); time.sleep(600)"
    )
    bench = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    pid = int(bench.stdout.readline())
    bench.send_signal(signal.SIGKILL)
    bench.wait()
    bench.stdout.close()
    assert gone(pid)


def test_a_free_port_has_no_listener() -> None:
    assert not answers(f"http://127.0.0.1:{free_port()}/")
