"""A page's identity: model, format, digest and every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from treeline_runtime.kvcache.page import PageFormat, format_of

SHAPE: dict[str, Any] = {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "element_bytes": 4}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    save_file({"weight": np.zeros(1000, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_page_has_all_components(model: Path) -> None:
    assert format_of(model, **SHAPE).nbytes == 2 * 2 * 4 * 2 * 8 * 4


def test_the_same_checkpoint_has_the_same_fingerprint(model: Path) -> None:
    assert format_of(model, **SHAPE, also=("float32", 512)) == format_of(model, **SHAPE, also=("float32", 512))


def new_weights(model: Path) -> None:
    """The same header, size and time, as after a training step in a reproducible image."""
    file = model / "model.safetensors"
    time = file.stat().st_mtime_ns
    save_file({"weight": np.ones(1000, dtype=np.float32)}, file)
    os.utime(file, ns=(time, time))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"a": 2}'),
        lambda model: os.utime(model / "model.safetensors"),
        lambda model: (model / "model.safetensors").rename(model / "other.safetensors"),
        new_weights,
    ],
)
def test_another_checkpoint_has_another_fingerprint(model: Path, change: Callable[[Path], object]) -> None:
    before = format_of(model, **SHAPE)
    change(model)
    assert format_of(model, **SHAPE).fingerprint != before.fingerprint


@pytest.mark.parametrize("name", SHAPE)
def test_another_shape_has_another_fingerprint(model: Path, name: str) -> None:
    before = format_of(model, **SHAPE)
    assert format_of(model, **SHAPE | {name: SHAPE[name] * 2}).fingerprint != before.fingerprint
    assert format_of(model, **SHAPE, also=("bfloat16",)).fingerprint != before.fingerprint


def test_a_checksum_covers_fingerprint_digest_and_every_byte() -> None:
    form, data = PageFormat(b"f" * 16, 64), bytearray(range(64))
    right = form.checksum(b"d" * 32, memoryview(data))
    assert PageFormat(b"g" * 16, 64).checksum(b"d" * 32, memoryview(data)) != right
    assert form.checksum(b"e" * 32, memoryview(data)) != right
    for i in range(64):
        data[i] ^= 0x10
        assert form.checksum(b"d" * 32, memoryview(data)) != right
        data[i] ^= 0x10
