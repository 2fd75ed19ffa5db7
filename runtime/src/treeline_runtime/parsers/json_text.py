"""Parses JSON while it is written: objects passed on piece by piece, and call objects with name and arguments.

The output is valid JSON even where models slip: raw control characters in strings (mostly newlines) and
meaningless backslashes are escaped. Anything else that is not JSON ends the object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from treeline_runtime.parsers.source import BrokenError, Source, Steps

MAX_DEPTH: Final = 128

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_SPACE_CHARS: Final = " \t\n\r"
_DIGITS: Final = "0123456789"
_HEX: Final = "0123456789abcdefABCDEF"
_WORDS: Final = {"t": "rue", "f": "alse", "n": "ull"}
# What a number may go on with, by where it stands; those in _NUMBER_ENDS may be its end.
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "-": {"0": "0"} | dict.fromkeys("123456789", "int"),
    "0": {".": ".", "e": "e", "E": "e"},
    "int": {".": ".", "e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "int"),
    ".": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e"} | dict.fromkeys(_DIGITS, "fraction"),
    "e": {"+": "e+", "-": "e+"} | dict.fromkeys(_DIGITS, "exponent"),
    "e+": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_NUMBER_ENDS: Final = {"0", "int", "fraction", "exponent"}
_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = (*_ARGUMENTS, "name", "id", "type")


class JsonScanner:
    """A JSON value (RFC 8259) read in pieces: a pushdown automaton whose stack is the open brackets.

    `scan` returns how far it came. Then `written` has what was read, as JSON; `done` is True after the value's end,
    `broken` at the first impossible character. Time is linear in the text, memory in its depth (`MAX_DEPTH`).
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.written = ""
        self._stack: list[str] = []
        self._state = "value"
        self._number = ""
        self._word = ""
        self._hex = 0
        self._in_key = False

    def scan(self, text: str, at: int) -> int:
        written: list[str] = []
        start = at
        while at < len(text) and not (self.done or self.broken):
            if self._state == "string":
                plain = _PLAIN.match(text, at)
                assert plain is not None  # it matches nothing at least
                at = plain.end()
                if at < len(text):
                    if text[at] < " ":
                        written += (text[start:at], json.dumps(text[at])[1:-1])
                        start = at + 1
                    elif text[at] == "\\":
                        self._state = "escape"
                    elif self._in_key:
                        self._state = "colon"
                    else:
                        self._ended()
                    at += 1
            elif self._state == "escape" and text[at] not in '"\\/bfnrtu':
                written += (text[start:at], "\\")  # the backslash already written was meant literally
                start = at
                self._state = "string"
            else:
                at = self._structure(text, at)
        written.append(text[start:at])
        self.written = "".join(written)
        return at

    def _ended(self) -> None:
        self._state = "after"
        self.done = not self._stack

    def _structure(self, text: str, at: int) -> int:
        """Reads one character outside strings, or white space. Returns the next position, but does not pass a wrong
        character, or the one after a complete number."""
        char = text[at]
        if self._state == "number":
            further = _NUMBER[self._number].get(char)
            if further is not None:
                self._number = further
                return at + 1
            self.broken = self._number not in _NUMBER_ENDS
            self._ended()
            return at
        if self._state not in ("escape", "hex", "word") and char in _SPACE_CHARS:
            space = _SPACE.match(text, at)
            assert space is not None  # it matches nothing at least
            return space.end()
        if self._accept(char):
            return at + 1
        self.broken = True
        return at

    def _accept(self, char: str) -> bool:
        match self._state:
            case "escape":
                self._state, self._hex = ("hex", 4) if char == "u" else ("string", 0)
            case "hex":
                if char not in _HEX:
                    return False
                self._hex -= 1
                if not self._hex:
                    self._state = "string"
            case "word":
                if char != self._word[0]:
                    return False
                self._word = self._word[1:]
                if not self._word:
                    self._ended()
            case "colon":
                self._state = "value"
                return char == ":"
            case "after" if char == ",":
                self._state = "key" if self._stack[-1] == "{" else "value"
            case "after" | "first key" | "first value" if char in "]}":
                return self._close(char)
            case "key" | "first key":
                self._state, self._in_key = "string", True
                return char == '"'
            case "value" | "first value":
                return self._open(char)
            case _:
                return False
        return True

    def _open(self, char: str) -> bool:
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return False
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first value"
        elif char == '"':
            self._state, self._in_key = "string", False
        elif char in _WORDS:
            self._state, self._word = "word", _WORDS[char]
        elif char == "-" or char in _DIGITS:
            self._state, self._number = "number", char if char in "-0" else "int"
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        bracket = "{" if char == "}" else "["
        if self._stack[-1] != bracket:
            return False
        self._stack.pop()
        self._ended()
        return True


def arguments(source: Source) -> Steps[None]:
    """Passes a JSON object on as the arguments of the current call. Its `{` is next."""
    scanner = JsonScanner()
    while not scanner.done:
        yield from source.scan(scanner.scan)
        source.argue(scanner.written)
        if scanner.broken:
            raise BrokenError


def string(source: Source) -> Steps[str]:
    """Reads and holds a JSON string; returns its value."""
    yield from source.expect('"')
    raw = yield from source.quoted('"')
    try:
        text = json.loads(f'"{raw}', strict=False)
    except ValueError:
        raise BrokenError from None
    assert isinstance(text, str)  # the value begins with a quote
    return text


def held_value(source: Source) -> Steps[str]:
    """Reads and holds a JSON value; returns its text."""
    scanner = JsonScanner()
    read: list[str] = []
    while not scanner.done:
        yield from source.scan(scanner.scan, hold=True)
        read.append(scanner.written)
        if scanner.broken:
            raise BrokenError
    return "".join(read)


def call_object(source: Source, names: Collection[str]) -> Steps[None]:
    """Reads `{"name": …, "arguments": {…}}` in any order and emits the call. "parameters" also count as arguments,
    missing ones are `{}`, and those inside a string are unpacked. A call is certain once its name is one of `names` and
    the arguments' `{`, or the final brace, was read."""
    begun = source.begun
    name = id = early = None
    yield from source.expect("{")
    separator = ","
    while separator == ",":
        yield from source.space()
        key = yield from string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        char = yield from source.ahead()
        if key == "name" and name is None:
            name = yield from string(source)
            if name not in names:
                raise BrokenError
        elif key in _ARGUMENTS and name is not None and char == "{" and source.begun == begun:
            source.begin_call(name, id)
            yield from arguments(source)
        else:
            if source.begun == begun and key not in _KEYS:
                raise BrokenError  # an object of another kind: it need not wait for its end
            value = yield from held_value(source)
            if key in _ARGUMENTS and early is None:
                early = value
            elif key == "id" and char == '"':
                id = json.loads(value)
        yield from source.space()
        separator = yield from source.need(",", "}")
    if source.begun == begun:
        if name is None:
            raise BrokenError
        early = _object_of(early or "null")
        source.begin_call(name, id)
        source.argue(early)


def _object_of(value: str) -> str:
    """The arguments in a JSON value: itself, or the content of a string."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = str(json.loads(value)).strip()
        scanner = JsonScanner()
        if scanner.scan(value, 0) < len(value) or not scanner.done:
            raise BrokenError
        value = scanner.written
    if not value.startswith("{"):
        raise BrokenError
    return value
