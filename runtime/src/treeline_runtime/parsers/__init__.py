"""Splits an output into reasoning, answer and tool calls.

Formats have SGLang's and vLLM's names (`--reasoning-parser`, `--tool-call-parser`), where `-` equals `_`. Each format's
module describes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from treeline_runtime.parsers import structures
from treeline_runtime.parsers.harmony import ANSWER, HARMONY, Harmony
from treeline_runtime.parsers.pythonic import PYTHONIC
from treeline_runtime.parsers.qwen_xml import QWEN_XML
from treeline_runtime.parsers.reasoning import FAMILIES, Tags
from treeline_runtime.parsers.source import Chained, OutputParser, Reading
from treeline_runtime.parsers.tools import DEEPSEEK, HERMES, LLAMA3, MISTRAL, ToolFormat
from treeline_runtime.registry import Registry


@dataclass(frozen=True)
class Calls:
    """A model's format of calls: the parser, and the structure for constrained decoding."""

    format: ToolFormat
    structure: structures.Structure


REASONING: Final[Registry[Tags | Harmony]] = Registry(
    "reasoning parser", {**FAMILIES, "gpt_oss": HARMONY, "openai_gptoss": HARMONY}
)
_CALLS: Final = {
    "deepseek_v3 deepseekv3": Calls(DEEPSEEK, structures.deepseek_v3),
    "deepseek_v31 deepseekv31": Calls(DEEPSEEK, structures.deepseek_v31),
    "gpt_oss openai": Calls(HARMONY, structures.harmony),
    "hermes qwen qwen25": Calls(HERMES, structures.hermes),
    "llama3 llama3_json llama4_json": Calls(LLAMA3, structures.llama3),
    "llama4_pythonic pythonic": Calls(PYTHONIC, structures.pythonic),
    "mistral": Calls(MISTRAL, structures.mistral),
    "qwen3_coder qwen3_xml": Calls(QWEN_XML, structures.qwen_xml),
}
TOOLS: Final = Registry("tool call parser", {name: calls for names, calls in _CALLS.items() for name in names.split()})
STRAYS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
"""Special tokens that end turns. Where a format needs special tokens in the text, thoughts and answers have none of
these, even if the client wants special tokens, or they are ordinary ones of its tokenizer."""


def new(reasoning: str | None, tools: str | None, functions: Collection[str] = (), prompt: str = "") -> OutputParser:
    """A parser for one output: reasoning first, then calls of `functions`. None: not parsed.

    `functions`: names, or better names → JSON Schema of the parameters, by which formats other than JSON tell strings
    from numbers. `prompt`: the text before the output, or its end: a template may have begun the reasoning there, or
    left it out. Raises ConfigError for an unknown parser.
    """
    schemas = functions if isinstance(functions, Mapping) else dict.fromkeys(functions)
    thoughts, calls = formats(reasoning, tools)
    parsers: list[OutputParser] = []
    if isinstance(thoughts, Harmony) or isinstance(calls, Harmony):  # which is both in one
        parsers.append(Reading(partial(HARMONY.steps, functions=schemas if calls is HARMONY else {}, prompt=prompt)))
    elif thoughts is not None:
        inside = thoughts.begins_inside(prompt)
        parsers.append(Reading(partial(thoughts.steps, inside=inside, tools=calls is not None)))
    if calls is not None and not isinstance(calls, Harmony):
        parsers.append(Reading(partial(calls.steps, functions=schemas)))
    if not parsers:
        parsers.append(Reading(lambda source: source.rest(source.say)))
    return Chained(*parsers) if len(parsers) == 2 else parsers[0]


def formats(reasoning: str | None, tools: str | None) -> tuple[Tags | Harmony | None, ToolFormat | None]:
    """The formats of these names; None for those not given. Raises ConfigError for an unknown name."""
    return (
        None if reasoning is None else REASONING.get(_known(reasoning)),
        None if tools is None else TOOLS.get(_known(tools)).format,
    )


def needs_special_tokens(reasoning: str | None, tools: str | None) -> bool:
    """Whether these formats need the output's special tokens (`skip_special_tokens: false`).
    Raises ConfigError for an unknown name."""
    return any(format is not None and format.special for format in formats(reasoning, tools))


def reasoning_end(reasoning: str | None, prompt: str) -> str:
    """The text after which a grammar applies, in an output after `prompt`: the end of reasoning; "" = from the start.
    Raises ConfigError for an unknown name."""
    tags = None if reasoning is None else REASONING.get(_known(reasoning))
    if isinstance(tags, Tags):
        return "" if prompt.rstrip().endswith(tags.closing) else tags.closing
    return "" if tags is None or prompt.endswith(ANSWER) else ANSWER


def structure(
    tools: str, functions: Sequence[structures.Function], *, required: bool, parallel: bool
) -> dict[str, Any]:
    """The structural tag (xgrammar 0.2.8) of outputs that may call these functions, after the reasoning.

    `required`: only calls, at least one (`tool_choice` "required"; for a named function pass only that one); otherwise
    text with possible calls ("auto"). `parallel`: several calls are possible. Needs a function. Raises ConfigError for
    an unknown parser.
    """
    assert functions
    format = TOOLS.get(_known(tools)).structure(functions, required=required, parallel=parallel)
    return {"type": "structural_tag", "format": format}


def _known(name: str) -> str:
    return name.replace("-", "_")
