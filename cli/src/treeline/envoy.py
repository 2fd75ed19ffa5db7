"""Where the Envoy binary is, as the operator's room finds it."""

from treeline_operator.envoy.binary import EnvoyNotFound, envoy_binary

__all__ = ["EnvoyNotFound", "envoy_binary"]
