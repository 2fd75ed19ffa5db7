"""Request fields that we do not act on: which may be there anyway, and which must be refused.

Three kinds. *Inert* fields change nothing about an answer (bookkeeping). *Neutral* values ask for what happens anyway
(`tool_choice: none`, `logprobs: false`). Everything else that we do not support is an error that names the field:
ignoring it would give an answer to another question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from treeline_runtime.server.http import ApiError

T = TypeVar("T")

INERT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "parallel_tool_calls",  # without tools, which are refused, it says nothing
    }
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "priority": (0,),
    "lora_path": ("",),
    "return_hidden_states": (),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "beam_width": (1,),
    "session_params": ({},),
}
"""Values beyond null, false, [] and {} that ask for nothing."""


def check_unknown(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises ApiError 400 for the first field that is neither known nor harmless."""
    for name, value in body.items():
        if name in known or name in INERT or is_neutral(name, value):
            continue
        raise ApiError(
            400,
            f"{name!r} is not supported by this server{_shown(value)}",
            param=name,
            code="unsupported_parameter",
        )


def is_neutral(name: str, value: Any) -> bool:
    if value is None or value is False or value == [] or value == {}:
        return True
    # 1 == True in Python: compare types too
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ()))


def _shown(value: Any) -> str:
    return f" (got {value!r})" if isinstance(value, str | int | float) and len(repr(value)) <= 40 else ""


def convert(body: Mapping[str, Any], type: type[T], where: str = "") -> T:
    """A decoded JSON object → a typed struct. Raises ApiError 400 naming the field. `where`: prefix of its name."""
    try:
        return msgspec.convert(body, type)
    except msgspec.ValidationError as error:
        raise as_api_error(error, where) from None


def as_api_error(error: msgspec.ValidationError, where: str = "") -> ApiError:
    text, _, path = str(error).partition(" - at `")
    param = where + path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(
            400, f"Missing required parameter: {param!r}", param=param, code="missing_required_parameter"
        )
    plain = text.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    return ApiError(400, f"Invalid value for {param!r}: {plain}", param=param or None, code="invalid_value")
