"""Rewrites `not`, `if`, `oneOf`, `dependentRequired`, `dependentSchemas`, `propertyNames`, `uniqueItems` of few values
and `minProperties` beside names into keywords that libraries support.

Most of these keywords say what a value is not. `_negated` expresses that as alternatives: a text outside a list, an
object without a property, a number beyond a bound. No value of an alternative fits the schema, but some values outside
the schema may fit no alternative (such as texts that a pattern does not match). So the result may allow less, never
more. If nothing would be left, the keyword stays and is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from functools import partial
from itertools import combinations, pairwise
from typing import Any

from treeline_runtime.grammar.formats import FORMATS
from treeline_runtime.grammar.schema_document import Document, Schema, UnsupportedError
from treeline_runtime.grammar.schema_words import listed, same, types, types_of

Alternatives = list[Any]
"""Schemas of which at least one must hold."""

_DEEPEST = 6
_MOST = 64
"""The most alternatives of one schema, over all conditions; libraries try each."""
_MOST_CHARACTERS, _LONGEST = 2048, 80
"""The most excluded texts, in all and each: the pattern nests a group per character."""
_MOST_VALUES = 6
"""The most values of unique items: they have as many sublists as a schema may have alternatives."""
_MOST_NAMES = 16
_ALL = 2
_BASIC = ("string", "number", "boolean", "null", "array", "object")
_BEYOND = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""Keyword → its type, the keyword for the opposite, and the distance at which that begins."""


def in_plain_words(document: Document) -> None:
    """Rewrites the document's schemas. Raises GrammarError."""
    rewritten = [(schema, *_conditions(document, schema, path)) for path, schema in document.schemas]
    for schema, words, conditions in rewritten:
        for word in words:
            del schema[word]
        if len(conditions) == 1 and "anyOf" not in schema:
            schema["anyOf"] = conditions[0]
        elif conditions:
            schema["allOf"] = [*schema.get("allOf", ()), *({"anyOf": one} for one in conditions)]
    for _path, schema in document.schemas:
        _name_properties(document, schema)


def _conditions(document: Document, schema: Schema, path: str) -> tuple[list[str], list[Alternatives]]:
    """The keywords to rewrite, and their rewriting. Leaves the schema as it is: others may be its opposite."""
    words, conditions = list[str](), list[Alternatives]()
    for word, rule in _RULES.items():
        if word in schema:
            found = rule(document, schema)
            if all(any(_loss(schema, one) < _ALL for one in options) for options in found):
                words += [word, *(("then", "else") if word == "if" else ())]
                conditions += found
    count = math.prod(len(one) for one in conditions if one != schema.get("oneOf"))
    if count > _MOST:
        raise UnsupportedError(words[0], path, f"with more than {_MOST} alternatives is not supported")
    return [word for word in words if word in schema], conditions


def _if(document: Document, schema: Schema) -> list[Alternatives]:
    when, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    unless = _negated(document, when)
    if not unless and when is not True:
        return [[]]
    return [[{"allOf": [when, then]}, *({"allOf": [one, otherwise]} for one in unless)]]


def _dependent_required(document: Document, schema: Schema) -> list[Alternatives]:
    return [
        _depending(name, {"required": [name, *needed]})
        for name, needed in schema["dependentRequired"].items()
        if needed
    ]


def _dependent_schemas(document: Document, schema: Schema) -> list[Alternatives]:
    return [
        _depending(name, {"required": [name], "allOf": [needed]}) for name, needed in schema["dependentSchemas"].items()
    ]


def _depending(name: str, present: Schema) -> Alternatives:
    return [_without(name), {"type": "object", **present}, *_of_no({"object"})]


def _one_of(document: Document, schema: Schema) -> list[Alternatives]:
    """For each option, values of no other option, unless two cannot overlap anyway."""
    options = [document.resolved(option) for option in schema["oneOf"]]
    made: Alternatives = []
    for i, option in enumerate(options):
        others = [other for j, other in enumerate(options) if j != i and not _apart(option, other)]
        most = max(1, int((_MOST / len(options)) ** (1 / max(1, len(others)))))
        without = [sorted(_negated(document, other), key=partial(_loss, option))[:most] for other in others]
        if any(not one and _only_types(other) for one, other in zip(without, others, strict=True)):
            continue  # all of it is of the other one, too
        if any(one and _loss(option, one[0]) == _ALL for one in without):
            continue  # the rest cannot be expressed
        if not all(without):
            return [[]]
        one = schema["oneOf"][i]
        made.append({"allOf": [one, *({"anyOf": other} for other in without)]} if without else one)
    return [made]


def _unique_items(document: Document, schema: Schema) -> list[Alternatives]:
    """For a few values: each at most once, in their order."""
    items = document.resolved(schema.get("items"))
    values = _values(items) if isinstance(items, dict) and "prefixItems" not in schema else []
    if not 0 < len(values) <= _MOST_VALUES:
        return [[]]
    most = min(schema.get("maxItems", _MOST_VALUES), len(values))
    counts = range(int(schema.get("minItems", 0)), int(most) + 1)
    found: Alternatives = [
        {
            "type": "array",
            "prefixItems": [{"enum": [value]} for value in chosen],
            "minItems": count,
            "maxItems": count,
        }
        for count in counts
        for chosen in combinations(values, count)
    ]
    return [[*found, *_of_no({"array"})]]


def _values(schema: Schema) -> list[Any]:
    """All values of a schema that lists them."""
    found = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if schema.keys() == {"type"} and schema["type"] == "boolean":
        return [False, True]
    return [value for i, value in enumerate(found) if not any(same(value, other) for other in found[:i])]


def _least_properties(document: Document, schema: Schema) -> list[Alternatives]:
    """Requires at least one of the named properties: alternatives by the first that is present."""
    names = [*schema.get("properties", ())]
    if schema["minProperties"] != 1 or not 0 < len(names) <= _MOST_NAMES:
        return [[]]
    firsts = [
        {"type": "object", "properties": dict.fromkeys(names[:i], False), "required": [name]}
        for i, name in enumerate(names)
    ]
    return [[*firsts, *_of_no({"object"})]]


_RULES = {
    "minProperties": _least_properties,
    "uniqueItems": _unique_items,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "not": lambda document, schema: [_negated(document, schema["not"])],
    "if": _if,
    "oneOf": _one_of,
}


def _apart(a: Any, b: Any) -> bool:
    """Whether no value fits both schemas: by types, values, a shared required property, or one that one lacks."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values_a, values_b = _finite(a), _finite(b)
    if values_a is not None and values_b is not None:
        return not any(same(x, y) for x in values_a for y in values_b)
    types_a, types_b = (
        _with_integers(types(one)) if values is None else set().union(*map(types_of, values))
        for one, values in ((a, values_a), (b, values_b))
    )
    if types_a and types_b and not types_a & types_b:
        return True
    if a.get("type") != "object" or b.get("type") != "object":
        return False
    if _lacks(a, b) or _lacks(b, a):
        return True
    tags = set(a.get("required", ())) & set(b.get("required", ()))
    return any(_apart(*(one.get("properties", {}).get(tag, True) for one in (a, b))) for tag in tags)


def _lacks(a: Schema, b: Schema) -> bool:
    if a.get("additionalProperties") is not False or "patternProperties" in a:
        return False
    return not set(b.get("required", ())) <= a.get("properties", {}).keys()


def _finite(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _only_types(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() == {"type"} and "integer" not in types(schema)


def _loss(option: Any, alternative: Any) -> int:
    """Estimates how much of an option an alternative removes: 0: a property, 1: perhaps more, 2: all."""
    if not isinstance(option, dict) or not isinstance(alternative, dict):
        return 1
    absent = {name for name, inner in alternative.get("properties", {}).items() if inner is False}
    shared = {*types(option)} & _with_integers(types(alternative))
    if absent & {*option.get("required", ())} or ({"type"} <= option.keys() & alternative.keys() and not shared):
        return _ALL
    return 0 if absent else 1


def _of_no(names: Container[str]) -> Alternatives:
    """All values of other types."""
    others = [name for name in _BASIC if name not in names]
    return [{"type": others}] if others else []


def _with_integers(names: Iterable[str]) -> set[str]:
    return {*names, *(("integer", "number") if {"integer", "number"} & {*names} else ())}


def _without(name: str) -> Schema:
    return {"type": "object", "properties": {name: False}}


def _negated(document: Document, schema: Any, depth: int = 0) -> Alternatives:
    if isinstance(schema, bool):
        return [] if schema else [True]
    if depth > _DEEPEST:
        return []
    if "$ref" in schema:  # alone, as older drafts have it
        return _negated(document, document.target(schema), depth + 1)
    return [one for word, value in schema.items() for one in _word_negated(document, word, value, depth + 1)]


def _word_negated(document: Document, word: str, value: Any, depth: int) -> Alternatives:
    if word in _BEYOND:
        about, opposite, step = _BEYOND[word]
        return [{"type": about, opposite: value + step}] if value + step >= 0 or about == "number" else []
    match word:
        case "type":
            return _of_no(_with_integers(listed(value)))
        case "const":
            return _none_of([value])
        case "enum":
            return _none_of(value)
        case "required":
            return [_without(name) for name in value]
        case "properties":
            each = {name: _negated(document, inner, depth) for name, inner in value.items()}
            return [
                {"type": "object", "properties": {name: {"anyOf": other}}, "required": [name]}
                for name, other in each.items()
                if other
            ]
        case "not":
            return [value]
        case "allOf":
            return [other for one in value for other in _negated(document, one, depth)]
        case "anyOf":
            parts = [_negated(document, one, depth) for one in value]
            return [{"allOf": [{"anyOf": one} for one in parts]}] if all(parts) else []
    return []


def _other_texts(texts: list[str]) -> str:
    """A pattern for all texts except these."""
    rest = dict[str, list[str]]()
    for text in filter(None, texts):
        rest.setdefault(text[0], []).append(text[1:])
    choices = [] if "" in texts else [""]
    choices += [re.escape(char) + _other_texts(more) for char, more in rest.items()]
    choices.append((f"[^{''.join(map(re.escape, rest))}]" if rest else "(?s:.)") + "(?s:.)*")
    return f"(?:{'|'.join(choices)})"


def _none_of(values: list[Any]) -> Alternatives:
    """Texts and numbers except these, and all values of other types."""
    found = _of_no({type for value in values for type in types_of(value)})
    texts = [value for value in values if isinstance(value, str)]
    if texts and sum(map(len, texts)) <= _MOST_CHARACTERS and max(map(len, texts)) <= _LONGEST:
        found.append({"type": "string", "pattern": f"^{_other_texts(texts)}$"})
    truths = {value for value in values if isinstance(value, bool)}
    if len(truths) == 1:
        found.append({"enum": [not truths.pop()]})
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    if numbers:
        found += [
            {"type": "number", "exclusiveMaximum": numbers[0]},
            {"type": "number", "exclusiveMinimum": numbers[-1]},
        ]
        found += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in pairwise(numbers)
            if high - low >= 1
        ]
    return found


def _name_properties(document: Document, schema: Schema) -> None:
    """Moves names from `propertyNames` (a list, a pattern or a length) to where the properties are."""
    names = document.resolved(schema.get("propertyNames"), alone=True)
    if not isinstance(names, dict):
        return
    if names.keys() == {"type"} and "string" in types(names):
        del schema["propertyNames"]
        return
    if {"properties", "patternProperties"} & schema.keys():
        return
    others = schema.get("additionalProperties", True)
    match {word: value for word, value in names.items() if word != "type"}:
        case {"enum": list(known), **rest} if not rest:
            made: Schema = {"properties": {name: others for name in known if isinstance(name, str)}}
        case {"pattern": str(pattern), **rest} if not rest:
            made = {"patternProperties": {pattern: others}}
        case {"format": str(name), **rest} if not rest and name in FORMATS:
            made = {"patternProperties": {FORMATS[name]: others}}
        case {**lengths} if lengths and lengths.keys() <= {"minLength", "maxLength"}:
            least, most = int(lengths.get("minLength", 0)), lengths.get("maxLength")
            made = {"patternProperties": {f"^[\\s\\S]{{{least},{'' if most is None else int(most)}}}$": others}}
        case _:
            return
    if "string" in (types(names) or ["string"]):
        del schema["propertyNames"]
        schema |= made | {"additionalProperties": False}
