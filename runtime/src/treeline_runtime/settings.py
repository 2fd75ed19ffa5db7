"""Settings that are defined once: a dataclass field with its bounds, its words for `--help`, where else it comes from.

From these are made the command line (`add_flags`), what the environment sets (`from_environment`), the check of values
that come from Python (`check`), and what `/server_info` shows (`shown`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

SECONDS = "S"
"""The placeholder of settings that are a time."""


class ConfigError(ValueError):
    """A setting that cannot work, with the setting's name and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a field says besides its name, type and default."""

    help: str
    group: str | None = None
    """Of `--help`. None: there is no flag, and the setting is for Python alone."""
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    parse: Callable[[str], Any] | None = None
    """Text → value; None: by the field's type."""
    env: str | None = None
    """The environment variable that sets it where the flag does not."""
    file_help: str | None = None
    """There is a flag `--NAME-file`, too, which names a file that holds the value; whoever parses reads it."""
    secret: bool = False


def setting(default: Any = dataclasses.MISSING, /, **words: Any) -> Any:
    """A dataclass field; `words` are the members of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(**words)})


def settings_of(kind: type) -> dict[str, tuple[dataclasses.Field[Any], Setting]]:
    """The fields of a dataclass by name."""
    return {field.name: (field, field.metadata["setting"]) for field in dataclasses.fields(kind)}


def check(value: Any) -> None:
    """Raises ConfigError for a dataclass whose values are out of bounds. None is always within them."""
    for name, (_, words) in settings_of(type(value)).items():
        if problem := _out_of_bounds(words, getattr(value, name)):
            raise ConfigError(f"{name} {problem}")


def shown(value: Any) -> dict[str, Any]:
    """All settings of a dataclass but for secrets."""
    settings = settings_of(type(value))
    found = {name: getattr(value, name) for name in settings}
    secret = {name for name, (_, words) in settings.items() if words.secret and found[name] is not None}
    return found | dict.fromkeys(secret, "(set)")


def from_environment(kind: type) -> dict[str, str]:
    """Values that environment variables have; an empty one is none."""
    named = {name: words.env for name, (_, words) in settings_of(kind).items() if words.env is not None}
    return {name: value for name, env in named.items() if (value := os.environ.get(env))}


def add_flags(parser: argparse.ArgumentParser, kind: type, groups: Mapping[str, str]) -> None:
    """A flag for each field that has a group. `groups`: their titles, in the order of `--help`."""
    hints = typing.get_type_hints(kind)
    for group, title in groups.items():
        added = parser.add_argument_group(title)
        for name, (field, words) in settings_of(kind).items():
            if words.group == group:
                flag = "--" + name.replace("_", "-")
                if words.file_help is not None:
                    added.add_argument(flag + "-file", metavar="FILE", help=words.file_help)
                added.add_argument(flag, dest=name, **_options(field, words, hints[name]))


def _options(field: dataclasses.Field[Any], words: Setting, hint: Any) -> dict[str, Any]:
    """The arguments of `add_argument`."""
    if hint is bool:
        return {"help": words.help, "action": "store_true"}
    options: dict[str, Any] = {"help": words.help, "metavar": words.metavar}
    if field.default is dataclasses.MISSING:
        options["required"] = True
    else:
        options["default"] = field.default
    if typing.get_origin(hint) is tuple:
        return options | {"type": words.parse, "action": "append", "default": []}
    if typing.get_origin(hint) is Literal:
        return options | {"choices": typing.get_args(hint)}
    kind = next((one for one in (typing.get_args(hint) or (hint,)) if one is not type(None)), str)
    return options | {"type": words.parse or _parser(kind, words)}


def _parser(kind: type, words: Setting) -> Callable[[str], Any]:
    if kind is str:
        return str
    expected = "seconds" if words.metavar == SECONDS else "a whole number" if kind is int else "a number"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
        if problem := _out_of_bounds(words, value):
            raise argparse.ArgumentTypeError(problem.replace(", not ", ", got "))
        return value

    return parse


def _out_of_bounds(words: Setting, value: Any) -> str | None:
    if value is None:
        return None
    low, above, high = words.at_least, words.above, words.at_most
    if (
        (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (low is None or value < float("inf"))
    ):
        return None
    bounds = [f"at least {low:g}"] if low is not None else [f"above {above:g}"] if above is not None else []
    bounds += [f"at most {high:g}"] if high is not None else []
    return f"must be {' and '.join(bounds)}, not {value}"
