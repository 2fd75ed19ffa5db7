"""Schemas as people and libraries write them: older drafts, OpenAPI, extra keywords, and negations. Accepted ones are
enforced; the rest are refused by name."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import typing
import uuid
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import BaseModel, Field
from support.grammar_schemas import judge, parse
from support.grammar_walks import Walker, synthetic_vocabulary
from treeline_runtime.grammar.backend import GrammarBackend, GrammarError
from treeline_runtime.grammar.backends import Backends
from treeline_runtime.grammar.schema_words import ignored
from treeline_runtime.messages import Grammar

VOCABULARY = synthetic_vocabulary(700)
END = VOCABULARY.stop_ids[0]
DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 7))
ZOD = pathlib.Path(__file__).with_name("zod.json")
"""The schemas that zod 4.6's `toJSONSchema` makes of its types, for OpenAPI 3.0 and for each draft that differs."""


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return Backends(VOCABULARY)


def _takes(backend: GrammarBackend, schema: Any, text: str) -> bool:
    matcher = backend.load(backend.compile(Grammar("json", json.dumps(schema)))).matcher([END])
    return all(matcher.accept(VOCABULARY.texts.index(bytes([b]))) for b in text.encode()) and matcher.completed


def _of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema, "b": {"type": "string"}}, "additionalProperties": False}


def _node(child: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"name": {"type": "string"}, "a": child}, "required": ["name", "a"]}


def _holds(child: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": child}, "required": ["k"]}


_N = {"$ref": "#/$defs/n"}
_ENDLESS = _holds(_N)


def _tagged(kind: str, more: dict[str, Any]) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, **more}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "taken", "others"),
    [
        ({"$schema": DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"$schema": DRAFT_4, "type": "integer", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
        (
            {"$schema": DRAFT_7, "type": "array", "items": [{"type": "integer"}], "additionalItems": False},
            ["[1]", "[]"],
            ["[1, 2]", '["a"]'],
        ),
        (
            {"$schema": DRAFT_7, "type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
            ["[1, 2]"],
            ["[1, 1]"],
        ),
        ({"type": "array", "items": {"const": 1}, "additionalItems": False}, ["[1, 1]"], ["[2]"]),
        ({"type": "string", "nullable": True, "maxLength": 1}, ['"a"', "null"], ['"ab"', "1"]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ['"a"'], ["null"]),
        ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
        ({"type": "integer", "format": "int64"}, ["9223372036854775807"], ["9223372036854775808", "1.5"]),
        ({"type": ["integer", "null"], "format": "int64", "maximum": 7}, ["7", "null"], ["8"]),
        ({"type": "number", "format": "double", "minimum": -1.7976931348623157e308}, ["1.5"], ['"a"']),
        (
            _of(True) | {"$schema": DRAFT_7, "dependencies": {"a": ["b"]}},
            ["{}", '{"b": "x"}', '{"a": 1, "b": "x"}'],
            ['{"a": 1}'],
        ),
        (_of(True) | {"dependentRequired": {"a": ["b"]}}, ["{}", '{"a": 1, "b": "x"}'], ['{"a": 1}']),
        (
            _of(True) | {"$schema": DRAFT_7, "dependencies": {"a": {"properties": {"b": {"const": "x"}}}}},
            ['{"b": "y"}', '{"a": 1, "b": "x"}'],
            ['{"a": 1, "b": "y"}'],
        ),
        (_of(True) | {"minProperties": 1}, ['{"a": 1}', '{"b": "x"}', '{"a": 1, "b": "x"}'], ["{}"]),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"b": 1}', '{"a": 1, "c": 1}'], ["{}"]),
        ({"required": ["a", "b"], "minProperties": 2}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy": 1}'], ['{"a": 1}', '{"\\u0061": 1}']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a": 1}', "{}"], ['{"b": 1}']),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"ab": 1}', '{"": 1}'], ['{"abc": 1}']),
        ({"type": "object", "propertyNames": {"minLength": 2}}, ['{"ab": 1}', '{"é\u00e9": 1}'], ['{"a": 1}']),
        ({"type": "object", "propertyNames": {"type": "string"}}, ['{"b": 1}'], ["1"]),
        ({"properties": {"a": {"not": {}}}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
        ({"type": "string", "not": {"enum": ["", "ab"]}}, ['"a"', '"abc"', '"b"'], ['""', '"ab"']),
        ({"type": "integer", "not": {"enum": [1, 5]}}, ["0", "2", "4", "6"], ["1", "5"]),
        ({"not": {"type": ["object", "array"]}}, ["1", '"a"', "null"], ["{}", "[]"]),
        (_of(True) | {"not": {"required": ["a", "b"]}}, ["{}", '{"a": 1}', '{"b": "x"}'], ['{"a": 1, "b": "x"}']),
        (
            _of({"enum": ["x", "y"]}) | {"if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
            ['{"a": "x", "b": "z"}', '{"a": "y"}', '{"b": "z"}'],
            ['{"a": "x"}', "{}"],
        ),
        (
            _of(True) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": "x"}'],
            ["{}", '{"a": 1, "b": "x"}'],
        ),
        ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ["1", '"b"'], ['"a"', "2"]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["a", "b"]', "[]"], ['["a", "a"]']),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
        ({"oneOf": [{"type": "string"}, {"enum": [1, None]}]}, ['"b"', "1"], ["2"]),
        (
            {"oneOf": [_tagged("x", {"n": {"enum": [1]}}), {"$ref": "#/$defs/y"}], "$defs": {"y": _tagged("y", {})}},
            ['{"kind": "x", "n": 1}', '{"kind": "y"}'],
            ['{"kind": "z"}', '{"kind": "x", "n": ""}'],
        ),
        ({"oneOf": [_tagged(f"t{i}", {}) for i in range(70)]}, ['{"kind": "t69"}'], ['{"kind": "t70"}']),
        ({"type": "string", "format": "utc-millisec", "faker": "x", "additonalProperties": 1}, ['"a"'], ["1"]),
        (
            {
                "$schema": DRAFT_4,
                "id": "http://x/y",
                "allOf": [{"$ref": "http://x/y#/definitions/a"}],
                "definitions": {"a": {"enum": [1]}},
            },
            ["1"],
            ["2"],
        ),
        ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "enum": [1]}}}, ["1"], ["2"]),
        (_node({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), ['{"name": "x", "a": null}'], ['{"name": "x"}']),
        (_node({"type": "array", "items": {"$ref": "#"}}), ['{"name": "x", "a": []}'], ['{"name": "x", "a": [1]}']),
        ({"$schema": DRAFT_4, "$ref": "#n", "definitions": {"a": {"id": "#n", "enum": [1]}}}, ["1"], ["2"]),
        ({"$ref": "b#/$defs/c", "$defs": {"a": {"$id": "b", "$defs": {"c": {"enum": [1]}}}}}, ["1"], ["2"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "type": "array", "items": {"$ref": "#"}}}},
            ["[[]]"],
            ["{}", "[1]"],
        ),
        (
            {"$ref": "#/components/a%20b", "components": {"a b": {"items": {"$ref": "#"}, "type": "array"}}},
            ["[[]]"],
            ["1"],
        ),
        ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-01-02"'], ['"1999-01-02"', '"2"']),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_schema_accepts_its_values_and_no_others(
    backend: GrammarBackend, schema: Any, taken: list[str], others: list[str]
) -> None:
    assert [text for text in taken if not _takes(backend, schema, text)] == []
    assert [text for text in others if _takes(backend, schema, text)] == []
    if not (schema.get("format") in ("int32", "int64", "double") or "nullable" in schema):
        assert [text for text in taken if not judge(schema).is_valid(json.loads(text))] == []
        assert [text for text in others if judge(schema).is_valid(json.loads(text))] in ([], ["{}"])


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"contains": {"type": "string"}}, "'contains' at /"),
        ({"anyOf": [True], "unevaluatedProperties": False}, "'unevaluatedProperties' at /"),
        ({"allOf": [True], "unevaluatedItems": False}, "'unevaluatedItems' at /"),
        ({"$ref": "http://example.com/a.json#/b"}, r"'\$ref' at / to another document \(http://example.com/a.json#/b\)"),
        ({"$dynamicRef": "#a"}, r"'\$dynamicRef' at /"),
        ({"uniqueItems": True}, "'uniqueItems' at /"),
        ({"not": {"pattern": "a"}}, "'not' at /"),
        ({"type": "string", "not": {"const": "a" * 500}}, "'not' at / is not supported"),
        ({"if": {"pattern": "a"}, "then": {"minLength": 1}}, "'if' at /"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "'propertyNames' at /"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'oneOf' at / is not supported"),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, "'oneOf' at / is not"),
        ({"type": "string", "not": {"type": "string", "pattern": "^a"}}, "'not' at / is not supported"),
        ({"$ref": "#"}, "the schema at / refers to itself for the same value"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "hold another one of its kind"),
        (_node({"$ref": "#"}), "hold another one of its kind: at /"),
        (_node({"type": "array", "items": {"$ref": "#"}, "minItems": 2}), "hold another one of its kind: at /"),
        (_node({"anyOf": [{"$ref": "#"}, {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]}), "hold"),
        ({"anyOf": [_ENDLESS, _ENDLESS], "$defs": {"n": _ENDLESS}}, "hold another one of its kind"),
        ({**_holds(_N), "$defs": {"n": _ENDLESS}}, "hold another one of its kind"),
        ({"properties": {"a": _N}, "$defs": {"n": _ENDLESS}}, "hold another one"),
        ({"anyOf": [{"type": "integer"}, _holds({"$ref": "#/anyOf/1"})]}, "hold another one of its kind"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, r"'\$schema' at / names a draft before the fourth"),
        ({"$schema": DRAFT_4, "oneOf": [{"const": 1}, {"const": 2}]}, "'const' at /oneOf/1 is no word of draft 4"),
        ({"prefixItems": [True], "items": [True]}, "'items' at / is a list beside"),
        ({"dependencies": ["a"]}, "'dependencies' at / has not the form"),
        ({"dependencies": {"a": ["b"]}, "dependentRequired": 3}, "'dependentRequired' at / has not the form"),
        ({"properties": {"a": True}, "oneOf": [{"required": [f"p{i}"]} for i in range(70)]}, "'oneOf' at / with more"),
    ],
)  # fmt: skip
def test_unenforceable_schemas_are_refused_by_name(backend: GrammarBackend, schema: Any, name: str) -> None:
    with pytest.raises(GrammarError, match=name):
        backend.compile(Grammar("json", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"pattern": "^a"}, {"type": "integer"}]},
        {"oneOf": [{"pattern": "^a"}, {"multipleOf": 3}]},
        {"oneOf": [{"items": {"type": "string"}}, {"minimum": 3}]},
        {"oneOf": [{"additionalProperties": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}]},
        {
            "$schema": DRAFT_7,
            "definitions": {"any": {"title": "x"}},
            "oneOf": [_holds({"$ref": "#/definitions/any", "type": "string"}), _holds({"type": "integer"})],
        },
        {
            "$schema": DRAFT_7,
            "definitions": {"any": {"title": "x"}},
            "oneOf": [_holds({"$ref": "#/definitions/any", "enum": ["s"]}), _holds({"enum": [1]})],
        },
        {
            "$schema": DRAFT_7,
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
                {"type": "object", "required": ["b"]},
            ],
        },
        {"not": {"format": "date", "pattern": "^2"}},
        {"if": {"format": "date", "pattern": "^2"}, "then": {"type": "string"}, "else": True},
        {"oneOf": [{"format": "date", "pattern": "^2"}, {"type": "integer"}]},
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/n", "maxLength": 2},
            "$defs": {"n": {"pattern": "^[a-z]+$"}},
        },
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}, "^[a]": {"type": ["integer", "string"]}},
            "additionalProperties": False,
        },
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.2}]},
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0}]},
        {"type": "number", "not": {"const": 0}, "minimum": -0.5, "maximum": 0.5},
        {"type": "string", "pattern": "^[(?<x]$"},
        {"type": "string", "pattern": "(?i)^[^ß]$"},
    ],
    ids=lambda schema: json.dumps(schema)[:90],
)  # fmt: skip
def test_accepted_schemas_are_enforced_and_the_rest_refused(backend: GrammarBackend, schema: Any) -> None:
    try:
        compiled = backend.load(backend.compile(Grammar("json", json.dumps(schema))))
    except GrammarError:
        return
    walker = Walker(backend, VOCABULARY)
    outputs = [walk.text.decode() for seed in range(100) if (walk := walker.walk(compiled, seed, 15, 160)).whole]
    assert [text for text in outputs if not judge(schema).is_valid(parse(text))] == []


def test_a_property_name_cannot_be_escaped_differently(backend: GrammarBackend) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^b": {"type": "integer"}}}
    for text in ('{"\\u0061": "x"}', '{"\\u0062": "x"}', '{"a": "x"}', '{"b": "x"}'):
        assert not _takes(backend, schema, text)


def test_keywords_without_effect_are_named_once() -> None:
    inner = {"additonalProperties": False, "x-note": 1, "properties": {"faker": {"format": "datetime", "faker": 1}}}
    assert ignored({"$defs": {"a": inner}, "title": "t", "items": [inner], "id": "x", "nullable": True}) == [
        "additonalProperties",
        "faker",
        "format.datetime",
    ]


Colour = enum.Enum("Colour", ["red", "blue"], type=str)


class Cat(BaseModel):
    kind: typing.Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: typing.Literal["dog"]
    friend: Dog | None = None


class Everything(BaseModel):
    """A field of each type that has a schema, except sets of items that no short list names: a grammar cannot keep
    their items distinct."""

    a: str
    b: int
    c: float
    d: bool
    e: bytes
    f: None
    g: Any
    h: decimal.Decimal
    i: Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)]
    j: datetime.datetime | datetime.date | datetime.time | datetime.timedelta
    k: uuid.UUID | pathlib.Path | ipaddress.IPv4Address | ipaddress.IPv6Network
    m: list[int] | tuple[int, str] | tuple[int, ...]
    n: set[Colour] | frozenset[bool]
    o: dict[str, int] | dict[int, str] | dict[Colour, int] | dict[uuid.UUID, int]
    p: Annotated[Cat | Dog, Field(discriminator="kind")]
    q: typing.Literal["a", 1, True, None]
    r: Annotated[int, Field(gt=0, lt=10, multiple_of=2)]
    s: Annotated[str, Field(min_length=1, max_length=3, pattern="^a")]
    t: pydantic.Json[int] | pydantic.SecretStr | pydantic.Base64Bytes | pydantic.ByteSize | pydantic.AwareDatetime
    u: pydantic.AnyUrl | pydantic.HttpUrl | pydantic.FilePath | pydantic.IPvAnyAddress | pydantic.UUID4
    v: pydantic.JsonValue


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_types_of_pydantics_fields_are_accepted(backend: GrammarBackend, mode: Any) -> None:
    backend.compile(Grammar("json", json.dumps(Everything.model_json_schema(mode=mode))))


def test_zods_types_are_accepted(backend: GrammarBackend) -> None:
    refused = {}
    for name, schema in json.loads(ZOD.read_text()).items():
        try:
            backend.compile(Grammar("json", json.dumps(schema)))
        except GrammarError as error:
            refused[name] = str(error)
    assert refused == {}
