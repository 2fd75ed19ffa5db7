"""Our parsers beside SGLang's own: the results on whole outputs, and each known difference with its reason.

White space around what is said is left out of the comparison: SGLang strips some of it.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_wheels import load_parsers, needs_engine_parsers
from support.outputs import read
from treeline_runtime import parsers

pytestmark = [needs_engine_parsers, pytest.mark.deep]

FUNCTIONS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hot": {"type": "boolean"}},
    },
    "search": {"type": "object", "properties": {}},
}
THEIRS = {
    "hermes": "hermes_detector.HermesDetector",
    "llama3": "llama32_detector.Llama32Detector",
    "mistral": "mistral_detector.MistralDetector",
    "deepseekv3": "deepseekv3_detector.DeepSeekV3Detector",
    "deepseekv31": "deepseekv31_detector.DeepSeekV31Detector",
    "pythonic": "pythonic_detector.PythonicDetector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "gpt-oss": "gpt_oss_detector.GptOssDetector",
}
ARGUMENTS = '{"city": "São \\"Paulo\\"", "days": 3, "hot": true}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def fenced(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def bare(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def listed(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def harmony(name: str, arguments: str) -> str:
    return f"<|start|>assistant<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>{arguments}<|call|>"


def element(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
MISTRAL = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "search", "arguments": {{}}}}]'
PYTHON = '[get_weather(city="São Paulo", days=3, hot=True), search(a=[1, {"b": None}])]'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"

ALIKE = [
    *((tools, text) for tools in THEIRS if tools != "gpt-oss" for text in ("", "Hello.", "a < b [1] {2}")),
    ("hermes", hermes("get_weather", ARGUMENTS)),
    ("hermes", f"I look.\n{hermes('get_weather', ARGUMENTS)}\n{hermes('search', '{}')}"),
    ("llama3", LLAMA),
    ("llama3", f"I look. <|python_tag|>{LLAMA};{LLAMA}"),
    ("mistral", f"[TOOL_CALLS] {MISTRAL}"),
    ("mistral", f"I look. [TOOL_CALLS] {MISTRAL}"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]search[ARGS]{{}}"),
    ("deepseekv3", f"I look.{listed(fenced('get_weather', ARGUMENTS))}"),
    ("deepseekv3", listed(f"{fenced('get_weather', ARGUMENTS)}\n{fenced('search', '{}')}")),
    ("deepseekv31", f"I look.{listed(bare('get_weather', ARGUMENTS) + bare('search', '{}'))}"),
    ("pythonic", PYTHON),
    ("pythonic", f"<|python_start|>{PYTHON}<|python_end|>"),
    ("qwen3_coder", f"I look.\n{element('get_weather', city='São <b>Paulo', days='3', hot='True')}"),
    ("qwen3_coder", element("search") + "\n" + element("get_weather", city="5\n6")),
    ("gpt-oss", f"{ANALYSIS}{harmony('get_weather', ARGUMENTS)}"),
    ("gpt-oss", f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{harmony('search', '{}')}"),
]
DIFFERENT = {
    "what is said behind a call is lost": [
        ("hermes", f"{hermes('search', '{}')} So.", "So."),
        ("qwen3_coder", f"{element('search')} So.", "So."),
        ("deepseekv31", f"{listed(bare('search', '{}'))} So.", "So."),
        ("mistral", f"[TOOL_CALLS]{MISTRAL} So.", "So."),
    ],
    "a call of a function that is not there, or no call at all, is lost": [
        ("hermes", hermes("other", "{}"), hermes("other", "{}")),
        ("llama3", '{"answer": 42}', '{"answer": 42}'),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]"),
        ("pythonic", "[search(a=open('x'))]", "[search(a=open('x'))]"),
    ],
}


def ours(tools: str, text: str) -> tuple[list[Any], str]:
    found = read(parsers.new(None, tools, FUNCTIONS), text)
    calls = [value for kind, value in found if kind == "call"]
    return calls, "".join(value for kind, value in found if kind == "said").strip()


def theirs(tools: str, text: str) -> tuple[list[Any], str]:
    module, name = THEIRS[tools].split(".")
    detector = getattr(load_parsers()[f"srt/function_call/{module}"], name)()
    offered = [
        SimpleNamespace(type="function", function=SimpleNamespace(name=name, parameters=parameters))
        for name, parameters in FUNCTIONS.items()
    ]
    found = detector.detect_and_parse(text, offered)
    return [(call.name, json.loads(call.parameters)) for call in found.calls], found.normal_text.strip()


@pytest.mark.parametrize(("tools", "text"), ALIKE)
def test_both_parsers_find_the_same_calls(tools: str, text: str) -> None:
    assert ours(tools, text) == theirs(tools, text)


@pytest.mark.parametrize(
    ("tools", "text", "said"),
    [pytest.param(*case, id=f"{why}: {case[0]}") for why, cases in DIFFERENT.items() for case in cases],
)
def test_our_parser_keeps_text_that_sglangs_loses(
    tools: str, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    assert ours(tools, text)[1] == said
    assert said not in theirs(tools, text)[1]


@pytest.mark.parametrize(
    ("reasoning", "detector", "text"),
    [
        ("deepseek-r1", "DeepSeekR1Detector", "Hm.</think>Yes."),
        ("deepseek-r1", "DeepSeekR1Detector", "<think>\nHm.\n</think>\n\nYes."),
        ("deepseek-r1", "DeepSeekR1Detector", "Hm, and no end"),
        ("qwen3", "Qwen3Detector", "<think>\nHm.\n</think>\n\nYes. <think>"),
        ("qwen3", "Qwen3Detector", "Yes."),
        ("qwen3", "Qwen3Detector", "<think>Hm."),
        ("mistral", "MistralDetector", "[THINK]Hm.[/THINK]Yes."),
        ("kimi", "KimiDetector", "◁think▷Hm.◁/think▷Yes."),
        ("glm45", "Glm45Detector", "<think>Hm.</think>\nYes."),
        ("kimi_k2", "KimiK2Detector", "<think>Hm.</think>Yes."),
    ],
)
def test_both_parsers_find_the_same_reasoning(reasoning: str, detector: str, text: str) -> None:
    found = dict(read(parsers.new(reasoning, None), text))
    they = getattr(load_parsers()["srt/parser/reasoning_parser"], detector)().detect_and_parse(text)
    assert found.get("thought", "") == they.reasoning_text.strip()
    assert found.get("said", "") == they.normal_text.strip()


def test_a_negative_number_costs_no_call_of_ours() -> None:
    assert ours("pythonic", "[search(a=-3)]") == ([("search", {"a": -3})], "")
    assert theirs("pythonic", "[search(a=-3)]") == ([], "")


def test_a_tag_within_the_answer_is_text_for_us() -> None:
    text = "Write <think> first."
    they = load_parsers()["srt/parser/reasoning_parser"].Qwen3Detector().detect_and_parse(text)
    assert they.reasoning_text == text
    assert read(parsers.new("qwen3", None), text) == [("said", text)]
