"""From request bodies to prompts, and to namespaces."""

import contextlib
from typing import Any

import pytest
from treeline_runtime.templates.pool import TemplatePool
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.namespaces import event_namespace
from treeline_wire.prompt import (
    Prompt,
    PromptError,
    TooDeep,
    namespace_of,
    prompt_of_chat,
    prompt_of_completion,
)
from treeline_wire.template_inline import MAX_SOURCE_CHARS

SHOW = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments|tojson }}>{% endfor %}]{% endfor %}"
    "{% if tools %}tools={{ tools|length }}{% endif %}{% if documents %}docs={{ documents|length }}{% endif %}"
    "{{ extra }}{{ reasoning_effort }}{% if add_generation_prompt %}>{% endif %}",
    special_tokens={},
    inline_seconds=60.0,
)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def shown(**body: Any) -> str:
    prompt = prompt_of_chat({"messages": [USER], **body}, SHOW)
    assert prompt.ids is None
    assert not prompt.add_special_tokens, "a chat template writes BOS itself"
    return str(prompt.text)


def refusal(body: dict[str, Any]) -> PromptError:
    with pytest.raises(PromptError) as caught:
        prompt_of_chat(body, SHOW)
    return caught.value


def test_a_chat_is_rendered() -> None:
    assert shown() == "[user:hi]>"
    assert shown(add_generation_prompt=False) == "[user:hi]"
    assert shown(tools=[TOOL], documents=[{"text": "d"}]) == "[user:hi]tools=1docs=1>"
    assert shown(chat_template_kwargs={"extra": "E"}, reasoning_effort="low") == "[user:hi]Elow>"
    assert shown(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}) == "[user:hi]high>"


def test_null_members_count_as_absent() -> None:
    nothing = dict.fromkeys(("tools", "documents", "chat_template_kwargs", "continue_final_message", "tool_choice"))
    assert shown(**nothing, add_generation_prompt=None, reasoning_effort=None) == "[user:hi]>"


def test_tools_are_hidden_when_calls_are_off() -> None:
    assert shown(tools=[TOOL], tool_choice="none") == "[user:hi]>"
    assert shown(tools=[], tool_choice="auto") == "[user:hi]>"


def test_text_parts_are_joined_with_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "text", "text": ""}]
    assert shown(messages=[{"role": "user", "content": parts}]) == "[user:a\nb\n]>"


def test_arguments_of_tool_calls_become_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert shown(messages=[call('{"a": [1, "é"]}')]) == '[assistant:<f {"a": [1, "é"]}>]>'
    assert shown(messages=[call("")]) == "[assistant:<f {}>]>"
    assert shown(messages=[call({"a": 1})]) == '[assistant:<f {"a": 1}>]>'


def test_the_request_is_not_modified() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [call]}]}
    before = repr(body)
    prompt_of_chat(body, SHOW)
    assert repr(body) == before


def test_the_final_message_can_be_continued() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.content }}>{% endfor %}", special_tokens={}, inline_seconds=60.0
    )
    messages = [USER, {"role": "assistant", "content": "I "}]
    assert prompt_of_chat({"messages": messages, "continue_final_message": True}, template).text == "<hi><I "
    assert refusal({"messages": messages, "continue_final_message": True, "add_generation_prompt": True})


def test_a_separate_template_for_tools_is_used_for_tools() -> None:
    template = ChatTemplate("plain", tool_source="with tools", special_tokens={}, inline_seconds=60.0)
    assert prompt_of_chat({"messages": [USER]}, template).text == "plain"
    assert prompt_of_chat({"messages": [USER], "tools": [TOOL]}, template).text == "with tools"
    assert prompt_of_chat({"messages": [USER], "tools": []}, template).text == "plain"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{**USER, "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "tool_calls": ["x"]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tools": ["f"]}, "tools"),
        ({"messages": [USER], "documents": "d"}, "documents"),
        ({"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": "yes"}, "continue_final_message"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_an_invalid_chat_request_is_named(body: dict[str, Any], param: str) -> None:
    assert refusal(body).param == param


def test_a_templates_refusal_is_a_client_error_and_its_bug_is_not() -> None:
    raising = ChatTemplate("{{ raise_exception('roles must alternate') }}", special_tokens={}, inline_seconds=60.0)
    with pytest.raises(PromptError, match="roles must alternate"):
        prompt_of_chat({"messages": [USER]}, raising)
    with contextlib.closing(TemplatePool()) as pool:
        broken = ChatTemplate("{# " + "x" * MAX_SOURCE_CHARS + " #}{% for %}", special_tokens={}, pool=pool)
        with pytest.raises(TemplateError, match="does not compile"):
            prompt_of_chat({"messages": [USER]}, broken)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("text", [Prompt(text="text")]),
        ("", [Prompt(text="")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([1, 2], [Prompt(ids=[1, 2], add_special_tokens=False)]),
        (
            [[1], [2, 3]],
            [Prompt(ids=[1], add_special_tokens=False), Prompt(ids=[2, 3], add_special_tokens=False)],
        ),
    ],
)
def test_completion_prompts(value: Any, prompts: list[Prompt]) -> None:
    assert prompt_of_completion({"prompt": value}) == prompts


def test_special_tokens_can_be_left_out_of_a_completion() -> None:
    body = {"prompt": "x", "add_special_tokens": False}
    assert prompt_of_completion(body) == [Prompt(text="x", add_special_tokens=False)]


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {},
        [],
        [[]],
        [1, "a"],
        [True],
        [-1],
        [2**31],
        [1.5],
        [float("inf")],
        [["a"]],
        [None],
        "\udfff",
        ["a", "\ud83d"],
    ],
)
def test_bad_completion_prompts(value: Any) -> None:
    with pytest.raises(PromptError) as caught:
        prompt_of_completion({"prompt": value})
    assert caught.value.param == "prompt"


def test_namespaces_keep_requests_apart() -> None:
    names = [
        namespace_of(body)
        for body in (
            {},
            {"cache_salt": "a"},
            {"extra_key": "a"},
            {"lora_path": "a"},
            {"cache_salt": "a", "extra_key": "b"},
            {"cache_salt": "ab"},
            {"extra_key": "ab"},
            {"lora_path": "a", "cache_salt": "a"},
            {"lora_path": "a", "extra_key": "a"},
        )
    ]
    assert len(set(names)) == len(names)
    assert names[0] is None


def test_an_empty_request_has_the_common_namespace() -> None:
    assert namespace_of({"cache_salt": None, "lora_path": "", "extra_key": ""}) is None
    assert event_namespace(None, None) is event_namespace("", "") is None


@pytest.mark.parametrize("name", ["cache_salt", "extra_key", "lora_path"])
def test_namespace_members_are_texts(name: str) -> None:
    with pytest.raises(PromptError) as caught:
        namespace_of({name: 3})
    assert caught.value.param == name


def test_events_and_requests_name_the_same_namespace() -> None:
    assert event_namespace(None, "s") == namespace_of({"cache_salt": "s"}), "as SGLang publishes it"
    assert event_namespace("l", "s") == namespace_of({"lora_path": "l", "cache_salt": "s"}), "as vLLM does"
    for body in (
        {"lora_path": "l"},
        {"cache_salt": "s"},
        {"cache_salt": "\0s"},
        {"extra_key": "e", "cache_salt": "s"},
    ):
        assert event_namespace(None, namespace_of(body)) == namespace_of(body), "as our runtime does"


@pytest.mark.parametrize("member", ["tools", "documents", "chat_template_kwargs", "reasoning_effort", "messages"])
def test_too_deeply_nested_input_is_refused_before_rendering(member: str) -> None:
    def nested(levels: int) -> Any:
        value: Any = "x"
        for _ in range(levels):
            value = [value] if value == "x" else {"a": value}
        return value

    def body(levels: int) -> dict[str, Any]:
        value = nested(levels)
        message: dict[str, Any] = {"role": "user", "content": "hello"}
        match member:
            case "messages":
                return {"messages": [{**message, "extra": value}]}
            case "chat_template_kwargs":
                return {"messages": [message], member: {"a": value}}
            case "reasoning_effort":
                return {"messages": [message], member: value}
            case _:
                return {"messages": [message], member: [{"a": value}]}

    template = ChatTemplate("{{ messages[0].content }}", special_tokens={}, inline_seconds=60.0)
    assert prompt_of_chat(body(10), template).text == "hello"
    with pytest.raises(TooDeep, match="levels deep"):
        prompt_of_chat(body(70), template)
