"""Fixtures that tests of several rooms take, and what holds for all properties."""

from hypothesis import HealthCheck, settings
from support.control_plane import control_plane, namespace

__all__ = ["control_plane", "namespace"]

# How long an example takes says how loaded the machine is; pytest has a time limit of its own.
settings.register_profile("treeline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treeline")
