"""Requests of Ollama's API as the chats that our own runtime makes of them, and its names of models."""

from __future__ import annotations

from typing import Any

import pytest
from treeline_wire.apis import ollama
from treeline_wire.apis.conversion import Context, Conversation, items_of
from treeline_wire.ollama_errors import is_ollamas
from treeline_wire.prompt import PromptError

OURS = Context("treeline", lambda *, must_show: True)
USER = {"role": "user", "content": "q"}


def chat(*messages: Any, **body: Any) -> Conversation:
    return ollama.to_chat({"messages": [*messages], **body}, [*messages], OURS)


def text(prompt: str, **body: Any) -> Conversation:
    return ollama.text_to_chat({"prompt": prompt, **body}, items_of(prompt, "prompt"), OURS)


def test_calls_results_and_thoughts_have_the_names_of_chat_completions() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    made = chat(
        USER,
        {"role": "assistant", "thinking": "hm", "tool_calls": [call, {**call, "id": "c"}]},
        {"role": "tool", "tool_name": "f", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        model="m",
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    shown = {"type": "function", **call}
    assert made.complete
    assert made.body == {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [shown, {**shown, "id": "c"}]},
            {"role": "tool", "content": "2", "name": "f"},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
    }


def test_images_become_parts_before_the_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/*;base64,aGk="}}
    seen = {"role": "user", "content": [image, image, {"type": "text", "text": "q"}]}
    assert chat({**USER, "images": ["aGk=", "aGk="]}).body["messages"] == [seen]
    system = {"role": "system", "content": "S"}
    assert text("q", system="S", images=["aGk=", "aGk="]).body["messages"] == [system, seen]


@pytest.mark.parametrize(
    ("think", "expected"),
    [
        (None, {}),
        (True, {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}),
        (False, {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}),
        ("high", {"reasoning_effort": "high"}),
    ],
)
def test_thinking_is_what_templates_read(think: Any, expected: dict[str, Any]) -> None:
    assert text("q", think=think).body == {"messages": [USER], **expected}


def test_an_answer_that_has_begun_is_continued() -> None:
    begun = {"role": "assistant", "content": "a"}
    assert chat(USER, begun).body["continue_final_message"] is True
    assert "continue_final_message" not in chat(USER, begun, USER).body


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        {"content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": "", "images": "aGk="},
        {"role": "user", "content": "", "images": [None]},
        {"role": "assistant", "tool_calls": {"function": {}}},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "", "tool_name": 5},
    ],
)
def test_other_forms_are_refused(message: Any) -> None:
    with pytest.raises(PromptError):
        chat(message)


def test_the_conversation_of_another_engine_is_unknown() -> None:
    made = ollama.to_chat({"model": "m"}, [USER], Context("sglang", OURS.inline_system))
    assert (made.complete, made.body["messages"]) == (False, [])


@pytest.mark.parametrize(
    ("asked", "served", "expected"),
    [
        ("m:latest", "m", "m"),
        ("m", "m", "m"),
        ("m:latest", "m:latest", "m:latest"),
        ("m:7b", "m", "m:7b"),
        ("m:latest", "other", "m"),
    ],
)
def test_a_model_may_be_named_with_the_tag_latest(asked: str, served: str, expected: str) -> None:
    assert ollama.without_tag(asked, served.__eq__) == expected


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("/api/chat", True),
        ("/pool/api/generate/", True),
        ("/api/tags", True),
        ("/api/chats", False),
        ("/generate", False),
        ("/v1/chat/completions", False),
        ("", False),
    ],
)
def test_errors_have_ollamas_format_at_its_paths(path: str, theirs: bool) -> None:
    assert is_ollamas(path) is theirs
