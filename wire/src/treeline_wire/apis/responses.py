"""OpenAI's `/v1/responses` as the chat completion that our runtime, vLLM and SGLang make of it.

vLLM 0.32: `construct_input_messages` in vllm/entrypoints/openai/responses/utils.py. SGLang 0.5.23:
`_construct_input_messages` in sglang/srt/entrypoints/openai/serving_responses.py. Only the engine has what
`previous_response_id` refers to, so only the instructions before it are known. Our runtime stores nothing, and merges
the items of an assistant's turn into one message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..errors import PromptError
from .conversion import (
    MAX_CALL_VALUES,
    PASSED,
    Context,
    Conversation,
    Message,
    Unknown,
    blocks_of,
    function,
    many_values,
    text_member,
    tools_of,
)

_DEVELOPER: Final = "Developer instructions:\n"
"""SGLang's prefix for the text of a developer message."""
_OPEN: Final = ("in_progress", "incomplete")
_TEXTS: Final = ("input_text", "output_text", "text")
_IMAGE: Final = "input_image"
_OTHER: Final = "its type is unknown"
_ENCRYPTED: Final = "it is encrypted"


def to_chat(body: Mapping[str, Any], items: list[Any], context: Context) -> Conversation:
    """Converts a request with these input items to a chat. Raises `PromptError`."""
    engine = context.engine
    add = _ADD.get(engine, _add_as_vllm)
    made: dict[str, Any] = {name: body[name] for name in PASSED if body.get(name) is not None}
    chat: list[Message] = []
    instructions = text_member(dict(body), "instructions", "body")
    if instructions:
        chat.append({"role": "system", "content": instructions})
    unknown: Unknown | None = None
    if body.get("previous_response_id") is not None:
        unknown = Unknown("previous_response_id", "responses are not stored: send the whole conversation as `input`")
    else:
        try:
            for i, item in enumerate(items):
                if not isinstance(item, dict):
                    raise PromptError(f"input[{i}]", "must be an object")
                add(item, f"input[{i}]", chat)
        except Unknown as error:
            unknown = error
    if engine == "sglang":
        chat = _merged(chat)
        if not context.inline_system(must_show=True):
            chat = _system_first(chat)
    elif unknown is None and items and _is_open(items[-1]):
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    made |= _tools(body, engine)
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        made["reasoning_effort"] = reasoning["effort"]
    return Conversation({**made, "messages": chat}, unknown)


def _is_open(item: dict[str, Any]) -> bool:
    """Whether the last item is an answer to be continued."""
    return item.get("status") in _OPEN and item.get("type", "message") == "message"


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if item.get("namespace"):
        raise Unknown(f"{where}.namespace", "tools have no namespaces here")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise PromptError(where, "must have a name and arguments")
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_as_ours(item: dict[str, Any], where: str, chat: list[Message]) -> None:
    """Adds an item; the assistant's reasoning, text and calls in one turn become one message."""
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else {}
    kind = item.get("type", "message")
    if kind == "function_call":
        calls = [*last.get("tool_calls", ()), _call(item, where)]
        if last:
            last["tool_calls"] = calls
        else:
            chat.append({"role": "assistant", "tool_calls": calls})
    elif kind == "reasoning":
        text = _reasoning(item, ("content", "summary"), where, first=False)
        if item.get("encrypted_content") and not text:
            raise Unknown(f"{where}.encrypted_content", "it cannot be read here")
        if text:
            chat.append({"role": "assistant", "reasoning_content": text})
    elif kind == "function_call_output":
        output = _known(item.get("output"), f"{where}.output", _TEXTS, _IMAGE)
        chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "message" and item.get("role") == "assistant":
        said = _known(item.get("content"), f"{where}.content", _TEXTS)
        text = said if isinstance(said, str) else "".join(part["text"] for part in said or ())
        if last and "content" not in last and "tool_calls" not in last:
            last["content"] = text
        else:
            chat.append({"role": "assistant", "content": text})
    elif kind == "message" and isinstance(item.get("role"), str):
        said = _known(item.get("content"), f"{where}.content", _TEXTS, _IMAGE)
        chat.append({"role": item["role"], "content": said})
    else:
        raise Unknown(where, "items of this type are not supported")


def _known(content: Any, where: str, texts: tuple[str, ...], *more: str) -> Any:
    """Content with its parts in chat completion format, all of these types."""
    if content is None or isinstance(content, str):
        return content
    for i, part in enumerate(blocks_of(content, where)):
        if part["type"] not in (*texts, *more):
            raise Unknown(f"{where}[{i}]", f"expected one of {', '.join((*texts, *more))}")
    return _plain(content, where)


def _add_as_vllm(item: dict[str, Any], where: str, chat: list[Message]) -> None:
    """Adds an item; those of an assistant's turn are merged while each adds something new."""
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "function_call":
        call = _call(item, where)
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
        else:
            chat.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        text = _reasoning(item, ("content", "summary"), where, first=True)
        if last is not None and last.get("reasoning") is None:
            last["reasoning"] = text
        else:
            chat.append({"role": "assistant", "reasoning": text})
    elif kind == "function_call_output":
        chat.append(
            {
                "role": "tool",
                "content": _plain(item.get("output"), f"{where}.output"),
                "tool_call_id": item.get("call_id"),
            }
        )
    elif kind == "message" and item.get("role") == "assistant":
        text = _first_text(item.get("content"), where)
        if last is not None and last.get("content") is None:
            last["content"] = text
        else:
            chat.append({"role": "assistant", "content": text})
    elif kind == "message" and isinstance(item.get("role"), str):
        chat.append({"role": item["role"], "content": _plain(item.get("content"), f"{where}.content")})
    else:
        raise Unknown(where, _OTHER)


def _add_as_sglang(item: dict[str, Any], where: str, chat: list[Message]) -> None:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call":
        call = _call(item, where)
        if many_values(call["function"]["arguments"]) > MAX_CALL_VALUES:
            raise Unknown(where, "it has many arguments")  # it takes long to see whether they are an object
        if not _is_object(call["function"]["arguments"]):
            call["function"]["arguments"] = "{}"
        chat.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        if item.get("encrypted_content") and not item.get("summary"):
            raise Unknown(where, _ENCRYPTED)
        text = _reasoning(item, ("summary", "content"), where, first=False)
        if text:
            chat.append({"role": "assistant", "reasoning_content": text})
    elif kind == "function_call_output":
        output = _plain(item.get("output"), f"{where}.output")
        if isinstance(output, list):
            output = "".join(part.get("text", "") for part in output)
        chat.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "message" and isinstance(role, str):
        content = _plain(item.get("content"), f"{where}.content")
        if role == "developer":
            role, content = "system", _labelled(content, where)
        chat.append({"role": role, "content": content})
    else:
        raise Unknown(where, _OTHER)


_ADD: Final = {"treeline": _add_as_ours, "sglang": _add_as_sglang}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _labelled(content: Any, where: str) -> Any:
    if content is None:
        return None
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part["type"] == "text":
                return [*content[:i], {"type": "text", "text": _DEVELOPER + part["text"]}, *content[i + 1 :]]
        raise Unknown(where, "it has no text")
    return f"{_DEVELOPER}{content}"


def _plain(content: Any, where: str) -> Any:
    """Content with its parts in chat completion format."""
    if content is None or isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in blocks_of(content, where):
        if part["type"] in _TEXTS:
            parts.append({"type": "text", "text": text_member(part, "text", where) or ""})
        elif part["type"] == _IMAGE:
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise Unknown(where, _OTHER)
    return parts


def _first_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    blocks = blocks_of(content, f"{where}.content")
    if not blocks or not isinstance(blocks[0].get("text"), str):
        raise Unknown(where, "it has no text")
    text: str = blocks[0]["text"]
    return text


def _reasoning(item: dict[str, Any], members: tuple[str, str], where: str, *, first: bool) -> str:
    if first and item.get("encrypted_content"):
        raise Unknown(where, _ENCRYPTED)
    for member in members:
        blocks = blocks_of(item.get(member) or [], f"{where}.{member}")
        texts = [text for block in blocks if (text := text_member(block, "text", where))]
        if first and blocks:
            return texts[0] if texts else ""
        if texts:
            return "\n".join(texts)
    return ""


def _merged(chat: list[Message]) -> list[Message]:
    """Merges consecutive messages of the assistant, as SGLang does."""
    out: list[Message] = []
    for message in chat:
        if message["role"] != "assistant" or not out or out[-1]["role"] != "assistant":
            out.append(message)
            continue
        last = out[-1] = dict(out[-1])
        content = message.get("content")
        if content:
            before = last.get("content")
            if not before:
                last["content"] = content
            elif isinstance(before, str) and isinstance(content, str):
                last["content"] = f"{before}\n\n{content}"
            else:
                last["content"] = [*_as_parts(before), *_as_parts(content)]
        if message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        if reasoning := message.get("reasoning_content"):
            had = last.get("reasoning_content")
            last["reasoning_content"] = f"{had}\n{reasoning}" if had else reasoning
    return out


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _system_first(chat: list[Message]) -> list[Message]:
    """Merges all system messages at the beginning, as SGLang does for templates that accept one only there."""
    texts: list[str] = []
    for message in chat:
        if message["role"] == "system":
            content = message["content"]
            parts = content if isinstance(content, list) else [{"text": content or ""}]
            texts += [part["text"] for part in parts if "text" in part]
    if not texts:
        return chat
    others = [message for message in chat if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _tools(body: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Tools and tool choice. Without `strict`, SGLang's tools are not strict; vLLM's have no such member."""
    given = tools_of(body)
    if any(tool.get("type") in ("custom", "namespace") for tool in given):
        raise PromptError("tools", "has unknown kinds of tools")
    functions = [tool for tool in given if tool.get("type") == "function"]
    if not functions:
        return {}
    choice = body.get("tool_choice")
    names = ("name", "description", "parameters")
    if engine == "treeline":
        tools = [function(**{name: tool.get(name) for name in (*names, "strict")}) for tool in functions]
        return {"tools": tools} | ({} if choice is None else {"tool_choice": _choice(choice)})
    strict = False if engine == "sglang" else None
    tools = [
        {
            "type": "function",
            "function": {name: tool.get(name) for name in names} | {"strict": tool.get("strict", strict)},
        }
        for tool in functions
    ]
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"function": {"name": choice.get("name")}}
    return {"tools": tools, "tool_choice": choice}


def _choice(choice: Any) -> Any:
    """`tool_choice` in chat completion format."""
    match choice:
        case {"type": "function", "name": name}:
            return function(name=name)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_choice(tool) for tool in tools]},
            }
    return choice
