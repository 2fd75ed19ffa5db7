"""From an output's text to its parts: what was thought, said, and which tools are called.

Formats are chosen by the names that SGLang and vLLM give them (`--reasoning-parser`, `--tool-call-parser`); `-` and `_`
are alike in names. Which output a format stands for is in its module.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Final

from treeline_runtime.parsers import reasoning as _reasoning
from treeline_runtime.parsers import tools as _tools
from treeline_runtime.parsers.chain import Chained, Reading, Without
from treeline_runtime.parsers.parts import OutputParser
from treeline_runtime.parsers.source import Markers, Source, Steps
from treeline_runtime.registry import Registry

REASONING: Final = Registry(
    "reasoning parser",
    {
        "deepseek_r1": _reasoning.DEEPSEEK_R1,
        "qwen3": _reasoning.QWEN3,
    },
)
TOOLS: Final = Registry(
    "tool call parser",
    {
        "hermes": _tools.HERMES,
        "qwen": _tools.HERMES,
        "qwen25": _tools.HERMES,
    },
)
_STRAYS: Final = Markers("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def _known(name: str) -> str:
    return name.replace("-", "_")


def needs_special_tokens(reasoning: str | None, tools: str | None) -> bool:
    """Must the output's text have its special tokens (`skip_special_tokens: false`) for these formats to be found in
    it? Those that end turns are removed from what is told. Raises ConfigError for a name that is not known."""
    return (reasoning is not None and REASONING.get(_known(reasoning)).special) or (
        tools is not None and TOOLS.get(_known(tools)).special
    )


def new(reasoning: str | None, tools: str | None, functions: Collection[str] = (), prompt: str = "") -> OutputParser:
    """A parser for one output: its reasoning first, then calls of `functions` (their names). None: not looked for.
    `prompt` is what the output follows, or the end of it: a template may have begun the reasoning there, or have left
    it out. Raises ConfigError for a name that is not known."""
    parsers: list[OutputParser] = []
    if reasoning is not None:
        tags = REASONING.get(_known(reasoning))
        inside = tags.begins_inside(prompt)
        parsers.append(Reading(partial(tags.steps, inside=inside, tools=tools is not None)))
    if tools is not None:
        parsers.append(Reading(partial(TOOLS.get(_known(tools)).steps, names=frozenset(functions))))
    parser = Chained(*parsers) if len(parsers) == 2 else parsers[0] if parsers else Reading(_all_said)
    return Without(parser, _STRAYS)


def _all_said(source: Source) -> Steps[None]:
    yield from source.rest(source.say)
