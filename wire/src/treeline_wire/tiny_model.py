"""The place of the tiny model, which is in the package `treeline-tiny`; in a checkout that is models/tiny."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def tiny_model() -> Path | None:
    """Returns the folder of its checkpoint; None if the package is not installed."""
    spec = find_spec("treeline_tiny")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def model_folder(name: str) -> Path:
    """Returns the folder with this name, which need not exist; for `tiny` without one, the tiny model's."""
    folder = Path(name).expanduser()
    if name == "tiny" and not folder.exists():
        return tiny_model() or folder
    return folder
