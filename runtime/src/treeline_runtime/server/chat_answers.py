"""One choice of a chat: its text as it comes → what OpenAI's API says of it, as deltas and as a whole message."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Final

from treeline_runtime.messages import FinishReason, TextOut
from treeline_runtime.parsers.parts import CallArguments, CallBegun, OutputParser, Part, Said, Thought
from treeline_runtime.server.answers import ChatFinishReason
from treeline_runtime.server.jobs import Shown
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.special_tokens import SpecialTokens, Unmarked

FED_CHARS: Final = 2 << 10
"""Of an answer, parsed before others get their turn."""

Delta = dict[str, Any]


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

    async def take(self, out: TextOut, pacer: Pacer) -> list[Delta]:
        """What an output adds, as few deltas as tell it in its order."""
        if self._parser is None:
            return [{"content": out.text}] if out.text else []
        self._count(out.token_ids)
        deltas = _Deltas()
        for start in range(0, len(out.text), FED_CHARS):
            self._tell(self._parser.feed(out.text[start : start + FED_CHARS]), deltas)
            await pacer.rest()
        if out.finish is not None:
            self._tell(self._parser.end(), deltas, over=True)
        return deltas.whole()

    def _tell(self, parts: Iterable[Part], deltas: _Deltas, *, over: bool = False) -> None:
        for part in self._clean(parts, over=over):
            if (delta := self._delta(part)) is not None:
                deltas.add(delta)

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

    def _delta(self, part: Part) -> Delta | None:
        match part:
            case Said(text):
                return {"content": text} if text else None
            case Thought(text):
                self._thinks = self._thinks or bool(text)
                return {"reasoning_content": text, "reasoning": text} if text and self._shown.reasoning else None
            case CallBegun(index, name, id):
                if index and not self._shown.several_calls:
                    return None
                self.calls += 1
                function = {"name": name, "arguments": ""}
                return _call({"index": index, "id": id or call_id(), "type": "function", "function": function})
            case CallArguments(index, text):
                if not text or index >= self.calls:
                    return None
                return _call({"index": index, "function": {"arguments": text}})

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


def call_id() -> str:
    """Of a call for which the model's format has no name."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _call(call: dict[str, Any]) -> Delta:
    return {"tool_calls": [call]}


class _Deltas:
    """Deltas one after another; those that only go on with a text are put together."""

    def __init__(self) -> None:
        self._made = list[tuple[Delta, list[str]]]()
        """Each with the pieces of its text."""

    def add(self, delta: Delta) -> None:
        text = _text(delta)
        if self._made and _goes_on(self._made[-1][0], delta):
            self._made[-1][1].append(text)
        else:
            self._made.append((delta, [text]))

    def whole(self) -> list[Delta]:
        for delta, pieces in self._made:
            if len(pieces) > 1:
                _set_text(delta, "".join(pieces))
        return [delta for delta, _ in self._made]


def _goes_on(before: Delta, delta: Delta) -> bool:
    """Whether a delta only adds to the text of the one before."""
    if "tool_calls" not in delta:
        return before.keys() == delta.keys()
    (call,) = delta["tool_calls"]
    return "id" not in call and "tool_calls" in before and before["tool_calls"][0]["index"] == call["index"]


def _text(delta: Delta) -> str:
    if "tool_calls" in delta:
        text: str = delta["tool_calls"][0]["function"]["arguments"]
    else:
        text = next(iter(delta.values()))
    return text


def _set_text(delta: Delta, text: str) -> None:
    if "tool_calls" in delta:
        delta["tool_calls"][0]["function"]["arguments"] = text
    else:
        delta.update(dict.fromkeys(delta, text))


def message(deltas: Iterable[Delta], *, reasons: bool) -> dict[str, Any]:
    """A whole answer's deltas as its message. Content is null where there are calls alone. `reasons`: the reasoning
    has its place, be there any or not."""
    content, reasoning = list[str](), list[str]()
    calls = list[dict[str, Any]]()
    for delta in deltas:
        match delta:
            case {"content": text}:
                content.append(text)
            case {"reasoning_content": text}:
                reasoning.append(text)
            case {"tool_calls": [{"id": id, "function": function}]}:
                calls.append({"id": id, "type": "function", "function": dict(function)})
            case {"tool_calls": [{"index": index, "function": function}]}:
                calls[index]["function"]["arguments"] += function["arguments"]
    made: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(content) if content or not calls else None,
        "refusal": None,
    }
    if reasons:
        thought = "".join(reasoning) or None
        made |= {"reasoning_content": thought, "reasoning": thought}
    return made | ({"tool_calls": calls} if calls else {})
