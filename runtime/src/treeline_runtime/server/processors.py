"""The fields of a request that ask for a logit processor → CustomProcessor. Pure functions.

SGLang 0.5.23 has `custom_logit_processor` and `custom_params` at the top level of chats and completions; of `/generate`
the first there, and the second in `sampling_params`. Its processors are classes that clients send as pickles. vLLM 0.32
names processors at start alone, and each is given the `vllm_xargs` of all requests. Here a request names one of those
that the engine was started with; whether it is one of them, the scheduler knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from treeline_runtime.logit_processors import MAX_NAME_CHARS, is_name
from treeline_runtime.messages import CustomProcessor
from treeline_runtime.server.errors import invalid

ProcessorName = Annotated[
    str,
    Meta(
        description="The logit processor, of those that the server was started with; Python is not taken.",
        extra_json_schema={"maxLength": MAX_NAME_CHARS},
    ),
]
MAX_PARAMS_BYTES: Final = 64 << 10
"""As JSON."""
MAX_DEPTH: Final = 32


def read_processor(
    names: Mapping[str, str | None], given: Mapping[str, dict[str, Any] | None]
) -> CustomProcessor | None:
    """names, given: what says which one, and with what, by field. Raises ApiError 400."""
    named = {field: name for field, name in names.items() if name is not None}
    filled = {field: params for field, params in given.items() if params}
    for found in (named, filled):
        if len(found) > 1:
            first, second, *_ = found
            raise invalid(second, f"it says the same as {first!r}: give one")
    if not named:
        for field in filled:
            raise invalid(field, "which logit processor is it for? Name it as 'custom_logit_processor'")
        return None
    ((field, name),) = named.items()
    if name.lstrip().startswith("{"):
        raise invalid(
            field,
            "code is never taken from requests. Put the class where the server can import it, start the server with "
            "--logit-processor NAME=module:attribute, and send NAME",
        )
    if not is_name(name):
        raise invalid(field, f"a name has 1 to {MAX_NAME_CHARS} of A-Z, a-z, 0-9, _, . and -")
    for param, params in filled.items():
        return _made(name, params, param)
    return CustomProcessor(name)


def _made(name: str, params: dict[str, Any], param: str) -> CustomProcessor:
    if _is_deep(params):
        raise invalid(param, f"nested more than {MAX_DEPTH} levels deep")
    try:
        made = CustomProcessor.of(name, params)
    except UnicodeEncodeError:
        raise invalid(param, "it contains half of a surrogate pair") from None
    if len(made.params) > MAX_PARAMS_BYTES:
        raise invalid(param, f"larger than {MAX_PARAMS_BYTES} bytes")
    return made


def _is_deep(params: dict[str, Any]) -> bool:
    level: list[Any] = [params]
    for _ in range(MAX_DEPTH):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)
