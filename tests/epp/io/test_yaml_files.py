"""Values that YAML's parser trips over, in every file that the picker reads: the file is refused, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from treeline_epp.compat.config import GIE, ConfigError, decode
from treeline_epp.endpoints.discovery import DiscoveryError, parse_file
from treeline_epp.flow.quota_file import QuotaFile, QuotaFileError, read_quotas
from treeline_epp.yaml_text import decode_yaml

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
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12].replace("\0", "zero"))
def test_a_value_that_cannot_be_is_a_fault_of_the_file(value: str, tmp_path: Path) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_yaml(f"a: {value}", dict[str, int])
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text(f"default: {{tokens_per_day: {value}}}")
    with pytest.raises(QuotaFileError):
        read_quotas(quotas)
    with pytest.raises(DiscoveryError):
        parse_file(f"endpoints: [{{name: a, address: 127.0.0.1:80, uid: {value}}}]")
    with pytest.raises(ConfigError):
        decode(f"apiVersion: {GIE}\nkind: EndpointPickerConfig\nplugins: [{{type: a, name: {value}}}]")


async def test_quotas_stay_where_the_new_ones_cannot_be_read(tmp_path: Path) -> None:
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
def test_a_port_that_cannot_be_is_a_fault_of_the_file(port: str) -> None:
    with pytest.raises(DiscoveryError):
        parse_file(f"endpoints: [{{name: a, address: '127.0.0.1:{port}'}}]")
