"""Fixtures for several rooms, and settings of all property tests."""

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import reaper
from support.control_plane import control_plane, namespace

__all__ = ["control_plane", "namespace"]

# Tests start hundreds of processes: none of them shall compile again what another one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# One torch thread a process: tests run engines side by side, and on two cores more threads only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in each run: what is red here is red everywhere. To look for new ones: --hypothesis-profile explore.
# How long an example takes says how loaded the machine is; pytest has a time limit of its own.
# `quick` is that of `make test`: it runs no property more than QUICK_EXAMPLES times, even if its own settings say more.
usual = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", usual)
settings.register_profile("treeline", settings(usual, derandomize=True))
settings.register_profile("quick", settings(usual, derandomize=True))
settings.load_profile("treeline")
QUICK_EXAMPLES = 12
TESTS = Path(__file__).parent

HEAVY = {"lang", "models", "runtime", "wire"}
"""Rooms whose tests import torch and transformers: by the variable TREELINE_ROOMS a run of pytest has only these
("heavy"), or all but these ("others")."""

DEEP_MODULE = re.compile(r"^pytestmark = (\[.*)?pytest\.mark\.deep\b", re.MULTILINE)

run = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, default=7.0, help="load of the tests named test_*chaos.py")


def pytest_configure(config: pytest.Config) -> None:
    # A run in the background of a script is started without it, and so would be all that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[run] = reaper.watch_this_run()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # Before the interpreter ends, which waits for threads that may wait for these processes.
    reaper.reap(config.stash[run])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files for another worker, and of deep modules if nothing deep is run."""
    rooms, (room, *_) = os.environ.get("TREELINE_ROOMS"), (*collection_path.relative_to(TESTS).parts, "")
    if rooms and room and (room in HEAVY) != (rooms == "heavy"):
        return True
    if collection_path.suffix == ".py" and "not deep" in config.option.markexpr:
        return True if DEEP_MODULE.search(collection_path.read_text()) else None
    return None


def pytest_collection() -> None:
    gc.disable()  # what is imported stays: looking through it again and again takes nearly half of the time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that start servers and clusters come first: the last ones are short, so all workers end together.
    long = {item.path for item in items if item.get_closest_marker("deep") or item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in long)
    if settings.get_current_profile_name() != "quick":
        return
    for item in items:
        # A property's own settings, where hypothesis keeps them: of the function, or of a state machine's class.
        for owner, name in (
            (getattr(item, "obj", None), "_hypothesis_internal_use_settings"),
            (getattr(item, "cls", None), "settings"),
        ):
            own = getattr(owner, name, None)
            if isinstance(own, settings) and own.max_examples > QUICK_EXAMPLES:
                setattr(getattr(owner, "__func__", owner), name, settings(own, max_examples=QUICK_EXAMPLES))


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """Remove the log handlers that a program set up in this process: they write to the test's captured output."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in before:
            root.removeHandler(handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Report tests skipped for want of an API server next to the count of those that passed."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    wanting = [report for report in skipped if "or: make control-plane" in str(report.longrepr)]
    if wanting:
        terminalreporter.write_line(
            f"{len(wanting)} tests were skipped because they need a real Kubernetes API server: "
            "`make control-plane` builds it once (Go 1.26, some ten minutes), then run this again",
            yellow=True,
        )
