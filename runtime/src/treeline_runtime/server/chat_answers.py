"""One choice of a chat: its text as it comes → its parts, and what OpenAI's API makes of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from msgspec import UNSET

from treeline_runtime.messages import FinishReason, TextOut
from treeline_runtime.parsers.parts import CallArguments, CallBegun, OutputParser, Part, Said, Thought
from treeline_runtime.server.answers import (
    CalledFunction,
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from treeline_runtime.server.jobs import ChatTask, Shown
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.prompts import Prompts
from treeline_runtime.server.special_tokens import SpecialTokens, Unmarked

FED_CHARS: Final = 2 << 10
"""Of an answer, parsed before others get their turn."""
_NOTHING_SPECIAL: Final = SpecialTokens(())


class Choice:
    """What one choice has said so far. `take` its outputs in order."""

    def __init__(
        self, parser: OutputParser | None, shown: Shown, special: SpecialTokens, end_of_thinking: int | None = None
    ) -> None:
        """`parser`: None where all is said. `special`: those that are in its text and must not be in the answer.
        `end_of_thinking`: the token."""
        self._parser = parser
        self._shown = shown
        self._said = Unmarked(special)
        self._thought = Unmarked(special)
        self._held = list[str]()
        """Of the reasoning, where it is to be sent in one piece."""
        self._end_of_thinking = end_of_thinking
        self._thinking_tokens = 0
        self._thinks = False
        self._has_thought = False
        self.calls = 0

    async def take(self, out: TextOut, pacer: Pacer) -> list[Part]:
        """What an output adds of what the request wants to see, as few parts as tell it in its order."""
        if self._parser is None:
            return [Said(out.text)] if out.text else []
        self._count(out.token_ids)
        found = list[Part]()
        for start in range(0, len(out.text), FED_CHARS):
            found += self._visible(self._parser.feed(out.text[start : start + FED_CHARS]), over=False)
            await pacer.rest()
        if out.finish is not None:
            found += self._visible(self._parser.end(), over=True)
        return _joined(found)

    def _visible(self, parts: Iterable[Part], *, over: bool) -> Iterator[Part]:
        for part in self._clean(parts, over=over):
            match part:
                case Said(text):
                    shown = bool(text)
                case Thought(text):
                    self._thinks = self._thinks or bool(text)
                    shown = bool(text) and self._shown.reasoning
                case CallBegun(index, _, _):
                    shown = not index or self._shown.several_calls
                    self.calls += shown
                case CallArguments(index, text):
                    shown = bool(text) and index < self.calls
            if shown:
                yield part

    def _clean(self, parts: Iterable[Part], *, over: bool) -> Iterator[Part]:
        """The parts without special tokens. Text that was held back comes before a part of another kind."""
        for part in parts:
            if not isinstance(part, Said) and (rest := self._said.end()):
                yield Said(rest)
            if not isinstance(part, Thought):
                yield from self._end_of_thought()
            match part:
                case Said(text):
                    yield Said(self._said.feed(text))
                case Thought(text) if self._shown.reasoning_at_once:
                    self._held.append(self._thought.feed(text))
                case Thought(text):
                    yield Thought(self._thought.feed(text))
                case _:
                    yield part
        if over:
            yield from self._end_of_thought()
            yield Said(self._said.end())

    def _end_of_thought(self) -> Iterator[Part]:
        text = "".join([*self._held, self._thought.end()])
        self._held.clear()
        if text:
            yield Thought(text)

    def _count(self, ids: list[int]) -> None:
        if self._end_of_thinking is None or self._has_thought:
            return
        self._has_thought = self._end_of_thinking in ids
        self._thinking_tokens += ids.index(self._end_of_thinking) + 1 if self._has_thought else len(ids)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of the tokens so far were reasoning, markers included; None = not known."""
        if self._end_of_thinking is None:
            return None
        return self._thinking_tokens if self._thinks else 0

    def finish_reason(self, finish: FinishReason) -> ChatFinishReason:
        """`tool_calls` where the model ended by itself and has called; one that was cut off may be in the midst of a
        call."""
        assert finish.type != "error", "which is no answer (`Service.check_finish`)"
        if finish.type == "stop" and self.calls and not isinstance(finish.matched, str):
            return "tool_calls"
        return finish.type


def choices(prompts: Prompts, task: ChatTask) -> list[Choice]:
    """The choices of an answer, of which nothing has come yet."""
    parsing = task.parsing
    if parsing is None:
        return [Choice(None, task.shown, _NOTHING_SPECIAL) for _ in range(task.n)]
    hidden = parsing.needs_special_tokens and not task.shown.special_tokens
    special = prompts.special_tokens if hidden else _NOTHING_SPECIAL
    end = None if parsing.closing is None else prompts.token_of(parsing.closing)
    return [Choice(parsing.parser(), task.shown, special, end) for _ in range(task.n)]


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Parts of one kind that follow each other become one."""
    runs = list[tuple[Part, list[str]]]()
    for part in parts:
        before = runs[-1][0] if runs else None
        if isinstance(part, CallBegun):
            runs.append((part, []))
        elif type(before) is type(part) and getattr(before, "index", 0) == getattr(part, "index", 0):
            runs[-1][1].append(part.text)
        else:
            runs.append((part, [part.text]))
    return [msgspec.structs.replace(part, text="".join(texts)) if len(texts) > 1 else part for part, texts in runs]


def deltas(parts: Iterable[Part]) -> list[ChatDelta]:
    """The first delta of a call has the arguments that came with it."""
    made = list[ChatDelta]()
    begun: ToolCallDelta | None = None
    for part in parts:
        match part:
            case Said(text):
                made.append(ChatDelta(content=text))
            case Thought(text):
                made.append(ChatDelta(reasoning_content=text, reasoning=text))
            case CallBegun(index, name, id):
                begun = ToolCallDelta(index, FunctionDelta("", name), id or call_id(), "function")
                made.append(ChatDelta(tool_calls=[begun]))
                continue
            case CallArguments(index, text):
                if begun is not None and begun.index == index:
                    begun.function.arguments = text
                else:
                    made.append(ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))]))
        begun = None
    return made


def call_id() -> str:
    """Of a call for which the model's format has no name."""
    return f"call_{uuid.uuid4().hex[:24]}"


def message(parts: Iterable[Part], *, reasons: bool, echo: str = "") -> ChatMessage:
    """The parts of a whole answer as its message. Content is null where there are calls alone. `reasons`: the reasoning
    has its place, be there any or not. `echo`: what the content begins with."""
    content, reasoning, calls = list[str](), list[str](), list[ToolCall]()
    for part in parts:
        match part:
            case Said(text):
                content.append(text)
            case Thought(text):
                reasoning.append(text)
            case CallBegun(_, name, id):
                calls.append(ToolCall(id or call_id(), "function", CalledFunction(name, "")))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    thought = ("".join(reasoning) or None) if reasons else UNSET
    return ChatMessage(
        "assistant",
        echo + "".join(content) if echo or content or not calls else None,
        None,
        thought,
        thought,
        calls or UNSET,
    )
