"""Progress on stderr: a live line on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

NOTE_EVERY_S = 10.0


class RichDisplay:
    """One benchmark's progress. Use as a context manager."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console
        # Twice a second: drawing takes time on the measured cores.
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._noted_at = 0.0

    def __enter__(self) -> RichDisplay:
        self._console.print(f"[bold]{self._name}[/bold]")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str, total: int | None = None) -> None:
        """Begin a new step, of `total` parts if that is known."""
        self._noted_at = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(f"  {text}", highlight=False, markup=False)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total, note="")

    def done(self, parts: int, note: str = "") -> None:
        """Show that `parts` of the step are done; the note is beside the bar, or a line now and then without a
        terminal.
        """
        if self._task is not None:
            self._progress.update(self._task, completed=parts, note=note)
        elif note and time.monotonic() - self._noted_at > NOTE_EVERY_S:
            self._noted_at = time.monotonic()
            self._console.print(f"    {parts} ended, {note}", highlight=False, markup=False)
