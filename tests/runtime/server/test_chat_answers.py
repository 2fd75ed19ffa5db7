"""Deltas and messages of a choice, from outputs as they come (the tests choose the engine's text)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from support.outputs import pieces
from treeline_runtime import parsers
from treeline_runtime.messages import FinishReason, TextOut
from treeline_runtime.parsers.source import Part
from treeline_runtime.server.chat import Choice, choices, deltas, message
from treeline_runtime.server.formats import Parsing
from treeline_runtime.server.jobs import ChatTask, Shown
from treeline_runtime.server.pacing import Pacer
from treeline_runtime.server.prompts import SpecialTokens

SPECIAL = SpecialTokens(["<|im_end|>", "<|im_start|>"])
STOP = FinishReason("stop", matched=2)
FUNCTIONS = ["weather", "now"]
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Kiel"}}\n</tool_call>\n'
CALLS += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
OUTPUT = "<think>\nIt is <|im_start|>asked.\n</think>\n\nLet me see<|im_end|>.\n" + CALLS


TOLD = Shown()


def choice(shown: Shown = TOLD, reasoning: str | None = "qwen3", tools: str | None = "hermes") -> Choice:
    return Choice(parsers.new(reasoning, tools, FUNCTIONS, "assistant\n"), shown, SPECIAL)


def takes(made: Choice, texts: list[str], finish: FinishReason) -> list[list[Part]]:
    """Return the parts that each output adds."""

    async def feed() -> list[list[Part]]:
        pacer = Pacer()
        parts = [await made.take(TextOut("r", text, [1] * len(text)), pacer) for text in texts]
        return [*parts, await made.take(TextOut("r", "", [], finish), pacer)]

    return asyncio.run(feed())


def told(made: Choice, texts: list[str]) -> list[dict[str, Any]]:
    """Return the answer as deltas."""
    return [msgspec.to_builtins(delta) for parts in takes(made, texts, STOP) for delta in deltas(parts)]


def whole(made: Choice, texts: list[str], finish: FinishReason = STOP, *, reasons: bool = False) -> dict[str, Any]:
    """Return the answer as a message."""
    parts = [part for some in takes(made, texts, finish) for part in some]
    found: dict[str, Any] = msgspec.to_builtins(message(parts, reasons=reasons))
    return found


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without ids, which differ each time."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
    return {**message, "tool_calls": calls}


WHOLE: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "refusal": None,
    "reasoning_content": "It is asked.",
    "reasoning": "It is asked.",
    "tool_calls": [{"name": "weather", "arguments": '{"city": "Kiel"}'}, {"name": "now", "arguments": "{}"}],
}


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_the_message_does_not_depend_on_the_cuts_of_the_text(cuts: list[int]) -> None:
    made = choice()
    found = plain(whole(made, pieces(OUTPUT, cuts), reasons=True))
    assert found == WHOLE
    assert made.finish_reason(STOP) == "tool_calls"


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_the_official_client_puts_the_deltas_together(cuts: list[int]) -> None:
    state = ChatCompletionStreamState()
    sent: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *told(choice(), pieces(OUTPUT, cuts)), {}]
    for index, delta in enumerate(sent):
        finish = "tool_calls" if index == len(sent) - 1 else None
        shown = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [shown]}
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    found = state.get_final_completion().choices[0].message
    assert found.content == WHOLE["content"]
    assert found.model_extra is not None
    assert found.model_extra["reasoning_content"] == found.model_extra["reasoning"] == WHOLE["reasoning"]
    assert found.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in found.tool_calls] == [
        (call["name"], call["arguments"]) for call in WHOLE["tool_calls"]
    ]
    assert all(call.id.startswith("call_") and call.type == "function" for call in found.tool_calls)


def test_a_delta_begins_a_call_and_others_continue_it() -> None:
    sent = [delta for delta in told(choice(), list(OUTPUT)) if "tool_calls" in delta]
    calls = [delta["tool_calls"][0] for delta in sent]
    begun = [index for index, call in enumerate(calls) if "id" in call]
    assert [set(calls[index]) for index in begun] == [{"index", "id", "type", "function"}] * 2
    assert [calls[index]["function"]["name"] for index in begun] == FUNCTIONS
    assert all(set(call["function"]) == {"arguments"} for call in calls if "id" not in call)
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert len(calls) > 10, "the arguments came as they were written"


def test_text_that_arrives_at_once_is_few_deltas() -> None:
    assert [list(delta) for delta in told(choice(), [OUTPUT])] == [
        ["reasoning_content", "reasoning"],
        ["content"],
        ["tool_calls"],
        ["tool_calls"],
    ]


def test_content_is_null_if_there_are_only_calls() -> None:
    found = whole(choice(reasoning=None), [CALLS])
    assert found["content"] is None
    assert "reasoning" not in found
    assert whole(choice(), [""], reasons=True) == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": None,
        "reasoning": None,
    }


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (STOP, "tool_calls"),
        (FinishReason("stop", matched="city"), "stop"),
        (FinishReason("length"), "length"),
        (FinishReason("abort"), "abort"),
    ],
)
def test_a_truncated_call_is_sent_as_far_as_it_came(finish: FinishReason, expected: str) -> None:
    made = choice(reasoning=None)
    (call,) = whole(made, [CALLS[: CALLS.index("Kiel") + 2]], finish)["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ki'}
    assert made.finish_reason(finish) == expected


def test_an_answer_without_calls_keeps_its_finish_reason() -> None:
    made = Choice(None, TOLD, SpecialTokens([]))
    assert whole(made, ["a", "b"])["content"] == "ab"
    assert made.finish_reason(STOP) == "stop"


def test_tokens_of_reasoning_are_counted_up_to_the_one_that_ends_it() -> None:
    def counted(text: str, *ids: list[int]) -> int | None:
        made = Choice(parsers.new("qwen3", None), TOLD, SpecialTokens([]), end_of_thinking=7)

        async def feed() -> None:
            pacer = Pacer()
            await made.take(TextOut("r", text, []), pacer)
            for some in ids:
                await made.take(TextOut("r", "", some), pacer)

        asyncio.run(feed())
        return made.reasoning_tokens

    assert counted("<think>a</think>b", [1, 2], [3, 7, 4], [5, 7]) == 4
    assert counted("<think>a", [1, 2], [3]) == 3
    assert counted("b", [1, 2], [3, 7]) == 0
    assert choice().reasoning_tokens is None


def test_a_models_own_name_of_a_call_is_kept() -> None:
    class Named:
        def feed(self, text: str) -> list[parsers.source.Part]:
            return [parsers.source.CallBegun(0, text, id="9charslng"), parsers.source.CallArguments(0, "{}")]

        def end(self) -> list[parsers.source.Part]:
            return []

    (call,) = whole(Choice(Named(), TOLD, SPECIAL), ["f"])["tool_calls"]
    assert call == {"id": "9charslng", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert json.loads(call["function"]["arguments"]) == {}


class FewTokens:
    """Stands in for the prompts of a model with one special token."""

    special_tokens = SpecialTokens([*parsers.STRAYS, "<|im_start|>"])

    def token_of(self, text: str) -> None:
        return None


@pytest.mark.parametrize(("kept", "said"), [(False, "A B"), (True, "A <|im_start|>B")])
def test_what_ends_turns_is_never_shown_where_calls_are_parsed(kept: bool, said: str) -> None:
    task = ChatTask(rid="r", prompts=[], parsing=Parsing("qwen3", "hermes"), shown=Shown(special_tokens=kept))
    (made,) = choices(FewTokens(), task)  # type: ignore[arg-type]
    assert whole(made, ["A <|im_", "start|>B<|im_end|", "><|endoftext|>"])["content"] == said
