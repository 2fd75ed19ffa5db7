"""Values that make YAML's parser fail, in every file that the picker reads: only that file is refused."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import indent

import msgspec
import pytest
from treeline_epp.compat.flags import ConfigError, check_config
from treeline_epp.endpoints.discovery import DiscoveryError, parse_file, read_endpoints
from treeline_epp.endpoints.engine_http import EngineKey
from treeline_epp.files import decode_yaml, read_file
from treeline_epp.flow.quotas import Limits, QuotaFile, QuotaFileError

VALUES = [
    "2001-99-99",
    "0001-01-01T00:00:00+23:00",
    "0x_",
    "9" * 5000,
    "!!int x",
    "!!float x",
    "!!bool x",
    "!!timestamp x",
    "!!binary x",
    "{[a]: b}",
    "\x00",
    "[" * 5000,
    "[" * 100_000,
    "{a: " * 100_000,
    "\n" + "".join(" " * depth + "- a:\n" for depth in range(1, 400)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12].replace("\0", "zero"))
def test_an_impossible_value_is_an_error_of_the_file(value: str, tmp_path: Path) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_yaml(f"a: {value}", dict[str, int])
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text(f"default: {{tokens_per_day: {value}}}")
    with pytest.raises(QuotaFileError):
        QuotaFile(quotas)
    with pytest.raises(DiscoveryError):
        parse_file(f"endpoints: [{{name: a, address: 127.0.0.1:80, uid: {value}}}]")
    with pytest.raises(ConfigError):
        check_config(f"kind: EndpointPickerConfig\nplugins: [{{type: a, name: {value}}}]")


LIMITS = "{requests_per_day: 1}"
FEW = [f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 10)}]}}" for at in range(1, 40)]
BOMB = "\n".join([f"a0: &a0 {LIMITS}", *FEW])


@pytest.mark.parametrize(
    "text", [BOMB, f"a: {LIMITS}\na: {{}}", f"a: {{<<: {LIMITS}, <<: {LIMITS}}}"], ids=["merged", "twice", "merges"]
)
def test_expansion_is_bounded_and_duplicate_names_are_refused(text: str, tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("clients:\n" + indent(text, "  "))
    with pytest.raises(QuotaFileError, match=r"more than 1000000 values|occurs twice - at `\$\.clients\.a"):
        QuotaFile(quotas)
    with pytest.raises(DiscoveryError, match=r"more than 1000000 values|occurs twice"):
        parse_file(f"{text}\nendpoints: []")


def test_lines_that_repeat_others_are_read(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text(f"clients:\n  a: &a {LIMITS}\n  b: *a\n  c: {{<<: *a, tokens_per_day: 5}}")
    table = QuotaFile(quotas).table
    once = Limits(requests_per_day=1)
    assert table.clients == {"a": once, "b": once, "c": Limits(requests_per_day=1, tokens_per_day=5)}


def test_a_file_that_is_not_regular_is_refused_at_once(tmp_path: Path) -> None:
    pipe, folder, large = tmp_path / "pipe", tmp_path / "folder", tmp_path / "large"
    os.mkfifo(pipe)
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(1 << 30)
    for file_ in (pipe, folder, large, Path("/dev/zero")):
        with pytest.raises(QuotaFileError):
            QuotaFile(file_)
        with pytest.raises(OSError, match=r"regular|directory|more than"):
            read_endpoints(file_)
        assert not EngineKey(file_)()


async def test_a_temporarily_unreadable_file_is_read_later(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text(f"default: {LIMITS}")
    rights = [True]

    def read(path: Path, most: int) -> bytes:
        if not rights[0]:
            raise PermissionError(f"{path}: no rights")
        return read_file(path, most)

    kept = QuotaFile(file, read)
    file.write_text("default: {requests_per_day: 25}")
    rights[0] = False
    await kept.refresh()
    assert kept.error
    rights[0] = True
    await kept.refresh()
    assert (kept.error, kept.table.default) == ("", Limits(requests_per_day=25))


async def test_quotas_stay_if_the_new_ones_are_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("default: {requests_per_day: 1}")
    kept = QuotaFile(file)
    kept.quotas.spend("a", 1, 0.0)
    file.write_text("default: 2001-99-99")
    os.utime(file, (1, 1))
    await kept.refresh()
    assert kept.error
    assert len(kept.quotas) == 1, "and what was counted by them"


@pytest.mark.parametrize("port", ["9" * 5000, "0", "65536", "-1", ""])
def test_an_impossible_port_is_an_error_of_the_file(port: str) -> None:
    with pytest.raises(DiscoveryError):
        parse_file(f"endpoints: [{{name: a, address: '127.0.0.1:{port}'}}]")
