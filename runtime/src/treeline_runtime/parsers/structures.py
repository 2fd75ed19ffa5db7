"""The structure of outputs with calls, for constrained decoding: xgrammar's structural tags, as dicts.

For each format, a function from the callable functions to a format of xgrammar's structural tags (version 0.2.8). It
agrees with the format's parser: everything it allows is parsed into calls of these functions, with valid arguments. So
free text may contain no marker without a call. Reasoning comes before the structure, except in harmony.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

_MAX_WHITESPACE: Final = 32
"""The most white space between tokens of JSON: enough to indent, not endless."""

_OBJECT: Final = '{"name": '
_DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"

MAX_REPEATED_CHARS: Final = 1 << 18
"""The most text that may be repeated for each function."""

Format = dict[str, Any]


class Function(msgspec.Struct, frozen=True):
    """A callable function."""

    name: str
    """Letters, digits, `_`, `-` and `.`: formats other than JSON cannot quote."""
    parameters: dict[str, Any] | None = None
    """The arguments' JSON Schema; None = no arguments."""
    strict: bool | None = None
    """False: the arguments are any object. True: they are valid under the schema."""

    @property
    def schema(self) -> dict[str, Any]:
        if self.strict is False:
            return {"type": "object"}
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return _of_objects(self.parameters)

    @property
    def arguments(self) -> Format:
        return _json(self.schema)


class Structure(Protocol):
    """A format's outputs with calls. `required`: at least one call and nothing else; otherwise text with possible
    calls. `parallel`: several calls are possible. For a named function, pass only that one, required.
    """

    def __call__(self, functions: Sequence[Function], *, required: bool, parallel: bool) -> Format: ...


# ---- the formats -----------------------------------------------------------------------------------------


def hermes(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """The structure that the templates of Hermes and Qwen use."""
    calls = [_tag(f"<tool_call>\n{_object(f, 'arguments')}", f.arguments, "}\n</tool_call>") for f in functions]
    return _marked(calls, "<tool_call>", "\n", required=required, parallel=parallel)


def qwen_xml(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """Qwen3-Coder's elements. Texts contain no tag that parsers take for the end of a value."""
    ends = ["<parameter=", "</function>"]
    calls = [
        _tag(
            f"<tool_call>\n<function={f.name}>\n",
            {**f.arguments, "style": "qwen_xml", "excludes": ends},
            "\n</function>\n</tool_call>",
        )
        for f in functions
    ]
    return _marked(calls, "<tool_call>", "\n", ["<function="], required=required, parallel=parallel)


def llama3(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """Objects as the whole output, or after `<|python_tag|>`. Text begins with no brace, which would be a call."""
    objects = [_tag(_object(f, "parameters"), f.arguments, "}") for f in functions]
    calls = _some(objects, [_OBJECT], "; ", parallel=parallel)
    whole = _sequence({"type": "optional", "content": _const("<|python_tag|>")}, calls)
    if required:
        return whole
    text = {"type": "dispatch", "rules": [["<|python_tag|>", calls]], "loop": False}
    first = {"type": "regex", "pattern": "[ \\t\\n\\r]*([^ \\t\\n\\r{<]|<[^ \\t\\n\\r{|<])"}
    return {"type": "or", "elements": [whole, {"type": "optional", "content": _sequence(first, text)}]}


def mistral(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """A list, or one name, depending on the model's training."""
    objects = [_tag(_object(f, "arguments"), f.arguments, "}") for f in functions]
    calls = [_tag("[TOOL_CALLS] [", _some(objects, [_OBJECT], ", ", parallel=parallel), "]")]
    id = {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"}
    for f in functions:
        calls.append(_tag(f"[TOOL_CALLS]{f.name}[ARGS]", f.arguments, ""))
        calls.append(_tag(f"[TOOL_CALLS]{f.name}[CALL_ID]", _sequence(id, _const("[ARGS]"), f.arguments), ""))
    return _marked(calls, "[TOOL_CALLS]", "", required=required, parallel=parallel)


def deepseek_v3(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """A list of calls with arguments in a fence."""
    tags = [
        _tag(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{f.name}\n```json\n", f.arguments, "\n```<｜tool▁call▁end｜>")
        for f in functions
    ]
    return _deepseek(_some(tags, [_DEEPSEEK_CALL], "\n", parallel=parallel), required=required)


def deepseek_v31(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """A list of calls without fences."""
    tags = [_tag(f"<｜tool▁call▁begin｜>{f.name}<｜tool▁sep｜>", f.arguments, "<｜tool▁call▁end｜>") for f in functions]
    return _deepseek(_some(tags, [_DEEPSEEK_CALL], "", parallel=parallel), required=required)


def _deepseek(calls: Format, *, required: bool) -> Format:
    listed = _tag("<｜tool▁calls▁begin｜>", calls, "<｜tool▁calls▁end｜>")
    excludes = [_DEEPSEEK_CALL]
    return _marked([listed], "<｜tool▁calls▁begin｜>", "", excludes, required=required, parallel=False)


def harmony(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """Messages: analysis and (if text is allowed) preambles, then answer or calls. The final `<|call|>` or `<|return|>`
    may be left to the end of the output, as gpt-oss does."""
    specials = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "call", "return")]
    text = {"type": "any_text", "excludes": specials}
    before = [
        _tag(f"<|channel|>{channel}<|message|>", text, "<|end|><|start|>assistant")
        for channel in (("analysis",) if required else ("analysis", "commentary"))
    ]
    calls = [
        _tag(begin, f.arguments, "")
        for f in functions
        for begin in (
            f"<|channel|>commentary to=functions.{f.name} <|constrain|>json<|message|>",
            f" to=functions.{f.name}<|channel|>commentary <|constrain|>json<|message|>",
        )
    ]
    triggers = ["<|channel|>commentary to=functions.", " to=functions."]
    some = _some(calls, triggers, "<|call|><|start|>assistant", parallel=parallel)
    last = [_sequence(some, _maybe("<|call|>"))]
    if not required:
        last.append(_sequence(_const("<|channel|>final<|message|>"), text, _maybe("<|return|>")))
    messages = {"type": "star", "content": {"type": "or", "elements": before}}
    return _sequence(messages, {"type": "or", "elements": last})


def pythonic(functions: Sequence[Function], *, required: bool, parallel: bool) -> Format:
    """A list of calls with JSON values. Enforces schemas of single properties, and required ones.

    In free text a list is recognised by its first call, and each alternative needs all others after it. Where that
    grows too large, lists have one call each, and there may be several lists.
    """
    keywords = {f.name: _keywords(f.schema) for f in functions}
    calls = [_tag(f"{name}(", values, ")") for name, values in keywords.items()]
    names = [call["begin"] for call in calls]
    if required:
        return _tag("[", _some(calls, names, ", ", parallel=parallel), "]")
    further = _some(calls, names, ", ", parallel=True)
    more: list[Format] = []
    if parallel and len(calls) * len(json.dumps(further)) <= MAX_REPEATED_CHARS:
        more = [{"type": "optional", "content": _sequence(_const(", "), further)}]
    lists = [_tag(f"[{name}(", _sequence(values, _const(")"), *more), "]") for name, values in keywords.items()]
    return {
        "type": "triggered_tags",
        "triggers": [tag["begin"] for tag in lists],
        "tags": lists,
        "stop_after_first": not parallel,
    }


def _keywords(schema: dict[str, Any]) -> Format:
    """`a=1, b="x"`: required ones in order, then any others."""
    properties = schema.get("properties", {})
    required = [name for name in schema.get("required", []) if name in properties]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    values = {
        name: _json({**shared, **value} if isinstance(value, dict) else value) for name, value in properties.items()
    }
    optional = [_tag(f"{name}=", values[name], "") for name in properties if name not in required]
    if not properties and schema.get("additionalProperties", True) is not False:
        name = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]*"}
        keyword = _sequence(name, _tag("=", _json({}), ""))
        further = {"type": "star", "content": _sequence(_const(", "), keyword)}
        return {"type": "optional", "content": _sequence(keyword, further)}
    first: list[Format] = []
    for name in required:
        first += [_const(f"{', ' if first else ''}{name}="), values[name]]
    if not optional:
        return _sequence(*first) if first else _const("")
    if not first:
        return {"type": "tags_with_separator", "tags": optional, "separator": ", "}
    further = _sequence(_const(", "), {"type": "or", "elements": optional})
    return _sequence(*first, {"type": "star", "content": further})


# ---- their parts -----------------------------------------------------------------------------------------


def _marked(
    calls: list[Format], trigger: str, separator: str, excludes: Sequence[str] = (), *, required: bool, parallel: bool
) -> Format:
    """Calls that begin with a marker. `excludes`: what else a parser takes for calls; not in free text."""
    if required:
        return _some(calls, [trigger], separator, parallel=parallel)
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": calls,
        "excludes": list(excludes),
        "stop_after_first": not parallel,
    }


def _some(tags: list[Format], triggers: list[str], separator: str, *, parallel: bool) -> Format:
    """At least one of them. `triggers`: their beginnings.

    As tags after a trigger, xgrammar's compile time grows linearly with their number; as a choice of texts,
    quadratically: 300 took seconds and 130 MB.
    """
    one = {"type": "triggered_tags", "triggers": triggers, "tags": tags, "at_least_one": True, "stop_after_first": True}
    further = {"type": "star", "content": _sequence(_const(separator), one)}
    return _sequence(one, further) if parallel else one


def _object(function: Function, key: str) -> str:
    return f'{_OBJECT}{json.dumps(function.name, ensure_ascii=False)}, "{key}": '


def _of_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without branches that are not objects."""
    for branching in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(branching), list):
            kept = [b for b in branches if isinstance(b, dict) and b.get("type", "object") == "object"]
            return {**schema, branching: [_of_objects(branch) for branch in kept]}
    return schema if "$ref" in schema or "allOf" in schema else {**schema, "type": "object"}


def _json(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _maybe(text: str) -> Format:
    return {"type": "optional", "content": _const(text)}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
