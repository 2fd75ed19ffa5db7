"""Bodies of a hostile client's requests. Deterministic: everything comes from the given generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Body = Callable[[random.Random], bytes]

_NUMBERS = (0, -1, 1, 1.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40, True, False)
_TEXTS = (
    "",
    "a",
    "\0",
    "\ud800",
    "𝔘𝔫𝔦",
    "<|im_start|>system",
    "<|endoftext|>",
    "x" * 4096,
    "é" * 999,
    "{{7*7}}",
    "%s%n",
    "\r\nX: y",
)
_FIELDS = (
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stream",
    "stream_options",
    "seed",
    "logprobs",
    "top_logprobs",
    "echo",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "user",
    "cache_salt",
    "extra_key",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "min_tokens",
    "ignore_eos",
    "rid",
    "text",
    "input_ids",
    "sampling_params",
    "best_of",
    "suffix",
    "metadata",
    "store",
    "__proto__",
    "constructor",
)


def chat(text: Any = "hello", **fields: Any) -> dict[str, Any]:
    """A valid request: one token for a user's text."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


def _value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(_TEXTS)
    if kind == 2:
        return None
    if kind == 3:
        return rng.randrange(-(2**70), 2**70)
    if kind == 4:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*_FIELDS, "role", "content", "type")): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def wrong_fields(rng: random.Random) -> bytes:
    """Up to three fields of any name and value. Never long answers: that would be load, not an attack."""
    fields = {rng.choice(_FIELDS): _value(rng) for _ in range(rng.randrange(1, 4))}
    if rng.random() < 0.7:
        fields = {name: value for name, value in fields.items() if name not in ("max_tokens", "max_completion_tokens")}
    return _dump(chat() | fields)


def mutated(rng: random.Random) -> bytes:
    """A good request with a few bytes changed, removed or doubled."""
    data = bytearray(_dump(chat(rng.choice(_TEXTS), stream=rng.random() < 0.5)))
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place]
            case _:
                data[place:place] = data[place : place + 8]
    return bytes(data)


def deep(rng: random.Random) -> bytes:
    """Nesting, anywhere in the request."""
    depth = rng.choice((50, 500, 5_000, 200_000))
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = opened * depth + b"1" + closed * depth
    field = rng.choice((b"chat_template_kwargs", b"messages", b"metadata", b"stop", b"tools", b"x"))
    return (
        b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"' + field + b'":' + inner + b"}"
    )


def wide(rng: random.Random) -> bytes:
    """Many messages, many keys, many parts, many stops, one long number, one key many times."""
    count = rng.choice((1_000, 20_000))
    match rng.randrange(6):
        case 0:
            return _dump(chat() | {"messages": [{"role": "user", "content": "a"}] * count})
        case 1:
            return _dump(chat() | {f"k{i}": i for i in range(count)})
        case 2:
            return _dump(chat([{"type": "text", "text": "a"}] * count))
        case 3:
            return _dump(chat(stop=["a"] * count))
        case 4:
            return b'{"model":"tiny","max_tokens":' + b"9" * count + b',"messages":[{"role":"user","content":"a"}]}'
        case _:
            return b"{" + b'"model":"tiny",' * count + b'"max_tokens":1,"messages":[{"role":"user","content":"a"}]}'


def large(rng: random.Random) -> bytes:
    """A text far beyond the context."""
    size = rng.choice((100_000, 1_000_000, 6_000_000))
    unit = rng.choice(("a", "word ", "é", "\\u0000", "<|im_end|>", "  \n"))
    text = (unit * (size // len(unit) + 1))[:size].rstrip("\\")
    return b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"' + text.encode() + b'"}]}'


def not_json(rng: random.Random) -> bytes:
    """No object, no JSON, no UTF-8."""
    return rng.choice(
        (
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"{",
            b"\xff\xfe{}",
            b"\xef\xbb\xbf{}",
            b"{}{}",
            b"NaN",
            b'{"a":NaN}',
            rng.randbytes(300),
        )
    )


def good(rng: random.Random) -> bytes:
    """A request that must be answered."""
    return _dump(chat(f"What is {rng.randrange(90)} + 1?", stream=rng.random() < 0.5))


ALL: tuple[Body, ...] = (wrong_fields, wrong_fields, mutated, mutated, deep, wide, large, not_json, good)


def any_body(rng: random.Random) -> bytes:
    """A body of any kind."""
    return rng.choice(ALL)(rng)
