"""Requests of other chat APIs as the chat completions that our own runtime makes of them. What vLLM and SGLang make of
them is tested where the picker reads them (tests/epp/io/test_doors.py)."""

from __future__ import annotations

from typing import Any

import pytest
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import Context, Conversation, Unknown, items_of, takes_inline_system
from treeline_wire.chat import ChatTemplate, NeedsWorkerError
from treeline_wire.prompt import PromptError

INLINE = Context("treeline", lambda *, must_show: True)
FIRST_ONLY = Context("treeline", lambda *, must_show: False)
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def of_responses(input: Any, context: Context = INLINE, **body: Any) -> Conversation:
    return responses.to_chat({"input": input, **body}, items_of(input, "input"), context)


def of_messages(*messages: Any, context: Context = INLINE, **body: Any) -> Conversation:
    return anthropic.to_chat({"messages": [*messages], **body}, [*messages], context)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def part(text: str, type: str) -> dict[str, Any]:
    return {"type": type, "text": text}


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def test_reasoning_text_and_calls_of_one_turn_become_one_message() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [part("hm", "reasoning_text")]}
    said = {"type": "message", "role": "assistant", "content": [part("a", "output_text"), part("b", "output_text")]}
    result = {"type": "function_call_output", "call_id": "c", "output": "2"}
    made = of_responses([user("q"), thought, said, CALL, CALL, result, thought, said, said], instructions="S")
    assert made.complete
    assert made.body["messages"] == [
        {"role": "system", "content": "S"},
        user("q"),
        {"role": "assistant", "reasoning_content": "hm", "content": "ab", "tool_calls": [CALLED, CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        {"role": "assistant", "reasoning_content": "hm", "content": "ab"},
        assistant("ab"),
    ]
    assert of_responses([CALL, said]).body["messages"] == [
        {"role": "assistant", "tool_calls": [CALLED]},
        assistant("ab"),
    ], "what is said behind a call is another turn: a template writes it before"
    empty = {"type": "reasoning", "summary": []}
    assert of_responses([user("q"), empty]).body["messages"] == [user("q")]


def test_a_truncated_answer_is_continued() -> None:
    cut = {"type": "message", "role": "assistant", "content": [part("a", "output_text")], "status": "incomplete"}
    made = of_responses([user("q"), cut]).body
    assert (made["continue_final_message"], made["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in of_responses([user("q"), {**cut, "status": "completed"}]).body
    assert "continue_final_message" not in of_responses([user("q"), cut, user("r")]).body


TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}
SHOWN = [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, 3]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}, 3]},
            },
        ),
        ({"type": "file_search"}, {"type": "file_search"}),
    ],
)
def test_tools_and_choices_of_responses_become_a_chats(choice: Any, expected: Any) -> None:
    made = of_responses("q", tools=[TOOL], tool_choice=choice).body
    assert (made["tools"], made["tool_choice"]) == (SHOWN, expected)
    assert "tool_choice" not in of_responses("q", tools=[TOOL]).body
    assert "tool_choice" not in of_responses("q", tool_choice=choice).body


def test_members_with_the_same_meaning_are_kept() -> None:
    same: dict[str, Any] = {"model": "m", "chat_template_kwargs": {"a": 1}, "cache_salt": "s", "extra_key": "k"}
    assert of_responses("q", **same, reasoning={"effort": "low"}).body == {
        **same,
        "reasoning_effort": "low",
        "messages": [user("q")],
    }


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "m"}, "input[1]"),
        (user([{"type": "input_audio", "data": "x"}]), "input[1].content[0]"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, "input[1].output[0]"),
        ({"type": "reasoning", "encrypted_content": "x", "summary": []}, "input[1].encrypted_content"),
        ({**CALL, "namespace": "n"}, "input[1].namespace"),
    ],
)
def test_unsupported_input_is_named(item: Any, param: str) -> None:
    made = of_responses([user("q"), item, user("r")])
    assert made.unknown is not None
    assert made.unknown.param == param
    assert made.body["messages"] == [user("q")]


def test_a_former_response_is_named() -> None:
    made = of_responses("q", previous_response_id="resp_1")
    assert isinstance(made.unknown, Unknown)
    assert (made.unknown.param, made.complete) == ("previous_response_id", False)


@pytest.mark.parametrize(
    ("input", "param"),
    [(5, "input"), ([5], "input[0]"), ([{**CALL, "name": 5}], "input[0]"), ([user(5)], "input[0].content")],
)
def test_wrong_input_is_named(input: Any, param: str) -> None:
    with pytest.raises(PromptError) as caught:
        of_responses(input)
    assert caught.value.param == param


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


def test_turns_of_messages() -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turn = [thought, {"type": "redacted_thinking", "data": "x"}, part("a", "text"), use]
    made = of_messages(user("q"), assistant(turn), user([result, part("b", "text")]), system="S")
    assert made.body["messages"] == [
        {"role": "system", "content": "S"},
        user("q"),
        {"role": "assistant", "reasoning": "hm", "tool_calls": [CALLED], "content": "a"},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
        user("b"),
    ]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    made = of_messages(user("q"), assistant("The answer is")).body
    assert (made["continue_final_message"], made["add_generation_prompt"]) == (True, False)
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for last in (assistant([use]), assistant([part("a", "text"), use]), assistant(""), user("r")):
        assert "continue_final_message" not in of_messages(user("q"), last).body
    vllm = Context("vllm", lambda *, must_show: True)
    assert "continue_final_message" not in of_messages(user("q"), assistant("a"), context=vllm).body


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_and_choices_of_messages_become_a_chats(choice: Any, expected: Any) -> None:
    tool = {"name": "f", "input_schema": {}, "strict": True, "cache_control": {"type": "ephemeral"}}
    made = of_messages(user("q"), tools=[tool], tool_choice=choice).body
    assert (made["tools"], made["tool_choice"]) == (SHOWN, expected)
    assert "tool_choice" not in of_messages(user("q"), tool_choice=choice).body


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_becomes_variables_of_templates(kind: str, thinks: bool) -> None:
    said = {"thinking": thinks, "enable_thinking": thinks}
    assert of_messages(user("q"), thinking={"type": kind}).body["chat_template_kwargs"] == said
    own = {"enable_thinking": not thinks, "x": 1}
    made = of_messages(user("q"), thinking={"type": kind}, chat_template_kwargs=own).body
    assert made["chat_template_kwargs"] == said | own, "what is said to the template itself wins"
    wrong = of_messages(user("q"), thinking={"type": kind}, chat_template_kwargs=[]).body
    assert wrong["chat_template_kwargs"] == [], "and is judged where chats are"
    assert "chat_template_kwargs" not in of_messages(user("q")).body
    assert of_messages(user("q"), output_config={"effort": "low"}).body["reasoning_effort"] == "low"


def test_a_system_message_among_the_others_moves_where_the_template_takes_it() -> None:
    late = {"role": "system", "content": "late"}
    assert of_messages(user("q"), late, user("r")).body["messages"] == [user("q"), late, user("r")]
    merged = of_messages(user("q"), late, user("r"), system="S", context=FIRST_ONLY).body["messages"]
    assert merged == [{"role": "system", "content": "Slate"}, user("q"), user("r")]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "document"}, "messages[0].content[0]"),
        ({"type": "tool_use", "name": "f", "input": {}}, "messages[0].content[0].id"),
        (
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document"}]},
            "messages[0].content[0].content",
        ),
    ],
)
def test_unsupported_blocks_are_named(block: Any, param: str) -> None:
    made = of_messages(user([block]))
    assert made.unknown is not None
    assert made.unknown.param == param


# ---- templates ------------------------------------------------------------------------------------------------------


def test_templates_that_take_a_later_system_message_are_recognised() -> None:
    def takes(source: str, *, must_show: bool) -> bool:
        return takes_inline_system(ChatTemplate(source, special_tokens={}, inline_seconds=60.0), must_show=must_show)

    all = "{% for m in messages %}{{ m.content }}{% endfor %}"
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    first = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}"
    )
    assert [takes(source, must_show=False) for source in (all, silent, first)] == [True, True, False]
    assert [takes(source, must_show=True) for source in (all, silent, first)] == [True, False, False]
    with pytest.raises(NeedsWorkerError):
        takes("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}", must_show=False)
