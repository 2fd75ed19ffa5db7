"""The parts of an output as events of the Responses API and of Anthropic's, as the official clients read them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treeline_runtime.messages import FinishReason, GenerateReq, SamplingParams, TextOut
from treeline_runtime.parsers.source import CallArguments, CallBegun, Part, Said, Thought
from treeline_runtime.server.apis.answering import EventMaker
from treeline_runtime.server.apis.anthropic_events import MessageEvents
from treeline_runtime.server.apis.responses_events import ResponseEvents
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.jobs import ChatTask
from treeline_runtime.server.pacing import encode_json

REPEATED = json.dumps(
    {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {},
        "temperature": 1.0,
        "text": {},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }
).encode()
TASK = ChatTask(rid="resp_1", prompts=[GenerateReq("", [1] * 10, SamplingParams())], repeated=REPEATED)
PROMPTS: Any = None
"""Prompts of a chat whose output is not parsed."""
Event = dict[str, Any]
STOP, LENGTH = FinishReason("stop", matched=3), FinishReason("length")
WORK: list[Part] = [
    Thought("\n"),
    Thought("hm"),
    Thought(", so"),
    Said("\n\n"),
    Said("I "),
    Said("look"),
    CallBegun(0, "get_weather", "call_0"),
    CallArguments(0, '{"city":'),
    CallArguments(0, ' "Paris"}'),
    Said("\n"),
    CallBegun(1, "now"),
    CallArguments(1, "{}"),
]


def responses() -> ResponseEvents:
    return ResponseEvents(TASK, PROMPTS, "m", clock=lambda: 2.5)


def messages(*, fills_context: bool = False) -> MessageEvents:
    return MessageEvents(msgspec.structs.replace(TASK, fills_context=fills_context), PROMPTS, "m")


def output(finish: FinishReason | None) -> TextOut:
    return TextOut("r", "", [], finish, prompt_tokens=10, cached_tokens=3, completion_tokens=7)


def told(events: EventMaker, parts: list[Part], finish: FinishReason = STOP) -> list[Event]:
    """Return each event as it was when it was sent."""

    def all() -> Iterator[Event]:
        yield from events.begin(output(None))
        for part in parts:
            yield from events.take(part)
        yield from events.end(output(finish), None)

    return [json.loads(encode_json(event)) for event in all()]


def answer(events: EventMaker) -> dict[str, Any]:
    """Return the answer as it is sent."""
    made: dict[str, Any] = json.loads(encode_json(events.answer))
    return made


# ---- /v1/responses --------------------------------------------------------------------------------------------------


def test_the_events_of_a_response_come_in_openais_order() -> None:
    events = told(responses(), WORK)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    thought = [name.replace("output_text", "reasoning_text") for name in text]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", *thought, "output_item.done"),
        *("output_item.added", *text, "output_item.done"),
        *("output_item.added", call[0], *call, "output_item.done"),
        *("output_item.added", *call, "output_item.done"),
        "completed",
    ]
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 4
    assert [item.get("content", []) for item in added] == [[]] * 4, "each as it was then"


def test_a_whole_response_equals_the_sum_of_its_stream() -> None:
    events = responses()
    last = told(events, WORK)[-1]
    made = answer(events)
    assert last["response"] == made
    assert (made["status"], made["completed_at"], made["incomplete_details"]) == ("completed", 2, None)
    thought, said, first, second = made["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "\nhm, so"}]
    assert said["content"][0]["text"] == "\n\nI look"
    assert (first["name"], first["call_id"], first["arguments"]) == ("get_weather", "call_0", '{"city": "Paris"}')
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert second["call_id"].startswith("call_"), "the model named none"
    assert made["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
    }


def test_a_truncated_response_marks_itself_and_its_item() -> None:
    events = responses()
    last = told(events, [Said("a"), CallBegun(0, "f"), CallArguments(0, '{"x')], LENGTH)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_a_failed_response_keeps_its_partial_output() -> None:
    events = responses()
    list(events.begin(output(None)))
    list(events.take(Said("so far")))
    *_, last, nothing = events.failed(ApiError(500, "it broke")).split(b"\n\n")
    assert last.startswith(b"event: response.failed\ndata: ")
    event = json.loads(last.split(b"data: ")[1])
    assert not nothing
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "it broke"}
    (item,) = event["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "so far")
    assert event["sequence_number"] == 8, "behind the ends of what had begun"
    aborted = told(responses(), [Said("a")], FinishReason("abort", message="aborted"))[-1]
    assert (aborted["type"], aborted["response"]["error"]["message"]) == ("response.failed", "aborted")


def test_clients_that_share_a_cache_get_no_cached_counts() -> None:
    task = msgspec.structs.replace(TASK, hides_cache=True)
    usage = told(ResponseEvents(task, PROMPTS, "m"), [Said("a")])[-1]["response"]["usage"]
    assert "input_tokens_details" not in usage
    counted = told(MessageEvents(task, PROMPTS, "m"), [Said("a")])[-2]["usage"]
    assert counted == {"input_tokens": 10, "output_tokens": 7}


# ---- /v1/messages ---------------------------------------------------------------------------------------------------


def test_the_events_of_a_message_come_in_anthropics_order() -> None:
    events = told(messages(), WORK)
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [event["type"] for event in events] == [
        "message_start",
        *(start, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, stop),
        *("message_delta", "message_stop"),
    ]
    assert events[0]["message"]["content"] == []
    assert [event["index"] for event in events if event["type"] == start] == [0, 1, 2, 3]
    kinds = [event["delta"]["type"] for event in events if event["type"] == delta]
    assert kinds == ["thinking_delta"] * 2 + ["text_delta"] * 2 + ["input_json_delta"] * 3
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    ("parts", "finish", "fills", "reason"),
    [
        ([Said("a")], STOP, False, "end_turn"),
        ([Said("a")], FinishReason("stop", matched="END"), False, "stop_sequence"),
        ([CallBegun(0, "f"), CallArguments(0, "{}")], STOP, False, "tool_use"),
        ([CallBegun(0, "f"), CallArguments(0, "{")], LENGTH, False, "max_tokens"),
        ([Said("a")], LENGTH, True, "model_context_window_exceeded"),
        ([Said("a")], STOP, True, "end_turn"),
    ],
)
def test_a_message_has_its_stop_reason(parts: list[Part], finish: FinishReason, fills: bool, reason: str) -> None:
    events = messages(fills_context=fills)
    told(events, parts, finish)
    matched = finish.matched if isinstance(finish.matched, str) else None
    assert (events.answer.stop_reason, events.answer.stop_sequence) == (reason, matched)


def test_a_message_ended_by_an_operator_is_an_error() -> None:
    with pytest.raises(ApiError, match="aborted"):
        told(messages(), [Said("a")], FinishReason("abort", message="aborted"))


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ("", {}),
        (" \n", {}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
        ('{"x', {"raw_arguments": '{"x'}),
        ("[1]", {"raw_arguments": "[1]"}),
        ('{"x": 1} and more', {"raw_arguments": '{"x": 1} and more'}),
        ('{"x":' + "[" * 5000 + "]" * 5000 + "}", None),
    ],
)
def test_a_models_arguments_become_an_object(arguments: str, input: Any) -> None:
    events = messages()
    told(events, [CallBegun(0, "f"), CallArguments(0, arguments)])
    made = json.loads(encode_json(events.answer))["content"][0]["input"]
    assert made == (input if input is not None else {"raw_arguments": arguments})


# ---- any parts ------------------------------------------------------------------------------------------------------

TEXT = st.text(alphabet="ab \n", max_size=4)


@st.composite
def outputs(draw: st.DrawFn) -> list[Part]:
    """Draw parts in an order in which parsers find them."""
    parts = list[Part]()
    calls = itertools.count()
    for kind in draw(st.lists(st.sampled_from(["thought", "said", "call"]), max_size=6)):
        if kind == "call":
            index = next(calls)
            parts.append(CallBegun(index, draw(st.sampled_from("fg"))))
            parts += [CallArguments(index, text) for text in draw(st.lists(TEXT, max_size=3))]
        else:
            parts.append(Thought(draw(TEXT)) if kind == "thought" else Said(draw(TEXT)))
    return parts


FINISHES = st.sampled_from([STOP, LENGTH, FinishReason("stop", matched="END")])


@settings(max_examples=80, deadline=None)
@given(outputs(), FINISHES)
def test_the_deltas_of_a_response_add_up_to_its_items(parts: list[Part], finish: FinishReason) -> None:
    events = responses()
    made = told(events, parts, finish)
    open: int | None = None
    texts: dict[int, str] = {}
    for event in made[2:-1]:
        index, type = event["output_index"], event["type"]
        if type == "response.output_item.added":
            assert open is None
            assert index == len(texts)
            open, texts[index] = index, ""
        assert index == open, "one after the other"
        if type.endswith(".delta"):
            texts[index] += event["delta"]
        if type == "response.output_item.done":
            item = event["item"]
            told_text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert texts[index] == told_text
            open = None
    assert open is None
    items = answer(events)["output"]
    assert made[-1]["response"]["output"] == items
    assert len(items) == len(texts)
    assert [item["name"] for item in items if item["type"] == "function_call"] == [
        part.name for part in parts if isinstance(part, CallBegun)
    ]


@settings(max_examples=80, deadline=None)
@given(outputs(), FINISHES)
def test_both_apis_describe_an_output_equally(parts: list[Part], finish: FinishReason) -> None:
    of_openai, of_anthropic = responses(), messages()
    told(of_openai, parts, finish)
    events = told(of_anthropic, parts, finish)
    shown = [item.get("name") or (item["type"], item["content"][0]["text"]) for item in answer(of_openai)["output"]]
    names = {"text": "message", "thinking": "reasoning"}
    assert shown == [
        block.get("name") or (names[block["type"]], block[block["type"]]) for block in answer(of_anthropic)["content"]
    ]
    said = "".join(part.text for part in parts if isinstance(part, Said))
    texts = "".join(text for kind, text in (one for one in shown if isinstance(one, tuple)) if kind == "message")
    assert texts.split() == said.split(), "only blanks may be missing"
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(shown)))
