"""Logging: one JSON object per line on standard error, or text.

Uses only the standard library, so that Envoy's launcher stays small.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

MOST_CHARS: Final = 4096
"""The longest message, field and exception: they may quote a peer, and lines go to disk."""
LEVELS: Final = ("debug", "info", "warning", "error")
_USUAL: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "fields"}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: `time`, `level`, `logger`, `message`, `exception`, and the members of `extra`.

    Members of `extra["fields"]` are added too, with any names.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str)
        if len(text) <= MOST_CHARS:
            return text
        # Values that are no texts, and too long, become some.
        return json.dumps({name: _bounded(value) for name, value in line.items()})


class TextFormatter(logging.Formatter):
    """A record as one line of text, followed by its `extra`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_short(str(value))}" for name, value in _fields(record).items())
        text = super().format(record)
        return f"{text}  {fields}" if fields else text

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _short(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _short(super().formatException(ei))


def set_up(level: str, *packages: str, form: str = "json") -> None:
    """Logs these packages from `level` on, and libraries from warnings on: at debug level they print requests with
    headers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for package in packages:
        logging.getLogger(package).setLevel(level.upper())


def _short(text: str) -> str:
    """The beginning and the end; a traceback's end names the error."""
    left = len(text) - MOST_CHARS
    half = MOST_CHARS // 2
    return text if left <= 0 else f"{text[:half]} … {left} characters … {text[-half:]}"


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return _short(value)
    text = json.dumps(value, default=str)
    return json.loads(text) if len(text) <= MOST_CHARS else _short(text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {name: value for name, value in record.__dict__.items() if name not in _USUAL}
    return {**extra, **getattr(record, "fields", {})}
