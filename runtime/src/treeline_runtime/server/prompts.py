"""Requests → token ids, and ids → text: the tokenizer and the chat template of one model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.keys import PrefixKeys
from treeline_wire.prompt import Prompt, PromptError, prompt_of_chat, prompt_of_completion
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.server.fields import check_messages
from treeline_runtime.server.http import ApiError

INLINE_BYTES = 16_384
"""Larger requests are rendered and encoded in a thread: they take 5 ms and more, and every other request would wait."""

T = TypeVar("T")
A = TypeVar("A")


class Prompts:
    """Raises ApiError 400 for what the client got wrong."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._template = ChatTemplate.from_bundle(bundle)

    def template_reads(self, name: str) -> bool:
        """Whether a chat template of the model mentions `name`."""
        return any(name in (text or "") for text in (self.bundle.chat_template, self.bundle.tool_template))

    async def of_chat(self, body: Mapping[str, Any], size: int) -> list[int]:
        """`size`: of the request in bytes."""
        return await _off_loop_if_big(size, self._of_chat, body)

    async def of_completion(self, body: Mapping[str, Any], size: int) -> list[list[int]]:
        """`size`: of the request in bytes."""
        return await _off_loop_if_big(size, self._of_completion, body)

    async def of_prompts(self, prompts: Sequence[Prompt], size: int) -> list[list[int]]:
        """`size`: of the request in bytes."""
        return await _off_loop_if_big(size, self._of_prompts, prompts)

    def _of_chat(self, body: Mapping[str, Any]) -> list[int]:
        if self._template is None:
            raise ApiError(400, "This model has no chat template; use /v1/completions", param="messages")
        check_messages(body.get("messages"), self.template_reads)
        try:
            prompt = prompt_of_chat(body, self._template)
        except PromptError as error:
            raise ApiError(400, _message(error), param=error.param) from None
        except TemplateError as error:
            raise ApiError(500, f"The model's chat template failed: {error}", type="server_error") from None
        return self._ids(prompt)

    def _of_completion(self, body: Mapping[str, Any]) -> list[list[int]]:
        try:
            return self._of_prompts(prompt_of_completion(body))
        except PromptError as error:
            raise ApiError(400, _message(error), param=error.param) from None

    def _of_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._ids(prompt) for prompt in prompts]

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt.ids is None:
            ids: list[int] = self._tokenizer.encode(
                prompt.text or "", add_special_tokens=prompt.add_special_tokens
            ).ids
            return ids
        if max(prompt.ids) >= self.vocab_size:
            raise ApiError(
                400,
                f"Token id {max(prompt.ids)} is not below {self.vocab_size}, the vocabulary's size",
                param="prompt",
            )
        return prompt.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, id: int, text: str) -> list[int]:
        """The bytes of one token, as OpenAI reports them: exact even where the token is part of a character."""
        raw = self._token_bytes[id] if id < len(self._token_bytes) else b""
        special = not raw or (len(raw) == 5 and raw[0] == 0xFF)
        return list(text.encode() if special else raw)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        return PrefixKeys.from_bundle(self.bundle).token_bytes


async def _off_loop_if_big(size: int, work: Callable[[A], T], argument: A) -> T:
    if size <= INLINE_BYTES:
        return work(argument)
    return await asyncio.to_thread(work, argument)


def _message(error: PromptError) -> str:
    return f"Invalid value for {error.param!r}: {error}"
