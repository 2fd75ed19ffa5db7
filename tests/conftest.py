"""Fixtures that tests of several rooms take, and what holds for all properties."""

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.control_plane import control_plane, namespace

__all__ = ["control_plane", "namespace"]

# Tests start hundreds of processes: none of them shall compile again what another one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same examples in each run: what is red here is red everywhere. To look for new ones: --hypothesis-profile explore.
# How long an example takes says how loaded the machine is; pytest has a time limit of its own.
usual = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", usual)
settings.register_profile("treeline", settings(usual, derandomize=True))
settings.load_profile("treeline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, default=7.0, help="load of tests/runtime/server/test_chaos.py")


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """A program that logs set up its handlers in this process: they write to what the test captured, and are gone."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in before:
            root.removeHandler(handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Tests that nobody ran are told where one looks: beside the count of those that passed."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    wanting = [report for report in skipped if "scripts/control_plane.sh" in str(report.longrepr)]
    if wanting:
        terminalreporter.write_line(
            f"{len(wanting)} tests were skipped because they need a real Kubernetes API server: "
            "`make control-plane` builds it once (Go 1.26, some ten minutes), then run `make test` again",
            yellow=True,
        )
