"""Bodies of other chat APIs → what they ask for, by way of a chat's: wire's conversion makes the messages, as it does
for the picker.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from msgspec.structs import replace
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import Context, Conversation, items_of
from treeline_wire.chat import TemplateBusyError
from treeline_wire.prompt import PromptError

from treeline_runtime.server import openai
from treeline_runtime.server.apis import anthropic_fields, responses_fields
from treeline_runtime.server.apis.answers import InputTokens, TokenCount
from treeline_runtime.server.apis.errors import renamed, renamed_param
from treeline_runtime.server.chat_reader import read_chat_task
from treeline_runtime.server.errors import ApiError, invalid, unsupported
from treeline_runtime.server.jobs import Answered, Caller, ChatTask
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.pacing import encode_json

Convert = Callable[[Mapping[str, Any], list[Any], Context], Conversation]
_ENGINE: Final = "treeline"
MAX_SHOWN_BYTES: Final = 2 << 20
"""Of what a response repeats of its request: a stream has it three times."""


@dataclass(frozen=True)
class ApiReader:
    """Reads one body. Raises ApiError 400, or UnknownModel."""

    model: openai.ModelFacts
    raw: Mapping[str, Any]
    limits: Limits
    caller: Caller

    def responses(self) -> ChatTask:
        body = responses_fields.read_responses(self.raw)
        more = responses_fields.chat_fields(body, self.raw)
        if body.rid is None and body.request_id is None:
            more["rid"] = f"resp_{uuid.uuid4().hex}"
        with responses_fields.uncut(body):
            task = self._chat(responses.to_chat, "input", responses_fields, more, body.stream)
        sampling = task.prompts[0].sampling
        try:
            repeated = encode_json(responses_fields.shown(body, sampling.temperature, sampling.top_p))
        except UnicodeEncodeError:
            raise ApiError(400, "The body contains half of a surrogate pair") from None
        if len(repeated) > MAX_SHOWN_BYTES:
            raise ApiError(
                400,
                f"'instructions', 'tools' and what else an answer repeats have more than {MAX_SHOWN_BYTES} bytes",
                param="instructions" if len(body.instructions or "") > MAX_SHOWN_BYTES // 2 else "tools",
            )
        return replace(task, repeated=repeated)

    def input_tokens(self) -> Answered:
        """How many tokens the prompt of the same request to `/v1/responses` has."""
        body = responses_fields.read_responses(self.raw)
        responses_fields.chat_fields(body, self.raw)  # what would be refused there is refused here
        counted = self._counted(responses.to_chat, "input", responses_fields, body.model)
        return Answered(body=encode_json(InputTokens("response.input_tokens", counted)))

    def messages(self) -> ChatTask:
        body = anthropic_fields.read_messages(self.raw)
        more = anthropic_fields.chat_fields(body, self.raw) | {"rid": body.rid or f"msg_{uuid.uuid4().hex}"}
        task = self._chat(anthropic.to_chat, "messages", anthropic_fields, more, body.stream)
        assert body.max_tokens is not None
        most = task.prompts[0].sampling.max_new_tokens
        task = _sampled(task, max_new_tokens=min(most, body.max_tokens))
        return replace(task, fills_context=body.max_tokens > most)

    def count_tokens(self) -> Answered:
        """How many tokens the prompt of the same request to `/v1/messages` has."""
        body = anthropic_fields.read_messages(self.raw, counts=True)
        counted = self._counted(anthropic.to_chat, "messages", anthropic_fields, body.model)
        return Answered(body=encode_json(TokenCount(counted)))

    def _counted(self, convert: Convert, name: str, api: ModuleType, model: str | None) -> int:
        """Tokens of the prompt."""
        self.model.check_model(model)
        chat = self.converted(convert, name)
        with renamed(api.NAMES, api.MEMBERS):
            return len(self.model.prompts.of_chat(chat, self.limits, openai.namespace(chat, self.caller)))

    def _chat(
        self, convert: Convert, name: str, api: ModuleType, more: dict[str, Any], stream: bool | None
    ) -> ChatTask:
        """The chat that the request is. `name`: as for `converted`; `api`: what its fields are called; `more`: members
        of the chat that have nothing to do with its prompt."""
        converted = self.converted(convert, name)
        with renamed(api.NAMES, api.MEMBERS):
            task = read_chat_task(converted | more, self.model, self.limits, self.caller)
        # Whether its grammar can be compiled shows later: it is blamed on what the API calls it.
        param = task.prompts[0].sampling.grammar_param
        if param is not None:
            task = _sampled(task, grammar_param=renamed_param(param, api.NAMES, api.MEMBERS))
        return replace(task, stream=bool(stream))

    def converted(self, convert: Convert, name: str) -> dict[str, Any]:
        """What of the chat's body says what its prompt is. `name`: of the member with what is said."""
        try:
            context = Context(_ENGINE, self.model.prompts.takes_inline_system)
            made = convert(self.raw, items_of(self.raw[name], name), context)
        except PromptError as error:
            raise invalid(error.param, str(error), code=None) from None
        except TemplateBusyError as error:
            raise ApiError(503, f"{error}; try again later", type="server_error") from None
        if made.unknown is not None:
            raise unsupported(made.unknown.param, made.unknown.why)
        return made.body


def _sampled(task: ChatTask, **changed: Any) -> ChatTask:
    (prompt,) = task.prompts
    return replace(task, prompts=[replace(prompt, sampling=replace(prompt.sampling, **changed))])
