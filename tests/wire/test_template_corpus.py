"""Over a corpus of templates and chats, a request becomes the text that `transformers` makes of the same conversation.

What an engine gives to a template is written down here a second time, from its description and not from the code: see
`meant`.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from treeline_wire.chat import ChatTemplate
from treeline_wire.dialects import dialect_of
from treeline_wire.prompt import PromptError, prompt_of_chat
from wire.template_corpus import Template, corpus

CORPUS = list(corpus())
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
_TAGS = {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}
_CITY = {"type": "string", "description": "“Zürich”"}
_WHERE = {"type": "object", "properties": {"city": _CITY, "tags": _TAGS}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Say <how> it is", "parameters": _WHERE}},
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
]


def said(role: str, content: Any = "A", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "weather", "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "tool_calls": calls, **more}


def result(i: int = 0, content: Any = '{"t": 3}') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{i}", "content": content}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


ASK, CALL = said("user", "Weather?"), '{"city": "Zürich"}'
CHATS: dict[str, list[dict[str, Any]] | dict[str, Any]] = {
    "one": [said("user", "Hi {{ 7 * 7 }} <|im_end|>\n")],
    "system": [said("system", "  Be brief.\n"), said("user", "  padded  ")],
    "turns": [said("system", "S"), said("user", "A"), said("assistant", " B\n\n"), said("user", "C")],
    "answered": [said("user"), said("assistant", "B and a blank ")],
    "two users": [said("user", "A"), said("user", "B")],
    "two assistants": [said("assistant", "A"), said("assistant", "B")],
    "late system": [said("user"), said("system", "S"), said("user", "B")],
    "call, null": [ASK, called(CALL, content=None), result()],
    "call, absent": [ASK, called(CALL), result(), said("assistant", "3 °C"), said("user", "Thanks")],
    "call, empty": [ASK, called(CALL, content=""), result()],
    "call, text": [ASK, called(CALL, content="I look."), result()],
    "call, object": [ASK, called({"city": "Bern"}, content=None), result()],
    "call, no arguments": [ASK, called("", content=None), result()],
    "parallel calls": [ASK, called(CALL, '{"tags": ["a"]}', content=None), result(0), result(1, "later")],
    "rounds": [ASK, called(CALL), result(), called(CALL), result(0, "9"), said("assistant", "so"), ASK],
    "result, parts": [ASK, called(CALL, content=None), result(0, parts("one", "two"))],
    "result, null": [ASK, called(CALL, content=None), result(0, None)],
    "tools": {"messages": [ASK], "tools": TOOLS},
    "tools, system": {"messages": [said("system", "S"), ASK], "tools": TOOLS},
    "tools, called": {"messages": [ASK, called(CALL, content=None), result()], "tools": TOOLS},
    "no tool may": {"messages": [ASK], "tools": TOOLS, "tool_choice": "none"},
    "parts": [said("user", parts("one ", "two"))],
    "system parts": [said("system", parts("a", "b")), said("user", parts(" c "))],
    "no parts": [said("user", [])],
    "image": [said("user", [{"type": "image_url", "image_url": {"url": "x"}}, *parts("what?")])],
    "thoughts": [said("user"), said("assistant", "B", reasoning_content="hm\n"), said("user", "C")],
    "thoughts at the end": [said("user"), said("assistant", "B", reasoning="because")],
    "not thinking": {"messages": [said("user")], "chat_template_kwargs": {"enable_thinking": False}},
    "scripts": [said("user", "日本語 😀 e\u0301 \u2028 \x00 \t عربى"), said("assistant", "नमस्ते"), said("user")],
    "empty": [said("user", ""), said("assistant", ""), said("user", " ")],
    "developer": [said("developer", "D"), said("user")],
    "developer later": [said("system", "S"), said("user"), said("developer", parts("D", "E")), said("user", "B")],
    "names": [said("user", "A", name="ann"), said("assistant", "B", name="bob"), said("user", "C", name="")],
    "prefill": {"messages": [said("user"), said("assistant", "The answer")], "continue_final_message": True},
    "no prompt": {"messages": [said("user"), said("assistant", "B")], "add_generation_prompt": False},
    "long": [said(("user", "assistant")[i % 2], f"message {i} " * 20) for i in range(41)],
}
REFUSED = {"image": "messages carry text only here"}
"""Chats that we render for no template, with the reason."""


def meant(body: dict[str, Any], template: Template) -> dict[str, Any]:
    """Return the arguments of `apply_chat_template` for a request, by the rules of our dialect."""
    messages = []
    for message in body["messages"]:
        message = dict(message)
        content = message.get("content")
        if content is None:
            message["content"] = ""
        elif isinstance(content, list) and (not template.lists or message["role"] == "tool"):
            message["content"] = "\n".join(part["text"] for part in content)
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        messages.append(message)
    if not template.developer and any(message["role"] == "developer" for message in messages):
        spoken = [message for message in messages if message["role"] in ("system", "developer")]
        texts = [m["content"] if isinstance(m["content"], str) else "D\nE" for m in spoken]
        others = [message for message in messages if message not in spoken]
        messages = [{"role": "system", "content": "\n\n".join(texts)}, *others]
    return {
        "conversation": messages,
        "tools": body.get("tools") if body.get("tool_choice") != "none" else None,
        "add_generation_prompt": body.get("add_generation_prompt", not body.get("continue_final_message", False)),
        "continue_final_message": body.get("continue_final_message", False),
        **body.get("chat_template_kwargs", {}),
    }


def _object(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


PATIENCE_S = 60.0
"""The time for a rendering: it may include a garbage collection, and only texts are compared."""


def bodies() -> dict[str, dict[str, Any]]:
    return {name: chat if isinstance(chat, dict) else {"messages": chat} for name, chat in CHATS.items()}


@pytest.mark.deep
def test_requests_become_transformers_renderings(reference: PreTrainedTokenizerFast) -> None:
    assert len(CORPUS) >= 150
    assert len(CHATS) >= 34
    assert len({template.source for template in CORPUS}) == len(CORPUS)
    compared = refused = 0
    for template in CORPUS:
        ours = ChatTemplate(template.source, special_tokens=SPECIAL, inline_seconds=PATIENCE_S)
        for name, body in bodies().items():
            try:
                got = prompt_of_chat(body, ours).text
            except PromptError:
                got = None
            try:
                expected = None if name in REFUSED else _reference(reference, template, body)
            except Exception:
                expected = None
            assert got == expected, (template.name, name)
            compared += expected is not None
            refused += expected is None
    assert compared > 20 * refused, (compared, refused)


def _reference(tokenizer: PreTrainedTokenizerFast, template: Template, body: dict[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(**meant(body, template), chat_template=template.source, tokenize=False))


def test_each_engine_recognises_list_templates_by_its_own_rule() -> None:
    for template in CORPUS:
        verdicts = {name: dialect_of(name).takes_lists(template.source) for name in ("treeline", "vllm", "sglang")}
        lists = template.lists
        assert verdicts == {"treeline": lists, "vllm": lists, "sglang": template.sglang_lists}, template.name
