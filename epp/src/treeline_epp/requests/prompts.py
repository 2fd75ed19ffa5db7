"""From a text or token ids to a prefix key, in bounded time; chats become texts in `chats`.

The key of a prompt's beginning is the beginning of its key, so a bound costs nothing but knowledge of what lies beyond:
two requests that differ only there look alike.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt, PromptError, prompt_of_completion

from treeline_epp.keyers.base import Keyer
from treeline_epp.requests.outline import Summary

CHARS_PER_TOKEN: Final = 4
"""Rough, for requests of which nothing better is known."""
KEY_COST: Final = 192 * 1024
"""What is normalized and scanned of a prompt: characters, those beyond ASCII counted several times for their work."""
_NOT_ASCII: Final = 7
_LAST_BLANK: Final = re.compile(r"[ \n](?=[^ \n]*\Z)")
"""Text behind which a beginning may end: tokens and Unicode's forms do not reach over it."""


class KeyedPrompt(msgspec.Struct, frozen=True, gc=False):
    """`tokens` are estimated for the whole prompt. `key_tokens`: for what the key covers, where that is only the
    beginning of it."""

    key: bytes | None
    tokens: int
    key_tokens: int | None = None


def completion(summary: Summary, keyer: Keyer | None) -> KeyedPrompt:
    """The prompt of a completion (of the native API too); the key is that of the first, where there are several."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    if keyer is None:
        return rough
    body = summary.members
    if summary.cut is not None and isinstance(body.get("prompt"), str):
        body = {**body, "prompt": shortened(body["prompt"])}
    try:
        prompts = prompt_of_completion(body)
    except PromptError:
        return rough
    tokens: int | None = None
    if summary.cut is not None or len(prompts) > 1:
        tokens = sum(_tokens(prompt, keyer) for prompt in prompts)
    if tokens is not None and summary.cut is not None:
        tokens = tokens * summary.cut_bytes // summary.cut_read
    return keyed(prompts[0], keyer, tokens)


def keyed(prompt: Prompt, keyer: Keyer, tokens: int | None) -> KeyedPrompt:
    """The key of a prompt, or of its beginning. `tokens` of the whole request, where the prompt is not all of it."""
    bounded = _bounded(prompt)
    key = keyer.key(bounded)
    if key is None:
        return KeyedPrompt(None, tokens or _tokens(prompt, keyer))
    in_key = len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(key))
    if bounded is prompt and tokens is None:
        return KeyedPrompt(key, in_key)
    return KeyedPrompt(key, max(in_key, tokens or _tokens(prompt, keyer)), in_key)


def _bounded(prompt: Prompt) -> Prompt:
    """A prompt, or its beginning where to normalize and scan all of it would take long."""
    text = prompt.text
    if text is None:
        return prompt
    size = len(text)
    while size > KEY_COST // _NOT_ASCII and (cost := _cost(text[:size])) > KEY_COST:
        size = min(size - 1, size * KEY_COST // cost)
    short = text if size == len(text) else shortened(text[:size])
    marks = long_run(short)
    if marks is not None:
        short = short[:marks]
    return prompt if short is text else Prompt(short, None, prompt.add_special_tokens)


def _cost(text: str) -> int:
    size = len(text)
    return size if text.isascii() else size + (_NOT_ASCII - 1) // 2 * (len(text.encode()) - size)


def _tokens(prompt: Prompt, keyer: Keyer) -> int:
    return len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(prompt.text or ""))


def shortened(text: str) -> str:
    """A text up to its last blank, if there is one near its end: so no token reaches over the end of it."""
    found = _LAST_BLANK.search(text, max(0, len(text) - 1024))
    return text[: found.start()] if found is not None else text
