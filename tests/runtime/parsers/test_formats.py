"""Calls in every other format, valid and broken."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outputs import cut_places, fed, near, read, same_however_cut
from treeline_runtime import parsers
from treeline_runtime.parsers.source import MAX_HELD, CallArguments, CallBegun

FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "units": {"$ref": "#/$defs/units"},
            "where": {"type": "object"},
            "exact": {"type": ["boolean", "string"]},
        },
        "$defs": {"units": {"enum": ["5", "C", "F"]}},
    },
    "search": None,
}
PARIS = ("call", ("get_weather", {"city": "Paris", "days": 3}))
NOTHING = ("call", ("search", {}))


def said(text: str) -> tuple[str, str]:
    return ("said", text)


ARGUMENTS = '{"city": "Paris", "days": 3}'
LLAMA = '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}"
LIST = '[{"name": "get_weather", "arguments": ' + ARGUMENTS + ', "id": "0a1b2c3d4"}, {"name": "search"}]'
FENCED = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
BARE = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
PYTHON = '[get_weather(city="Paris", days=3)]'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
HARMONY_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm. <|end|>"
FINAL = "<|channel|>final<|message|>Yes.\n<|return|>"

CORPUS: list[tuple[str, str, list[Any]]] = [
    ("llama3", LLAMA, [PARIS]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA};{LLAMA}", [PARIS, PARIS, PARIS]),
    ("llama3", f"\n\n{LLAMA}\n{LLAMA}", [PARIS, PARIS]),
    ("llama3", f"{LLAMA}\n<b>{LLAMA}", [PARIS, said(f"\n<b>{LLAMA}")]),
    ("llama3", f"Let me see. <|python_tag|>{LLAMA}", [said("Let me see."), PARIS]),
    ("llama3", '{"type": "function", "name": "search", "parameters": {}}', [NOTHING]),
    ("llama3", '{"answer": 42}', [said('{"answer": 42}')]),
    ("llama3", f"{LLAMA}; and so on", [PARIS, said("; and so on")]),
    ("llama3", f'{LLAMA}; {{"name": "other"}}', [PARIS, said('; {"name": "other"}')]),
    ("llama3", f"Like {LLAMA}", [said(f"Like {LLAMA}")]),
    ("llama3", '<|python_tag|>search.call(q="x")', [said('<|python_tag|>search.call(q="x")')]),
    ("llama3", '{"name": "sear', [said('{"name": "sear')]),
    ("mistral", f"[TOOL_CALLS] {LIST}", [PARIS, NOTHING]),
    ("mistral", f"So:\n[TOOL_CALLS]{LIST} Done", [said("So:"), PARIS, NOTHING, said(" Done")]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]search[ARGS]{{}}", [PARIS, NOTHING]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]0a1b2c3d4[ARGS]{ARGUMENTS}", [PARIS]),
    ("mistral", f"[TOOL_CALLS]get_weather{ARGUMENTS}", [PARIS]),
    ("mistral", "[TOOL_CALLS][]", [said("[TOOL_CALLS][]")]),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", [said("[TOOL_CALLS]other[ARGS]{}")]),
    ("mistral", f'[TOOL_CALLS] {LIST[:-1]}, {{"name": "oth"}}]', [PARIS, NOTHING, said(', {"name": "oth"}]')]),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"q": "a[', [("call", ("search", '{"q": "a['))]),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{FENCED}\n{FENCED}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
     [PARIS, PARIS]),
    ("deepseekv31", f"I look.\n\n<｜tool▁calls▁begin｜>{BARE}{BARE}<｜tool▁calls▁end｜>",
     [said("I look."), PARIS, PARIS]),
    ("deepseekv31", f"{BARE} So.", [PARIS, said(" So.")]),
    ("deepseekv31", BARE.replace("get_weather", "other"), [said(BARE.replace("get_weather", "other"))]),
    ("deepseekv31", "<｜tool▁calls▁begin｜>", [said("<｜tool▁calls▁begin｜>")]),
    ("pythonic", PYTHON, [PARIS]),
    ("pythonic", f"<|python_start|>{PYTHON[:-1]}, search()]<|python_end|>", [PARIS, NOTHING]),
    ("pythonic", "See [1] and [search] and [search(me)].", [said("See [1] and [search] and [search(me)].")]),
    ("pythonic", f"Well. {PYTHON} So.", [said("Well."), PARIS, said(" So.")]),
    ("pythonic", """[search(a='it\\'s "x"', b=[1, (2,), {'k': None}], c=true, d=-1.5, e=False,)]""",
     [("call", ("search", {"a": 'it\'s "x"', "b": [1, [2], {"k": None}], "c": True, "d": -1.5, "e": False}))]),
    ("pythonic", "[search(a='],)')]", [("call", ("search", {"a": "],)"}))]),
    ("pythonic", "[search(a=open('x'))]", [said("[search(a=open('x'))]")]),
    ("pythonic", "[search(a=1, b=c)]", [("call", ("search", '{"a": 1')), said(", b=c)]")]),
    ("pythonic", "[search(a=1), other()]", [("call", ("search", {"a": 1})), said(", other()]")]),
    ("qwen3_coder", XML, [PARIS]),
    ("qwen3_coder", f"I look.\n{XML}\n{XML}\n", [said("I look."), PARIS, PARIS]),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n"), [PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=search>\n</function>\n</tool_call>", [NOTHING]),
    ("qwen3_coder", "<tool_call><function=search><parameter=q>\n\n5 <b>\n\n</parameter></function>",
     [("call", ("search", {"q": "\n5 <b>\n"}))]),
    ("qwen3_coder",
     "<function=get_weather><parameter=days>null</parameter><parameter=units>5</parameter>"
     "<parameter=where>{'a': True}</parameter><parameter=exact>True</parameter><parameter=city>3</parameter>"
     "</function>",
     [("call", ("get_weather", {"days": None, "units": "5", "where": {"a": True}, "exact": True, "city": "3"}))]),
    ("qwen3_coder", "<function=get_weather><parameter=days>several<parameter=exact>\"x\"</function>",
     [("call", ("get_weather", {"days": "several", "exact": '"x"'}))]),
    ("qwen3_coder", XML.replace("get_weather", "other"), [said(XML.replace("get_weather", "other"))]),
    ("qwen3_coder", "A <function=x", [said("A <function=x")]),
    ("gpt-oss", f"{ANALYSIS}<|start|>assistant{FINAL}", [("thought", "Hm. "), said("Yes.\n")]),
    ("openai", f"{ANALYSIS}<|start|>assistant{HARMONY_CALL}", [("thought", "Hm. "), PARIS]),
    ("openai", f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}", [PARIS]),
    ("openai", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HARMONY_CALL}"
     f"<|start|>assistant{FINAL}",
     [said("I look."), PARIS, said("Yes.\n")]),
    ("openai", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
     [("thought", "Hm."), said("Yes.")]),
    ("openai", HARMONY_CALL.replace("get_weather", "other"), [said(HARMONY_CALL.replace("get_weather", "other"))]),
    ("openai", "<|channel|>commentary to=functions.search<|message|>[1]<|call|>",
     [said("<|channel|>commentary to=functions.search<|message|>[1]<|call|>")]),
    ("openai", "<|channel|>final<|message|>a < b <|e", [said("a < b <|e")]),
    ("openai", "Just text.", [said("Just text.")]),
    ("openai", " to=me", [said(" to=me")]),
    ("openai", "<|channel|>fin", []),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "found"), CORPUS)
def test_calls_are_found_and_nothing_else_is_lost(tools: str, text: str, found: list[Any]) -> None:
    assert read(parsers.new(None, tools, FUNCTIONS), text) == found
    same_however_cut(lambda: parsers.new(None, tools, FUNCTIONS), text, ())


def test_an_id_given_by_the_model_is_kept() -> None:
    call, listed = f"get_weather[CALL_ID]0a1b2c3d4[ARGS]{ARGUMENTS}", '[{"id": "0a1b2c3d4", "name": "search"}]'
    for text in (call, listed):
        [begun, *_] = fed(parsers.new(None, "mistral", FUNCTIONS), [f"[TOOL_CALLS]{text}"])
        assert isinstance(begun, CallBegun)
        assert begun.id == "0a1b2c3d4"


@pytest.mark.parametrize(
    ("prompt", "text", "found"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", FINAL, [said("Yes.\n")]),
        ("<|start|>assistant<|channel|>final<|message|>Well, ", "yes.<|return|>", [said("yes.")]),
        ("<|start|>assistant<|channel|>analysis<|message|>", f"Hm.<|end|><|start|>assistant{FINAL}",
         [("thought", "Hm."), said("Yes.\n")]),
    ],
)  # fmt: skip
def test_a_prompt_may_have_begun_a_message(prompt: str, text: str, found: list[Any]) -> None:
    assert read(parsers.new("gpt_oss", None, prompt=prompt), text) == found


FRAGMENTS = {
    "llama3": (LLAMA, "<|python_tag|>", "; ", ";", '{"name": "search"}', '{"name": "other"}', '{"x": ', "}", "text "),
    "mistral": (LIST, "[TOOL_CALLS]", "search", "[ARGS]", "[CALL_ID]", ARGUMENTS, '{"name": "search"', "}", ", ", "]",
                "text "),
    "deepseek_v3": (FENCED, BARE, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "function",
                    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "search", "```json\n", "\n```", ARGUMENTS, "text "),
    "pythonic": (PYTHON, "[", "search(", "get_weather(", "a=", "'x, ]'", '"\\""', "[1, 2]", "{'a': None}", ", ", ")",
                 "]", "<|python_start|>", "<|python_end|>", "text "),
    "qwen3_coder": (XML, "<tool_call>", "</tool_call>", "<function=search>", "<function=other>", "</function>", "\n",
                    "<parameter=days>", "<parameter=q>", "</parameter>", "[1, 2]", "null", "text "),
    "gpt-oss": (HARMONY_CALL, ANALYSIS, FINAL, "<|start|>assistant", "<|channel|>", "analysis", "commentary to=search",
                "final", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "{}", ARGUMENTS, "text "),
}  # fmt: skip


@settings(max_examples=60)
@given(data=st.data(), cuts=cut_places, reasoning=st.sampled_from([None, None, "deepseek_r1", "mistral"]))
@pytest.mark.parametrize("tools", FRAGMENTS)
def test_results_do_not_depend_on_the_cuts_of_the_text(
    tools: str, data: st.DataObject, cuts: list[int], reasoning: str | None
) -> None:
    text = data.draw(near(FRAGMENTS[tools]))
    if tools != "gpt-oss" and data.draw(st.booleans()):
        text = f"Hm.</think>{text}"
    found = same_however_cut(lambda: parsers.new(reasoning, tools, FUNCTIONS), text, cuts)
    if tools != "gpt-oss" and reasoning is None and all(kind == "said" for kind, _ in found):
        assert "".join(value for _, value in found) == text


HOSTILE = {
    "hermes": '<tool_call>{"name": "search", "arguments": {"q": [',
    "llama3": "; {",
    "mistral": "[TOOL_CALLS]search[ARGS]{",
    "deepseek_v3": "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{",
    "pythonic": "[search(a=[",
    "qwen3_coder": "<function=get_weather><parameter=days>1<",
    "gpt-oss": "<|channel|>commentary<|constrain|>",
}


@pytest.mark.parametrize("tools", HOSTILE)
def test_a_hostile_output_takes_time_in_proportion_to_its_length(tools: str) -> None:
    for repeated in (HOSTILE[tools], "[", " ", '"a<'):

        def seconds(chars: int, repeated: str = repeated) -> float:
            text = (HOSTILE[tools] + repeated * (chars // len(repeated)))[:chars]
            start = time.process_time()
            fed(parsers.new("qwen3", tools, FUNCTIONS), text)
            return time.process_time() - start

        few = min(seconds(500) for _ in range(3))
        many = min(seconds(4_000) for _ in range(2))
        assert many < 32 * few, "twice the text takes four times the time: something is read again and again"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "end"),
    [
        (None, "", ""),
        ("qwen3", "<|im_start|>assistant\n", "</think>"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("deepseek_r1", "<think>\n", "</think>"),
        ("gpt_oss", "<|start|>assistant", "<|channel|>final<|message|>"),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", ""),
    ],
)
def test_a_grammar_holds_after_the_reasoning(reasoning: str | None, prompt: str, end: str) -> None:
    assert parsers.reasoning_end(reasoning, prompt) == end


def test_special_tokens_are_text_where_no_format_needs_them() -> None:
    assert read(parsers.new("qwen3", None), "Say <|im_end|>.") == [said("Say <|im_end|>.")]


@pytest.mark.parametrize(
    "value", ["-" * 50_000 + "1", "9" * 50_000 + "_0", "a" + ".a" * 30_000, "(" * 130 + ")" * 130, "'\x00'", "1j"]
)
def test_a_hostile_literal_is_no_call(value: str) -> None:
    text = f"[search(a={value})]"
    assert read(parsers.new(None, "pythonic", FUNCTIONS), text) == [said(text)]


BEGUN = {
    "hermes": '<tool_call>{"name": "search", "arguments": ',
    "llama3": '{"name": "search", "parameters": ',
    "mistral": "[TOOL_CALLS]search[ARGS]",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n",
    "deepseekv31": "<｜tool▁call▁begin｜>search<｜tool▁sep｜>",
    "gpt-oss": "<|channel|>commentary to=functions.search <|constrain|>json<|message|>",
}


@pytest.mark.parametrize("tools", BEGUN)
def test_arguments_are_streamed(tools: str) -> None:
    parser = parsers.new(None, tools, FUNCTIONS)
    assert parser.feed(BEGUN[tools]) == []
    assert parser.feed("{") == [CallBegun(0, "search"), CallArguments(0, "{")]
    for char in '"q": "a\\n\u00e9 <", "r": [1, {}]}':
        assert parser.feed(char) == [CallArguments(0, char)]


def test_a_string_of_an_element_is_streamed() -> None:
    parser = parsers.new(None, "qwen3_coder", FUNCTIONS)
    assert parser.feed("<function=get_weather><parameter=city>\n")[0] == CallBegun(0, "get_weather")
    for char in "Paris":
        assert parser.feed(char) == [CallArguments(0, char)]


@pytest.mark.parametrize(
    ("tools", "begun"),
    [("hermes", '<tool_call>{"arguments": {"q": "'), ("pythonic", "[search(a='"), ("gpt-oss", "<|channel|>"),
     ("qwen3_coder", "<function=get_weather><parameter=days>"), ("mistral", "[TOOL_CALLS]")],
)  # fmt: skip
def test_held_back_text_is_bounded(tools: str, begun: str) -> None:
    parser = parsers.new(None, tools, FUNCTIONS)
    parts = parser.feed(begun)
    for _ in range(5):
        parts += parser.feed("x" * (MAX_HELD // 4))
    assert sum(len(getattr(part, "text", "")) for part in parts) >= MAX_HELD
