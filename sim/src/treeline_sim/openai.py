"""Requests to a simulated engine, and the format of its answers: OpenAI's two completion APIs. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.prompt import Prompt, PromptError, prompt_of_chat, prompt_of_completion
from treeline_wire.tokenizer import TokenizerBundle

from treeline_sim.tokens import TokenPrompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_OUTPUT = {COMPLETIONS: 16, CHAT: 128}
"""Output tokens of a request without a limit: a simulated output never ends by itself."""


_WORDS = (" the", " and", " a", "the", "a")
"""Candidates for the repeated word of an output: the first that is one token."""


class SimCase(msgspec.Struct, frozen=True):
    """A known request. `held`: its prompt is in the cache from the start, on this engine."""

    path: str
    body: bytes
    held: bool


class BadRequest(ValueError):
    """A 400; the message is for the client."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    chat: bool
    prompt: TokenPrompt
    whole: TokenPrompt
    output_tokens: int
    stream: bool
    include_usage: bool


class Reader:
    """Reads requests for one model. The output is one token over and over."""

    def __init__(self, bundle: TokenizerBundle, block_size: int, context: int) -> None:
        self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        self._template = ChatTemplate.from_bundle(bundle)
        self._block_size, self._context = block_size, context
        words = (self._tokenizer.encode(word, add_special_tokens=False).ids for word in _WORDS)
        self._filler = min(words, key=len)[:1]
        self.text: str = self._tokenizer.decode(self._filler)

    def read(self, path: str, body: bytes) -> Asked:
        """Parse a request. Raises BadRequest."""
        try:
            asked = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from None
        if not isinstance(asked, dict):
            raise BadRequest("the body must be a JSON object")
        if asked.get("n") not in (None, 1):
            raise BadRequest("n: a simulated engine gives one choice")
        output = _count(asked, "max_completion_tokens", _count(asked, "max_tokens", DEFAULT_OUTPUT[path]))
        ids = self._ids(self._prompt(path, asked))
        if not ids or len(ids) + output > self._context:
            raise BadRequest(f"{len(ids)} tokens and {output} out: there is room for 1 to {self._context} together")
        prompt = TokenPrompt(ids, self._block_size)
        options = asked.get("stream_options")
        usage = bool(options.get("include_usage")) if isinstance(options, dict) else False
        whole = prompt.extended(self._filler * output)
        return Asked(path == CHAT, prompt, whole, output, asked.get("stream") is True, usage)

    def _prompt(self, path: str, asked: dict[str, Any]) -> Prompt:
        try:
            if path == COMPLETIONS:
                prompts = prompt_of_completion(asked)
                if len(prompts) > 1:
                    raise BadRequest("prompt: a simulated engine takes one at a time")
                return prompts[0]
            if self._template is None:
                raise BadRequest("the model has no chat template: use /v1/completions")
            return prompt_of_chat(asked, self._template)
        except (PromptError, TemplateError) as error:
            raise BadRequest(str(error)) from None

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt.ids is not None:
            return prompt.ids
        ids: list[int] = self._tokenizer.encode(prompt.text or "", add_special_tokens=prompt.add_special_tokens).ids
        return ids


def _count(asked: dict[str, Any], name: str, default: int) -> int:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{name} must be a positive integer")
    return value


class Shapes:
    """The answers to one request, by a server that calls its model `model`."""

    def __init__(self, asked: Asked, model: str, number: int, text: str) -> None:
        self._asked, self._text = asked, text
        kind = "chat.completion" if asked.chat else "text_completion"
        self._base = {
            "id": f"sim-{number}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def part(self, tokens: int, *, first: bool) -> bytes:
        """Return an event of a stream, with `tokens` more tokens."""
        text = self._text * tokens
        if self._asked.chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            return self._event([_choice(None, delta=delta)])
        return self._event([_choice(None, text=text)])

    def last(self, cached_tokens: int) -> bytes:
        """Return the events that end a stream."""
        nothing: dict[str, Any] = {"delta": {}} if self._asked.chat else {"text": ""}
        ending = self._event([_choice("length", **nothing)])
        if self._asked.include_usage:
            ending += self._event([], usage=self._usage(cached_tokens))
        return ending + b"data: [DONE]\n\n"

    def whole(self, cached_tokens: int) -> bytes:
        """Return an answer that is not streamed."""
        text = self._text * self._asked.output_tokens
        said = {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
        usage = self._usage(cached_tokens)
        return msgspec.json.encode({**self._base, "choices": [_choice("length", **said)], "usage": usage})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._base, "choices": choices, **more}) + b"\n\n"

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        prompt, output = self._asked.prompt.tokens, self._asked.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _choice(finish: str | None, **said: Any) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish}
