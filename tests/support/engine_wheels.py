"""Imports vLLM's and SGLang's own code without installing them: the files that `make engine-wheels` took from their
wheels.

`load` imports the modules of one release that are there; whatever else these import from their package is a stand-in
made on the spot: a class without members, unless `_REAL` says better. What came to use such a class would fail. Several
releases can be loaded beside each other: none stays in `sys.modules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import logging
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "engine_wheels.py"
_STAND_INS = ("IPython", "cbor2", "orjson", "partial_json_parser", "pybase64")
"""Packages that the modules import and that need not be installed here."""


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("engine_wheels_script", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FETCHED = _script()
COMMAND_LINES, is_there = _FETCHED.COMMAND_LINES, _FETCHED.is_there
"""The engines' readers of pools' command lines, and whether they were fetched."""


def missing() -> list[str]:
    """Return the names of the missing releases."""
    return [f"{r.package} {r.version}" for r in _FETCHED.RELEASES if not _FETCHED.is_there(r)]


needs_engine_wheels = pytest.mark.skipif(
    bool(missing()), reason=f"not there: {', '.join(missing())} (`make engine-wheels` fetches them)"
)


needs_engine_parsers = pytest.mark.skipif(
    not _FETCHED.is_there(_FETCHED.OUTPUT_PARSERS),
    reason="SGLang's parsers are not there (`make engine-wheels` fetches them)",
)


needs_engine_frontend = pytest.mark.skipif(
    not _FETCHED.is_there(_FETCHED.FRONTEND),
    reason="SGLang's frontend language is not there (`make engine-wheels` fetches it)",
)


def frontend_folder() -> Path:
    return Path(_FETCHED.FRONTEND.folder)


@contextlib.contextmanager
def frontend() -> Iterator[ModuleType]:
    """SGLang's frontend language as one imports it, with `RuntimeEndpoint` and the choices methods in it. It imports
    parts of itself as programs run, and finds them while this lasts."""
    release = _FETCHED.FRONTEND
    with _importing(release.package, release.folder):
        sgl = ModuleType("sgl")
        for part in ("api", "backend.runtime_endpoint", "choices", "global_config"):
            found = vars(importlib.import_module(f"{release.package}.lang.{part}"))
            vars(sgl).update({name: value for name, value in found.items() if not name.startswith("__")})
        yield sgl


def load_parsers() -> dict[str, ModuleType]:
    """Load SGLang's parsers, by their path below the package, like `srt/function_call/hermes_detector`."""
    return _load(_FETCHED.OUTPUT_PARSERS.package, _FETCHED.OUTPUT_PARSERS.folder, _FETCHED.OUTPUT_PARSERS.modules)


def load(package: str, version: str) -> dict[str, ModuleType]:
    """Load a release's modules that are there, by their path below the package, like `distributed/kv_events`."""
    [release] = [r for r in _FETCHED.RELEASES if (r.package, r.version) == (package, version)]
    return _load(package, release.folder, release.modules)


@cache
def _load(package: str, folder: Path, modules: Sequence[str]) -> dict[str, ModuleType]:
    with _importing(package, folder):
        return {
            module.removesuffix(".py"): importlib.import_module(
                f"{package}.{module.removesuffix('.py')}".replace("/", ".")
            )
            for module in modules
            if (folder / package / module).is_file()
        }


@contextlib.contextmanager
def _importing(package: str, folder: Path) -> Iterator[None]:
    """Make imports of `package` load from `folder`, and imports of other packages give stand-ins."""
    roots = (package, *_STAND_INS)

    def taken() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in roots]

    before = {name: sys.modules.pop(name) for name in taken()}
    finder = _Finder(roots, folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in taken():
            del sys.modules[name]
        sys.modules.update(before)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: Sequence[str], folder: Path) -> None:
        self._roots = roots
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._roots:
            return None
        place = self._folder.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _StandIn


class _StandIn(ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        real = _REAL.get(f"{self.__name__}.{name}")
        return type(name, (), {}) if real is None else real


def _page_hashes(key: Any, prior_digest: bytes | None, page_size: int | None) -> list[str]:
    """SGLang's hashes of a key's pages, in hexadecimal: what its C++ extension computes (and, in Python, 0.5.6's
    `get_hash_str`): SHA-256 over the digest before it and the page's tokens as u32 little-endian, both of a pair."""
    tokens, digest, hashes = list(key), prior_digest or b"", []
    for start in range(0, len(tokens), page_size or len(tokens)):
        items = tokens[start : start + (page_size or len(tokens))]
        page = [token for item in items for token in (item if isinstance(item, tuple) else (item,))]
        digest = hashlib.sha256(digest + struct.pack(f"<{len(page)}I", *page)).digest()
        hashes.append(digest.hex())
    return hashes


def _sha256_of_0_9(value: Any) -> int:
    raise AssertionError("0.9.0 hashes by hash() unless it is told otherwise")


_REAL: dict[str, Any] = {
    "vllm.envs": SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True, VLLM_SERVER_DEV_MODE=False),
    "vllm.config.KVEventsConfig": type("KVEventsConfig", (), {}),
    "vllm.config.utils.config": dataclasses.dataclass,
    "vllm.logger.init_logger": logging.getLogger,
    "vllm.utils.sha256": _sha256_of_0_9,
    "orjson.loads": json.loads,
    "sglang.srt.environ.envs": SimpleNamespace(SGLANG_FORWARD_UNKNOWN_TOOLS=SimpleNamespace(get=lambda: False)),
    "sglang.srt.parser.inkling_tokenizer.INKLING_CONTROL_TOKENS": (),
    "sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash": _page_hashes,
}
