"""The outputs of one answer → its parts, as a chat tells them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treeline_runtime.messages import TextOut
from treeline_runtime.parsers.parts import CallArguments, CallBegun, Part, Said, Thought
from treeline_runtime.server.chat import choices
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.prompts import Prompts


class Parts:
    """`take` the outputs in order."""

    def __init__(self, prompts: Prompts, task: ChatTask) -> None:
        (self._choice,) = choices(prompts, task)

    async def take(self, out: TextOut, pacer: Pacer) -> list[Part]:
        """What an output adds: only what the request wants to be told."""
        return [part for delta in await self._choice.take(out, pacer) for part in _parts(delta)]

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens so far were reasoning; None = not known."""
        return self._choice.reasoning_tokens


def _parts(delta: dict[str, Any]) -> Iterator[Part]:
    match delta:
        case {"content": text}:
            yield Said(text)
        case {"reasoning_content": text}:
            yield Thought(text)
        case {"tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": text}}]}:
            yield CallBegun(index, name, id)
            yield CallArguments(index, text)
        case {"tool_calls": [{"index": index, "function": {"arguments": text}}]}:
            yield CallArguments(index, text)
        case _:
            raise AssertionError(f"a delta of an unknown kind: {sorted(delta)}")
