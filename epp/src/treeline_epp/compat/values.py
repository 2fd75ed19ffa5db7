"""Values as Go's flags spell them."""

from __future__ import annotations

import argparse
import re

_DURATION = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def go_bool(text: str) -> bool:
    """As Go's `strconv.ParseBool` reads it. Raises ValueError."""
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def flag_bool(text: str) -> bool:
    """The same as a type of argparse."""
    try:
        return go_bool(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """A number of seconds, or a duration as Go's `time.ParseDuration` reads it: `30s`, `1m30s`, `500ms`. Not negative.

    Raises ValueError.
    """
    try:
        value = float(text)
    except ValueError:
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{text!r} is no duration like 30s, 1m30s or 500ms") from None
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is no duration: it must not be negative, nor endless")
    return value
