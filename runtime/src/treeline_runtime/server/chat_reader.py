"""The body of a chat → what it asks for: its prompt, what the answer may call, what it must be, how it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from treeline_runtime import parsers
from treeline_runtime.server import formats, openai
from treeline_runtime.server.errors import ApiError
from treeline_runtime.server.formats import Parsing
from treeline_runtime.server.grammars import FIELDS as GRAMMAR_FIELDS
from treeline_runtime.server.grammars import read_constraint
from treeline_runtime.server.jobs import Caller, ChatTask, Shown
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.tools import Calls, read_calls


def read_chat_task(raw: Mapping[str, Any], model: openai.ModelFacts, limits: Limits, caller: Caller) -> ChatTask:
    """Raises ApiError 400 or 404."""
    body = openai.read_chat(raw, model)
    calls = read_calls(raw)
    if calls is not None:
        _check_tools(model, body.chat_template)
    constraint = read_constraint(raw, GRAMMAR_FIELDS)
    namespace = openai.namespace(raw, caller)
    ids = model.prompts.of_chat(raw, limits, namespace)
    end = model.prompts.end_of(ids)
    parsing = _parsing(body, model, calls, end)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    constraint = formats.whole_output(constraint, calls, model.formats, end)
    most = limits.max_new_tokens(len(ids), asked, None, "messages")
    sampling = openai.sampling(body, model, most, constraint, openai.processor(body))
    if parsing is not None and parsing.needs_special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    fields = openai.task_fields(body, caller, "chatcmpl", (body.top_logprobs or 0) if body.logprobs else None)
    task = ChatTask(
        **fields,
        prompts=[openai.request(body, ids, sampling, namespace, fields["logprobs"])],
        parsing=parsing,
        shown=Shown(
            reasoning=body.include_reasoning is not False,
            reasoning_at_once=body.stream_reasoning is False,
            several_calls=calls is None or calls.several,
            special_tokens=body.skip_special_tokens is False,
        ),
        echo=_echo(raw) if body.echo else "",
    )
    task.check_copies()
    return task


def _echo(raw: Mapping[str, Any]) -> str:
    """The text of the last message, where the answer is one of the same role: the assistant's, or, without a generation
    prompt, anyone's."""
    last = raw["messages"][-1]
    goes_on = raw.get("add_generation_prompt") is False or raw.get("continue_final_message") is True
    if not goes_on and last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _check_tools(model: openai.ModelFacts, template: str | None) -> None:
    """Raises ApiError 400 where calls could not be made, or not be found."""
    if model.formats.tools is None:
        known = ", ".join(parsers.TOOLS.names())
        raise ApiError(
            400,
            "'tools' needs a server that knows how its model writes calls: start it with --tool-call-parser NAME "
            f"({known}), or send 'tool_choice': 'none'",
            param="tools",
            code="unsupported_parameter",
        )
    if "tools" not in model.prompts.variables(template):
        raise ApiError(
            400,
            "The chat template has no place for tools: it would not know of them",
            param="tools",
            code="unsupported_parameter",
        )


def _parsing(body: openai.ChatBody, model: openai.ModelFacts, calls: Calls | None, end: str) -> Parsing | None:
    """How the output is to be read; None: it is all said. Raises ApiError 400."""
    if body.separate_reasoning is False and model.formats.harmonic:
        raise ApiError(
            400,
            "'separate_reasoning' cannot be false for a model that writes harmony: nothing else is its answer",
            param="separate_reasoning",
            code="unsupported_parameter",
        )
    reasoning = None if body.separate_reasoning is False else model.formats.reasoning
    tools = None if calls is None else model.formats.tools
    if reasoning is None and tools is None:
        return None
    functions = {} if calls is None else {tool.name: tool.parameters for tool in calls.tools}
    return Parsing(reasoning, tools, functions, end)
