"""The fields of a request that ask for a logit processor → CustomProcessor. Pure functions.

SGLang 0.5.23 has `custom_logit_processor` and `custom_params` at the top level of chats and completions; of `/generate`
the first there, and the second in `sampling_params`. Its processors are classes that clients send as pickles. vLLM 0.32
names processors at start alone, and each is given the `vllm_xargs` of all requests. Here a request names one of those
that the engine was started with; whether it is one of them, the scheduler knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from treeline_runtime.logit_processors import MAX_NAME_CHARS, is_name
from treeline_runtime.messages import CustomProcessor
from treeline_runtime.server.http import ApiError

MAX_PARAMS_BYTES: Final = 64 << 10
"""As JSON."""
MAX_DEPTH: Final = 32

NAME: Final = "custom_logit_processor"


def read_processor(
    name: str | None, given: Mapping[str, dict[str, Any] | None], where: str = ""
) -> CustomProcessor | None:
    """given: the objects that there are for it, by field. `where`: prefix of the fields' names. Raises ApiError 400."""
    filled = {field: params for field, params in given.items() if params}
    for field in filled if name is None else ():
        raise _refused(where + field, f"which logit processor is it for? Name it as {where + NAME!r}")
    if name is None:
        return None
    if name.lstrip().startswith("{"):
        raise _refused(
            where + NAME,
            "code is never taken from requests. Put the class where the server can import it, start the server with "
            "--logit-processor NAME=module:attribute, and send NAME",
        )
    if not is_name(name):
        raise _refused(where + NAME, f"a name has 1 to {MAX_NAME_CHARS} of A-Z, a-z, 0-9, _, . and -")
    if len(filled) > 1:
        raise _refused(where + list(filled)[1], f"it says the same as {where + next(iter(filled))!r}: give one")
    for field, params in filled.items():
        return _made(name, params, where + field)
    return CustomProcessor(name)


def with_processor(params: Any, above: Mapping[str, Any]) -> Any:
    """`sampling_params` with what the body says of the logit processor. Raises ApiError 400 for both."""
    above = {field: value for field, value in above.items() if value is not None}
    if not above or not isinstance(params, dict | None):
        return params
    own = params or {}
    for field in above:
        if own.get(field) is not None:
            raise _refused(field, f"it is also in 'sampling_params.{field}': give one")
    return own | above


def _made(name: str, params: dict[str, Any], param: str) -> CustomProcessor:
    if _is_deep(params):
        raise _refused(param, f"nested more than {MAX_DEPTH} levels deep")
    try:
        made = CustomProcessor.of(name, params)
    except UnicodeEncodeError:
        raise _refused(param, "it contains half of a surrogate pair") from None
    if len(made.params) > MAX_PARAMS_BYTES:
        raise _refused(param, f"larger than {MAX_PARAMS_BYTES} bytes")
    return made


def _is_deep(params: dict[str, Any]) -> bool:
    level: list[Any] = [params]
    for _ in range(MAX_DEPTH):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def _refused(param: str, what: str) -> ApiError:
    return ApiError(400, f"Invalid value for {param!r}: {what}", param=param, code="invalid_value")
