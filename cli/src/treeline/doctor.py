"""`treeline doctor`: checks what this machine can run, and what it lacks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import zmq
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from treeline_wire.command_line import Parser
from treeline_wire.tiny_model import tiny_model

from treeline.main import PARTS, how_to_install, missing_parts

GIB = 1024**3
ENOUGH_MEMORY_GIB = 4


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but with less
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `mend` says what to do and is empty when there is nothing to do."""

    what: str
    verdict: Verdict
    fact: str
    mend: str = ""


def _python() -> Finding:
    fact = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("Python", Verdict.NOTE, fact, "Envoy and GPUs are for Linux; the rest works here")
    return Finding("Python", Verdict.OK, fact)


def _memory() -> Finding:
    total = psutil.virtual_memory().total / GIB
    fact = f"{os.cpu_count()} cores, {total:.0f} GiB of memory"
    if total < ENOUGH_MEMORY_GIB:
        return Finding("machine", Verdict.NOTE, fact, f"two runtimes of the tiny model want {ENOUGH_MEMORY_GIB} GiB")
    return Finding("machine", Verdict.OK, fact)


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Finding("torch", Verdict.MISSING, str(error), how_to_install(["runtime"]))
    fact = torch.__version__
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return Finding("torch", Verdict.OK, f"{fact}; {device.name}, {device.total_memory / GIB:.0f} GiB")
    return Finding(
        "torch",
        Verdict.NOTE,
        f"{fact}, no GPU",
        "on the CPU: fine for the tiny model, slow for large ones",
    )


def _envoy() -> Finding:
    from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary

    try:
        binary = envoy_binary()
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except EnvoyNotFound as missing:
        return Finding("Envoy", Verdict.MISSING, "not found", str(missing))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("Envoy", Verdict.MISSING, str(error), "its binary does not run here (glibc 2.31 or later?)")
    return Finding("Envoy", Verdict.OK, answer.stdout.split("version:")[-1].split("/")[1])


def _curve() -> Finding:
    if zmq.has("curve"):
        return Finding("ZMQ CURVE", Verdict.OK, f"libzmq {zmq.zmq_version()}")
    return Finding("ZMQ CURVE", Verdict.NOTE, "not built in", "KV events can only be served on loopback")


def _tiny_model() -> Finding:
    if folder := tiny_model():
        return Finding("tiny model", Verdict.OK, str(folder))
    return Finding(
        "tiny model", Verdict.NOTE, "not installed", "pip install treeline-tiny, or name a model: `treeline up MODEL`"
    )


def _ports() -> Finding:
    from treeline.up.plan import UpOptions, busy_ports, plan

    busy = busy_ports(plan(UpOptions(model=""), envoy_binary=Path(), bootstrap=Path()))
    if busy:
        return Finding(
            "ports", Verdict.NOTE, "; ".join(busy), "stop what holds them, or move ours: `treeline up --port-base 9100`"
        )
    return Finding("ports", Verdict.OK, "those of `treeline up` are free")


def _parts() -> Finding:
    if missing := missing_parts(UP_PARTS):
        return Finding(
            "parts",
            Verdict.MISSING,
            f"without {' and '.join(PARTS[part].name for part in missing)}",
            how_to_install(missing),
        )
    return Finding("parts", Verdict.OK, "the runtime and the picker")


UP_PARTS = ("runtime", "picker")
CHECKS: tuple[Callable[[], Finding], ...] = (_python, _memory, _parts)
UP_CHECKS: tuple[Callable[[], Finding], ...] = (
    _torch,
    _envoy,
    _curve,
    _tiny_model,
    _ports,
)

EPILOG = """examples:
  treeline doctor                              a line for each check; status 1 if `treeline up` cannot run here
  treeline doctor --json | jq '.findings[] | select(.verdict != "ok")'"""

MARKS = {Verdict.OK: "[green]✓[/]", Verdict.NOTE: "[yellow]![/]", Verdict.MISSING: "[red]✗[/]"}


def main(argv: Sequence[str]) -> int:
    """Print a line per check; status 1 when something that `treeline up` needs is missing."""
    parser = Parser(
        prog="treeline doctor",
        description="Say what this machine can run, and what is missing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for scripts and bug reports")
    as_json = parser.parse_args(argv).json
    console = Console(stderr=as_json)
    with console.status("looking around"):
        checks = CHECKS if missing_parts(UP_PARTS) else (*CHECKS, *UP_CHECKS)
        findings = [check() for check in checks]
    missing = [finding.what for finding in findings if finding.verdict is Verdict.MISSING]
    if as_json:
        print(json.dumps({"ready": not missing, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 1 if missing else 0
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(MARKS[finding.verdict], finding.what, escape(finding.fact), escape(finding.mend))
    console.print(table)
    if missing:
        console.print(f"`treeline up` cannot run here yet: {', '.join(missing)}", style="red", soft_wrap=True)
        return 1
    console.print("`treeline up` can run here.", soft_wrap=True)
    return 0
