"""Settings, each defined once as a dataclass field with bounds, help, and further sources.

Command-line flags (`add_flags`), parsed values (`values`), checks of values from Python (`check`), and a listing
without secrets (`shown`) follow from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import numbers
import operator
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

_SECONDS = ("S", "SECONDS")
"""Placeholders of settings that are durations."""


class ConfigError(ValueError):
    """A setting with an unusable value; the message names the setting and says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The properties of a setting besides name, type and default."""

    help: str
    group: str | None = ""
    """Its group in `--help`. None: no flag, for Python only."""
    flag: str | None = None
    """The flag's name if that differs from the field's."""
    also: str | None = None
    """Another name of the flag."""
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: Iterable[Any] | None = None
    """The allowed values. None: those of a `Literal`, or any."""
    parse: Callable[[str], Any] | None = None
    """Text → value, or a ConfigError that says what is expected; None: by the field's type. A bool with a parser may be
    given with or without a value."""
    repeated: bool = False
    """A tuple field: the given values, each once, or else the default."""
    several: bool = False
    """The same, where one flag takes several values."""
    either: bool = False
    """A bool with a second flag `--no-NAME`."""
    env: str | None = None
    """The environment variable used if the flag is absent; an empty one counts as unset."""
    secret: bool = False
    rare: bool = False
    """Shown only by `--help-all`."""
    word: bool = False
    """The command also takes it without a flag, so the flag is not required."""


def setting(default: Any = dataclasses.MISSING, /, **words: Any) -> Any:
    """Returns a dataclass field; `words` are the members of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(**words)})


def port_setting(default: Any, /, least: int = 0, **words: Any) -> Any:
    """Returns a setting of one or more ports; 0, if allowed, is any free port."""
    return setting(default, at_least=least, at_most=65535, **words)


def namespace(text: str) -> str:
    """Parses a Kubernetes namespace."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace (a-z, 0-9 and -)")
    return text


def settings_of(kind: type) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """Returns the settings of a dataclass by name."""
    fields = [field for field in dataclasses.fields(kind) if "setting" in field.metadata]
    return {field.name: (field, field.metadata["setting"]) for field in fields}


def check(value: Any) -> None:
    """Raises ConfigError for values out of bounds or not among the choices. None is always allowed."""
    kind: type = type(value)
    choices = _choices_of(kind)
    for name, (_, words) in settings_of(kind).items():
        found = getattr(value, name)
        for one in found if words.repeated or words.several else (found,):
            if problem := _out_of_bounds(words, one) or _no_choice(choices[name], one):
                raise ConfigError(f"{name} {problem}")


def shown(value: Any) -> dict[str, Any]:
    """Returns all settings of a dataclass, with secrets hidden."""
    found = {name: (words, getattr(value, name)) for name, (_, words) in settings_of(type(value)).items()}
    return {n: "(set)" if words.secret and one is not None else one for n, (words, one) in found.items()}


def add_flags(
    target: argparse._ActionsContainer,
    kind: type,
    group: str = "",
    environ: Mapping[str, str] = os.environ,
    *,
    short: bool = False,
) -> None:
    """Adds a flag for each setting of this group. `short`: help omits the rare ones."""
    hints = typing.get_type_hints(kind)
    for name, (field, words) in settings_of(kind).items():
        if words.group == group:
            flag = _flag(name, words)
            default = environ.get(words.env or "") or field.default
            said = argparse.SUPPRESS if short and words.rare else words.help
            flags = (flag, words.also) if words.also else (flag,)
            target.add_argument(*flags, help=said, **_argument(words, hints[name], default))


def values(kind: type, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the value of each field whose flag was added."""
    found = {}
    for name, (field, words) in settings_of(kind).items():
        dest = _flag(name, words).removeprefix("--").replace("-", "_")
        if dest in given:
            value = getattr(given, dest)
            found[name] = tuple(dict.fromkeys(value)) or field.default if words.repeated or words.several else value
    return found


def _flag(name: str, words: Setting) -> str:
    return words.flag or "--" + name.replace("_", "-")


def _argument(words: Setting, hint: Any, default: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument`. A text default, as from the environment, is parsed like a flag's
    value.
    """
    found = {"required": not words.word} if default is dataclasses.MISSING else {"default": default}
    if hint is bool and words.parse is None:
        return found | {"action": argparse.BooleanOptionalAction if words.either else "store_true"}
    if hint is bool:
        found |= {"nargs": "?", "const": True}
    if words.repeated:
        found |= {"action": "append", "default": []}
    if words.several:
        found |= {"action": "extend", "nargs": "+", "default": []}
    return found | {"type": _parser(words, hint), "metavar": words.metavar, "choices": _choices(words, hint)}


def _choices(words: Setting, hint: Any) -> Iterable[Any] | None:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else words.choices


@functools.cache
def _choices_of(kind: type) -> dict[str, Iterable[Any] | None]:
    hints = typing.get_type_hints(kind)
    # Also of a bool: a call from Python can pass any value, and "off" would count as true.
    either = {name: (False, True) for name, hint in hints.items() if hint is bool}
    return {name: either.get(name) or _choices(words, hints[name]) for name, (_, words) in settings_of(kind).items()}


def _parser(words: Setting, hint: Any) -> Callable[[str], Any]:
    kind = next((one for one in typing.get_args(hint) or (hint,) if one in (int, float, Path)), str)
    expected = "a whole number" if kind is int else "seconds" if words.metavar in _SECONDS else "a number"

    def parse(text: str) -> Any:
        try:
            value = (words.parse or kind)(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
        if problem := _out_of_bounds(words, value):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def _out_of_bounds(words: Setting, value: Any) -> str | None:
    limits = (
        ("at least", words.at_least, operator.ge),
        ("above", words.above, operator.gt),
        ("at most", words.at_most, operator.le),
    )
    bounds = [(word, bound, holds) for word, bound, holds in limits if bound is not None]
    if not bounds or value is None:
        return None
    number = isinstance(value, numbers.Real)
    if number and value < float("inf") and all(holds(value, bound) for _, bound, holds in bounds):
        return None
    got = value if number else repr(value)
    return f"must be {' and '.join(f'{word} {bound}' for word, bound, _ in bounds)}, got {got}"


def _no_choice(choices: Iterable[Any] | None, value: Any) -> str | None:
    if choices is None or value is None or value in (known := tuple(choices)):
        return None
    return f"must be {', '.join(map(str, known[:-1]))} or {known[-1]}, got {value!r}"
