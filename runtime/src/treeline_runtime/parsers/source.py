"""Text that arrives in pieces, read as if complete: the basis of all format parsers.

A format is a generator that reads a `Source` and yields where it needs more text. All reads decide by characters, so
results do not depend on how the text is cut.

Text that was read is *held* until it is classified: as markup of a call (`settle` drops it), or not (`release` emits it
as `Said`). Nothing is lost or read twice, and time is linear. `MAX_HELD` bounds the held text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Final, NoReturn, Protocol, TypeVar

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class Said(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A tool call begins: call number `index`, from 0."""

    index: int
    name: str
    id: str | None = None
    """The model's own id of the call, if its format has one."""


class CallArguments(msgspec.Struct, frozen=True):
    """More arguments of the current call; all pieces joined are a JSON object."""

    index: int
    text: str


Part = Thought | Said | CallBegun | CallArguments


class OutputParser(Protocol):
    """Parses one output as it comes. Results do not depend on where the text is cut."""

    def feed(self, text: str) -> list[Part]:
        """Adds `text`; returns the parts that are certain by now. Never raises: text outside the format is `Said`."""

    def end(self) -> list[Part]:
        """Ends the output; returns the rest. Unfinished parts are returned as far as they came."""


MAX_HELD: Final = 1 << 18
"""The most characters held as a possible call."""
MAX_SPACE: Final = 64
"""The most white space held as a possible call's surroundings."""

T = TypeVar("T")
Steps = Generator[None, None, T]


class BrokenError(Exception):
    """The text is not in the format: the held text is emitted, and the next is read as a new start."""


class OverError(BrokenError):
    """The output ended before what the format needs."""


class Source:
    """One output's text, and the parts found in it."""

    __slots__ = ("_at", "_held", "_held_chars", "_over", "_parts", "_text", "begun", "certain")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._over = False
        self._held: list[str] = []
        self._held_chars = 0
        self._parts: list[Part] = []
        self.begun = 0
        """Calls that have begun."""
        self.certain = False
        """The held text belongs to a call that has begun: at the end of the output it is no answer."""

    # ---- from outside ------------------------------------------------------------------------------------

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def finish(self) -> None:
        self._over = True

    def parts(self) -> list[Part]:
        """Parts found since the last call."""
        found, self._parts = self._parts, []
        return found

    # ---- telling -----------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if text:
            self._parts.append(Said(text))

    def think(self, text: str) -> None:
        if text:
            self._parts.append(Thought(text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Reports that a call begins, and drops the held text, which was its markup."""
        self.settle()
        self.certain = True
        self._parts.append(CallBegun(self.begun, name, id))
        self.begun += 1

    def argue(self, text: str) -> None:
        """More arguments of the last call."""
        if text:
            self._parts.append(CallArguments(self.begun - 1, text))

    def settle(self) -> None:
        """Drops the held text, which was markup."""
        self._held.clear()
        self._held_chars = 0
        self.certain = False

    def release(self) -> str:
        """Returns the held text, which is no call; the caller must emit it."""
        held = "".join(self._held)
        self.settle()
        return held

    # ---- reading -----------------------------------------------------------------------------------------

    def ahead(self) -> Steps[str]:
        """The next character, unread; "" at the end."""
        while self._at == len(self._text):
            if self._over:
                return ""
            yield
        return self._text[self._at]

    def skip(self, chars: int) -> None:
        """Reads and holds characters that have arrived."""
        room = MAX_HELD - self._held_chars
        piece = self._text[self._at : self._at + min(chars, room)]
        self._at += len(piece)
        self._held_chars += len(piece)
        self._held.append(piece)
        if chars > room:
            raise BrokenError

    def take(self, run: re.Pattern[str]) -> Steps[str]:
        """Reads all following characters of `run`, a class with `*` or `*+`; at most `MAX_HELD`."""
        taken: list[str] = []
        while True:
            match = run.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                taken.append(match.group())
                self.skip(match.end() - self._at)
            if self._at < len(self._text) or self._over:
                return "".join(taken)
            yield

    def space(self) -> Steps[None]:
        yield from self.take(_SPACE)

    def quoted(self, quote: str) -> Steps[str]:
        """Reads the text after an opening `quote` (`"` or `'`), including the closing one; returns it with its escapes,
        where a backslash takes the next character along."""
        read: list[str] = []
        char = ""
        while char != quote:
            read.append((yield from self.take(_UNQUOTED[quote])))
            char = yield from self.ahead()
            if not char:
                raise OverError
            self.skip(1)
            if char == "\\":
                char += yield from self.ahead()
                self.skip(1)
            read.append(char)
        return "".join(read)

    def flow(self, run: re.Pattern[str], tell: Callable[[str], None]) -> Steps[None]:
        """Emits all following characters of `run` as they come; holds nothing."""
        while (yield from self.ahead()):
            match = run.match(self._text, self._at)
            if match is None or match.end() == self._at:
                return
            tell(match.group())
            self._at = match.end()

    def drop_space(self) -> Steps[None]:
        """Skips white space of any length that belongs to no part."""
        yield from self.flow(_SPACE, lambda _: None)

    def rest(self, tell: Callable[[str], None]) -> Steps[None]:
        yield from self.flow(_ANY, tell)

    def expect(self, literal: str) -> Steps[None]:
        """Reads `literal`; BrokenError if the text differs."""
        for wanted in literal:
            char = yield from self.ahead()
            if not char:
                raise OverError
            if char != wanted:
                raise BrokenError
            self.skip(1)

    def one_of(self, literals: Sequence[str]) -> Steps[str]:
        """Reads the longest of `literals` that follows; "" if none begins. BrokenError after a partial one."""
        read = ""
        while longer := [literal for literal in literals if literal.startswith(read) and literal != read]:
            char = yield from self.ahead()
            if not char or not any(literal.startswith(read + char) for literal in longer):
                break
            read += char
            self.skip(1)
        if read and read not in literals:
            yield from self.broken()
        return read

    def need(self, *literals: str) -> Steps[str]:
        """Reads the one of `literals` that follows; BrokenError if none does."""
        read = yield from self.one_of(literals)
        return read or (yield from self.broken())

    def broken(self) -> Steps[NoReturn]:
        """Something else was needed here."""
        raise BrokenError if (yield from self.ahead()) else OverError

    def scan(self, scan: Callable[[str, int], int], *, hold: bool = False) -> Steps[None]:
        """Lets `scan(text, at)` read text that has arrived, up to the position that it returns."""
        if not (yield from self.ahead()):
            raise OverError
        end = scan(self._text, self._at)
        if hold:
            self.skip(end - self._at)
        else:
            self._at = end

    def until(self, markers: Markers, tell: Callable[[str], None]) -> Steps[str]:
        """Emits the text before the first of the markers and returns the marker, which is held with white space before
        it; "" at the end, after emitting everything."""
        while True:
            text, at = self._text, self._at
            match = markers.whole.search(text, at)
            end = match.start() if match else len(text) if self._over else markers.open_end(text, at)
            told = at + len(text[at:end].rstrip(_SPACE_CHARS))
            spare = end - told
            if self._over and not match:
                told = end
            elif spare > MAX_SPACE:  # so long a run is text; how much of it waits depends on its length alone
                told += (spare - 1) // MAX_SPACE * MAX_SPACE
            if told > at:
                tell(text[at:told])
                self._at = told
            if match:
                self.skip(match.end() - told)
                return match.group()
            if self._over:
                return ""
            yield

    def exactly_until(self, markers: Markers, tell: Callable[[str], None]) -> Steps[str]:
        """The same, but white space before the marker is emitted."""
        marker = yield from self.until(markers, tell)
        held = self.release()
        if space := held[: len(held) - len(marker)]:
            tell(space)
        return marker


class Markers:
    """Literals to search for; none is the beginning of another."""

    def __init__(self, *markers: str) -> None:
        assert markers
        longest_first = sorted(markers, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, longest_first)))
        prefixes = {re.escape(marker[:length]) for marker in markers for length in range(1, len(marker))}
        # The leftmost match is the longest end of a text that may become a marker.
        self._open = re.compile(f"(?:{'|'.join(sorted(prefixes, key=len, reverse=True)) or '(?!)'})\\Z")
        self._longest = max(map(len, markers), default=0)

    def open_end(self, text: str, at: int) -> int:
        """Index in `text` of its longest end that may become a marker; its length if there is none."""
        match = self._open.search(text, max(at, len(text) - self._longest))
        return match.start() if match else len(text)


@cache
def markers(*literals: str) -> Markers:
    """Cached, since formats have few."""
    return Markers(*literals)


_SPACE_CHARS: Final = " \t\n\r"
_SPACE: Final = re.compile(f"[{_SPACE_CHARS}]*")
_ANY: Final = re.compile(r".*", re.DOTALL)
_UNQUOTED: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}


class Reading:
    """An OutputParser made of steps that read a source."""

    def __init__(self, steps: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = steps(self._source)
        next(self._steps, None)

    def feed(self, text: str) -> list[Part]:
        self._source.add(text)
        next(self._steps, None)
        return self._source.parts()

    def end(self) -> list[Part]:
        self._source.finish()
        next(self._steps, None)
        return self._source.parts()


class Chained:
    """`first`, whose `Said` goes through `second`."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Part]:
        return self._through(self._first.feed(text))

    def end(self) -> list[Part]:
        return self._through(self._first.end()) + self._second.end()

    def _through(self, parts: list[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Said):
                found += self._second.feed(part.text)
            else:
                found.append(part)
        return found
