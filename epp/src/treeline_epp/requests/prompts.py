"""From a request body to the prefix key of its prompt, in bounded time.

The key of a prompt's beginning is the beginning of its key, so a bound costs nothing but knowledge of what lies beyond:
two requests that differ only there look alike. A chat is bounded by rendering its first messages as one that is to be
continued: what the template writes up to there is what it writes for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from treeline_wire.chat import TemplateError
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt, PromptError, TooDeep, prompt_of_completion

from treeline_epp.requests.keyers import Keyer
from treeline_epp.requests.summary import Summary

CHARS_PER_TOKEN: Final = 4
"""Rough, for requests of which nothing better is known."""
MAX_MESSAGES: Final = 256
"""Messages, tools and documents that a template is given; rendering costs by each."""
MAX_TOOLS: Final = 256
KEY_COST: Final = 192 * 1024
"""What is normalized and scanned of a prompt: characters, those beyond ASCII counted several times for their work."""
_NOT_ASCII: Final = 7
_LAST_BLANK: Final = re.compile(r"[ \n](?=[^ \n]*\Z)")
"""Text behind which a beginning may end: tokens and Unicode's forms do not reach over it."""
_RENDERED: Final = frozenset(
    {
        "tools",
        "tool_choice",
        "documents",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
    }
)


class KeyedPrompt(msgspec.Struct, frozen=True, gc=False):
    """`tokens` are estimated for the whole prompt. `key_tokens`: for what the key covers, where that is only the
    beginning of it."""

    key: bytes | None
    tokens: int
    key_tokens: int | None = None


def chat(summary: Summary, keyer: Keyer | None) -> KeyedPrompt:
    """The prompt of a chat request. Raises `TooDeep`; other faults mean no key."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    body = summary.members
    if keyer is None or summary.left_out & _RENDERED or not _few(body):
        return rough
    messages = body.get("messages")
    cut = summary.cut is not None or (isinstance(messages, list) and len(messages) > MAX_MESSAGES)
    try:
        prompt = _beginning_of_chat(summary, keyer) if cut else keyer.render(body)
    except TooDeep:
        raise
    except (PromptError, TemplateError):
        return rough
    if prompt is None:
        return rough
    return _keyed(prompt, keyer, keyer.estimate_tokens(summary.size) if cut else None)


def completion(summary: Summary, keyer: Keyer | None) -> KeyedPrompt:
    """The prompt of a completion (of the native API too); the key is that of the first, where there are several."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    if keyer is None:
        return rough
    body = summary.members
    if summary.cut is not None and isinstance(body.get("prompt"), str):
        body = {**body, "prompt": _shortened(body["prompt"])}
    try:
        prompts = prompt_of_completion(body)
    except PromptError:
        return rough
    tokens: int | None = None
    if summary.cut is not None or len(prompts) > 1:
        tokens = sum(_tokens(prompt, keyer) for prompt in prompts)
    if tokens is not None and summary.cut is not None:
        tokens = tokens * summary.cut_bytes // summary.cut_read
    return _keyed(prompts[0], keyer, tokens)


def _keyed(prompt: Prompt, keyer: Keyer, tokens: int | None) -> KeyedPrompt:
    """The key of a prompt, or of its beginning. `tokens` of the whole request, where the prompt is not all of it."""
    bounded = keyer.affordable(_bounded(prompt))
    key = keyer.key(bounded)
    if key is None:
        return KeyedPrompt(None, tokens or _tokens(prompt, keyer))
    in_key = len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(key))
    if bounded is prompt and tokens is None:
        return KeyedPrompt(key, in_key)
    return KeyedPrompt(key, max(in_key, tokens or _tokens(prompt, keyer)), in_key)


def _bounded(prompt: Prompt) -> Prompt:
    """A prompt, or its beginning where to normalize and scan all of it would take long."""
    text = prompt.text
    if text is None:
        return prompt
    size = len(text)
    while size > KEY_COST // _NOT_ASCII and (cost := _cost(text[:size])) > KEY_COST:
        size = min(size - 1, size * KEY_COST // cost)
    short = text if size == len(text) else _shortened(text[:size])
    marks = long_run(short)
    if marks is not None:
        short = short[:marks]
    return prompt if short is text else Prompt(short, None, prompt.add_special_tokens)


def _cost(text: str) -> int:
    size = len(text)
    return size if text.isascii() else size + (_NOT_ASCII - 1) // 2 * (len(text.encode()) - size)


def _tokens(prompt: Prompt, keyer: Keyer) -> int:
    return len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(prompt.text or ""))


def _few(body: Mapping[str, Any]) -> bool:
    """Few enough tools and documents to be rendered?"""
    lists = (body.get("tools"), body.get("documents"))
    return all(not isinstance(value, list) or len(value) <= MAX_TOOLS for value in lists)


def _beginning_of_chat(summary: Summary, keyer: Keyer) -> Prompt | None:
    """Render as far as the messages are known: with the beginning of the last one, or else up to it."""
    body = summary.members
    known = body.get("messages")
    if not isinstance(known, list):
        return None
    some = known[:MAX_MESSAGES]
    if summary.complete is not known and len(known) <= MAX_MESSAGES and summary.cut is not None:
        some = _shorten_last(some)
    for messages in (some, summary.complete):
        if not isinstance(messages, list):
            continue
        messages = _with_text_at_end(messages[:MAX_MESSAGES])
        if not messages:
            continue
        asked = {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        try:
            return keyer.render(asked)
        except TooDeep:
            raise
        except (PromptError, TemplateError):
            continue
    return None


def _with_text_at_end(messages: list[Any]) -> list[Any]:
    """Without the last ones that have no text, behind which a rendering could end."""
    end = len(messages)
    while end and not (isinstance(messages[end - 1], dict) and messages[end - 1].get("content")):
        end -= 1
    return messages[:end]


def _shorten_last(messages: list[Any]) -> list[Any]:
    """The text of the last message ends where nothing that follows can change it."""
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or not last:
        return messages
    content = last.get("content")
    if isinstance(content, str) and next(reversed(last)) == "content":
        return [*messages[:-1], {**last, "content": _shortened(content)}]
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if isinstance(part.get("text"), str) and next(reversed(part)) == "text":
            parts = [*content[:-1], {**part, "text": _shortened(part["text"])}]
            return [*messages[:-1], {**last, "content": parts}]
    return messages[:-1]


def _shortened(text: str) -> str:
    found = _LAST_BLANK.search(text, max(0, len(text) - 1024))
    return text[: found.start()] if found is not None else text
