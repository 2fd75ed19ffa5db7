"""Requests → token ids, and ids → text: the tokenizer and the chat template of one model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.keys import PrefixKeys
from treeline_wire.prompt import Prompt, PromptError, prompt_of_chat, prompt_of_completion
from treeline_wire.tokenizer import TokenizerBundle

from treeline_runtime.server.http import ApiError

INLINE_CHARS = 16_384
"""Longer texts are encoded in a thread: about 5 ms, which every other request would wait for."""


class Prompts:
    """Raises ApiError 400 for what the client got wrong."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        source = bundle.chat_template
        self._template = (
            None if source is None else ChatTemplate(source, special_tokens=bundle.special_tokens)
        )

    def template_reads(self, name: str) -> bool:
        """Whether the chat template mentions the variable `name`."""
        return name in (self.bundle.chat_template or "")

    async def of_chat(self, body: Mapping[str, Any]) -> list[int]:
        if self._template is None:
            raise ApiError(400, "This model has no chat template; use /v1/completions", param="messages")
        try:
            prompt = prompt_of_chat(body, self._template)
        except PromptError as error:
            raise ApiError(400, _message(error), param=error.param) from None
        except TemplateError as error:
            raise ApiError(500, f"The model's chat template failed: {error}", type="server_error") from None
        return await self.ids(prompt)

    async def of_completion(self, body: Mapping[str, Any]) -> list[list[int]]:
        try:
            prompts = prompt_of_completion(body)
        except PromptError as error:
            raise ApiError(400, _message(error), param=error.param) from None
        return [await self.ids(prompt) for prompt in prompts]

    async def ids(self, prompt: Prompt) -> list[int]:
        if prompt.ids is None:
            return await self.encode(prompt.text or "", prompt.add_special_tokens)
        for id in prompt.ids:
            if id >= self.vocab_size:
                raise ApiError(
                    400,
                    f"Token id {id} is not below {self.vocab_size}, the vocabulary's size",
                    param="prompt",
                )
        return prompt.ids

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

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


def _message(error: PromptError) -> str:
    return f"Invalid value for {error.param!r}: {error}"
