"""One formatter for the logs of all programs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from treeline_wire.logs import MOST_CHARS, JsonFormatter, TextFormatter, set_up


class Key(NamedTuple):
    kind: str
    name: str


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_log_lines_carry_their_fields(formatter: logging.Formatter) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    log = logging.Logger("treeline_x.y", logging.INFO)
    log.addHandler(handler)
    log.info("created %s", "a", extra={"key": Key("pool", "p"), "uid": 7})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().splitlines()
    if isinstance(formatter, JsonFormatter):
        first, second = map(json.loads, lines)
        assert (first["message"], first["level"], first["key"], first["uid"]) == (
            "created a",
            "info",
            ["pool", "p"],
            7,
        )
        assert "ValueError: why" in second["exception"]
    else:
        assert "created a  key=Key(" in lines[0]
        assert "uid=7" in lines[0]
        assert any("ValueError: why" in line for line in lines)


def test_fields_may_have_the_names_that_records_use_themselves() -> None:
    record = logging.makeLogRecord({"msg": "hello", "fields": {"name": "a", "args": [1]}})
    line: dict[str, Any] = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["name"], line["args"]) == ("hello", "a", [1])


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_log_line_has_a_bounded_part_of_a_peers_data(formatter: logging.Formatter) -> None:
    sent = "\x00ü" * 200_000
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    log = logging.Logger("treeline_x.y", logging.INFO)
    log.addHandler(handler)
    try:
        raise ValueError(sent)
    except ValueError as error:
        log.exception("refused: %s", error, extra={"text": sent, "list": [sent] * 3, "fields": {"deep": {"a": sent}}})
    assert len(out.getvalue()) < 5 * 6 * MOST_CHARS + 1000, "six characters stand for one in JSON"
    assert "refused: " in out.getvalue()
    assert "ValueError: " in out.getvalue()


def test_our_packages_log_from_the_chosen_level_and_libraries_from_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        set_up("info", "treeline_x")
        for name in ("treeline_x.y", "library"):
            logging.getLogger(name).debug("detail")
            logging.getLogger(name).info("note")
            logging.getLogger(name).warning("danger")
    finally:
        root.handlers, root.level = before
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["level"]) for line in told] == [
        ("treeline_x.y", "info"),
        ("treeline_x.y", "warning"),
        ("library", "warning"),
    ]


def test_terminals_get_text_and_times_are_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        for file, form, is_json in (
            (Terminal(), None, False),
            (io.StringIO(), None, True),
            (Terminal(), "json", True),
            (io.StringIO(), "text", False),
        ):
            monkeypatch.setattr(sys, "stderr", file)
            set_up("info", "treeline_x", form=form, process="scheduler")
            said = {
                "name": "treeline_x",
                "levelno": 20,
                "levelname": "INFO",
                "msg": "hello",
                "created": 0.5,
                "msecs": 500,
            }
            logging.getLogger("treeline_x").handle(logging.makeLogRecord(said))
            if is_json:
                line = json.loads(file.getvalue())
                assert (line["time"], line["process"]) == ("1970-01-01T00:00:00.500+00:00", "scheduler")
            else:
                assert file.getvalue() == "1970-01-01T00:00:00.500Z INFO    scheduler   hello\n"
    finally:
        root.handlers, root.level = before


def test_warnings_of_libraries_are_ordinary_log_lines() -> None:
    program = (
        "import warnings, treeline_wire.logs as logs; logs.set_up('info', 'treeline_x', form='json');"
        "warnings.warn('this is old')"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert "this is old" in json.loads(told)["message"]


def test_logging_loads_only_the_standard_library() -> None:
    program = "import sys, treeline_wire.logs; sys.exit('msgspec' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
