"""Calls as a list of Python calls: `[f(a=1, b="x"), g()]`, as Llama 4 and others write them.

Values are Python or JSON literals, emitted one by one after conversion to JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Final

from treeline_runtime.parsers.json_text import MAX_DEPTH, JsonScanner
from treeline_runtime.parsers.source import BrokenError, OverError, Source, Steps, markers
from treeline_runtime.parsers.tools import Functions, attempt, function_name

_LIST: Final = markers("[", "<|python_start|>")
_PLAIN: Final = re.compile(r"""[^\[\](){}"'\\,]*""")
_IDENTIFIER: Final = re.compile(r"\w*")
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True)
class Pythonic:
    """A list of calls anywhere in the text."""

    special: bool = True

    def steps(self, source: Source, functions: Functions) -> Steps[None]:
        while marker := (yield from source.until(_LIST, source.say)):
            yield from attempt(source, self._list(source, functions, marker))

    def _list(self, source: Source, functions: Functions, marker: str) -> Steps[None]:
        if marker != "[":
            yield from source.space()
            yield from source.expect("[")
        separator = ""
        while separator != "]":
            if separator:
                yield from source.space()
            yield from self._call(source, functions)
            source.settle()
            yield from source.space()
            separator = yield from source.need(",", "]")
        source.settle()
        yield from source.space()
        if (yield from source.one_of(("<|python_end|>",))):
            source.settle()
            yield from source.space()
        if (yield from source.ahead()):
            raise BrokenError  # the held characters are text

    def _call(self, source: Source, functions: Functions) -> Steps[None]:
        name = yield from function_name(source, functions)
        yield from source.expect("(")
        begun, separator = source.begun, ","
        yield from source.space()
        if (yield from source.one_of((")",))):
            source.begin_call(name)
            source.argue("{}")
            return
        while separator == ",":
            yield from source.space()
            key = yield from source.take(_IDENTIFIER)
            if not key and source.begun > begun and (yield from source.one_of((")",))):
                break  # behind a comma too many, which Python allows
            if not key:
                yield from source.broken()
            yield from source.space()
            yield from source.expect("=")
            value = as_json((yield from self._value(source)))
            if source.begun == begun:
                source.begin_call(name)
                source.argue("{")
            else:
                source.settle()
                source.argue(", ")
            source.certain = True
            source.argue(f"{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = yield from source.need(",", ")")
        source.argue("}")

    def _value(self, source: Source) -> Steps[str]:
        """Reads and holds a value's text, up to the comma or bracket after it."""
        text: list[str] = []
        closing: list[str] = []
        while True:
            text.append((yield from source.take(_PLAIN)))
            char = yield from source.ahead()
            if not char:
                raise OverError
            if not closing and char in ",)":
                return "".join(text)
            if char in _CLOSING:
                closing.append(_CLOSING[char])
            elif char in ")]}" and (not closing or closing.pop() != char):
                raise BrokenError
            if len(closing) > MAX_DEPTH:
                raise BrokenError
            source.skip(1)
            text.append(char)
            if char in "'\"":
                text.append((yield from source.quoted(char)))


def as_json(value: str) -> str:
    """A JSON or Python literal as JSON. Raises BrokenError for others."""
    value = value.strip()
    scanner = JsonScanner()
    end = scanner.scan(f"{value} ", 0)  # a number ends with what follows it
    if scanner.done and not scanner.broken and end == len(value) and scanner.written == value:
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return json.dumps(ast.literal_eval(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise BrokenError from None


PYTHONIC: Final = Pythonic()
