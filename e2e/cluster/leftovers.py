"""Finds what a cluster left on a machine: `python -m e2e.cluster.leftovers save|compare FILE`."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.node import CGROUPS, KUBELET_SYSCTLS, hierarchies
from e2e.cluster.place import Home

PROGRAMS = re.compile(
    r"treeline-e2e|containerd|runc|kubelet|kube-proxy|coredns|buildah|debootstrap|/pause$|^(unshare|nsenter)\b"
)
"""Programs that run only for a cluster. Control planes of other work may come and go meanwhile; ours names its
folder."""
FOLDERS = (
    "/var/lib",
    "/var/run",
    "/run",
    "/run/netns",
    "/opt",
    "/etc/cni",
    "/var/log",
    "/usr/libexec/kubernetes",
)

Snapshot = dict[str, list[str]]


def snapshot() -> Snapshot:
    """List the machine's processes, mounts, network and files, by kind."""
    return {
        "processes": _processes(),
        "mounts": sorted(line.split(" ", 4)[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "namespaces": _namespaces(),
        "interfaces": sorted(p.name for p in Path("/sys/class/net").iterdir()),
        "routes": _lines("ip", "route", "show", "table", "all"),
        "iptables": [line for tool in ("iptables-save", "ip6tables-save") for line in _rules(tool)],
        "control groups": sorted(str(p) for h in hierarchies(CGROUPS) for p in h.iterdir() if p.is_dir()),
        "settings": [f"{key} = {Path('/proc/sys', key).read_text().strip()}" for key in KUBELET_SYSCTLS],
        "files": [str(Home.default().path)] * Home.default().path.exists() + _files(),
    }


def compare(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each item that appeared or disappeared (processes, namespaces and files: appeared only).
    Pure."""
    found = []
    for kind, was in before.items():
        now = after[kind]
        found += [f"{kind}: left: {item}" for item in now if item not in was]
        if kind not in ("processes", "namespaces", "files"):  # others' may have ended meanwhile
            found += [f"{kind}: gone: {item}" for item in was if item not in now]
    return found


def _processes() -> list[str]:
    """List the processes of a cluster's programs, and every process in another PID namespace than ours."""
    found = []
    for line in _lines("ps", "-eo", "pid=,stat=,args="):
        pid, state, args = line.split(None, 2)
        if "Z" not in state and (PROGRAMS.search(args) or _elsewhere(pid)):
            found.append(f"{pid} {args[:150]}")
    return found


def _elsewhere(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()
    return False  # it has ended


def _namespaces() -> list[str]:
    """List the namespaces of mounts, networks and processes, with the command of the first process in each."""
    lines = _lines("lsns", "--noheadings", "--output=NS,TYPE,COMMAND", "--type=mnt", "--type=net", "--type=pid")
    return [re.sub(r"\s+", " ", line.strip()) for line in lines]


def _files() -> list[str]:
    found: list[str] = []
    for folder in map(Path, FOLDERS):
        if folder.is_dir():
            found += [str(p) for p in folder.iterdir()]
    # where everybody puts things, only what could be ours
    return sorted([*found, *(str(p) for p in Path("/tmp").iterdir() if PROGRAMS.search(p.name))])


def _rules(tool: str) -> list[str]:
    if not shutil.which(tool):
        return []
    return [line for line in _lines(tool) if line[:1] in "-:"]


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.strip()]


def main(arguments: list[str] | None = None) -> int:
    """Save a snapshot, or print the differences from a saved one. Return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.leftovers", description=__doc__)
    parser.add_argument("word", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args(arguments)
    if args.word == "save":
        args.file.write_text(json.dumps(snapshot(), indent=1))
        return 0
    before = json.loads(args.file.read_text())
    deadline = time.monotonic() + 60  # the machine's init reaps, and the kernel takes down namespaces, a moment later
    while (found := compare(before, snapshot())) and time.monotonic() < deadline:
        time.sleep(0.2)
    sys.stdout.write("\n".join(found) + "\n" if found else "nothing is left\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
