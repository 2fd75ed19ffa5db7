"""The variables that each engine gives its chat template for the same request.

The tables are what the engines' sources say, function by function as the dialects' modules name them. vLLM 0.32's and
SGLang 0.5.23's own functions gave the same for the messages here and for those of `test_template_corpus`.
"""

from typing import Any

import pytest
from treeline_wire.chat import ChatTemplate
from treeline_wire.dialects import dialect_of
from treeline_wire.prompt import PromptError, beginning_of_chat, prompt_of_chat

LISTS = "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}"
TEXTS = "{{ messages }}"
USER = {"role": "user", "content": "u"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
AS_LIST = [{"type": "text", "text": "u"}]
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
ENGINES = ("treeline", "vllm", "sglang")


def content(engine: str, given: Any, source: str, role: str = "user") -> Any:
    message = {"role": role} if given == "absent" else {"role": role, "content": given}
    return dialect_of(engine).messages([message], source, {})[0]["content"]


@pytest.mark.parametrize(
    ("given", "source", "role", "expected"),
    [
        ("u", TEXTS, "user", ("u", "u", "u")),
        ("u", LISTS, "user", ("u", AS_LIST, "u")),
        (PARTS, TEXTS, "user", ("a\nb", "a\nb", "a b")),
        (PARTS, LISTS, "user", (PARTS, PARTS, PARTS)),
        (PARTS, TEXTS, "tool", ("a\nb", "a\nb", "a b")),
        (PARTS, LISTS, "tool", ("a\nb", "a\nb", "a b")),
        (None, TEXTS, "assistant", ("", "", "")),
        ("absent", TEXTS, "assistant", ("", "", "")),
        (None, LISTS, "assistant", ("", [], "")),
        (None, LISTS, "tool", ("", "", "")),
        ([], TEXTS, "user", ("", "", "")),
        ([], LISTS, "user", ([], [], [])),
    ],
)
def test_content(given: Any, source: str, role: str, expected: tuple[Any, ...]) -> None:
    assert tuple(content(engine, given, source, role) for engine in ENGINES) == expected


def test_parts_that_only_one_engine_reads() -> None:
    spoken = [{"type": "thinking", "thinking": "t"}, {"type": "output_text", "text": "o"}, "s"]
    assert content("vllm", spoken, TEXTS, "assistant") == "t\no\ns"
    assert content("vllm", [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}], TEXTS) == "no"
    assert content("sglang", [{"type": "thinking", "thinking": "t"}, {"type": "input_text", "text": "i"}], TEXTS) == "i"
    assert content("vllm", [{"type": "text", "text": "x", "cache_control": {}}], LISTS) == [
        {"type": "text", "text": "x"}
    ]
    for engine in ENGINES:
        for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": 1}, {"type": []}, 3):
            with pytest.raises(PromptError):
                content(engine, [part], LISTS)


def test_tool_calls_have_the_members_and_the_order_of_the_engines_types() -> None:
    def calls(engine: str, *calls: Any, api: str = "", **more: Any) -> list[str]:
        message = {"role": "assistant", "content": None, "tool_calls": list(calls), **more}
        made = dialect_of(engine, api).messages([message], TEXTS, {})[0]
        return [repr(call) for call in made.get("tool_calls", ())]

    function = "'function': {'name': 'f', 'arguments': {'x': 1}}"
    assert calls("treeline", CALL) == ["{'type': 'function', 'id': 'c', " + function + "}"]
    assert calls("vllm", CALL) == ["{'id': 'c', 'function': {'arguments': {'x': 1}, 'name': 'f'}, 'type': 'function'}"]
    assert calls("vllm", CALL, api="responses") == calls("treeline", CALL)
    assert calls("sglang", CALL) == ["{'id': 'c', 'index': None, 'type': 'function', " + function + "}"]
    for arguments in ("{", "[1]", "3", "", None, "absent"):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert "'arguments': {}" in calls("vllm", call)[0]
    for engine in ("treeline", "sglang"):
        for spoilt in ("[1]", "3", "{"):
            with pytest.raises(PromptError) as caught:
                calls(engine, {"function": {"name": "f", "arguments": spoilt}})
            assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
    with pytest.raises(PromptError):
        calls("vllm", {"type": "custom", "custom": {}})
    assert calls("vllm") == []
    assert "tool_calls" not in dialect_of("vllm").messages([{"role": "assistant", "tool_calls": []}], TEXTS, {})[0]


def test_members_of_messages() -> None:
    given = {"role": "assistant", "content": "c", "reasoning": "r", "name": "n", "other": 1, "task": 2}
    vllm = {"role": "assistant", "content": "c", "reasoning": "r", "reasoning_content": "r", "name": "n"}
    assert dialect_of("treeline").messages([given], TEXTS, {}) == [given]
    assert dialect_of("vllm").messages([given], TEXTS, {}) == [vllm]
    assert dialect_of("sglang").messages([given], TEXTS, {}) == [{"role": "assistant", "content": "c", "name": "n"}]
    unsaid = {"role": "assistant", "content": None, "reasoning_content": "r"}
    assert dialect_of("vllm").messages([unsaid], TEXTS, {}) == [{"role": "assistant", "content": ""}]
    named = {"role": "user", "content": "c", "name": "n"}
    assert dialect_of("vllm").messages([named], TEXTS, {}) == [named]
    assert dialect_of("sglang").messages([named], TEXTS, {}) == [{"role": "user", "content": "c"}]
    billed = [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nrest"}]
    assert [content(e, billed[0]["content"], TEXTS, "system") for e in ENGINES] == [
        billed[0]["content"],
        "rest",
        billed[0]["content"],
    ]


def test_a_developer_unknown_to_the_template_becomes_the_system() -> None:
    messages = [USER, {"role": "developer", "content": "D"}, {"role": "system", "content": PARTS}]
    joined = [{"role": "system", "content": "D\n\na\nb"}, USER]
    assert dialect_of("treeline").messages(messages, TEXTS, {}) == joined
    assert dialect_of("vllm").messages(messages, TEXTS, {}) == joined
    assert [m["role"] for m in dialect_of("sglang").messages(messages, TEXTS, {})] == ["user", "developer", "system"]
    for engine in ENGINES:
        known = dialect_of(engine).messages(messages, TEXTS + "{# 'developer' #}", {})
        assert [m["role"] for m in known] == ["user", "developer", "system"]
    first = [{"role": "developer", "content": "D", "tools": []}, USER]
    assert dialect_of("vllm").messages(first, TEXTS, {}) == [{"role": "system", "content": "D"}, USER]


def test_tools() -> None:
    bare = {"function": {"parameters": {}, "name": "f", "more": 1}, "type": "function"}

    def shown(engine: str, choice: Any = None) -> str:
        return repr(dialect_of(engine).tools({"tools": [bare], "tool_choice": choice}))

    assert shown("treeline") == repr([bare])
    assert shown("vllm") == ("[{'type': 'function', 'function': {'name': 'f', 'description': None, 'parameters': {}}}]")
    assert shown("sglang") == (
        "[{'type': 'function', 'function': {'parameters': {}, 'name': 'f', 'description': None}, "
        "'defer_loading': None}]"
    )
    assert [shown(engine, "none") != "None" for engine in ENGINES] == [False, True, False]
    other = {"type": "function", "function": {"name": "g"}}
    assert [shown(engine, other) != "None" for engine in ENGINES] == [True, True, False]
    assert [dialect_of(engine).tools({}) for engine in ENGINES] == [None, None, None]


def test_variables_of_reasoning() -> None:
    def variables(engine: str, given: dict[str, Any], **body: Any) -> dict[str, Any]:
        return dialect_of(engine).variables(body, given)

    low, high = {"reasoning_effort": "low"}, {"reasoning_effort": "high"}
    assert variables("treeline", {}, **low) == variables("sglang", {}, **low)
    assert variables("vllm", {}, **low) == {**low, "enable_thinking": True}
    assert variables("sglang", {}, **low) == {**low, "enable_thinking": True, "thinking": True}
    assert variables("treeline", high) == high
    assert variables("treeline", high, **low) == {**high, "enable_thinking": True, "thinking": True}
    assert variables("vllm", high, **low) == {**low, "enable_thinking": True}
    assert variables("sglang", high, **low)["reasoning_effort"] == "high"
    off = {"enable_thinking": False}
    for engine in ENGINES:
        assert variables(engine, {}, reasoning_effort="none")["enable_thinking"] is False
        assert variables(engine, off, **low)["enable_thinking"] is False
    assert variables("sglang", {}, reasoning={"enabled": True}) == {"enable_thinking": True, "thinking": True}


CHAT = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if documents %}D{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    special_tokens={},
    inline_seconds=60.0,
)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ("<user>u<assistant>I<assistant>", "<user>u<assistant>I<assistant>", "<user>u<user>I<assistant>")),
        ({"continue_final_message": True}, ("<user>u<assistant>I",) * 3),
        ({"add_generation_prompt": False}, ("<user>u<assistant>I", "<user>u<assistant>I", "<user>u<user>I<assistant>")),
    ],
)
def test_the_end_of_a_conversation(more: dict[str, Any], expected: tuple[str, ...]) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "I"}], **more}
    assert tuple(prompt_of_chat(body, CHAT, dialect_of(engine)).text for engine in ENGINES) == expected
    for engine in ENGINES:
        assert beginning_of_chat(body, CHAT, dialect_of(engine)).text == "<user>u<assistant>I"


def test_documents_and_special_tokens() -> None:
    body = {"messages": [USER], "documents": [{"text": "d"}], "add_special_tokens": True}
    prompts = [prompt_of_chat(body, CHAT, dialect_of(engine)) for engine in ENGINES]
    assert ["D" in (prompt.text or "") for prompt in prompts] == [True, True, False]
    assert [prompt.add_special_tokens for prompt in prompts] == [False, True, False]


def test_sglang_tries_a_template_that_fails_with_tools_without_their_wrapper() -> None:
    picky = ChatTemplate(
        "{% for tool in tools %}{{ tool['name'] if 'name' in tool else raise_exception('no name') }}{% endfor %}",
        special_tokens={},
        inline_seconds=60.0,
    )
    body = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert prompt_of_chat(body, picky, dialect_of("sglang")).text == "f"
    with pytest.raises(PromptError):
        prompt_of_chat(body, picky, dialect_of("vllm"))


@pytest.mark.parametrize(
    ("source", "vllm", "sglang"),
    [
        ("{% set a = messages[1:] %}{% for x in a %}{% for p in x.content | list %}{% endfor %}{% endfor %}", 1, 0),
        ("{% macro f(x, y) %}{% for p in y %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ f(1, y=m.content) }}{% endfor %}", 1, 0),
        ("{% macro f(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
         "{% for m in messages %}{{ f(m.role) }}{% endfor %}", 0, 0),
        ("{% for p in content %}{% endfor %}", 1, 0),
        ("{% set m = messages[0] %}{% for p in m.content %}{% endfor %}", 0, 1),
        ("{% set ns.x = messages %}" + LISTS, 0, 1),
        ("{% set a = messages %}{% set b = a %}{% set a = b %}{{ a }}", 0, 0),
        ("{# vision #}", 0, 1),
        ("{% for %}", 0, 0),
        ("{# " + "x" * (32 << 10) + " #}" + LISTS, 0, 0),
    ],
)  # fmt: skip
def test_templates_that_take_lists(source: str, vllm: int, sglang: int) -> None:
    assert [dialect_of(engine).takes_lists(source) for engine in ENGINES] == [vllm, vllm, sglang]
