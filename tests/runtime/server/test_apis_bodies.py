"""Bodies of `/v1/responses` and `/v1/messages`: refusals name the field, and no body is too much."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.epp_io import small_bundle
from treeline_runtime.server.errors import NO_THREADS, ApiError, anthropic_error
from treeline_runtime.server.formats import Formats
from treeline_runtime.server.jobs import Answered, Caller, ChatTask, Kind
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.reader import Reader
from treeline_runtime.server.sampling import SamplingDefaults
from treeline_wire.tokenizer import TokenizerBundle

SOURCE = (
    "{% for t in tools or [] %}tool {{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.id }}{{ m.tool_call_id }}{% endfor %};{% endfor %}"
    "{{ reasoning_effort }}{% if add_generation_prompt %}assistant:{% endif %}"
)
LIMITS = Limits(4096, 4096)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    bundle = TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=SOURCE)
    prompts = Prompts(bundle)
    yield Reader("m", prompts, SamplingDefaults(), formats=Formats("qwen3", "hermes"))
    prompts.close()


def read(reader: Reader, kind: Kind, body: Any) -> Any:
    return reader.read(kind, json.dumps(body).encode(), LIMITS, Caller())


ASK: dict[str, Any] = {"input": "hi"}
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CLAUDES = {"name": "weather", "input_schema": {"type": "object"}}
KEPT = {"type": "clear_thinking_20251015", "keep": "all"}


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*content]}]}


def item(**members: Any) -> dict[str, Any]:
    return {"input": [members]}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"background": True}, "background"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"prompt": {"id": "p"}}, "prompt"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("responses", {"include": [{}]}, "include"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ("responses", {"tools": [5]}, "tools[0]"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ("responses", {"text": {"format": 5}}, "text.format.type"),
        ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [5]}, "input[0]"),
        ("responses", {"cache_salt": 5}, "cache_salt"),
        (
            "responses",
            {"tools": [{"type": "function", "name": "f", "description": "x" * 3_000_000}], "tool_choice": "none"},
            "tools",
        ),
        ("responses", item(type="function_call_output", call_id=5, output="x"), "input[0].call_id"),
        ("responses", item(type="item_reference", id="m"), "input[0].type"),
        ("responses", item(role="tool", content="x"), "input[0].role"),
        ("responses", item(role="user", content="x", tool_calls=[]) | {"n": 2}, "n"),
        ("responses", item(role="user", content="x", name="n"), "input[0].name"),
        ("responses", item(role="user", content=[{"type": "input_image"}]), "input[0].content[0]"),
        (
            "responses",
            item(role="user", content=[{"type": "input_text", "text": "x", "detail": "high"}]),
            "input[0].content[0].detail",
        ),
        ("responses", item(type="function_call", name="f", call_id="c", arguments="{"), "input"),
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"messages": None}, "messages"),
        ("messages", {"container": "c"}, "container"),
        ("messages", {"thread": {"type": "create"}}, "thread"),
        (
            "messages",
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits",
        ),
        ("messages", {"context_management": {"edits": [{**KEPT, "keep": 2}]}}, "context_management.edits"),
        ("messages", {"context_management": {"edits": 5}}, "context_management.edits"),
        ("messages", {"mcp_servers": [{}]}, "mcp_servers"),
        ("messages", {"stop": ["x"]}, "stop"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ("messages", {"thinking": {"type": "between"}}, "thinking.type"),
        ("messages", {"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("messages", {"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ("messages", said({"type": "image", "source": {}}), "messages[0].content[0].type"),
        ("messages", said({"type": "text", "text": 5}), "messages[0].content[0].text"),
        ("messages", {"system": [{"type": "image"}]}, "system[0].type"),
        ("messages", said({"type": "tool_use", "id": "c", "name": "f", "input": {}}), "messages[0].content[0].type"),
        ("messages", said({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            "messages",
            said({"type": "tool_use", "id": "c", "name": 5, "input": {}}, role="assistant"),
            "messages[0].content[0].name",
        ),
        (
            "messages",
            said({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].type",
        ),
        (
            "messages",
            said({"type": "tool_use", "id": "c", "name": "f", "input": [1]}, role="assistant"),
            "messages[0].content[0].input",
        ),
        ("responses", {"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ("responses", {"tools": [WEATHER | {"parameters": []}]}, "tools[0].parameters"),
        ("responses", {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ("responses", {"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("responses", {"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ("messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ("messages", {"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ("messages", {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ("messages", {"output_config": {"effort": "lots"}}, "output_config.effort"),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ("count_tokens", {"messages": []}, "messages"),
        ("count_tokens", said({"type": "document"}), "messages[0].content[0].type"),
    ],
)
def test_unsupported_fields_are_refused_by_name(reader: Reader, kind: Kind, body: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(reader, kind, (ASK if kind == "responses" else SAY) | body)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param
    assert param in refused.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            "responses",  # as Codex asks
            {
                "instructions": "S",
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "k",
                "parallel_tool_calls": False,
                "tool_choice": "auto",
                "tools": [],
                "reasoning": {"effort": "none", "summary": "auto"},
                "text": {"verbosity": "medium"},
                "client_metadata": {"x-codex-installation-id": "i"},
            },
        ),
        ("responses", {"text": {"format": {"type": "text"}}, "truncation": "disabled", "top_logprobs": 0}),
        ("responses", {"reasoning": {"context": "auto", "mode": "standard"}, "background": False}),
        ("responses", {"temperature": 0, "top_k": 5, "seed": 1, "stop": ["x"], "rid": "mine", "cache_salt": "s"}),
        (
            "messages",  # as Claude Code asks
            {
                "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
                "metadata": {"user_id": "u"},
                "tools": [],
                "max_tokens": 32000,
                "thinking": {"type": "enabled", "budget_tokens": 31999},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "medium"},
                "speed": "standard",
                "stream": True,
            },
        ),
        ("messages", {"service_tier": "auto", "inference_geo": "us", "top_k": 3, "tool_choice": {"type": "auto"}}),
        ("messages", said({"type": "thinking", "thinking": "t", "signature": ""}, role="assistant")),
        ("messages", said({"type": "text", "text": "t", "parsed_output": {"a": 1}}, role="assistant")),
        ("messages", {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["direct"]}]}),
        ("messages", {"context_management": {"edits": []}, "thread": None}),
        ("responses", item(role="assistant", content=[{"type": "output_text", "text": "t", "parsed": {"a": 1}}])),
        (
            "responses",
            item(type="function_call", call_id="c", name="f", arguments="{}", parsed_arguments={"a": 1}),
        ),
    ],
)
def test_requests_of_popular_clients_are_accepted(reader: Reader, kind: Kind, body: Any) -> None:
    task = read(reader, kind, (ASK if kind == "responses" else SAY) | body)
    assert isinstance(task, ChatTask)
    assert task.stream == bool(body.get("stream"))


def test_an_effort_is_a_hint_if_the_template_ignores_it(reader: Reader) -> None:
    bundle = TokenizerBundle.build(small_bundle().tokenizer_json, chat_template=SOURCE.replace("reasoning_effort", "x"))
    prompts = Prompts(bundle)
    try:
        plain = dataclasses.replace(reader, prompts=prompts)
        ids = [
            read(plain, "messages", SAY | {"output_config": {"effort": effort}}).prompts[0].input_ids
            for effort in ("medium", "max", None)
        ]
        assert ids[0] == ids[1] == ids[2]
        assert read(plain, "responses", ASK | {"reasoning": {"effort": "high"}}).ignored == ("reasoning_effort",)
        with pytest.raises(ApiError, match="effort"):
            read(plain, "messages", SAY | {"output_config": {"effort": "x"}})
    finally:
        prompts.close()


def test_a_refused_thread_has_anthropics_error_code() -> None:
    error = ApiError(400, "no", param="thread", code=NO_THREADS)
    told = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert anthropic_error(error)["error"] == {"type": "invalid_request_error", "message": "no", "details": told}
    assert "details" not in anthropic_error(ApiError(400, "no", code="other"))["error"]


def test_a_prompt_and_its_count_equal_the_chats(reader: Reader) -> None:
    chat = read(reader, "chat", {"messages": SAY["messages"], "cache_salt": "s"})
    asked = read(reader, "responses", ASK | {"cache_salt": "s"})
    told = read(reader, "messages", SAY | {"cache_salt": "s"})
    assert chat.prompts[0].input_ids == asked.prompts[0].input_ids == told.prompts[0].input_ids
    assert chat.prompts[0].namespace == asked.prompts[0].namespace == told.prompts[0].namespace != None  # noqa: E711
    counted = read(reader, "count_tokens", SAY)
    assert isinstance(counted, Answered)
    assert json.loads(counted.body) == {"input_tokens": len(chat.prompts[0].input_ids)}


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
LOOSE = {**SCHEMA, "additonalProperties": False, "x-note": 1, "properties": {"x": {"type": "string", "format": "zip"}}}


def _asked(strict: bool) -> dict[str, Any]:
    """Return a request for each way to ask for a schema."""
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOSE, "strict": strict}}
    function = {"type": "function", "function": {"name": "f", "parameters": LOOSE, "strict": strict}}
    called = {"tools": [function], "tool_choice": "required"}
    return {"response_format.json_schema.schema": {"response_format": wrapped}, "tools.f": called}


@pytest.mark.parametrize("where", ["response_format.json_schema.schema", "tools.f"])
def test_keywords_of_a_schema_without_effect_are_named(
    reader: Reader, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {strict: {"messages": SAY["messages"], **_asked(strict)[where]} for strict in (True, False)}
    minding = dataclasses.replace(reader, formats=msgspec.structs.replace(reader.formats, strict_schemas=True))
    with caplog.at_level("INFO"):
        told = [read(one, "chat", asked[strict]).ignored for one, strict in ((reader, True), (minding, False))]
    assert told == [(f"{where}/additonalProperties", f"{where}/format.zip")] * 2
    assert "'additonalProperties', 'format.zip'" in caplog.text
    with pytest.raises(ApiError, match="'additonalProperties'") as refused:
        read(minding, "chat", asked[True])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<f>", "schema": LOOSE, "end": "</f>"}], "triggers": ["<f"]},
        {"format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": LOOSE}]}},
    ],
)
def test_keywords_of_a_schema_in_a_structural_tag_are_named_too(reader: Reader, tag: dict[str, Any]) -> None:
    told = read(reader, "chat", {"messages": SAY["messages"], "structural_tag": tag}).ignored
    assert [name.rpartition("/")[2] for name in told] == ["additonalProperties", "format.zip"]


def test_output_formats_become_the_chats_grammars(reader: Reader) -> None:
    def grammar(kind: Kind, body: Any) -> Any:
        return read(reader, kind, body).prompts[0].sampling.grammar

    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    read_chat = read(reader, "chat", {"messages": SAY["messages"], "response_format": wrapped})
    expected = read_chat.prompts[0].sampling.grammar
    assert expected is not None
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    assert grammar("responses", ASK | {"text": {"format": format}}) == expected
    assert (
        grammar("messages", SAY | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}) == expected
    )
    object = read(reader, "chat", {"messages": SAY["messages"], "response_format": {"type": "json_object"}})
    assert grammar("responses", ASK | {"text": {"format": {"type": "json_object"}}}) == (
        object.prompts[0].sampling.grammar
    )
    assert grammar("responses", ASK) is grammar("messages", SAY) is None


WORDS = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "reasoning", "user", "assistant", "system", "developer"),
        *("input_text", "output_text", "text", "tool_use", "tool_result", "thinking", "image", "function", "custom"),
        *("auto", "any", "tool", "none", "required", "enabled", "json_schema", "json_object", "{}", "f", "incomplete"),
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, 5, 10**25, 0.5, 1e308])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "\ud800", "x"]) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "text", "id", "name", "input", "arguments", "call_id", "output"),
                    *("tool_use_id", "thinking", "status", "format", "schema", "effort", "parameters", "input_schema"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=8,
)
ITEM = st.fixed_dictionaries(
    {"type": WORDS},
    optional={"role": WORDS, "content": JSON, "name": WORDS, "arguments": WORDS, "call_id": WORDS, "output": JSON}
    | {"summary": JSON, "text": WORDS | JSON, "input": JSON, "id": WORDS, "tool_use_id": WORDS, "status": WORDS},
)
TOOL = st.fixed_dictionaries(
    {"name": WORDS},
    optional={"type": st.sampled_from(["function", "custom"]), "strict": st.booleans(), "description": WORDS}
    | dict.fromkeys(("parameters", "input_schema"), JSON | st.just({"type": "object"})),
)
TURN = st.fixed_dictionaries({"role": WORDS, "content": WORDS | st.lists(ITEM, max_size=3)})
LISTED = st.lists(ITEM | TURN | JSON, max_size=3)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "input": JSON | LISTED | WORDS,
        "messages": JSON | LISTED,
        "max_tokens": NUMBERS | st.just(5),
        **dict.fromkeys(
            ("system", "instructions", "tool_choice", "reasoning", "thinking", "output_config", "text"), JSON
        ),
        "tools": JSON | st.lists(ITEM | TOOL, max_size=2),
        **dict.fromkeys(("metadata", "stop_sequences", "include", "stream_options", "chat_template_kwargs", "n"), JSON),
        **dict.fromkeys(("temperature", "max_output_tokens", "seed", "top_k"), NUMBERS),
    },
)


def status(reader: Reader, kind: Kind, body: Any) -> int:
    try:
        assert isinstance(read(reader, kind, body), ChatTask | Answered)
    except ApiError as error:
        return error.status
    return 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODY, st.sampled_from(["responses", "messages", "count_tokens"]), st.booleans())
def test_any_invalid_body_is_a_client_error(reader: Reader, body: dict[str, Any], kind: Kind, whole: bool) -> None:
    if whole:
        body = (ASK if kind == "responses" else SAY) | body
    assert status(reader, kind, body) in (200, 400, 404)


@pytest.mark.parametrize("kind", ["responses", "messages", "count_tokens"])
@pytest.mark.parametrize(
    "member", ["input", "messages", "tools", "tool_choice", "system", "text", "reasoning", "thinking"]
)
@pytest.mark.parametrize("depth", [100, 990, 100_000])
def test_deep_bodies_are_refused(reader: Reader, kind: Kind, member: str, depth: int) -> None:
    body = json.dumps((ASK if kind == "responses" else SAY) | {member: None})
    for opened, closed in (("[", "]"), ('{"content":[', "]}"), ('{"type":"allowed_tools","tools":[', "]}")):
        deep = body.replace(f'"{member}": null', f'"{member}": {opened * depth}{closed * depth}')
        with pytest.raises(ApiError) as refused:
            reader.read(kind, deep.encode(), LIMITS, Caller())
        assert refused.value.status == 400
