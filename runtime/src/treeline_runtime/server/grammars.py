"""A request's constraints in the spellings of OpenAI, SGLang and vLLM → one Grammar. Pure functions.

Sources: vLLM 0.32 (`vllm/sampling_params.py`, `entrypoints/openai/*/protocol.py`), SGLang 0.5.23
(`srt/sampling/sampling_params.py`, `srt/entrypoints/openai/protocol.py`), xgrammar 0.2.8 (`structural_tag.py`). A
request has one constraint. Empty values count: the schema {} allows any JSON, the pattern "" the empty text; an empty
list of choices is refused. `treeline_runtime.grammar` finds out whether it compiles.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from treeline_runtime.grammar.schema_words import ignored
from treeline_runtime.messages import Grammar
from treeline_runtime.server.errors import invalid, missing, short, wrong
from treeline_runtime.server.fields import check_unknown, ignore, why_not_json
from treeline_runtime.server.pacing import encode_json

MAX_SOURCE_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 128
"""The deepest schema or structural tag: a property within a property takes two levels."""
MAX_CHOICES: Final = 4096

ANY_OBJECT: Final = Grammar("json", '{"type":"object"}')

STRICT: Final = ContextVar("strict", default=False)
"""Whether schemas with `strict: true` are refused for ignored keywords; set by `Reader.read`."""
_MOST_SHOWN: Final = 8

logger = logging.getLogger(__name__)
_decode = msgspec.json.Decoder().decode
_ROOT: Final = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)


def _meta(description: str, *types: str, **schema: Any) -> Meta:
    said = f"Constraint (at most one): {description}"
    return Meta(description=said, extra_json_schema={"type": [*types, "null"], **schema})


JsonSchema = Annotated[Any, _meta("a JSON Schema.", "object", "string")]
Regex = Annotated[Any, _meta("a pattern for the whole output.", "string")]
Ebnf = Annotated[Any, _meta("a grammar in xgrammar's form, with a rule `root ::= …`.", "string")]
StructuralTag = Annotated[Any, _meta("xgrammar's structural tag, or SGLang's older form.", "object", "string")]
Choices = Annotated[Any, _meta("the texts to choose from.", "array", items={"type": "string"})]
ResponseFormat = Annotated[Any, _meta("OpenAI's format, and type `structural_tag`.", "object")]
StructuredOutputs = Annotated[Any, _meta("vLLM's format.", "object")]
"""Fields of bodies (`FIELDS`), checked by `read_constraint`."""


class Constraint(NamedTuple):
    """The grammar of an output, and the field that it comes from."""

    param: str
    grammar: Grammar


def read_constraint(body: Mapping[str, Any], names: Container[str], where: str = "") -> Constraint | None:
    """The constraint in these fields of a body (`FIELDS`); None = none.

    `where`: prefix of their names in errors. Raises ApiError 400 for a wrong value or a second constraint.
    """
    found: Constraint | None = None
    for name, value in body.items():
        if value is None or name not in names:
            continue
        asked = _FIELDS[name](value, where + name)
        if asked is None:
            continue
        if found is not None:
            raise wrong(asked.param, f"{found.param!r} and {asked.param!r} are two constraints: give one")
        found = asked
    return found


def note_words(schema: Any, param: str, *, strict: bool = False) -> None:
    """Reports a schema's ignored keywords in the response header and the log. Raises ApiError 400 for them if the
    schema is strict and the server refuses that (`STRICT`)."""
    shown = list[str]()
    for word in ignored(schema):
        ignore(f"{param}/{word}")
        shown.append(repr(short(word)))
    if shown and strict and STRICT.get():
        raise invalid(
            param, f"with 'strict', a schema may have no unknown or ignored keywords: {', '.join(shown[:_MOST_SHOWN])}"
        )
    if shown:
        logger.info("ignored keywords of a schema: %s", ", ".join(shown[:_MOST_SHOWN]))


def as_format(grammar: Grammar) -> dict[str, Any]:
    """Converts a grammar into a format of xgrammar's structural tags, to be combined with others."""
    match grammar.kind:
        case "json":
            return {"type": "json_schema", "json_schema": _decode(grammar.source)}
        case "regex":
            return {"type": "regex", "pattern": grammar.source}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": c} for c in _decode(grammar.source)]}
        case "structural_tag":
            made: dict[str, Any] = _decode(grammar.source)["format"]
            return made


def structural_tag(format: Mapping[str, Any], param: str) -> Grammar:
    """A format of xgrammar as a grammar: a combined constraint. Raises ApiError 400 if it is too large."""
    return Grammar("structural_tag", _source({"type": "structural_tag", "format": format}, param, 4 * MAX_SOURCE_BYTES))


def _json(value: Any, param: str, *, strict: bool = False) -> Constraint:
    """A JSON Schema, as an object or text."""
    schema = _parsed(value, param) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise invalid(param, "a JSON Schema is an object ({} permits any value)")
    source = _source(schema, param)
    note_words(schema, param, strict=strict)
    return Constraint(param, Grammar("json", source))


def _json_object(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise invalid(param, "expected true or false")
    return Constraint(param, ANY_OBJECT) if value else None


def _regex(value: Any, param: str) -> Constraint:
    return Constraint(param, Grammar("regex", _text(value, param)))


def _ebnf(value: Any, param: str) -> Constraint:
    text = _text(value, param)
    if not _ROOT.search(text):
        raise invalid(
            param,
            "expected a grammar as xgrammar and llama.cpp write it, with a rule `root ::= …`; Lark's is not taken",
        )
    return Constraint(param, Grammar("ebnf", text))


def _choice(value: Any, param: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise invalid(param, "expected a list of texts that is not empty")
    if len(value) > MAX_CHOICES:
        raise invalid(param, f"more than {MAX_CHOICES} choices")
    return Constraint(param, Grammar("choice", _source(list(dict.fromkeys(value)), param)))


def _structural_tag(value: Any, param: str) -> Constraint:
    """xgrammar's `{"format": …}`, or SGLang's older `{"structures": […], "triggers": […]}`; also as text."""
    tag = _parsed(value, param) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise invalid(param, "expected an object")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise invalid(f"{param}.type", "expected 'structural_tag'")
    if "structures" in tag or "triggers" in tag:
        check_unknown(tag, {"type", "structures", "triggers", "at_least_one"}, harmless=(), where=f"{param}.")
        return Constraint(param, structural_tag(_triggered(tag, param), param))
    check_unknown(tag, {"type", "format"}, harmless=(), where=f"{param}.")
    format = tag.get("format")
    if not isinstance(format, dict) or not isinstance(format.get("type"), str):
        raise invalid(f"{param}.format", "expected an object with a 'type'")
    made = Constraint(param, structural_tag(format, param))
    waiting: list[Any] = [format]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            note_words(part.get("json_schema"), param)
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return made


def _triggered(tag: Mapping[str, Any], param: str) -> dict[str, Any]:
    """SGLang's structures as xgrammar's `triggered_tags`, like xgrammar's own conversion."""
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise invalid(f"{param}.structures", "expected a list that is not empty")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise invalid(f"{param}.triggers", "expected a list of texts that is not empty")
    tags = []
    for index, structure in enumerate(structures):
        where = f"{param}.structures[{index}]"
        if not isinstance(structure, dict):
            raise invalid(where, "expected an object")
        check_unknown(structure, {"begin", "schema", "end"}, harmless=(), where=f"{where}.")
        begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise invalid(where, "expected texts 'begin' and 'end'")
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise invalid(f"{where}.begin", "begins with none of the triggers")
        if not isinstance(schema, dict | None):
            raise invalid(f"{where}.schema", "a JSON Schema is an object ({} permits any value)")
        note_words(schema, f"{where}.schema")
        tags.append({"begin": begin, "content": {"type": "json_schema", "json_schema": schema or {}}, "end": end})
    at_least_one = tag.get("at_least_one") or False
    if not isinstance(at_least_one, bool):
        raise invalid(f"{param}.at_least_one", "expected true or false")
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "at_least_one": at_least_one}


def _response_format(value: Any, param: str) -> Constraint | None:
    if not isinstance(value, dict):
        raise invalid(param, "expected an object with a 'type'")
    match value.get("type"):
        case "text" | "json_object" as kind:
            check_unknown(value, {"type"}, harmless=(), where=f"{param}.")
            return Constraint(param, ANY_OBJECT) if kind == "json_object" else None
        case "json_schema":
            check_unknown(value, {"type", "json_schema", "schema"}, harmless=(), where=f"{param}.")
            return _format_schema(value, param)
        case "structural_tag":
            return Constraint(param, _structural_tag(value, param).grammar)
    raise invalid(f"{param}.type", "expected 'text', 'json_object', 'json_schema' or 'structural_tag'")


def _format_schema(value: Mapping[str, Any], param: str) -> Constraint:
    """OpenAI's `{"json_schema": {"name", "schema", "strict"}}`, or the schema beside the type, as in SGLang."""
    wrapped = value.get("json_schema")
    if wrapped is None and isinstance(value.get("schema"), dict):
        return Constraint(param, _json(value["schema"], f"{param}.schema").grammar)
    where = f"{param}.json_schema"
    if wrapped is None:
        raise missing(where)
    if not isinstance(wrapped, dict):
        raise invalid(where, "expected an object")
    check_unknown(wrapped, {"name", "description", "schema", "strict"}, harmless=(), where=f"{where}.")
    for name, type in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(wrapped.get(name), type | None):
            raise invalid(f"{where}.{name}", f"expected {'a text' if type is str else 'true or false'}")
    if wrapped.get("schema") is None:
        where = f"{where}.schema"
        raise missing(where)
    schema = _json(wrapped["schema"], f"{where}.schema", strict=wrapped.get("strict") is True)
    return Constraint(param, schema.grammar)


_OUTPUTS: Final[Mapping[str, Callable[[Any, str], Constraint | None]]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_FALLBACK: Final = ("disable_fallback",)
"""Whether vLLM may use another library than the named one; there is only one here."""


def _structured_outputs(value: Any, param: str) -> Constraint:
    """vLLM's object, with exactly one member set."""
    if not isinstance(value, dict):
        raise invalid(param, "expected an object")
    check_unknown(value, _OUTPUTS.keys(), harmless=_FALLBACK, where=f"{param}.")
    found = [
        asked
        for name, read in _OUTPUTS.items()
        if value.get(name) is not None and (asked := read(value[name], f"{param}.{name}")) is not None
    ]
    if len(found) != 1:
        raise invalid(param, f"exactly one of {', '.join(_OUTPUTS)} has to be set, {len(found)} are")
    return found[0]


_FIELDS: Final[Mapping[str, Callable[[Any, str], Constraint | None]]] = {
    "response_format": _response_format,
    "json_schema": _json,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
    "choice": _choice,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "structured_outputs": _structured_outputs,
}
FIELDS: Final = frozenset(_FIELDS)
"""Constraint fields of chats and completions."""
SAMPLING_FIELDS: Final = frozenset({"json_schema", "regex", "ebnf", "structural_tag", "choice"})
"""Constraint fields in the `sampling_params` of `/generate`."""


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise invalid(param, "expected a text")
    _check_size(value.encode("utf-8", "surrogatepass"), param)
    if "\0" in value:
        raise invalid(param, "contains a NUL character")
    return value


def _parsed(text: str, param: str) -> Any:
    try:
        return _decode(_text(text, param))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(param, f"not JSON: {short(why_not_json(text.encode('utf-8', 'surrogatepass'), error))}") from None


def _source(value: Any, param: str, most: int = MAX_SOURCE_BYTES) -> str:
    _check_depth(value, param)
    encoded = encode_json(value)
    _check_size(encoded, param, most)
    return encoded.decode()


def _check_size(encoded: bytes, param: str, most: int = MAX_SOURCE_BYTES) -> None:
    if len(encoded) > most:
        raise invalid(param, f"larger than {most} bytes")


def _check_depth(value: Any, param: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise invalid(param, f"nested more than {MAX_DEPTH} levels deep")
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [item for one in inner for item in (one.values() if isinstance(one, dict) else one)]
