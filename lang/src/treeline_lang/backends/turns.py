"""A prompt as chat turns, for servers that accept only these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeline_lang.errors import Unsupported
from treeline_lang.templates import ChatTemplate
from treeline_lang.transcript import Prompt, content_of


def turns_of(prompt: Prompt, template: ChatTemplate, backend: str) -> list[dict[str, Any]]:
    """The turns in OpenAI's format. The last is the begun turn of the assistant, if any.

    template: the one that wrote the prompt's text. Raises Unsupported for text outside of turns and for generation in
    other roles, which a chat API cannot express.
    """
    if prompt.role != "assistant":
        raise Unsupported(f"{backend} takes chats only: generate in a turn of the assistant, assistant(gen(…))")
    text = "".join(_written(prompt.messages, template))
    if text + template.begin("assistant", not prompt.messages) + prompt.turn != prompt.text:
        raise Unsupported(
            f"{backend} takes chats only: text outside of system(…), user(…) and assistant(…) would be lost"
        )
    turns = [dict(message) for message in prompt.messages]
    if prompt.turn or prompt.images:
        turns.append({"role": "assistant", "content": content_of(prompt.turn, prompt.images)})
    return turns


def _written(messages: tuple[Mapping[str, Any], ...], template: ChatTemplate) -> list[str]:
    """Each turn as it is in the text. Images are not in it."""
    written = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        written.append(template.begin(role, not number) + said + template.end(role))
    return written
