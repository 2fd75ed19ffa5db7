"""A node: namespaces of its own (mounts, processes, network, name) with one init process, which holds them all.

When init ends the kernel ends every process in there, and with the last of them go mounts, interfaces and iptables
chains. So a node that was left half-way is removed by ending one process, whose pid was written down before it began.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.owned import Registry, children, until
from e2e.cluster.place import ClusterError, Home

INSIDE = Path("/run/treeline-e2e")
"""A node's own folder, as seen inside it."""
PKI = INSIDE / "pki"
CGROUPS = Path("/sys/fs/cgroup")
CGROUP = "treeline-e2e"

KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings that a kubelet demands of the whole machine; the node sees them in files of its own."""


def set_up(folder: Path, pki: Path, hostname: str) -> str:
    """Return the script that a node runs in its namespaces before its first program. Pure."""
    here, inside = shlex.quote(str(folder)), shlex.quote(str(INSIDE))
    lines = [
        "set -eu",
        "mount --make-rshared /",
        # sockets, locks and network namespaces are this node's alone
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir -p {inside} /run/lock",
        f"mount --bind {here} {inside}",
        f"mkdir -p {inside}/pki && mount --bind {shlex.quote(str(pki))} {inside}/pki",
        # what programs write to fixed places (/var/log/pods, /var/lib/cni, …) lands in the node's folder
        f"mkdir -p {inside}/var.upper {inside}/var.work {inside}/sysctl",
        f"mount -t overlay -o lowerdir=/var,upperdir={inside}/var.upper,workdir={inside}/var.work overlay /var",
        "[ -e /var/run ] && [ ! -L /var/run ] && mount --bind /run /var/run || true",
        f"hostname {shlex.quote(hostname)}",
    ]
    for key, value in KUBELET_SYSCTLS.items():
        file = f"{inside}/sysctl/{key.replace('/', '.')}"
        lines.append(f"echo {value} > {file} && mount --bind {file} /proc/sys/{key}")
    return "\n".join(lines)


class NodeSpace:
    """The namespaces of one node."""

    def __init__(self, home: Home, registry: Registry, node: network.Node) -> None:
        self._home, self._registry, self.node = home, registry, node
        self.folder = home.node(node.name)
        self._holder = f"{node.name}.init"
        self._init: int | None = None

    def create(self, pause: Path) -> int:
        """Start the init process. Return its pid."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._registry.start(
            self._holder,
            [
                *("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--propagation=private"),
                *("--mount-proc", "--fork", "--kill-child=SIGKILL", str(pause)),
            ],
        )
        until(lambda: self._find_init(pause) is not None, f"{self.node.name}'s namespaces")
        self.run(set_up(self.folder, self._home.path / "pki", self.node.name))
        return self.init

    @property
    def init(self) -> int:
        if self._init is None:
            raise ClusterError(f"{self.node.name} has no namespaces")
        return self._init

    def _find_init(self, pause: Path) -> int | None:
        holder = self._registry.get(self._holder)
        if holder is None:
            return None
        for child in children(holder.pid):
            with contextlib.suppress(OSError):
                # it is unshare itself until it becomes the program
                if Path(f"/proc/{child}/exe").readlink() == pause.resolve():
                    self._init = child
        return self._init

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def run(self, script: str) -> str:
        """Run a shell script inside and return its output. Raises ClusterError with its errors."""
        return _run([*self._enter(), "/bin/sh", "-ec", script], f"in {self.node.name}")

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a program inside, called ``NODE.NAME`` in logs and records."""
        self._registry.start(f"{self.node.name}.{name}", [*self._enter(), *command])


def on_this_machine(script: str) -> str:
    """Run a shell script and return its output."""
    return _run(["/bin/sh", "-ec", script], "on this machine")


def _run(command: list[str], where: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ClusterError(f"{where}: {done.stderr.strip() or done.stdout.strip() or done.returncode}\n{command[-1]}")
    return done.stdout


# Control groups: one below every hierarchy; nodes have theirs in it.


def hierarchies(base: Path = CGROUPS) -> list[Path]:
    """Return the hierarchies of control groups: one with version 2, one for each controller with version 1."""
    if (base / "cgroup.controllers").exists():
        return [base]
    return sorted({p.resolve() for p in base.iterdir() if (p / "cgroup.procs").exists()})


def make_cgroups(node: str, base: Path = CGROUPS) -> None:
    """Create the groups below which a node's kubelet puts its pods."""
    for hierarchy in hierarchies(base):
        above = hierarchy
        for part in (CGROUP, node):
            group = above / part
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (group / file).exists() and (above / file).exists() and not (group / file).read_text().strip():
                    (group / file).write_text((above / file).read_text())
            controllers = above / "cgroup.controllers"
            if controllers.exists() and (wanted := [f"+{c}" for c in controllers.read_text().split()]):
                (above / "cgroup.subtree_control").write_text(" ".join(wanted))
            above = group


def remove_cgroups(base: Path = CGROUPS, *, patience_s: float = 10.0) -> None:
    """Remove all our groups: empty ones at once, those of ending processes a moment later."""
    deadline = time.monotonic() + patience_s
    while left := [group for h in hierarchies(base) if (group := h / CGROUP).exists()]:
        for group in left:
            for folder in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            raise ClusterError(f"control groups are still in use: {', '.join(map(str, left))}")
        time.sleep(0.02)
