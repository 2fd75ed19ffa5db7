"""Reasoning between tags, and calls in Hermes' format, valid and broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.outputs import cut_places, near, read, same_however_cut
from treeline_runtime import parsers
from treeline_runtime.config import ConfigError
from treeline_runtime.parsers.source import OutputParser

NAMES = ("get_weather", "search")


def parser(reasoning: str | None = None, tools: str | None = None, prompt: str = "") -> Callable[[], OutputParser]:
    return lambda: parsers.new(reasoning, tools, NAMES, prompt)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.5e3]}}\n</tool_call>'
PARIS = ("call", ("get_weather", {"city": "Paris", "days": [1, 2500.0]}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello.\n", [("said", "Hello.\n")]),
        (CALL, [PARIS]),
        (f"I look.\n\n{CALL}\n", [("said", "I look."), PARIS]),
        (f"{CALL}\n{CALL}", [PARIS, PARIS]),
        (f"{CALL}\nThat was it.", [PARIS, ("said", "\nThat was it.")]),
        ('<tool_call>{"name": "search"}</tool_call>', [("call", ("search", {}))]),
        ('<tool_call>{"name": "search", "arguments": null}</tool_call>', [("call", ("search", {}))]),
        ('<tool_call>{"arguments": {"q": 1}, "name": "search"}</tool_call>', [("call", ("search", {"q": 1}))]),
        ('<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>', [("call", ("search", {"q": 1}))]),
        ('<tool_call>{"name": "search", "parameters": {"q": "\\u00e9\\n"}}', [("call", ("search", {"q": "é\n"}))]),
        ('<tool_call>{"name": "search", "arguments": {"q": "a\nb\\d"}}', [("call", ("search", {"q": "a\nb\\d"}))]),
        ('<tool_call>{"name": "search", "arguments": {"q": [1', [("call", ("search", '{"q": [1'))]),
        ('<tool_call>{"name": "search", "arguments": {"q": 1}}\n<tool_call>{"name": "search"}',
         [("call", ("search", {"q": 1})), ("call", ("search", {}))]),
        ("Use <tool_call> for it.", [("said", "Use <tool_call> for it.")]),
        ("a <tool_ca", [("said", "a <tool_ca")]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',
         [("said", '<tool_call>{"name": "other", "arguments": {}}</tool_call>')]),
        ('<tool_call>{"name": "search", "arguments": [1]}',
         [("said", '<tool_call>{"name": "search", "arguments": [1]}')]),
        ('<tool_call>{"name": "search", "arguments": {"q": 1,, }}',
         [("call", ("search", '{"q": 1,')), ("said", ", }}")]),
        (f"<tool_call>\n<tool_call>{CALL}", [("said", "<tool_call>\n<tool_call>"), PARIS]),
    ],
)  # fmt: skip
def test_calls_are_found_and_nothing_else_is_lost(text: str, found: object) -> None:
    assert read(parser(tools="hermes")(), text) == found


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "found"),
    [
        ("qwen3", "", "<think>\nHm.\n</think>\n\nYes.", [("thought", "Hm."), ("said", "Yes.")]),
        ("qwen3", "<think>\n", "Hm.\n</think>\n\nYes.", [("thought", "Hm."), ("said", "Yes.")]),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes.", [("said", "Yes.")]),
        ("qwen3", "", "No <think> here.", [("said", "No <think> here.")]),
        ("deepseek-r1", "", "Hm.</think>Yes.", [("thought", "Hm."), ("said", "Yes.")]),
        ("deepseek_r1", "", "<think>\nHm.</think>\nYes.", [("thought", "Hm."), ("said", "Yes.")]),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", [("said", "Yes.")]),
        ("deepseek_r1", "", "Hm </thin", [("thought", "Hm </thin")]),
        ("deepseek_r1", "", "", []),
        ("qwen3", "", f"<think>So.\n{CALL}", [("thought", "So."), PARIS]),
        ("qwen3", "", f"<think>So.\n</think>\n\nWell.\n{CALL}", [("thought", "So."), ("said", "Well."), PARIS]),
    ],
)
def test_reasoning_comes_before_the_answer(reasoning: str | None, prompt: str, text: str, found: object) -> None:
    assert read(parser(reasoning, "hermes", prompt)(), text) == found


FRAGMENTS = (
    CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "search", "arguments": ', '{"q": "x\\n"}',
    '{"name": "other", "arguments": {}}', '"arguments": {"a": [true, null, {}], "b": -1.5e+7}, "name": "search"}',
    '"\\u00e9"', "<|im_end|>", '{"name":"get_weather"}', "\n\n", "}", "Hello",
)  # fmt: skip


@given(text=near(FRAGMENTS), cuts=cut_places, reasoning=st.sampled_from([None, "qwen3", "deepseek_r1"]))
def test_results_do_not_depend_on_the_cuts_of_the_text(text: str, cuts: list[int], reasoning: str) -> None:
    found = same_however_cut(parser(reasoning, "hermes"), text, cuts)
    if reasoning is None and all(kind == "said" for kind, _ in found):
        assert "".join(value for _, value in found) == text


def test_names_are_known_or_refused() -> None:
    with pytest.raises(ConfigError, match="known: deepseek_r1"):
        parsers.new("nobody", None)
    with pytest.raises(ConfigError, match=r"known: .*hermes"):
        parsers.needs_special_tokens(None, "nobody")
    assert parsers.needs_special_tokens("qwen3", "hermes")


def test_names_of_sglang_and_vllm_are_known() -> None:
    for reasoning in ("deepseek-r1", "deepseek_r1", "qwen3", "mistral", "gpt-oss", "openai_gptoss", "kimi_k2", "glm45"):
        parsers.new(reasoning, None)
    hermes = ("hermes", "qwen", "qwen25")
    deepseek = ("deepseekv3", "deepseek_v3", "deepseekv31", "deepseek_v31")
    others = ("llama3", "llama3_json", "mistral", "openai", "gpt-oss", "pythonic", "qwen3_coder", "qwen3_xml")
    for tools in (*hermes, *deepseek, *others):
        parsers.new(None, tools)
    assert not parsers.needs_special_tokens("qwen3", None)
