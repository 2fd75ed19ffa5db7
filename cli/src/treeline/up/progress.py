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

from treeline.up.supervisor import Child, Phase

REFRESH_S = 0.1


def _row(child: Child, spinner: Spinner) -> tuple[Spinner | Text, str, str]:
    seconds = f"{time.monotonic() - child.since:.0f} s"
    match child.phase:
        case Phase.READY:
            return Text("✓", style="green"), child.spec.name, child.spec.ready_url.rsplit("/", 1)[0]
        case Phase.EXITED:
            return Text("✗", style="red"), child.spec.name, "exited"
        case Phase.STARTING if not child.spec.argv:
            return spinner, child.spec.name, f"no answer yet from {child.spec.ready_url}, {seconds}"
        case Phase.STARTING:
            return spinner, child.spec.name, f"loading, {seconds}"
        case Phase.WAITING:
            return Text("·", style="dim"), child.spec.name, f"waits for {', '.join(child.spec.after)}"


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
    shown: dict[str, Phase] = {}
    while not all(child.ready.is_set() for child in children):
        _print_changes(children, shown, console)
        await asyncio.sleep(REFRESH_S)
    _print_changes(children, shown, console)


def _print_changes(children: Sequence[Child], shown: dict[str, Phase], console: Console) -> None:
    for child in children:
        if child.phase is not Phase.WAITING and shown.get(child.spec.name) is not child.phase:
            shown[child.spec.name] = child.phase
            phase = (
                f"waiting for {child.spec.ready_url}"
                if not child.spec.argv and not child.ready.is_set()
                else child.phase
            )
            console.print(f"{child.spec.name}: {phase}", highlight=False, soft_wrap=True)
