"""Sampling parameters: a `gen`'s own override its run's."""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

MAX_NEW_TOKENS: Final = 128
"""The default limit."""

REGEX_INT: Final = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT: Final = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL: Final = r"(True|False)"
REGEX_STR: Final = r'"[\w\d\s]*"'
_PATTERNS: Final[dict[type, str]] = {int: REGEX_INT, float: REGEX_FLOAT, bool: REGEX_BOOL, str: REGEX_STR}
"""The patterns of SGLang's language."""
_STOPS: Final[dict[type, tuple[str, ...]]] = {int: (" ", "\n"), float: (" ", "\n")}
Dtype = type[int] | type[float] | type[bool] | type[str]
_DTYPES: Final[dict[str, Dtype]] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """None means unset. Names are those of the runtime's API, except `max_tokens` and `min_tokens`."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    """The text ends at the first match; what matched is cut off."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: Dtype | None = None
    regex: str | None = None
    json_schema: str | None = None
    """The schema as JSON."""

    def over(self, defaults: Sampling) -> Sampling:
        """These parameters, with defaults for the unset ones; stops are combined."""
        said: dict[str, Any] = {}
        for name in _FIELDS:
            mine, theirs = getattr(self, name), getattr(defaults, name)
            if name in ("stop", "stop_token_ids", "stop_regex"):
                said[name] = tuple(dict.fromkeys((*mine, *theirs)))
            else:
                said[name] = theirs if mine is None else mine
        return Sampling(**said)

    @property
    def limit(self) -> int:
        """The largest number of tokens to generate."""
        return MAX_NEW_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def constrained(self) -> bool:
        return self.regex is not None or self.json_schema is not None

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """The set parameters among `names`, as JSON values."""
        found = {name: value for name in names if (value := getattr(self, name)) not in (None, ())}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def native(self) -> dict[str, Any]:
        """Token sampling parameters under the names of Treeline's engine and SGLang's `/generate`, without constraints
        and `n`."""
        least = {} if self.min_tokens is None else {"min_new_tokens": self.min_tokens}
        return {"max_new_tokens": self.limit, **least, **self.given(_NATIVE)}

    def value_of(self, text: str) -> Any:
        """The value of a variable with this text. Raises ValueError."""
        if self.dtype is bool:
            if text not in ("True", "False"):
                raise ValueError
            return text == "True"
        if self.dtype is str:
            return text.removeprefix('"').removesuffix('"')
        return text if self.dtype is None else self.dtype(text)


_NATIVE: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "stop_regex",
)
_FIELDS: Final = tuple(field.name for field in fields(Sampling))


def check_sampling(**given: Any) -> Sampling:
    """A Sampling from a user's arguments. Raises TypeError for wrong types and names, ValueError for wrong values.

    Besides the fields, `stop` and `stop_regex` may be one text, `json_schema` a mapping or a pydantic model, `dtype` a
    name, and `max_new_tokens` means `max_tokens`.
    """
    if "max_new_tokens" in given:
        most = given.pop("max_new_tokens")
        if most is not None and given.get("max_tokens") is not None:
            raise TypeError("max_tokens and max_new_tokens mean the same: give one of them")
        given["max_tokens"] = given.get("max_tokens") if most is None else most
    unknown = sorted(given.keys() - set(_FIELDS))
    if unknown:
        names = ", ".join(sorted(_FIELDS))
        raise TypeError(f"there is no parameter {unknown[0]!r}; the sampling parameters are {names}")
    for name in ("stop", "stop_token_ids", "stop_regex"):
        given[name] = _several(name, given.get(name))
    for pattern in (*given["stop_regex"], given.get("regex")):
        _check_regex(pattern)
    given["json_schema"] = _schema(given.get("json_schema"))
    given["dtype"] = _dtype(given.get("dtype"))
    _check_numbers(given)
    sampling = Sampling(**given)
    constraints = [name for name in ("regex", "json_schema", "dtype") if getattr(sampling, name) is not None]
    if len(constraints) > 1:
        raise ValueError(f"{' and '.join(constraints)} are several constraints: give one")
    return _with_dtype(sampling)


def _with_dtype(sampling: Sampling) -> Sampling:
    if sampling.dtype is None:
        return sampling
    stops = (*sampling.stop, *_STOPS.get(sampling.dtype, ()))
    return replace(sampling, regex=_PATTERNS[sampling.dtype], stop=tuple(dict.fromkeys(stops)))


def _several(name: str, given: Any) -> tuple[Any, ...]:
    kind, made = (numbers.Integral, int) if name == "stop_token_ids" else (str, str)
    if given is None:
        return ()
    several = (given,) if isinstance(given, kind) else tuple(given) if isinstance(given, list | tuple) else None
    if several is None or not all(isinstance(one, kind) for one in several):
        raise TypeError(f"{name} is a list of {made.__name__}, not {given!r}")
    if "" in several:
        raise ValueError(f"{name} holds an empty text, which matches everywhere")
    return tuple(made(one) for one in several)


def _check_regex(pattern: Any) -> None:
    if pattern is None:
        return
    if not isinstance(pattern, str):
        raise TypeError(f"a regex is a string, not {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the regex {pattern!r} is wrong: {error}") from None


def _schema(given: Any) -> str | None:
    if given is None:
        return None
    if hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
    if not isinstance(given, Mapping | bool):
        raise TypeError(f"json_schema is an object (as a mapping, JSON, or a pydantic model), not {given!r}")
    return json.dumps(given)


def _dtype(given: Any) -> Dtype | None:
    found = _DTYPES.get(given, given) if isinstance(given, str) else given
    if found is not None and found not in _PATTERNS:
        raise ValueError(f"dtype is int, float, bool or str, not {given!r}")
    return found


_NUMBERS: Final[dict[str, tuple[type, float, float]]] = {
    "max_tokens": (int, 0, 1 << 31),
    "min_tokens": (int, 0, 1 << 31),
    "n": (int, 1, 128),
    "temperature": (float, 0, 1e6),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 1 << 31),
    "min_p": (float, 0, 1),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "logprob_start_len": (int, -1, 1 << 31),
    "top_logprobs_num": (int, 0, 20),
}


def _check_numbers(given: dict[str, Any]) -> None:
    for name in ("ignore_eos", "return_logprob", "return_text_in_logprobs"):
        if given.get(name) is not None and not isinstance(given[name], bool):
            raise TypeError(f"{name} is True or False, not {given[name]!r}")
    for name, (kind, low, high) in _NUMBERS.items():
        value = given.get(name)
        if value is None:
            continue
        wanted: Any = numbers.Integral if kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise TypeError(f"{name} is {'an integer' if kind is int else 'a number'}, not {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{name} is between {low:g} and {high:g}, not {value!r}")
        if type(value) not in (int, float):  # NumPy's, which JSON does not know
            given[name] = kind(value)
    least, most = given.get("min_tokens"), given.get("max_tokens")
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_tokens {least} is above max_tokens {most}")
