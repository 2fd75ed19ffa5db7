"""Names of logit processors at start: `NAME=module:attribute`, `NAME=BUILT_IN`, `BUILT_IN`. No torch here."""

from __future__ import annotations

import re
from typing import Final

from treeline_wire.settings import ConfigError

MAX_NAME_CHARS: Final = 64
_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")
_PLACE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def split(text: str) -> tuple[str, str]:
    """An entry's name, and `module:attribute` or a built-in's name. Raises ConfigError."""
    name, given, place = text.partition("=")
    place = place if given else name
    if not is_name(name) or not (_PLACE.fullmatch(place) or is_name(place)):
        raise ConfigError(
            f"expected NAME=module:attribute, or the NAME of a built-in, got {text!r} (a name has up to "
            f"{MAX_NAME_CHARS} of A-Z, a-z, 0-9, _, . and -)"
        )
    return name, place


def entry(text: str) -> str:
    """Checks a flag's value."""
    split(text)
    return text
