"""Qwen3-Coder's calls, whose arguments are elements rather than JSON:

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is text, which is a string or JSON by what the function's schema says of the parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any, Final

from treeline_runtime.parsers.pythonic import as_json
from treeline_runtime.parsers.source import BrokenError, Markers, OverError, Source, Steps
from treeline_runtime.parsers.tools import Functions, Marked

_NAME: Final = re.compile(r"[^<>\n]*")
_TEXT: Final = re.compile(r"[^<]*")
_PARAMETER: Final = "<parameter="
_FURTHER: Final = (_PARAMETER, "</function>", "</tool_call>")
_VALUE_ENDS: Final = ("</parameter>", _PARAMETER, "</function>")
_VALUE_MARKERS: Final = Markers(*_VALUE_ENDS)
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_KINDS: Final = frozenset(("string", "number", "boolean", "null", "object", "array"))
_STRING: Final = frozenset(("string",))
_FIRST: Final = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_MAX_DEPTH: Final = 16
"""Of schemas within schemas that are looked through for a type."""


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
        kinds = _kinds_of_parameter(functions[name], key)
        tag = yield from (_string(source) if kinds == _STRING else _value(source, kinds))
        if tag == "</parameter>":
            tag = yield from _further(source)
    source.argue("}")


def _further(source: Source) -> Steps[str]:
    """The tag that follows a name or a value."""
    yield from source.space()
    tag = yield from source.one_of(_FURTHER)
    if not tag:
        raise BrokenError if (yield from source.ahead()) else OverError
    return tag


def _string(source: Source) -> Steps[str]:
    """Tell a value as a JSON string, as it comes → the tag behind it."""
    if (yield from source.ahead()) == "\n":
        source.skip(1)
        source.release()
    source.argue('"')
    tag = yield from source.until(_VALUE_MARKERS, lambda piece: source.argue(_quoted(piece)[1:-1]))
    if not tag:
        raise OverError
    space = source.release().removesuffix(tag).removesuffix("\n")
    source.argue(_quoted(space)[1:])
    source.certain = True
    return tag


def _value(source: Source, kinds: frozenset[str]) -> Steps[str]:
    """Read a value, held, and tell it as JSON → the tag behind it."""
    tag = ""
    while not tag:
        yield from source.take(_TEXT)
        tag = yield from source.one_of(_VALUE_ENDS)
        if not tag and not (yield from source.ahead()):
            raise OverError
    text = source.release().removesuffix(tag).removeprefix("\n").removesuffix("\n")
    source.argue(_as_json(text, kinds))
    source.certain = True
    return tag


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """A value's text: JSON (or Python) of one of `kinds`, else a string."""
    try:
        value = as_json(_PYTHON_WORDS.get(text.strip(), text))
    except BrokenError:
        return _quoted(text)
    kind = _FIRST.get(value[0], "number")
    return value if kind in kinds and (kind != "string" or kinds == _STRING) else _quoted(text)


# ---- what a schema says of a parameter -------------------------------------------------------------------


def _kinds_of_parameter(schema: Any, key: str) -> frozenset[str]:
    """Of which JSON types a parameter may be: one that is not described is a string."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or key not in properties:
        return _STRING
    return _kinds(properties[key], schema, _MAX_DEPTH)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return _KINDS
    found = _KINDS
    if isinstance(reference := schema.get("$ref"), str):
        found &= _kinds(_resolved(reference, root), root, depth - 1)
    if isinstance(type := schema.get("type"), str | list):
        names = [type] if isinstance(type, str) else type
        found &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if isinstance(values := schema.get("enum"), list):
        found &= {_FIRST.get(json.dumps(value)[0], "number") for value in values}
    if "const" in schema:
        found &= {_FIRST.get(json.dumps(schema["const"])[0], "number")}
    for any in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(any), list):
            found &= frozenset().union(*(_kinds(branch, root, depth - 1) for branch in branches))
    if isinstance(branches := schema.get("allOf"), list):
        found = reduce(frozenset.intersection, (_kinds(branch, root, depth - 1) for branch in branches), found)
    return found


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer within the schema points to; None where it is elsewhere."""
    place: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


QWEN_XML: Final = Marked(_call, ("<tool_call>", "<function="), ("</tool_call>",), special=True)
"""Qwen3-Coder, Qwen3.5 and those that write alike."""
