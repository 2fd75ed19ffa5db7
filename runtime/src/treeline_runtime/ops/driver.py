"""Precompiles Triton's driver, its one piece of C, for images without a compiler.

Triton compiles `driver.c` at first use and caches it. `python driver.py gcc` does that while an image is built and
stores the library beside the source; `use_prebuilt` gives it to Triton. It is identified by the source's hash and the
Python version.

Imports only the standard library until a GPU is used: image builds run it alone.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def prebuilt() -> Path | None:
    """The library for the installed Triton; None if not compiled. Searched once."""
    place = _place(_source())
    return place if place.exists() else None


def use_prebuilt() -> None:
    """Makes Triton use the library, if there is one, instead of compiling its driver."""
    library = prebuilt()
    if library is None:
        return
    from triton import knobs

    def build(name: str, source: str, *_: object) -> str:
        if Path(source).resolve() != _source().resolve():
            raise RuntimeError(f"Triton wants to compile {name}, and a C compiler is not here")
        return str(library)

    knobs.build.impl = build


def prebuild(compiler: Sequence[str], place: Path | None = None) -> Path:
    """Compiles the driver by `compiler …` into `place` (default: beside the source). Raises CalledProcessError.

    Needs no GPU: an empty library stands in for `libcuda.so.1`.
    """
    source = _source()
    target = place or _place(source)
    shared = [*compiler, "-O3", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty.c")
        empty.touch()
        subprocess.run(
            [*shared, "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", str(empty)],
            check=True,
        )
        headers = [f"-I{source.parent / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
        libraries = [f"-L{folder}", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
        subprocess.run([*shared, "-o", str(target), str(source), *headers, *libraries], check=True)
    return target


def _source() -> Path:
    spec = find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package triton is not installed")
    return Path(spec.submodule_search_locations[0], "backends", "nvidia", "driver.c")


def _place(source: Path) -> Path:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return source.with_name(f"driver-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}")


if __name__ == "__main__":
    sys.stdout.write(f"{prebuild(sys.argv[1:])}\n")
