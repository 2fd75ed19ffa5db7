"""What the user sees while things load: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from treeline.printable import printable
from treeline.up.supervisor import Child, Phase

REFRESH_S = 0.1


def _row(child: Child, spinner: Spinner) -> tuple[Spinner | Text, Text, Text]:
    """Names and problems are others' words: as `Text` nothing in them is markup."""
    mark, state = _state(child, spinner)
    return mark, Text(printable(child.spec.name)), Text(state)


def _state(child: Child, spinner: Spinner) -> tuple[Spinner | Text, str]:
    seconds = f"{time.monotonic() - child.since:.0f} s"
    match child.phase:
        case Phase.READY:
            return Text("✓", style="green"), _address(child)
        case Phase.EXITED:
            return Text("✗", style="red"), "exited"
        case Phase.STARTING if child.spec.engine is not None:
            return spinner, f"not ready, {seconds}: {child.problem or _address(child)}"
        case Phase.STARTING:
            return spinner, f"loading, {seconds}"
        case Phase.WAITING:
            return Text("·", style="dim"), f"waits for {', '.join(map(printable, child.spec.after))}"


def _address(child: Child) -> str:
    engine = child.spec.engine
    return child.spec.ready_url.rsplit("/", 1)[0] if engine is None else f"http://{engine.address}"


async def show(children: Sequence[Child], console: Console) -> None:
    """Show the children's phases until all are ready. Cancel it to stop early."""
    if not console.is_terminal:
        await _show_lines(children, console)
        return
    spinner = Spinner("dots")
    with Live(console=console, transient=True, refresh_per_second=10) as live:
        while not all(child.ready.is_set() for child in children):
            table = Table.grid(padding=(0, 2))
            for child in children:
                table.add_row(*_row(child, spinner))
            live.update(table)
            await asyncio.sleep(REFRESH_S)


async def _show_lines(children: Sequence[Child], console: Console) -> None:
    shown: dict[str, str] = {}
    while not all(child.ready.is_set() for child in children):
        _print_changes(children, shown, console)
        await asyncio.sleep(REFRESH_S)
    _print_changes(children, shown, console)


def _print_changes(children: Sequence[Child], shown: dict[str, str], console: Console) -> None:
    for child in children:
        if child.phase is Phase.WAITING:
            continue
        line: str = child.phase
        if child.spec.engine is not None and child.phase is Phase.STARTING:
            line = f"not ready: {child.problem}" if child.problem else f"waiting for {_address(child)}"
        if shown.get(child.spec.name) != line:
            shown[child.spec.name] = line
            console.print(f"{printable(child.spec.name)}: {line}", markup=False, highlight=False, soft_wrap=True)
