"""The formats in which a server's model thinks and calls tools, and their effect on a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime import parsers
from treeline_runtime.parsers.harmony import Harmony
from treeline_runtime.parsers.reasoning import Tags
from treeline_runtime.parsers.source import OutputParser
from treeline_runtime.parsers.structures import Function
from treeline_runtime.server.errors import wrong
from treeline_runtime.server.grammars import Constraint, as_format, note_words, structural_tag
from treeline_runtime.server.tools import Calls

AUTO, NONE = "auto", "none"
"""Flag values besides names: guess from the chat template, or none."""

_THINKING: Final = (
    ("gpt_oss", "<|channel|>"),
    ("qwen3", "<think>"),
    ("mistral", "[THINK]"),
    ("kimi", "◁think▷"),
    ("seed_oss", "<seed:think>"),
)
"""A closing marker alone proves nothing: templates of other models remove it from earlier turns too."""
_CALLING: Final = (
    ("openai", "<|channel|>"),
    ("glm45", "<tool_call>", "<arg_key>"),
    ("seed_oss", "<seed:tool_call>"),
    ("qwen3_coder", "<tool_call>", "<parameter="),
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", "<|python_tag|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
)
"""A format and its mark in a chat template; the first match counts, if there is a parser of that name."""


class Formats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names of parsers; None = none."""

    reasoning: str | None = None
    tools: str | None = None
    strict_schemas: bool = False
    """Schemas with `strict: true` may have no ignored keywords."""

    @property
    def harmonic(self) -> bool:
        """Whether reasoning, answer and calls are messages of one format."""
        return any(isinstance(found, Harmony) for found in parsers.formats(self.reasoning, self.tools))


NO_FORMATS: Final = Formats()


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """The formats for parsing an output; see `parsers.new`."""

    reasoning: str | None = None
    tools: str | None = None
    functions: dict[str, Any] = {}
    """Callable functions and the JSON Schemas of their arguments."""
    prompt: str = ""

    def parser(self) -> OutputParser:
        return parsers.new(self.reasoning, self.tools, self.functions, self.prompt)

    @property
    def closing(self) -> str | None:
        """The end marker of reasoning, if it is one text."""
        tags = None if self.reasoning is None else parsers.REASONING.get(self.reasoning)
        return tags.closing if isinstance(tags, Tags) else None

    @property
    def needs_special_tokens(self) -> bool:
        return parsers.needs_special_tokens(self.reasoning, self.tools)


def formats_of(bundle: TokenizerBundle, reasoning: str, tools: str, strict_schemas: bool = False) -> Formats:
    """From flags, or the chat template. Raises ConfigError for an unknown name."""
    templates = "".join(text for text in (bundle.chat_template, bundle.tool_template) if text is not None)
    found = Formats(
        _named(reasoning, templates, _THINKING, parsers.REASONING.names()),
        _named(tools, templates, _CALLING, parsers.TOOLS.names()),
        strict_schemas,
    )
    parsers.needs_special_tokens(found.reasoning, found.tools)  # it knows the names
    return found


def _named(flag: str, templates: str, shown: Iterable[tuple[str, ...]], known: list[str]) -> str | None:
    if flag == NONE:
        return None
    if flag != AUTO:
        return flag.replace("-", "_")
    found = next((name for name, *markers in shown if all(marker in templates for marker in markers)), None)
    return found if found in known else None


# ---- what an output must be ----------------------------------------------------------------------------------------


def whole_output(
    constraint: Constraint | None, calls: Calls | None, formats: Formats, prompt: str
) -> Constraint | None:
    """The grammar of an output including reasoning and calls, whose answer follows `constraint`; None = free. `prompt`:
    its end. Raises ApiError 400 if that is impossible.

    If tools may be called, the output is an answer or calls; if a call is required, only calls.
    """
    if calls is not None and calls.required:
        constraint = Constraint("tools", structural_tag(_calling(calls, formats, required=True), "tools"))
    elif calls is not None and constraint is not None:
        constraint = _either(constraint, calls, formats)
    elif calls is not None and calls.constrained:
        constraint = Constraint("tools", structural_tag(_calling(calls, formats, required=False), "tools"))
    if constraint is None or (calls is not None and formats.harmonic):  # that structure has the reasoning in it
        return constraint
    return _after_thinking(constraint, formats.reasoning, prompt)


def _either(constraint: Constraint, calls: Calls, formats: Formats) -> Constraint:
    """An answer by the constraint, or calls."""
    param = constraint.param
    if formats.harmonic:
        raise wrong(
            param,
            f"{param!r} and 'tools' cannot be combined for a model that writes harmony, unless 'tool_choice' is 'none' "
            "or 'required'",
            code="unsupported_parameter",
        )
    elements = [as_format(constraint.grammar), _calling(calls, formats, required=True)]
    return Constraint(param, structural_tag({"type": "or", "elements": elements}, param))


def _calling(calls: Calls, formats: Formats, *, required: bool) -> dict[str, Any]:
    """xgrammar's format of an output with calls, or, if not required, also with text."""
    assert formats.tools is not None, "checked where the tools were read"
    functions = [Function(tool.name, tool.parameters or None, tool.strict or required) for tool in calls.tools]
    for tool in calls.tools:
        if tool.strict or required:
            note_words(tool.parameters, f"tools.{tool.name}", strict=tool.strict)
    tag = parsers.structure(formats.tools, functions, required=required, parallel=calls.several)
    format: dict[str, Any] = tag["format"]
    return format


def _after_thinking(constraint: Constraint, reasoning: str | None, prompt: str) -> Constraint:
    """The same for an output that may begin with free reasoning.

    If the prompt has begun it, the constraint starts after its end; if the model decides, the grammar allows both.
    """
    end = parsers.reasoning_end(reasoning, prompt)
    if reasoning is None or not end:
        return constraint
    tags = parsers.REASONING.get(reasoning)
    if not isinstance(tags, Tags) or tags.begins_inside(prompt):
        return constraint._replace(grammar=msgspec.structs.replace(constraint.grammar, after=end))
    thought = {"type": "tag", "begin": tags.opening, "content": {"type": "any_text"}, "end": tags.closing}
    thinking = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "\\n{0,2}"}]}
    whole = [{"type": "optional", "content": thinking}, as_format(constraint.grammar)]
    return constraint._replace(grammar=structural_tag({"type": "sequence", "elements": whole}, constraint.param))
