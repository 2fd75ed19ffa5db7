"""Bodies of chats, and of other APIs by way of a chat, → tasks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import Context, Convert, items_of
from treeline_wire.chat import TemplateBusyError
from treeline_wire.prompt import PromptError

from treeline_runtime import parsers
from treeline_runtime.media.sources import PromptMedia, checked, named, read_sources
from treeline_runtime.server import formats, jobs, openai
from treeline_runtime.server.apis import anthropic_fields, ollama_fields, responses_fields
from treeline_runtime.server.apis.answers import InputTokens, TokenCount
from treeline_runtime.server.errors import ApiError, invalid, renamed, renamed_param, unsupported, wrong
from treeline_runtime.server.formats import Parsing
from treeline_runtime.server.grammars import FIELDS as GRAMMAR_FIELDS
from treeline_runtime.server.grammars import read_constraint
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.pacing import encode_json
from treeline_runtime.server.tools import Calls, read_calls

_ENGINE: Final = "treeline"
MAX_SHOWN_BYTES: Final = 2 << 20
"""The most bytes that a response repeats of its request: a stream repeats them three times."""


def read_chat_task(
    raw: Mapping[str, Any], model: openai.ModelFacts, limits: Limits, caller: jobs.Caller
) -> jobs.ChatTask:
    """Raises ApiError 400 or 404."""
    body = openai.read_chat(raw, model)
    calls = read_calls(raw)
    if calls is not None:
        _check_tools(model, body.chat_template)
    constraint = read_constraint(raw, GRAMMAR_FIELDS)
    namespace = openai.namespace(raw, caller)
    ids, parts = model.prompts.with_media(raw, limits, namespace)
    (sources,) = read_sources(raw, [parts], model.media)
    end = model.prompts.end_of(ids)
    parsing = _parsing(body, model, calls, end)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    constraint = formats.whole_output(constraint, calls, model.formats, end)
    most = limits.max_new_tokens(len(ids), asked, None, "messages")
    sampling = openai.sampling(body, model, most, constraint, openai.processor(body))
    if parsing is not None and parsing.needs_special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    fields = openai.task_fields(body, caller, "chatcmpl", (body.top_logprobs or 0) if body.logprobs else None)
    prompts = [openai.request(body, ids, sampling, namespace, fields["logprobs"])]
    task = jobs.ChatTask(
        **fields,
        prompts=prompts,
        media=checked([PromptMedia(sources, asked)], prompts),
        parsing=parsing,
        shown=jobs.Shown(
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
    """The last message's text if the answer has its role: the assistant's, or, without a generation prompt, any."""
    last = raw["messages"][-1]
    goes_on = raw.get("add_generation_prompt") is False or raw.get("continue_final_message") is True
    if not goes_on and last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _check_tools(model: openai.ModelFacts, template: str | None) -> None:
    """Raises ApiError 400 if calls could not be made or found."""
    if model.formats.tools is None:
        known = ", ".join(parsers.TOOLS.names())
        raise wrong(
            "tools",
            "'tools' needs a server that knows how its model writes calls: start it with --tool-call-parser NAME "
            f"({known}), or send 'tool_choice': 'none'",
            code="unsupported_parameter",
        )
    if "tools" not in model.prompts.variables(template):
        raise wrong(
            "tools",
            "The chat template has no place for tools: the model would not see them",
            code="unsupported_parameter",
        )


def _parsing(body: openai.ChatBody, model: openai.ModelFacts, calls: Calls | None, end: str) -> Parsing | None:
    """Chooses the formats for parsing the output; None if all of it is text. Raises ApiError 400."""
    if body.separate_reasoning is False and model.formats.harmonic:
        raise wrong(
            "separate_reasoning",
            "'separate_reasoning' cannot be false for a harmony model: its answer is one of several messages",
            code="unsupported_parameter",
        )
    reasoning = None if body.separate_reasoning is False else model.formats.reasoning
    tools = None if calls is None else model.formats.tools
    if reasoning is None and tools is None:
        return None
    functions = {} if calls is None else {tool.name: tool.parameters for tool in calls.tools}
    return Parsing(reasoning, tools, functions, end)


@dataclass(frozen=True)
class ApiReader:
    """Reads a body of another chat API by way of a chat: wire's conversion makes the messages, as in the picker. Raises
    ApiError 400, or UnknownModel."""

    model: openai.ModelFacts
    raw: Mapping[str, Any]
    limits: Limits
    caller: jobs.Caller

    def responses(self) -> jobs.ChatTask:
        body = self._responses()
        more = responses_fields.chat_fields(body, self.raw)
        if body.rid is None and body.request_id is None:
            more["rid"] = f"resp_{uuid.uuid4().hex}"
        with responses_fields.uncut(body):
            task = self.chat(responses.to_chat, "input", responses_fields, more, body.stream)
        sampling = task.prompts[0].sampling
        try:
            repeated = encode_json(responses_fields.shown(body, sampling.temperature, sampling.top_p))
        except UnicodeEncodeError:
            raise ApiError(400, "The body contains half of a surrogate pair") from None
        if len(repeated) > MAX_SHOWN_BYTES:
            raise wrong(
                "instructions" if len(body.instructions or "") > MAX_SHOWN_BYTES // 2 else "tools",
                f"'instructions', 'tools' and what else an answer repeats have more than {MAX_SHOWN_BYTES} bytes",
            )
        return replace(task, repeated=repeated)

    def input_tokens(self) -> jobs.Answered:
        """Tokens of the prompt of the same request to `/v1/responses`."""
        body = self._responses()
        responses_fields.chat_fields(body, self.raw)  # what would be refused there is refused here
        counted = self._counted(responses.to_chat, "input", responses_fields, body.model)
        return jobs.Answered(body=encode_json(InputTokens("response.input_tokens", counted)))

    def messages(self) -> jobs.ChatTask:
        body = anthropic_fields.read_messages(self.raw, images=self.model.media is not None)
        more = anthropic_fields.chat_fields(body, self.raw) | {"rid": body.rid or f"msg_{uuid.uuid4().hex}"}
        task = self.chat(anthropic.to_chat, "messages", anthropic_fields, more, body.stream)
        assert body.max_tokens is not None
        most = task.prompts[0].sampling.max_new_tokens
        task = task.sampled(max_new_tokens=min(most, body.max_tokens))
        return replace(task, fills_context=body.max_tokens > most)

    def count_tokens(self) -> jobs.Answered:
        """Tokens of the prompt of the same request to `/v1/messages`."""
        body = anthropic_fields.read_messages(self.raw, images=self.model.media is not None, counts=True)
        counted = self._counted(anthropic.to_chat, "messages", anthropic_fields, body.model)
        return jobs.Answered(body=encode_json(TokenCount(counted)))

    def _responses(self) -> responses_fields.ResponsesBody:
        return responses_fields.read_responses(self.raw, images=self.model.media is not None)

    def _counted(self, convert: Convert, name: str, api: ModuleType, model: str | None) -> int:
        self.model.check_model(model)
        chat = self.converted(convert, name)
        with renamed(api.NAMES, api.MEMBERS):
            return len(self.model.prompts.of_chat(chat, self.limits, openai.namespace(chat, self.caller)))

    def chat(
        self,
        convert: Convert,
        name: str,
        api: ModuleType | ollama_fields.Api,
        more: dict[str, Any],
        stream: bool | None,
    ) -> jobs.ChatTask:
        """The request as a chat. `name`: as `converted`'s; `api`: its field names; `more`: no prompt reads these."""
        return self.task_of(self.converted(convert, name) | more, name, api, stream)

    def task_of(
        self, chat: Mapping[str, Any], name: str, api: ModuleType | ollama_fields.Api, stream: bool | None
    ) -> jobs.ChatTask:
        """The task of a chat that was made of the request. `name`: of the member that its messages are."""
        with renamed(api.NAMES, api.MEMBERS):
            task = read_chat_task(chat, self.model, self.limits, self.caller)
        # Whether its grammar can be compiled shows later: it is blamed on what the API calls it.
        param = task.prompts[0].sampling.grammar_param
        if param is not None:
            task = task.sampled(grammar_param=renamed_param(param, api.NAMES, api.MEMBERS))
        return replace(task, stream=bool(stream), media=[named(media, name) for media in task.media])

    def converted(self, convert: Convert, name: str) -> dict[str, Any]:
        """The members of the chat's body that make its prompt. `name`: of the member with the conversation."""
        try:
            context = Context(_ENGINE, self.model.prompts.takes_inline_system)
            made = convert(self.raw, items_of(self.raw[name], name), context)
        except PromptError as error:
            raise invalid(error.param, str(error), code=None) from None
        except TemplateBusyError as error:
            raise ApiError(503, f"{error}; try again later") from None
        if made.unknown is not None:
            raise unsupported(made.unknown.param, made.unknown.why)
        return made.body
