"""A prompt as the turns of a chat, for servers that are sent nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeline_lang.errors import Unsupported
from treeline_lang.templates import ChatTemplate
from treeline_lang.transcript import Prompt, content_of


def turns_of(prompt: Prompt, template: ChatTemplate, backend: str) -> list[dict[str, Any]]:
    """The turns in the words of OpenAI's API; the last is the assistant's, as far as it has come, if it has begun.

    template: what the prompt's text was written with. Raises Unsupported for what has no place in a chat: text outside
    of the turns would be lost, and only the assistant answers.
    """
    if prompt.role != "assistant":
        raise Unsupported(f"{backend} is sent chats: generate in a turn of the assistant, assistant(gen(…))")
    text = "".join(_written(prompt.messages, template))
    if text + template.begin("assistant", not prompt.messages) + prompt.turn != prompt.text:
        raise Unsupported(f"{backend} is sent chats: text outside of system(…), user(…) and assistant(…) would be lost")
    turns = [dict(message) for message in prompt.messages]
    if prompt.turn or prompt.images:
        turns.append({"role": "assistant", "content": content_of(prompt.turn, prompt.images)})
    return turns


def _written(messages: tuple[Mapping[str, Any], ...], template: ChatTemplate) -> list[str]:
    """Each turn as the text has it. Images leave no mark there."""
    written = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        written.append(template.begin(role, not number) + said + template.end(role))
    return written
