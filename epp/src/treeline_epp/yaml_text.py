"""YAML of files that operators write. Its parser fails in ways of its own: on a day that no calendar has, on `0x_`, on
a number of thousands of digits."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")

_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What PyYAML lets through of values that it cannot make."""


def decode_yaml(text: str | bytes, kind: type[T]) -> T:
    """What a text (YAML or JSON) says. Raises msgspec.DecodeError and its ValidationError, whatever is wrong."""
    try:
        return msgspec.yaml.decode(text, type=kind)
    except msgspec.MsgspecError:
        raise
    except _OF_VALUES as error:
        raise msgspec.DecodeError(f"no YAML: {error or type(error).__name__}") from error
