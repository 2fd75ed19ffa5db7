"""Constraints in every spelling of OpenAI's API, SGLang and vLLM, and the errors of the refused ones."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treeline_runtime.messages import FinishReason, GenerateReq, Grammar, SamplingParams
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.grammars import (
    FIELDS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    SAMPLING_FIELDS,
    Constraint,
    as_format,
    read_constraint,
)
from treeline_runtime.server.http import ApiRequest
from treeline_runtime.server.jobs import Generations
from treeline_runtime.server.limits import ByteBudget
from treeline_runtime.server.service import Service, State
from treeline_wire import headers

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": 1.0}}, "required": ["z"]}
AS_JSON = Grammar("json", '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":1.0}},"required":["z"]}')
ANY = Grammar("json", "{}")
OBJECT = Grammar("json", '{"type":"object"}')
GBNF = 'item ::= "a" | "b"\nroot ::= item+'
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def read(body: dict[str, Any]) -> Constraint | None:
    return read_constraint(body, FIELDS)


def schema_format(**json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT),
        (schema_format(name="n", schema=SCHEMA, strict=True), AS_JSON),
        (schema_format(name="n", schema=SCHEMA, strict=False, description="d"), AS_JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_JSON),
        ({"json_schema": SCHEMA}, AS_JSON),
        ({"json_schema": json.dumps(SCHEMA, indent=2)}, AS_JSON),
        ({"guided_json": SCHEMA}, AS_JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}}, AS_JSON),
        ({"guided_json": {}}, ANY),
        ({"guided_json": "{}"}, ANY),
        ({"structured_outputs": {"json": {}}}, ANY),
        (schema_format(name="n", schema={}), ANY),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"json_schema": {"const": 1 << 70}}, Grammar("json", f'{{"const":{1 << 70}}}')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "", "json": None, "disable_any_whitespace": False}}, Grammar("regex", "")),
        ({"ebnf": GBNF}, Grammar("ebnf", GBNF)),
        ({"guided_grammar": GBNF}, Grammar("ebnf", GBNF)),
        ({"structured_outputs": {"grammar": GBNF}}, Grammar("ebnf", GBNF)),
        ({"choice": ["a", "é", "a"]}, Grammar("choice", '["a","é"]')),
        ({"guided_choice": ["a", "é"]}, Grammar("choice", '["a","é"]')),
        ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", '["a","é"]')),
    ],
    ids=str,
)
def test_a_constraint_in_each_spelling(body: dict[str, Any], expected: Grammar) -> None:
    found = read(body)
    assert found is not None
    assert found.grammar == expected
    (field,) = body
    assert found.param.partition(".")[0] == field


@pytest.mark.parametrize(
    "value", [OLD, json.dumps(OLD), {"format": TRIGGERED}, {"type": "structural_tag", "format": TRIGGERED}]
)
@pytest.mark.parametrize("field", ["response_format", "structural_tag", "structured_outputs"])
def test_structural_tags_in_xgrammars_and_sglangs_spelling(field: str, value: Any) -> None:
    if field == "response_format" and ("type" not in value or isinstance(value, str)):
        return  # it needs its type there, and no other engine takes a text
    found = read({field: {"structural_tag": value} if field == "structured_outputs" else value})
    assert found is not None
    assert found.grammar.kind == "structural_tag"
    tag = json.loads(found.grammar.source)
    assert tag["type"] == "structural_tag"
    assert tag["format"].pop("at_least_one", False) is False
    assert tag["format"]["tags"][0].pop("type", "tag") == "tag"
    assert tag["format"] == {**TRIGGERED, "tags": [{name: TAG[name] for name in ("begin", "content", "end")}]}


@pytest.mark.parametrize(
    "body",
    [
        {},
        dict.fromkeys(FIELDS),
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "x": None}},
    ],
)
def test_requests_without_a_constraint_have_none(body: dict[str, Any]) -> None:
    assert read(body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": [SCHEMA]}}, "response_format.json_schema"),
        (schema_format(name="n"), "response_format.json_schema.schema"),
        (schema_format(name="n", schema=[]), "response_format.json_schema.schema"),
        (schema_format(name=5, schema={}), "response_format.json_schema.name"),
        (schema_format(name="n", schema={}, strict="yes"), "response_format.json_schema.strict"),
        (schema_format(name="n", schema={}, lenient=True), "response_format.json_schema.lenient"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": ""}, "json_schema"),
        ({"json_schema": "true"}, "json_schema"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": []}, "guided_json"),
        ({"regex": 5}, "regex"),
        ({"regex": "a\0"}, "regex"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "regex"),
        ({"regex": "é" * (MAX_SOURCE_BYTES // 2 + 1)}, "regex"),
        ({"json_schema": {"const": "a" * MAX_SOURCE_BYTES}}, "json_schema"),
        ({"ebnf": ""}, "ebnf"),
        ({"ebnf": "\n" * MAX_SOURCE_BYTES}, "ebnf"),
        ({"ebnf": " root\n" * (MAX_SOURCE_BYTES // 6)}, "ebnf"),
        ({"guided_grammar": '?start: "a" | "b"'}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, "choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "a+"}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": []}, "structural_tag"),
        ({"structural_tag": {}}, "structural_tag.format"),
        ({"structural_tag": {"type": "tag", "format": TRIGGERED}}, "structural_tag.type"),
        ({"structural_tag": {**OLD, "triggers": []}}, "structural_tag.triggers"),
        ({"structural_tag": {**OLD, "triggers": ["<g"]}}, "structural_tag.structures[0].begin"),
        ({"structural_tag": {**OLD, "structures": [5]}}, "structural_tag.structures[0]"),
        ({"structural_tag": {**OLD, "structures": [{"begin": "<f"}]}}, "structural_tag.structures[0]"),
        (
            {"structural_tag": {**OLD, "structures": [{"begin": "<f", "end": "", "schema": 1}]}},
            "structural_tag.structures[0].schema",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"items": made}
    return made


def test_nesting_is_limited() -> None:
    assert read({"json_schema": nested(MAX_DEPTH - 2)}) is not None
    for schema in (nested(MAX_DEPTH + 1), json.dumps(nested(MAX_DEPTH + 1))):
        with pytest.raises(ApiError, match="levels deep"):
            read({"json_schema": schema})
    with pytest.raises(ApiError, match=r"not JSON|levels deep"):
        read({"json_schema": "[" * 100_000})


def test_two_constraints_are_refused_and_both_are_named() -> None:
    with pytest.raises(ApiError) as caught:
        read({"regex": "a", "response_format": {"type": "json_object"}})
    assert caught.value.body["error"]["param"] == "response_format"
    assert "'regex' and 'response_format'" in str(caught.value)
    assert read({"regex": "a", "response_format": {"type": "text"}, "ebnf": None}) == ("regex", Grammar("regex", "a"))


def test_the_fields_of_generate_are_sglangs() -> None:
    assert SAMPLING_FIELDS < FIELDS
    found = read_constraint({"guided_regex": "b", "regex": "a"}, SAMPLING_FIELDS, "sampling_params.")
    assert found == ("sampling_params.regex", Grammar("regex", "a"))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*("type", "json_schema", "schema", "structures", "triggers", "format", "begin", "end", "name", "strict"), "json"]
)
hostile = st.recursive(
    values | st.sampled_from(["text", "json_schema", "json_object", "structural_tag", GBNF, "{}", ["a"]]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=12,
)


@given(st.sampled_from(sorted(FIELDS)), hostile)
def test_any_value_is_a_constraint_or_a_400_that_names_the_field(field: str, value: Any) -> None:
    found, refusal = None, None
    try:
        found = read({field: value})
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.body["error"]["param"].startswith(field)
        return
    if found is None:
        assert value is None or (field == "response_format" and value["type"] == "text")
        return
    grammar = found.grammar
    if grammar.kind in ("json", "choice", "structural_tag"):
        json.loads(grammar.source)
    assert as_format(grammar)["type"]


@given(st.dictionaries(st.text(max_size=5), st.integers(-(1 << 60), 1 << 60) | st.text(max_size=5), max_size=6))
def test_a_schema_keeps_its_members_and_their_order(properties: dict[str, Any]) -> None:
    for value in ({"properties": properties}, json.dumps({"properties": properties})):
        found = read({"json_schema": value})
        assert found is not None
        assert list(json.loads(found.grammar.source)["properties"].items()) == list(properties.items())


@pytest.mark.parametrize("isolation", [headers.PER_KEY, headers.SHARED])
async def test_named_clients_take_turns_with_and_without_isolation(isolation: str) -> None:
    sent = list[GenerateReq]()

    def keep(requests: list[GenerateReq], **_: object) -> None:
        sent.extend(requests)

    service = mock.Mock(Service, budget=ByteBudget(1 << 20), manager=mock.Mock(open=keep), state=State(ready=True))
    told = [(headers.CLIENT.encode(), b"ada"), (headers.ISOLATION.encode(), isolation.encode())]
    job = Generations(rid="r", prompts=[GenerateReq("", [1], SamplingParams())])
    for told_by_edge in (told, told[1:]):
        await Service.open(service, job, ApiRequest({"type": "http", "headers": told_by_edge}, mock.Mock()))
    assert [request.client for request in sent] == ["ada", None]


def test_a_client_that_used_up_its_seconds_gets_a_retry_time() -> None:
    with pytest.raises(ApiError) as refused:
        Service.check_finish(mock.Mock(Service), FinishReason("error", message="wait", status=429))
    assert (refused.value.status, refused.value.body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert dict(refused.value.headers)[b"retry-after"]
