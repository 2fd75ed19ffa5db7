"""Anthropic's Messages API: Anthropic's own, or any server's `/v1/messages`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treeline_lang.backends.base import Backend, Call, Completion, GrowingCompletion
from treeline_lang.backends.http import HttpClient, given_up, read
from treeline_lang.backends.turns import turns_of
from treeline_lang.errors import Unreachable, Unsupported
from treeline_lang.sampling import Sampling
from treeline_lang.templates import TEMPLATES, ChatTemplate
from treeline_lang.transcript import Prompt

VERSION: Final = "2023-06-01"
"""The version of the API, sent as `anthropic-version`."""
_PLAIN: Final = ("temperature", "top_p", "top_k")
_FINISHES: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
_UNKNOWN: Final = {
    "min_p": "",
    "min_tokens": "",
    "frequency_penalty": "",
    "presence_penalty": "",
    "stop_token_ids": "",
    "stop_regex": "",
    "ignore_eos": "",
    "return_logprob": ": it tells no logprobs",
    "regex": ": ask for a json_schema in place of a regex or a dtype",
}


class Anthropic(Backend):
    """A model behind Anthropic's API. It receives chat turns and answers as the assistant."""

    chats = True
    reads_images = True

    def __init__(
        self,
        *,
        model: str,
        api_key: str | None = None,
        url: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """api_key: None means the variable ANTHROPIC_API_KEY. url: the address before `/v1/messages` (None: the
        variable ANTHROPIC_BASE_URL, or Anthropic's own). Raises ValueError for a malformed one."""
        key = api_key or os.environ.get("ANTHROPIC_API_KEY")
        headers = {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})
        url = url or os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com"
        self._http = HttpClient(url, headers, timeout_s=timeout_s)
        self._model = model
        self._template = replace(TEMPLATES["plain"], stop=())

    async def template(self) -> ChatTemplate:
        return self._template

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        answer = await self._http.post("/v1/messages", self._body(prompt, sampling))
        return [completion_of(answer)]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        growing = Growing()
        body = self._body(prompt, sampling) | {"stream": True}
        async with aclosing(self._http.events("/v1/messages", body)) as events:
            async for event in events:
                if growing.take(event):
                    yield growing.completion()
        if growing.finish is None:
            raise Unreachable(f"the server at {self._http.url} broke off: its stream ended before the text did")

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        turns = turns_of(prompt, self._template, "Anthropic")
        leading = next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
        if any(turn["role"] == "system" for turn in turns[leading:]):
            raise Unsupported("Anthropic's API has the system speak first: put system(…) before the other turns")
        body = {"model": self._model, **sampling_body(sampling)}
        if leading:
            body["system"] = [block for turn in turns[:leading] for block in _blocks(turn["content"])]
        return body | {"messages": [turn | {"content": _content(turn["content"])} for turn in turns[leading:]]}

    async def aclose(self) -> None:
        await self._http.close()


def sampling_body(sampling: Sampling) -> dict[str, Any]:
    """The members of a request, without its prompt. Raises Unsupported."""
    if (sampling.n or 1) > 1:
        raise Unsupported("Anthropic's API gives one answer: fork the state in place of n")
    for name, why in _UNKNOWN.items():
        if getattr(sampling, name) not in (None, (), False):
            raise Unsupported(f"Anthropic's API has no {name}{why}")
    body: dict[str, Any] = {"max_tokens": sampling.limit, **sampling.given(_PLAIN)}
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if sampling.json_schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(sampling.json_schema)}}
    return body


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else _blocks(content)


def _blocks(content: Any) -> list[dict[str, Any]]:
    """A turn's content as blocks. Blocks without text are left out, since the API refuses them."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return [_block(part) for part in content if part.get("text") != ""]


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    url = part["image_url"]["url"]
    if data := re.fullmatch(r"data:([^;,]+);base64,(.*)", url, re.DOTALL):
        return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}
    return {"type": "image", "source": {"type": "url", "url": url}}


def completion_of(answer: Any) -> Completion:
    """Raises BackendError if the answer is not a message."""
    growing = Growing()
    with read(answer, "a message"):
        growing.take_message(answer)
        for block in answer["content"]:
            growing.take_block(block)
        growing.take_end(answer)
    return growing.completion()


@dataclass
class Growing(GrowingCompletion):
    """A message that is being streamed."""

    usage: dict[str, int] = field(default_factory=dict)

    def take(self, event: Any) -> bool:
        """Returns whether there is more text now. Raises BackendError for an error event or a malformed one."""
        with read(event, "an event of a message"):
            match event["type"]:
                case "message_start":
                    self.take_message(event["message"])
                case "content_block_start":
                    self.take_block(event["content_block"])
                case "content_block_delta":
                    self.take_block(event["delta"])
                case "message_delta":
                    self.take_end({**event["delta"], "usage": event.get("usage")})
                case "error":
                    raise given_up(event["error"])
                case _:  # pings, ends of blocks, and what may be added to the API
                    return False
        return True

    def take_message(self, message: Mapping[str, Any]) -> None:
        self.meta["id"] = message.get("id")
        self._count(message.get("usage"))

    def take_block(self, block: Mapping[str, Any]) -> None:
        self.text += block.get("text") or ""
        self.reasoning += block.get("thinking") or ""

    def take_end(self, delta: Mapping[str, Any]) -> None:
        reason: Any = delta.get("stop_reason")
        self.finish, self.matched = _FINISHES.get(reason, reason), delta.get("stop_sequence")
        self._count(delta.get("usage"))

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        """Token counts under the names of `/generate`; cache reads and writes belong to the prompt."""
        self.usage |= {name: value for name, value in (usage or {}).items() if isinstance(value, int)}
        if "input_tokens" in self.usage:
            cached = self.usage.get("cache_read_input_tokens", 0)
            written = self.usage.get("cache_creation_input_tokens", 0)
            self.meta |= {"prompt_tokens": self.usage["input_tokens"] + cached + written, "cached_tokens": cached}
            self.meta["completion_tokens"] = self.usage.get("output_tokens", 0)
