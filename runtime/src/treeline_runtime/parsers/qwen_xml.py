"""Qwen3-Coder's calls, whose arguments are elements rather than JSON:

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Whether a value is a string or JSON depends on the parameter's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from treeline_runtime.parsers.pythonic import as_json
from treeline_runtime.parsers.source import MAX_HELD, BrokenError, OverError, Source, Steps, markers
from treeline_runtime.parsers.tools import Functions, Marked

_NAME: Final = re.compile(r"[^<>\n]*")
_PARAMETER: Final = "<parameter="
_FURTHER: Final = (_PARAMETER, "</function>", "</tool_call>")
_VALUE_ENDS: Final = ("</parameter>", _PARAMETER, "</function>")
_VALUE_MARKERS: Final = markers(*_VALUE_ENDS)
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_KINDS: Final = frozenset(("string", "number", "boolean", "null", "object", "array"))
_STRING: Final = frozenset(("string",))
_FIRST: Final = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_TYPES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_NARROWING: Final = ("enum", "const", "pattern", "format", "minLength", "maxLength")
_MAX_SCHEMAS: Final = 64
_MAX_VALUES: Final = 1024


def _call(source: Source, functions: Functions, marker: str) -> Steps[None]:
    if marker == "<tool_call>":
        yield from source.space()
        yield from source.expect("<function=")
    name = yield from source.take(_NAME)
    yield from source.expect(">")
    if name not in functions:
        raise BrokenError
    tag = yield from _further(source)
    source.begin_call(name)
    source.argue("{")
    separator = ""
    while tag == _PARAMETER:
        key = yield from source.take(_NAME)
        yield from source.expect(">")
        source.settle()
        source.argue(f"{separator}{_quoted(key)}: ")
        source.certain = True  # that the call has begun: what follows is its, if the output ends there
        separator = ", "
        tag = yield from _value(source, _parameter(functions[name], key))
        if tag == "</parameter>":
            tag = yield from _further(source)
    source.argue("}")


def _further(source: Source) -> Steps[str]:
    """The tag after a name or value."""
    yield from source.space()
    return (yield from source.need(*_FURTHER))


def _value(source: Source, parameter: _Parameter) -> Steps[str]:
    """Emits a value as JSON; returns the tag after it. Strings and very long values are emitted as they come."""
    if (yield from source.ahead()) == "\n":
        source.skip(1)
        source.release()
    as_string = parameter.kinds == _STRING and not parameter.narrow
    if as_string:
        source.argue('"')
    waiting: list[str] = []
    chars = 0

    def tell(piece: str) -> None:
        nonlocal as_string, chars
        if not as_string:
            waiting.append(piece)
            chars += len(piece)
            if chars <= MAX_HELD:
                return
            source.argue('"')
            piece, as_string = "".join(waiting), True
        source.argue(_quoted(piece)[1:-1])

    tag = yield from source.until(_VALUE_MARKERS, tell)
    if not tag:
        raise OverError
    space = source.release().removesuffix(tag).removesuffix("\n")
    if as_string:
        source.argue(_quoted(space)[1:])
    else:
        source.argue(_as_json("".join(waiting) + space, parameter))
    source.certain = True
    return tag


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, parameter: _Parameter) -> str:
    """A value's text as JSON (or Python) of an allowed kind, else as a string."""
    string = _quoted(text.strip() if parameter.narrow else text)
    try:
        value = as_json(_PYTHON_WORDS.get(text.strip(), text))
    except BrokenError:
        return string
    return value if _kind(value) in parameter.kinds - _STRING else string


def _kind(value: str) -> str:
    return _FIRST.get(value[0], "number")


# ---- what a schema says of a parameter -------------------------------------------------------------------


@dataclass
class _Parameter:
    """The JSON types that a parameter's value may have. Reads at most `_MAX_SCHEMAS` schemas; others allow any type."""

    root: Mapping[str, Any]
    kinds: frozenset[str] = _STRING
    narrow: bool = False
    """Strings have further restrictions: surrounding white space is not part of them."""
    looked_at: int = 0

    def look_at(self, schema: Any) -> frozenset[str]:
        self.looked_at += 1
        if not isinstance(schema, Mapping) or self.looked_at > _MAX_SCHEMAS:
            return _KINDS
        self.narrow = self.narrow or any(key in schema for key in _NARROWING)
        kinds = _KINDS
        if isinstance(reference := schema.get("$ref"), str):
            kinds &= self.look_at(_resolved(reference, self.root))
        if isinstance(names := schema.get("type"), str | list):
            names = [names] if isinstance(names, str) else names
            kinds &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        if isinstance(values := schema.get("enum"), list):
            kinds &= {_TYPES.get(type(value), "number") for value in values[:_MAX_VALUES]}
        if "const" in schema:
            kinds &= {_TYPES.get(type(schema["const"]), "number")}
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list):
                kinds &= frozenset().union(*map(self.look_at, branches[:_MAX_SCHEMAS]))
        if isinstance(branches := schema.get("allOf"), list):
            kinds = reduce(frozenset.intersection, map(self.look_at, branches[:_MAX_SCHEMAS]), kinds)
        return kinds


def _parameter(schema: Any, key: str) -> _Parameter:
    """A parameter outside the schema is a string."""
    root = schema if isinstance(schema, Mapping) else {}
    parameter, properties = _Parameter(root), root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        parameter.kinds = parameter.look_at(properties[key])
    return parameter


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a JSON pointer within the schema; None if it is elsewhere."""
    place: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


QWEN_XML: Final = Marked(_call, ("<tool_call>", "<function="), ("</tool_call>",), special=True)
"""Qwen3-Coder, Qwen3.5 and others with this format."""
