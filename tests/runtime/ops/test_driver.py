"""Triton's driver is compiled beforehand: an image without a compiler runs on it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from treeline_runtime.ops import driver, obstacle_to_triton

triton = pytest.importorskip("triton")
build = pytest.importorskip("triton.runtime.build")

CPU = torch.device("cpu")


def look_again() -> None:
    driver.prebuilt.cache_clear()
    obstacle_to_triton.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Hide all C compilers. Return the path at which a compiled driver would lie."""
    place = tmp_path / "driver.so"
    monkeypatch.setattr(driver, "_place", lambda source: place)
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    look_again()
    yield place
    look_again()


def test_without_a_compiler_the_kernels_need_the_prebuilt_driver(without_compiler: Path) -> None:
    assert "C compiler" in str(obstacle_to_triton(CPU))
    driver.use_prebuilt()
    assert triton.knobs.build.impl is None, "there is nothing to use"
    without_compiler.touch()
    look_again()
    assert obstacle_to_triton(CPU) is None


def test_repeated_lookups_of_a_start_are_cached(without_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler.touch()
    looked = itertools.count()
    monkeypatch.setattr(driver, "_place", lambda source: (next(looked), without_compiler)[1])
    for _ in range(3):
        assert obstacle_to_triton(CPU) is None
        driver.use_prebuilt()
    assert next(looked) == 1


def test_triton_uses_the_library_and_compiles_nothing_else(without_compiler: Path, tmp_path: Path) -> None:
    without_compiler.touch()
    driver.use_prebuilt()
    arguments: tuple[list[str], ...] = ([], [], [], [])
    assert build._build("cuda_utils", str(driver._source()), str(tmp_path), *arguments) == str(without_compiler)
    with pytest.raises(RuntimeError, match="a C compiler is not here"):
        build._build("another", str(tmp_path / "another.c"), str(tmp_path), *arguments)


@pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="no C compiler here")
def test_the_library_asks_for_the_driver_of_the_machine_it_runs_on(tmp_path: Path) -> None:
    library = driver.prebuild([os.environ.get("CC", "cc")], tmp_path / "driver.so").read_bytes()
    assert library.startswith(b"\x7fELF")
    assert b"\0libcuda.so.1\0" in library
    assert b"\0PyInit_cuda_utils\0" in library
    assert str(tmp_path).encode() not in library, "nothing of where it was built"


def test_a_library_of_another_release_is_not_used(tmp_path: Path) -> None:
    places = []
    for text in ("one", "two"):
        (tmp_path / "driver.c").write_text(text)
        places.append(driver._place(tmp_path / "driver.c"))
    assert places[0] != places[1]
    assert {place.parent for place in places} == {tmp_path}
