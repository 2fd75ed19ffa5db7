"""From an output's text to its parts: what was thought, said, and which tools are called.

Formats are chosen by the names that SGLang and vLLM give them (`--reasoning-parser`, `--tool-call-parser`); `-` and `_`
are alike in names. Which output a format stands for is in its module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from treeline_runtime.parsers.chain import Chained, Reading, Without
from treeline_runtime.parsers.harmony import HARMONY, Harmony
from treeline_runtime.parsers.parts import OutputParser
from treeline_runtime.parsers.pythonic import PYTHONIC
from treeline_runtime.parsers.qwen_xml import QWEN_XML
from treeline_runtime.parsers.reasoning import FAMILIES, Tags
from treeline_runtime.parsers.source import Markers, Source, Steps
from treeline_runtime.parsers.tools import DEEPSEEK, HERMES, LLAMA3, MISTRAL, ToolFormat
from treeline_runtime.registry import Registry

REASONING: Final[Registry[Tags | Harmony]] = Registry(
    "reasoning parser", {**FAMILIES, "gpt_oss": HARMONY, "openai_gptoss": HARMONY}
)
TOOLS: Final[Registry[ToolFormat]] = Registry(
    "tool call parser",
    {
        "deepseek_v3": DEEPSEEK,
        "deepseek_v31": DEEPSEEK,
        "deepseekv3": DEEPSEEK,
        "deepseekv31": DEEPSEEK,
        "gpt_oss": HARMONY,
        "hermes": HERMES,
        "llama3": LLAMA3,
        "llama3_json": LLAMA3,
        "llama4_json": LLAMA3,
        "llama4_pythonic": PYTHONIC,
        "mistral": MISTRAL,
        "openai": HARMONY,
        "pythonic": PYTHONIC,
        "qwen": HERMES,
        "qwen25": HERMES,
        "qwen3_coder": QWEN_XML,
        "qwen3_xml": QWEN_XML,
    },
)
STRAYS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
"""Special tokens that end turns. Where special tokens are in the text, these are taken out of thoughts and answers."""

_STRAYS: Final = Markers(*STRAYS)


def new(reasoning: str | None, tools: str | None, functions: Collection[str] = (), prompt: str = "") -> OutputParser:
    """A parser for one output: its reasoning first, then calls of `functions`. None: not looked for.

    `functions` are names, better names → JSON Schema of the parameters: formats that are not JSON need it to tell
    strings from numbers. `prompt` is what the output follows, or the end of it: a template may have begun the
    reasoning there, or have left it out. Raises ConfigError for a name of a parser that is not known.
    """
    schemas = functions if isinstance(functions, Mapping) else dict.fromkeys(functions)
    thoughts = None if reasoning is None else REASONING.get(_known(reasoning))
    calls = None if tools is None else TOOLS.get(_known(tools))
    parsers: list[OutputParser] = []
    if isinstance(thoughts, Harmony) or isinstance(calls, Harmony):  # which is both in one
        parsers.append(Reading(partial(HARMONY.steps, functions=schemas if calls is HARMONY else {}, prompt=prompt)))
    elif thoughts is not None:
        inside = thoughts.begins_inside(prompt)
        parsers.append(Reading(partial(thoughts.steps, inside=inside, tools=calls is not None)))
    if calls is not None and not isinstance(calls, Harmony):
        parsers.append(Reading(partial(calls.steps, functions=schemas)))
    parser = Chained(*parsers) if len(parsers) == 2 else parsers[0] if parsers else Reading(_all_said)
    return Without(parser, _STRAYS)


def needs_special_tokens(reasoning: str | None, tools: str | None) -> bool:
    """Must an output's text have its special tokens (`skip_special_tokens: false`) for these formats to be found in
    it? `STRAYS` are removed from what is told. Raises ConfigError for a name that is not known."""
    formats = (
        None if reasoning is None else REASONING.get(_known(reasoning)),
        None if tools is None else TOOLS.get(_known(tools)),
    )
    return any(format is not None and format.special for format in formats)


def reasoning_end(reasoning: str | None, prompt: str) -> str:
    """The text with which the reasoning of an output that follows `prompt` ends: a grammar holds from behind it on.
    "" where there is no reasoning, or none that ends before the answer's format begins (harmony)."""
    tags = None if reasoning is None else REASONING.get(_known(reasoning))
    return tags.end_after(prompt) if isinstance(tags, Tags) else ""


def _known(name: str) -> str:
    return name.replace("-", "_")


def _all_said(source: Source) -> Steps[None]:
    yield from source.rest(source.say)
