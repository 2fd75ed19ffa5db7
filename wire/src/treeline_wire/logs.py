"""Logging: one JSON object per line on standard error, or text, with times in UTC.

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
FORMATS: Final = ("text", "json")
FORMAT_HELP: Final = "text for people, or one JSON object a line (default: text on a terminal, json elsewhere)"
_USUAL: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "fields"}


class JsonFormatter(logging.Formatter):
    """A record as a JSON object: `time`, `level`, `logger`, `process` (of programs with several), `message`,
    `exception`, and the members of `extra`.

    Members of `extra["fields"]` are added too, with any names.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str)
        if len(text) <= MOST_CHARS:
            return text
        # Values other than texts become shortened texts if they are too long.
        return json.dumps({name: _bounded(value) for name, value in line.items()})


class TextFormatter(logging.Formatter):
    """A record as one line of text, followed by its `extra`."""

    def __init__(self, process: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {f'{process:<11} ' if process else ''}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_one_line(_short(str(value)))}" for name, value in _fields(record).items())
        text = super().format(record)
        return f"{text}  {fields}" if fields else text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _utc(record).replace("+00:00", "Z")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _one_line(_short(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _short(super().formatException(ei))


def set_up(level: str, *packages: str, form: str | None = None, process: str = "") -> None:
    """Logs these packages from `level` on, and libraries from warnings on: at debug level they print requests with
    headers.

    `form`: one of `FORMATS`; None: text on a terminal, JSON elsewhere. `process`: which one of a program's several.
    """
    text = sys.stderr.isatty() if form is None else form == "text"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(process) if text else JsonFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for package in packages:
        logging.getLogger(package).setLevel(level.upper())


def _one_line(text: str) -> str:
    """Escapes line ends and control characters, with which a peer's text could forge log lines."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _short(text: str) -> str:
    """Shortens a text to its beginning and end; a traceback's end names the error."""
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
