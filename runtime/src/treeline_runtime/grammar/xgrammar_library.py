"""Imports xgrammar without libraries that it needs only for types and unused conveniences.

It would import `transformers`, and `torch` even where nothing is computed. Without them the start takes 0.2 s and 60 MB
instead of 4 s and 400 MB.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any


class _Named(ModuleType):
    """A module with any attribute: classes that accept everything and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


def load() -> ModuleType:
    """Imports xgrammar. The stand-ins are removed afterwards, so later imports get the real libraries."""
    if "xgrammar" in sys.modules:
        return sys.modules["xgrammar"]
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # torch itself has it; else it may be compiled now
    needless = [name for name in ("transformers", "torch") if name not in sys.modules]
    if "torch" in needless:
        sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi does without it, but not with a stand-in
        importlib.import_module("tvm_ffi")
    for name in needless:
        sys.modules[name] = _Named(name)
    try:
        return importlib.import_module("xgrammar")
    finally:
        for name in needless:
            del sys.modules[name]
