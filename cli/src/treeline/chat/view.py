"""Shows an answer on a terminal while it arrives: finished blocks of markdown are printed, the last one is redrawn."""

from __future__ import annotations

import signal
import threading
import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.style import Style
from rich.text import Text

from treeline.chat.answer import Piece
from treeline.printable import printable

DRAWS_A_SECOND = 10
LONGEST_BLOCK = 1 << 15
"""Characters: to draw a block takes time as it grows, so a longer one is printed in parts."""

_BLOCKS = MarkdownIt("commonmark").enable("table")
_BLOCKS.core.ruler.enableOnly(["normalize", "block"])


def settled(markdown: str) -> int:
    """Counts the leading characters that look the same whatever follows: all blocks but the last."""
    starts = [
        token.map[0] for token in _BLOCKS.parse(markdown) if token.level == 0 and token.map and token.nesting >= 0
    ]
    if not starts:
        return 0
    return sum(len(line) + 1 for line in markdown.split("\n")[: starts[-1]])


class Shown:
    """A server's text without the control characters that a terminal would obey.

    Markdown can spell a character that the text does not have: `&#x202e;`, or `%1b` in a link.
    """

    def __init__(self, inner: RenderableType, *, last_lines: int | None = None, apart: bool = False) -> None:
        """last_lines: where only so many have room; apart: it begins with an empty line."""
        self._inner, self._last_lines, self._apart = inner, last_lines, apart

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        if self._last_lines is not None:
            lines = lines[-self._last_lines :]
        if self._apart and lines and any(segment.text.strip() for segment in lines[0]):
            yield Segment.line()
        for line in lines:
            for number, (text, style, _control) in enumerate(line, 1):
                if number == len(line) and not (style and style.bgcolor):
                    text = text.rstrip(" ")  # padding would be copied with the line
                yield Segment(printable(text), style)
            yield Segment.line()


class AnswerView:
    """Shows the pieces of one answer. A Ctrl-C may come anywhere between `start` and `stop`, also in `start`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._kind = ""
        self._pending = ""
        """The text that is not printed yet."""
        self._has_block = False
        """Whether the printed text ends with a block, from which an empty line separates the next one."""
        self._spinner = Spinner("dots", style=Style(dim=True))
        self._began = time.monotonic()
        self._looked_at = 0.0
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            auto_refresh=False,  # its thread may draw between the two halves of a print
            transient=True,  # a drawn block is printed once it is complete
            vertical_overflow="crop",
        )

        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._drawing = threading.Thread(target=self._draw_again, daemon=True)

    def start(self) -> None:
        self._live.start(refresh=True)
        self._drawing.start()

    def stop(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave half a block drawn
        try:
            self._is_over.set()
            if self._drawing.is_alive():
                self._drawing.join()
            self._live.stop()
            self._print_first(len(self._pending))
        finally:
            signal.signal(signal.SIGINT, before)

    def _draw_again(self) -> None:
        while not self._is_over.wait(1 / DRAWS_A_SECOND):
            with self._lock:
                self._live.refresh()

    def add(self, piece: Piece) -> None:
        with self._lock:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        if piece.kind != self._kind:
            self._print_first(len(self._pending))
            self._kind = piece.kind
        self._pending += piece.text if self._pending else piece.text.lstrip("\n")
        now = time.monotonic()
        if "\n" in self._pending and now - self._looked_at > 1 / DRAWS_A_SECOND:
            self._looked_at = now
            self._print_first(settled(self._pending) if self._kind == "text" else self._pending.rfind("\n") + 1)
        if len(self._pending) > LONGEST_BLOCK:
            self._print_first(len(self._pending))

    def _print_first(self, count: int) -> None:
        done, self._pending = self._pending[:count], self._pending[count:]
        if done.strip():
            is_text = self._kind == "text"
            self._console.print(Shown(self._rendered(done), apart=self._has_block and is_text), end="")
            self._has_block = is_text

    def _rendered(self, text: str) -> RenderableType:
        if self._kind == "reasoning":
            return Text(text.rstrip("\n"), style="dim italic")
        return Markdown(text, hyperlinks=False)  # a link shows where it leads

    def _draw(self) -> RenderableType:
        if not self._pending:
            waited = time.monotonic() - self._began
            self._spinner.update(text=Text(f"{waited:.0f} s, Ctrl-C stops", style="dim"))
            return self._spinner
        return Shown(self._rendered(self._pending), last_lines=max(1, self._console.height - 2))
