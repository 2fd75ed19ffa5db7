from __future__ import annotations

import pytest
from support.control_plane import ControlPlane
from support.operator_run import Room


@pytest.fixture
def room(control_plane: ControlPlane, namespace: str) -> Room:
    """A fresh namespace of the shared control plane."""
    return Room(control_plane, namespace)
