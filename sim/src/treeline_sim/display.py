"""Progress on stderr: a live line on a terminal, a line a step elsewhere."""

from __future__ import annotations

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


class RichDisplay:
    """One benchmark's progress. Use as a context manager."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console
        # Twice a second: drawing takes time on the cores that are being measured.
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> RichDisplay:
        self._console.print(f"[bold]{self._name}[/bold]")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str, total: int | None = None) -> None:
        if not self._console.is_terminal:
            self._console.print(f"  {text}", highlight=False, markup=False)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=total)

    def done(self, parts: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=parts)
