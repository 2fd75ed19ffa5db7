"""A model that is a function of the text, as a backend of the language: what it says depends on the last characters."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from treeline_lang.backends.base import Backend, Call, Completion
from treeline_lang.errors import Refused
from treeline_lang.sampling import Sampling
from treeline_lang.transcript import Prompt

TOKEN_CHARS = 3
"""Tokens end at multiples of it, counted from the beginning of the text, wherever a request begins."""


class ScriptedModel(Backend):
    """Deterministic: what a longer answer says is what shorter ones say one after the other."""

    tells_tokens = True

    def __init__(
        self,
        script: Mapping[str, str],
        *,
        chats: bool = False,
        goes_on: bool = True,
        tells_tokens: bool = True,
        most: int = 1 << 31,
    ) -> None:
        """script: the end of a text → the character that follows, "" for an end; the longest end counts. most: tokens
        that may be asked for."""
        self._script = dict(sorted(script.items(), key=lambda item: -len(item[0])))
        self.chats, self._goes_on, self.tells_tokens = chats, goes_on, tells_tokens
        self._most = most
        self.asked: list[Sampling] = []
        self.prompt_chars = 0

    async def continues(self) -> bool:
        return self._goes_on

    async def generate(self, prompt: Prompt, sampling: Sampling, call: Call) -> list[Completion]:
        self.asked.append(sampling)
        self.prompt_chars += len(prompt.text)
        if sampling.limit > self._most:
            raise Refused(f"{sampling.limit} tokens are too many")
        return [self._complete(prompt.text, sampling) for _ in range(sampling.n or 1)]

    async def stream(self, prompt: Prompt, sampling: Sampling, call: Call) -> AsyncGenerator[Completion]:
        self.asked.append(sampling)
        yield self._complete(prompt.text, sampling)

    def _complete(self, text: str, sampling: Sampling) -> Completion:
        tokens: list[str] = []
        finish: dict[str, Any] = {"type": "length", "length": sampling.limit}
        said = ""
        while len(tokens) < sampling.limit:
            piece, ended = self._token(text + said)
            if piece:
                tokens.append(piece)
                said += piece
            found = [(said.find(stop) + len(stop), -len(stop), stop) for stop in sampling.stop if stop in said]
            if found:
                end, _, stop = min(found)
                said, finish = said[: end - len(stop)], {"type": "stop", "matched": stop}
                break
            if ended:
                finish = {"type": "stop", "matched": None}
                break
        meta: dict[str, Any] = {"finish_reason": finish, "prompt_tokens": len(text), "completion_tokens": len(tokens)}
        if sampling.return_logprob and self.tells_tokens:
            meta["output_token_logprobs"] = [(0.0, 0, token) for token in [*tokens, "<end>"]]
        return Completion(said, meta)

    def _token(self, text: str) -> tuple[str, bool]:
        """→ (a token, whether it is the end)."""
        piece = ""
        while True:
            character = next((said for end, said in self._script.items() if text.endswith(end)), "")
            if not character:
                return piece, not piece
            text, piece = text + character, piece + character
            if len(text) % TOKEN_CHARS == 0:
                return piece, False


def says(text: str, continuation: str) -> dict[str, str]:
    """A script by which a text that ends so goes on so."""
    whole = text + continuation
    return {whole[:at]: whole[at] for at in range(len(text), len(whole))}
