"""Forms with a recording: what is in them, and hostile ones."""

from __future__ import annotations

import pytest
from treeline_runtime.server.apis.transcription_fields import read_form
from treeline_runtime.server.errors import ApiError


def part(value: bytes, name: str = "a", more: bytes = b"") -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (name.encode(), more, value)


def test_fields_and_files_are_found() -> None:
    form = part(b"0.5", "temperature") + part(b"\0\r\n--y\r\n", "file", b'; filename="f"') + part(b"en", "language")
    assert read_form(form + b"--x--\r\n") == {"temperature": 0.5, "file": b"\0\r\n--y\r\n", "language": "en"}


@pytest.mark.parametrize(
    "parts",
    [part(b"v") * 65, b"".join(part(b"v", f"a{i}") for i in range(65)), part(b"", more=b'; filename="f"') * 200_000],
    ids=["of one name", "of many names", "of files"],
)
def test_only_so_many_parts_are_read(parts: bytes) -> None:
    with pytest.raises(ApiError, match=r"more than 64 fields|twice"):
        read_form(parts + b"--x--\r\n")


@pytest.mark.parametrize(
    "form",
    [
        *(b"", b"--", b"--\r\n", b"{}", b"\r\n--x\r\n", b"--;\r\n", b'--""\r\n', b"--" + b"a" * 300),
        *(b"--x\r\n--x--\r\n", b"--x\r\n\r\nabc\r\n--x--\r\n", b"--x\r\nX: y\r\n\r\nabc\r\n--x--\r\n"),
        *(b"--x\r\n" + b"a: b\r\n" * 9 + b"\r\n", b"--x\r\na: " + b"b" * 5000, b"--x\r\n:\r\n"),
        part(b"A\r\n", more=b"\r\nContent-Transfer-Encoding: base64") + b"--x--\r\n",
    ],
)
def test_broken_forms_are_refused(form: bytes) -> None:
    with pytest.raises(ApiError, match="form") as refused:
        read_form(form)
    assert refused.value.status == 400


def test_numbers_are_those_of_json_or_stay_texts() -> None:
    for text, value in ((b"1", 1), (b"1e3", 1000.0), (b"one", "one"), (b"\xff", "\ufffd")):
        assert read_form(part(text, "temperature") + b"--x--\r\n") == {"temperature": value}
