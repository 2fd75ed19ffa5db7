"""The distribution's packages that the `local` provider needs, and their installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster.config import CNI_PLUGINS
from e2e.cluster.place import ClusterError
from e2e.cluster.progress import Progress

COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "sysctl": "procps",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "hostname": "hostname",
}
"""Command → Debian's and Ubuntu's package."""
BUILD_COMMANDS = {"buildah": "buildah", "skopeo": "skopeo", "debootstrap": "debootstrap"}
CNI_PACKAGE = "containernetworking-plugins"


def cni_plugins() -> str | None:
    """Return the folder with the network plugins."""
    return next((folder for folder in CNI_PLUGINS if (Path(folder) / "ptp").exists()), None)


def missing(*, build: bool) -> list[str]:
    """Return the packages whose commands are missing here."""
    commands = {**COMMANDS, **(BUILD_COMMANDS if build else {})}
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    packages = {package for command, package in commands.items() if not shutil.which(command, path=path)}
    return sorted(packages | ({CNI_PACKAGE} if cni_plugins() is None else set()))


def unfit() -> str | None:
    """Return why this machine cannot have a `local` cluster at all."""
    if sys.platform != "linux":
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root: namespaces, mounts, control groups"
    if not shutil.which("apt-get") and (packages := missing(build=True)):
        return f"it needs Debian or Ubuntu; elsewhere install first: {', '.join(packages)}"
    if shutil.which("unshare"):
        spaces = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "true"]
        done = subprocess.run(spaces, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"this root may not make namespaces: {done.stderr.strip()}"
    return None


def require(progress: Progress, *, build: bool, install: bool) -> None:
    """Install the missing packages, or raise ClusterError with the command that does. Never removes a package (another
    containerd stays)."""
    if not (packages := missing(build=build)):
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", "--no-remove", *packages]
    if not install or not shutil.which("apt-get"):
        raise ClusterError(f"missing here: {', '.join(packages)}. Install with: {' '.join(command)}")
    with progress.step(f"installing {', '.join(packages)}"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["apt-get", "update", "-qq"], command):
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                raise ClusterError(f"{' '.join(words)} failed:\n{done.stderr.strip()[-1500:]}")
    if left := missing(build=build):
        raise ClusterError(f"installed, yet not found: {', '.join(left)}")
