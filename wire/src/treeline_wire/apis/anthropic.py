"""Anthropic's `/v1/messages` as the chat completion that our runtime, vLLM and SGLang make of it.

vLLM 0.32: `AnthropicServingMessages.to_chat_completion_request` in vllm/entrypoints/anthropic/serving.py. SGLang
0.5.23: `AnthropicServing._convert_to_chat_completion_request` in sglang/srt/entrypoints/anthropic/serving.py. They
differ in the separator of system parts, in the place of user text beside tool results, and in reasoning. SGLang's
reasoning depends on the parser it was started with, so a key ends before it. Our runtime follows vLLM, but continues a
last message of the assistant, and passes thinking to templates under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..dialects.base import check_size
from ..errors import PromptError
from .conversion import (
    PASSED,
    Context,
    Conversation,
    Message,
    Unknown,
    begins_answer,
    blocks_of,
    function,
    text_member,
    tools_of,
)

_BILLING: Final = "x-anthropic-billing-header"


def to_chat(body: Mapping[str, Any], messages: list[Any], context: Context) -> Conversation:
    """Converts a request with these messages to a chat. Raises `PromptError`."""
    sglang = context.engine == "sglang"
    made: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    if sglang:
        made.pop("chat_template_kwargs", None)
    merged = any(_role(message) == "system" for message in messages) and not context.inline_system(must_show=sglang)
    chat: list[Message] = []
    system = _system(body.get("system"), sglang)
    if merged:
        inline = (_inline_text(message, sglang) for message in messages if _role(message) == "system")
        system += [text for text in inline if text]
    if system:
        chat.append({"role": "system", "content": ("\n" if sglang else "").join(system)})
    unknown: Unknown | None = None
    try:
        for i, message in enumerate(messages):
            _convert(message, f"messages[{i}]", chat, context.engine, merged)
    except Unknown as error:
        unknown = error
    ours = context.engine == "treeline"
    if ours and unknown is None and begins_answer(chat):
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = _tools(body, messages, context.engine)
    if tools:
        made["tools"] = tools
        made["tool_choice"] = _choice(body.get("tool_choice"), ours)
    made |= _thinking(body, context.engine, made.get("chat_template_kwargs"))
    return Conversation({**made, "messages": chat}, unknown)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _system(value: Any, sglang: bool) -> list[str]:
    if not value:
        return []
    if isinstance(value, str):
        return [value] if not sglang or value.strip() else []
    texts = [text_member(block, "text", "system") for block in blocks_of(value, "system") if block["type"] == "text"]
    return [text for text in texts if text and (sglang or not text.startswith(_BILLING))]


def _inline_text(message: Message, sglang: bool) -> str:
    """Returns the text of a system message in the middle of a chat."""
    content = message.get("content")
    if isinstance(content, str):
        texts: list[str | None] = [content]
    else:
        texts = [text_member(b, "text", "messages") for b in blocks_of(content, "messages") if b["type"] == "text"]
    if sglang:
        return "\n".join(stripped for text in texts if (stripped := (text or "").strip()))
    return "".join(text for text in texts if text and not text.startswith(_BILLING))


def _convert(message: Any, where: str, chat: list[Message], engine: str, merged: bool) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(where, "must be an object with a role")
    role, content, sglang = message["role"], message.get("content"), engine == "sglang"
    if role == "system" and merged:
        return
    if role == "system" and not sglang:
        if text := _inline_text(message, sglang):
            chat.append({"role": "system", "content": text})
        return
    if isinstance(content, str):
        chat.append({"role": role, "content": content})
        return
    turn = _Turn(role, sglang, engine == "treeline", chat)
    for i, block in enumerate(blocks_of(content, f"{where}.content")):
        turn.take(block, f"{where}.content[{i}]")
    turn.end()


@dataclass
class _Turn:
    """Converts one message's blocks to messages in `chat`; each tool result becomes one, before the rest."""

    role: str
    sglang: bool
    ours: bool
    chat: list[Message]
    parts: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def take(self, block: dict[str, Any], where: str) -> None:
        match block["type"]:
            case "text":
                text = text_member(block, "text", where, None)
                if text or (self.sglang and text is not None):
                    self.parts.append({"type": "text", "text": text})
            case "image":
                self.parts.append(_image(block, where))
            case "thinking" if self.sglang:
                raise Unknown(where, "reasoning depends on the engine's settings")
            case "thinking":
                self.reasoning.append(text_member(block, "thinking", where) or "")
            case "redacted_thinking" | "tool_reference":
                pass
            case "tool_use":
                check_size(block.get("input"), f"{where}.input")
                if not block.get("id"):
                    raise Unknown(f"{where}.id", "it is missing")  # the engine makes one up
                called = function(name=block.get("name") or "", arguments=json.dumps(block.get("input") or {}))
                self.calls.append({"id": block["id"], **called})
            case "tool_result" if self.role == "user":
                if self.sglang and self.parts:
                    self.chat.append({"role": "user", "content": _content(self.parts)})
                    self.parts.clear()
                self.chat.append(_result(block, where, self.sglang, self.ours))
            case _:
                raise Unknown(where, "blocks of this type are not supported")

    def end(self) -> None:
        made: Message = {"role": self.role}
        if self.reasoning:
            made["reasoning"] = "".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = self.calls
        if self.parts:
            made["content"] = _content(self.parts)
        elif self.sglang and not self.calls and self.role != "user":
            made["content"] = ""
        if "content" in made or self.role != "user":
            self.chat.append(made)


def _content(parts: list[dict[str, Any]]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block.get("source"):
        case {"type": "base64", "data": str(data), **more}:
            url = f"data:{more.get('media_type')};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise PromptError(f"{where}.source", "expected base64 with data, or url; files are not stored here")
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: dict[str, Any], where: str, sglang: bool, ours: bool) -> Message:
    """Converts a tool result to a message of its own. Of a result with images other engines' text is unknown."""
    content = block.get("content")
    made: Message = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}
    if isinstance(content, list):
        blocks = blocks_of(content, f"{where}.content")
        if any(inner["type"] != "text" for inner in blocks):
            if not ours or any(inner["type"] not in ("text", "image") for inner in blocks):
                raise Unknown(f"{where}.content", "only texts are supported")
            made["content"] = [
                _image(inner, f"{where}.content[{i}]")
                if inner["type"] == "image"
                else {"type": "text", "text": text_member(inner, "text", where)}
                for i, inner in enumerate(blocks)
            ]
            return made
        texts = [text_member(inner, "text", where) or "" for inner in blocks]
        texts = [text for text in texts if text or not sglang]
        made["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    elif content and not isinstance(content, str):
        raise PromptError(f"{where}.content", "must be a string or a list")
    return made


def _tools(body: Mapping[str, Any], messages: list[Any], engine: str) -> list[dict[str, Any]]:
    tools = tools_of(body)
    if tools and any(block.get("type") in ("tool_addition", "tool_removal") for block in _all_blocks(messages)):
        raise PromptError("messages", "changes the tools")
    return [made for tool in tools if (made := _tool(tool, engine)) is not None]


def _tool(tool: dict[str, Any], engine: str) -> dict[str, Any] | None:
    name, description, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
    strict, deferred = tool.get("strict"), tool.get("defer_loading")
    if engine == "treeline":
        return function(name=name, description=description, parameters=schema, strict=strict)
    made = {"name": name, "description": description, "parameters": schema, "strict": strict}
    if engine != "sglang":
        return {"type": "function", "function": {**made, "defer_loading": deferred}}
    if schema is None:
        return None  # one of Anthropic's own tools
    return {"type": "function", "function": made | {"description": description or ""}, "defer_loading": deferred}


def _all_blocks(messages: list[Any]) -> list[dict[str, Any]]:
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return [block for content in contents if isinstance(content, list) for block in content if isinstance(block, dict)]


def _choice(value: Any, ours: bool) -> Any:
    """Converts `tool_choice`, which affects what a template sees: no tools, or one; and in our runtime, what the model
    must do.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}
    if kind == "any" and ours:
        return "required"
    return "none" if kind == "none" else "auto"


def _thinking(body: Mapping[str, Any], engine: str, given: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    output, thinking = body.get("output_config"), body.get("thinking")
    effort = output.get("effort") if isinstance(output, dict) else None
    if effort is not None:
        found["reasoning_effort"] = "max" if engine == "sglang" and effort == "xhigh" else effort
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind is not None and engine in ("sglang", "treeline"):
        # SGLang knows from its parser flag which of the two the model's template reads.
        said = {"thinking": kind != "disabled", "enable_thinking": kind != "disabled"}
        if engine == "sglang" or given is None:
            found["chat_template_kwargs"] = said
        elif isinstance(given, dict):
            found["chat_template_kwargs"] = said | given
    elif kind == "disabled":
        found["reasoning_effort"] = "none"
    return found
