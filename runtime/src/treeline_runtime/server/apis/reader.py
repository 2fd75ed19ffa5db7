"""Bodies of other chat APIs → what they ask for, by way of a chat's: wire's conversion makes the messages, as it does
for the picker.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
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
from treeline_runtime.server.jobs import Answered, Caller, ChatTask, MessagesTask, ResponsesTask, Streaming
from treeline_runtime.server.limits import Limits
from treeline_runtime.server.pacing import encode_json

if TYPE_CHECKING:
    from treeline_runtime.server.reader import Reader

Convert = Callable[[Mapping[str, Any], list[Any], Context], Conversation]
_ENGINE: Final = "treeline"
MAX_SHOWN_BYTES: Final = 2 << 20
"""Of what a response repeats of its request: a stream has it three times."""


@dataclass(frozen=True)
class ApiReader:
    """Reads one body. Raises ApiError 400, or UnknownModel."""

    reader: Reader
    raw: Mapping[str, Any]
    limits: Limits
    caller: Caller

    def responses(self) -> ResponsesTask:
        body = responses_fields.read_responses(self.raw)
        more = responses_fields.chat_fields(body, self.raw)
        if body.rid is None and body.request_id is None:
            more["rid"] = f"resp_{uuid.uuid4().hex}"
        converted = self.converted(responses.to_chat, "input")
        with renamed(responses_fields.NAMES, responses_fields.MEMBERS), responses_fields.uncut(body):
            chat = read_chat_task(converted | more, self.reader, self.limits, self.caller)
        chat = _in_names_of(chat, responses_fields.NAMES, responses_fields.MEMBERS)
        sampling = chat.job.prompts[0].sampling
        shown = responses_fields.shown(body, sampling.temperature, sampling.top_p)
        try:
            encoded = encode_json(shown)
        except UnicodeEncodeError:
            raise ApiError(400, "The body contains half of a surrogate pair") from None
        if len(encoded) > MAX_SHOWN_BYTES:
            raise ApiError(
                400,
                f"'instructions', 'tools' and what else an answer repeats have more than {MAX_SHOWN_BYTES} bytes",
                param="instructions" if len(body.instructions or "") > MAX_SHOWN_BYTES // 2 else "tools",
            )
        return ResponsesTask(_streamed(chat, body.stream), encoded)

    def input_tokens(self) -> Answered:
        """How many tokens the prompt of the same request to `/v1/responses` has."""
        body = responses_fields.read_responses(self.raw)
        responses_fields.chat_fields(body, self.raw)  # what would be refused there is refused here
        names = responses_fields.NAMES, responses_fields.MEMBERS
        counted = self._counted(responses.to_chat, "input", body.model, *names)
        return Answered(encode_json(InputTokens("response.input_tokens", counted)))

    def messages(self) -> MessagesTask:
        body = anthropic_fields.read_messages(self.raw)
        more = anthropic_fields.chat_fields(body, self.raw) | {"rid": body.rid or f"msg_{uuid.uuid4().hex}"}
        converted = self.converted(anthropic.to_chat, "messages")
        with renamed(anthropic_fields.NAMES, anthropic_fields.MEMBERS):
            chat = read_chat_task(converted | more, self.reader, self.limits, self.caller)
        chat = _in_names_of(chat, anthropic_fields.NAMES, anthropic_fields.MEMBERS)
        (prompt,) = chat.job.prompts
        most = prompt.sampling.max_new_tokens
        assert body.max_tokens is not None
        sampling = msgspec.structs.replace(prompt.sampling, max_new_tokens=min(most, body.max_tokens))
        job = msgspec.structs.replace(chat.job, prompts=[msgspec.structs.replace(prompt, sampling=sampling)])
        chat = msgspec.structs.replace(chat, job=job)
        return MessagesTask(_streamed(chat, body.stream), body.max_tokens > most)

    def count_tokens(self) -> Answered:
        """How many tokens the prompt of the same request to `/v1/messages` has."""
        body = anthropic_fields.read_messages(self.raw, counts=True)
        names = anthropic_fields.NAMES, anthropic_fields.MEMBERS
        counted = self._counted(anthropic.to_chat, "messages", body.model, *names)
        return Answered(encode_json(TokenCount(counted)))

    def _counted(
        self, convert: Convert, name: str, model: str | None, names: Mapping[str, str], members: Mapping[str, str]
    ) -> int:
        """Tokens of the prompt. `name`: as for `converted`; the others as for `renamed`."""
        self.reader.check_model(model)
        chat = self.converted(convert, name)
        with renamed(names, members):
            return len(self.reader.prompts.of_chat(chat, self.limits, openai.namespace(chat, self.caller)))

    def converted(self, convert: Convert, name: str) -> dict[str, Any]:
        """What of the chat's body says what its prompt is. `name`: of the member with what is said."""
        try:
            context = Context(_ENGINE, self.reader.prompts.takes_inline_system)
            made = convert(self.raw, items_of(self.raw[name], name), context)
        except PromptError as error:
            raise invalid(error.param, str(error), code=None) from None
        except TemplateBusyError as error:
            raise ApiError(503, f"{error}; try again later", type="server_error") from None
        if made.unknown is not None:
            raise unsupported(made.unknown.param, made.unknown.why)
        return made.body


def _in_names_of(chat: ChatTask, names: Mapping[str, str], members: Mapping[str, str]) -> ChatTask:
    """The same, with what its grammar is blamed on as the API calls it: whether it can be compiled shows later."""
    (prompt,) = chat.job.prompts
    param = prompt.sampling.grammar_param
    if param is None:
        return chat
    sampling = msgspec.structs.replace(prompt.sampling, grammar_param=renamed_param(param, names, members))
    job = msgspec.structs.replace(chat.job, prompts=[msgspec.structs.replace(prompt, sampling=sampling)])
    return msgspec.structs.replace(chat, job=job)


def _streamed(chat: ChatTask, stream: bool | None) -> ChatTask:
    return msgspec.structs.replace(chat, streaming=Streaming(bool(stream)))
