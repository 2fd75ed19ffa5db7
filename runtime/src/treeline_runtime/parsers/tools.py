"""Parsers of tool calls: shared steps, and formats with calls in JSON.

A call is certain once its function is known and its arguments have begun; text that only looks like one is emitted in
full. From then on arguments are emitted as they come. Where they stop being JSON, the call stays as it is, and the rest
is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from treeline_runtime.parsers.json_text import arguments, call_object
from treeline_runtime.parsers.source import BrokenError, OverError, Source, Steps, markers

Functions = Mapping[str, Any]
"""Callable functions: name → JSON Schema of the parameters, or None."""

NAME: Final = re.compile(r"[^\s<>\[\](){}|｜\"',;]*")
"""Allowed characters of a name outside JSON strings."""


class ToolFormat(Protocol):
    """A format in which models write calls."""

    @property
    def special(self) -> bool:
        """Whether its markers are special tokens, at least in some models."""

    def steps(self, source: Source, functions: Functions) -> Steps[None]:
        """Parses an output without reasoning."""


def attempt(source: Source, steps: Steps[None]) -> Steps[bool]:
    """Reads a possible call; returns whether it was one. If not, emits its text, unless the output ends in it."""
    try:
        yield from steps
    except OverError:
        if not source.certain:
            source.say(source.release())
    except BrokenError:
        source.say(source.release())
        return False
    source.settle()
    return True


def function_name(source: Source, functions: Functions) -> Steps[str]:
    name = yield from source.take(NAME)
    if name not in functions:
        yield from source.broken()
    return name


def call(source: Source, name: str, id: str | None = None) -> Steps[None]:
    """Reads the arguments of a call of `name`, a JSON object that makes it certain."""
    yield from source.space()
    if (yield from source.ahead()) != "{":
        yield from source.broken()
    source.begin_call(name, id)
    yield from arguments(source)


@dataclass(frozen=True)
class Marked:
    """A format whose calls begin with a marker."""

    call: Callable[[Source, Functions, str], Steps[None]]
    """Reads what follows a marker, up to its closing."""
    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    """Texts that may follow a call without being part of the answer."""
    special: bool = False

    def steps(self, source: Source, functions: Functions) -> Steps[None]:
        opening = markers(*self.opening)
        marker = yield from source.until(opening, source.say)
        while marker:
            if marker in self.closing:
                source.settle()
                marker = yield from self._adjoining(source)
            elif (yield from attempt(source, self.call(source, functions, marker))):
                marker = yield from self._adjoining(source)
            else:
                marker = ""
            marker = marker or (yield from source.until(opening, source.say))

    def _adjoining(self, source: Source) -> Steps[str]:
        """The marker directly after a call; white space at the end is dropped."""
        try:
            yield from source.space()
            marker = yield from source.one_of((*self.opening, *self.closing))
        except BrokenError:
            marker = ""
        if not marker:
            held = source.release()
            if (yield from source.ahead()):
                source.say(held)
        return marker


# ---- Hermes ----------------------------------------------------------------------------------------------


def _hermes(source: Source, functions: Functions, marker: str) -> Steps[None]:
    yield from source.space()
    yield from call_object(source, functions)


HERMES: Final = Marked(_hermes, ("<tool_call>",), ("</tool_call>",), special=True)
"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""


# ---- Llama 3 ---------------------------------------------------------------------------------------------

_PYTHON_TAG: Final = "<|python_tag|>"
_TAGGED: Final = markers(_PYTHON_TAG)


@dataclass(frozen=True)
class _Llama3:
    special: bool = True

    def steps(self, source: Source, functions: Functions) -> Steps[None]:
        yield from attempt(source, self._calls(source, functions))
        while (yield from source.until(_TAGGED, source.say)):
            yield from attempt(source, self._calls(source, functions))

    def _calls(self, source: Source, functions: Functions) -> Steps[None]:
        separated = True
        while separated:
            yield from source.space()
            yield from source.one_of((_PYTHON_TAG,))
            yield from source.space()
            yield from call_object(source, functions)
            source.settle()
            yield from source.space()
            separated = bool((yield from source.one_of((";",)))) or (yield from source.ahead()) in ("{", "<")
        if (yield from source.ahead()):
            raise BrokenError  # the held characters and all that follow are text


LLAMA3: Final = _Llama3()
"""`{"name": "f", "parameters": {…}}` as the whole output, or behind `<|python_tag|>`; `;` or a
line's end between several: Llama 3.1, 3.2 and 3.3."""


# ---- Mistral ---------------------------------------------------------------------------------------------


def _mistral(source: Source, functions: Functions, marker: str) -> Steps[None]:
    yield from source.space()
    if (yield from source.one_of(("[",))):
        separator = ","
        while separator == ",":
            yield from source.space()
            yield from call_object(source, functions)
            source.settle()
            yield from source.space()
            separator = yield from source.need(",", "]")
        return
    name = yield from function_name(source, functions)
    id = None
    label = yield from source.one_of(("[CALL_ID]", "[ARGS]"))
    if label == "[CALL_ID]":
        id = yield from source.take(NAME)
        yield from source.expect("[ARGS]")
    yield from call(source, name, id)


MISTRAL: Final = Marked(_mistral, ("[TOOL_CALLS]",), special=True)
"""`[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`, and since the tokenizer's version 11
`[TOOL_CALLS]f[CALL_ID]0a1b2c3d4[ARGS]{…}`, without the id since version 13."""


# ---- DeepSeek --------------------------------------------------------------------------------------------

_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_ENDS: Final = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")


def _deepseek(source: Source, functions: Functions, marker: str) -> Steps[None]:
    if marker == _CALLS:
        yield from source.space()
        yield from source.expect(_CALL)
    yield from source.space()
    name = yield from source.take(NAME)
    yield from source.space()
    yield from source.expect(_SEPARATOR)
    fenced = name == "function" and (yield from source.ahead()) != "{"
    if fenced:
        name = yield from function_name(source, functions)
        yield from source.space()
        yield from source.expect("```json")
    elif name not in functions:
        raise BrokenError
    yield from call(source, name)
    if fenced:
        yield from source.space()
        yield from source.expect("```")


DEEPSEEK: Final = Marked(_deepseek, (_CALLS, _CALL), _ENDS, special=True)
"""DeepSeek V3 and R1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, the arguments in a fence of
`json` on lines of their own, `<｜tool▁call▁end｜>`, …, `<｜tool▁calls▁end｜>`. V3.1 has
`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}` instead. What a model writes shows which it is."""
