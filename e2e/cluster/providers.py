"""Chooses the provider of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from e2e.cluster.existing import Existing
from e2e.cluster.kind import Kind
from e2e.cluster.local import Local
from e2e.cluster.place import ClusterError, Home
from e2e.cluster.progress import Progress


class Provider(Protocol):
    """A way to have a cluster. All but ``unfit`` raise ClusterError."""

    @property
    def name(self) -> str:
        """The provider's name on the command line."""

    def unfit(self) -> str | None:
        """Return why the cluster cannot be used here; None if it can."""

    def prepare(self) -> None:
        """Build the cluster's programs and the project's images, which are built only once."""

    def up(self) -> Path:
        """Start the cluster, with the project's images. Return the path of its kubeconfig."""

    def down(self) -> None:
        """Remove the cluster."""

    def status(self) -> dict[str, Any]:
        """Return at least ``provider``, ``state`` and ``kubeconfig``."""

    def commands(self) -> list[Path]:
        """Return the folders of kubectl and helm that came with the cluster."""


def every(
    progress: Progress, *, nodes: int | None = None, images: bool = True, install: bool = True
) -> dict[str, Provider]:
    """Return all providers, the first choice first."""
    home = Home.default()
    offered: list[Provider] = [
        Existing(),
        Kind(home, progress, nodes=nodes, images=images),
        Local(home, progress, nodes=nodes, images=images, install=install),
    ]
    return {provider.name: provider for provider in offered}


def choose(name: str, offered: dict[str, Provider]) -> Provider:
    """Return the provider of that name; for ``auto`` the first that this machine can run."""
    if name != "auto":
        if name not in offered:
            raise ClusterError(f"no provider '{name}': there are auto, {', '.join(offered)}")
        return offered[name]
    reasons = {}
    for provider in offered.values():
        if (reason := provider.unfit()) is None:
            return provider
        reasons[provider.name] = reason
    raise ClusterError("no cluster can be had here: " + "; ".join(f"{n}: {r}" for n, r in reasons.items()))
