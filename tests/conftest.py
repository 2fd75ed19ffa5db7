"""Fixtures that tests of several rooms take."""

from support.control_plane import control_plane, namespace

__all__ = ["control_plane", "namespace"]
