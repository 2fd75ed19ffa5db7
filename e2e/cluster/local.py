"""The `local` provider: a real Kubernetes on this machine, as root, without Docker.

Each node is a set of namespaces (node.py); the first one also runs etcd and the control plane.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeline_bench.control_plane.pki import Authority, Issued

from e2e.cluster import config, network, packages
from e2e.cluster.images import Store
from e2e.cluster.node import CGROUPS, INSIDE, NodeSpace, make_cgroups, on_this_machine, remove_cgroups
from e2e.cluster.owned import Registry, until
from e2e.cluster.place import ROOT, ClusterError, Home
from e2e.cluster.progress import Progress

PROGRAMS = ("kubernetes", "etcd", "coredns", "pause", "helm")
CONTEXT = "treeline-e2e"
_PATIENCE_S = 60.0


class Local:
    """Owns the cluster of a work folder."""

    name = "local"

    def __init__(
        self,
        home: Home | None = None,
        progress: Progress | None = None,
        *,
        nodes: int | None = None,
        images: bool = True,
        install: bool = True,
    ) -> None:
        self.home = home or Home.default()
        self.progress = progress or Progress()
        self._registry = Registry(self.home)
        self._asked = nodes
        self._nodes = [network.Node(number) for number in range(nodes or 1)]
        self._images, self._install = images, install
        self._store = Store(self.home, self._registry, self.progress)
        self._programs: dict[str, Path] = {}

    # What people say

    def unfit(self) -> str | None:
        """Return why this machine cannot run the cluster."""
        # One that is there, or half there, may always be looked at and taken down.
        builds = self._images and not self.home.path.exists()
        return packages.unfit() or (self._store.lacks_room() if builds else None)

    def prepare(self) -> None:
        """Build the programs and the images; only the cache keeps anything."""
        if self.home.path.exists():
            return  # a cluster is up, or half up: `up` finds out what it lacks
        if reason := self.unfit():
            raise ClusterError(f"the local provider: {reason}")
        with self._alone():
            self._prepare()
            self.home.remove()

    def up(self) -> Path:
        """Start the cluster, or its missing parts. Return the path of its kubeconfig."""
        if reason := self.unfit():
            raise ClusterError(f"the local provider: {reason}")
        with self._alone():
            self._up()
        return self.home.kubeconfig

    def down(self) -> None:
        """Remove the cluster: every process, mount, namespace, interface and file. Also removes an incomplete one."""
        if not self.home.path.exists():
            return
        with self._alone():
            self._clear()
            self.home.remove()

    def status(self) -> dict[str, Any]:
        """Return provider, state, kubeconfig, nodes, ended processes and images of the cluster."""
        state = self._state()
        processes = {name: self._registry.alive(name) for name in self._registry.names()}
        return {
            "provider": self.name,
            "state": self._word(state, processes),
            "kubeconfig": str(self.home.kubeconfig) if self.home.kubeconfig.exists() else None,
            "nodes": state.get("nodes", []),
            "ended": sorted(n for n, alive in processes.items() if not alive),
            "images": sorted(self._store.has()),
        }

    def _word(self, state: dict[str, Any], processes: dict[str, bool]) -> str:
        if not self.home.path.exists():
            return "down"
        return "up" if state.get("complete") and processes and all(processes.values()) else "incomplete"

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator and return its output."""
        program = self._programs["kubernetes"] / "kubectl"
        done = subprocess.run(
            [
                str(program),
                f"--kubeconfig={self.home.kubeconfig}",
                f"--cache-dir={self.home.path}/kubectl",
                *args,
            ],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode and check:
            raise ClusterError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout if not done.returncode else ""

    def send_programs(self, programs: dict[str, Path]) -> None:
        """Import images of single static programs into the nodes, by name."""
        self._store.send_programs(programs, [self.home.node(name) for name in self._state()["nodes"]])

    def commands(self) -> list[Path]:
        """Return the folders of kubectl and helm; empty before :meth:`up`."""
        return [self._programs[name] for name in ("kubernetes", "helm") if self._programs]

    # Steps

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Allow one `up` or `down` at a time. The lock is on the folder itself, so that it leaves no file."""
        self.home.make()
        handle = os.open(self.home.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ClusterError(f"another up or down is at work in {self.home.path}") from None
        finally:
            os.close(handle)

    def _up(self) -> None:
        self._prepare()
        if self.status()["state"] == "up":
            there = self._state()["nodes"]
            if self._asked and len(there) != self._asked:
                raise ClusterError(f"a cluster with other nodes ({', '.join(there)}) is up: take it down first")
            if self._images:
                self._send_images()
            self.progress.say("the cluster is up")
            return
        if self._registry.names():
            with self.progress.step("removing what an earlier up left"):
                self._clear()
        self._check_network()
        state = {"nodes": [n.name for n in self._nodes], "images": self._store.has()}
        self._save({**state, "complete": False})
        with self.progress.step("making nodes"):
            spaces = self._make_nodes()
        with self.progress.step("starting the control plane"):
            self._start_control_plane(spaces[0])
        with self.progress.step("starting kubelets"):
            for space in spaces:
                self._start_node(space)
            self._await_nodes()
        with self.progress.step("starting DNS"):
            self._start_dns()
        self._save({**state, "complete": True})

    def _clear(self) -> None:
        # the first process of a node's namespaces takes all others with it
        for name in sorted(self._registry.names(), key=lambda name: (not name.endswith(".init"), name)):
            self._registry.end(name)
        on_this_machine(f"ip link delete {network.CABLE} 2>/dev/null || true")
        remove_cgroups(CGROUPS)
        self.home.empty()
        self.home.make()

    def _prepare(self) -> None:
        packages.require(self.progress, build=self._images, install=self._install)
        command = [str(ROOT / "scripts/control_plane.sh"), *PROGRAMS]
        # Programs are compiled while images mostly wait for downloads and disks.
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as building:
            if self._images:
                self._store.bring_project()
            with self.progress.step("programs"):
                folders, _ = building.communicate()
        if building.returncode:
            raise ClusterError("building the cluster's programs failed (see above)")
        self._programs = dict(zip(PROGRAMS, map(Path, folders.split()), strict=True))
        self._store.bring_programs(self._programs)

    def _check_network(self) -> None:
        if taken := network.clashes(on_this_machine("ip -4 -json route show table all type unicast")):
            raise ClusterError(f"the cluster's addresses are in use here: routes to {', '.join(taken)}")

    def _send_images(self) -> None:
        state = self._state()
        images = self._store.send(state["images"], [self.home.node(n) for n in state["nodes"]])
        self._save({**state, "images": images})

    def _make_nodes(self) -> list[NodeSpace]:
        self._write_pki()
        spaces = [NodeSpace(self.home, self._registry, node) for node in self._nodes]
        pause = self._programs["pause"] / "pause"
        first, *others = spaces
        for space in spaces:
            self._store.copy_to(space.folder / "containerd")
            make_cgroups(space.node.name)
            space.create(pause)
        on_this_machine("\n".join(network.plug_first(first.node, first.init)))
        first.run("\n".join(network.in_first(first.node)))
        for other in others:
            # a process is named by its number outside: the cable is plugged from here, by the first node's network
            plug = "\n".join(network.plug_other(other.node, other.init))
            on_this_machine(f"nsenter --target={first.init} --net -- /bin/sh -ec '{plug}'")
            other.run("\n".join(network.in_other(other.node)))
        for space in spaces:
            if ways := network.neighbours(space.node, self._nodes):
                space.run("\n".join(ways))
            on_this_machine(network.route_to(space.node))
        return spaces

    def _write_pki(self) -> None:
        folder = self.home.path / "pki"
        authority = Authority(folder, CONTEXT)
        first = self._nodes[0]
        addresses, names = config.apiserver_names(first)
        authority.issue("apiserver", "kube-apiserver", addresses=addresses, names=names)
        authority.issue("front-proxy", "front-proxy-client")
        authority.issue("apiserver-kubelet", "kube-apiserver-kubelet-client", ["system:masters"])
        authority.key("service-account")
        (folder / "audit-policy.json").write_text(json.dumps(config.AUDIT_POLICY))
        identities = {
            "controller-manager": ("system:kube-controller-manager", []),
            "scheduler": ("system:kube-scheduler", []),
            "proxy": ("system:kube-proxy", []),
            **{n.name: (f"system:node:{n.name}", ["system:nodes"]) for n in self._nodes},
        }
        for name, (user, groups) in identities.items():
            self._write_kubeconfig(folder / f"{name}.kubeconfig", authority, authority.issue(name, user, groups))
        self._write_kubeconfig(self.home.kubeconfig, authority, authority.issue("admin", "admin", ["system:masters"]))

    def _write_kubeconfig(self, path: Path, authority: Authority, issued: Issued) -> None:
        content = config.kubeconfig(
            config.server(self._nodes[0]),
            CONTEXT,
            authority.cert.read_bytes(),
            issued.cert.read_bytes(),
            issued.key.read_bytes(),
        )
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))

    def _start_control_plane(self, space: NodeSpace) -> None:
        kubernetes = self._programs["kubernetes"]
        space.start("etcd", [str(self._programs["etcd"] / "etcd"), *config.etcd()])
        space.start("kube-apiserver", [str(kubernetes / "kube-apiserver"), *config.apiserver(space.node)])
        self._until(
            lambda: self.kubectl("get", "--raw=/readyz", check=False) == "ok",
            "the API server",
            space,
            "kube-apiserver",
        )
        space.start(
            "kube-controller-manager",
            [str(kubernetes / "kube-controller-manager"), *config.controller_manager()],
        )
        space.start("kube-scheduler", [str(kubernetes / "kube-scheduler"), *config.scheduler()])

    def _start_node(self, space: NodeSpace) -> None:
        node, folder, kubernetes = space.node, space.folder, self._programs["kubernetes"]
        plugins = packages.cni_plugins()
        assert plugins is not None
        (folder / "cni").mkdir()
        (folder / "cni/10-treeline.conflist").write_text(json.dumps(config.cni(node)))
        (folder / "kubelet.json").write_text(json.dumps(config.kubelet(node)))
        (folder / "resolv.conf").write_text("")
        inside = INSIDE
        text = config.containerd(inside, Path("/run/containerd"), plugins)
        (folder / "containerd.toml").write_text(text)
        space.start("containerd", ["containerd", "--config", f"{inside}/containerd.toml"])
        self._until((folder / "containerd.sock").is_socket, "containerd", space, "containerd")
        space.start("kubelet", [str(kubernetes / "kubelet"), *config.kubelet_flags(node)])
        space.start("kube-proxy", [str(kubernetes / "kube-proxy"), *config.kube_proxy(node)])

    def _await_nodes(self) -> None:
        ready = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"

        def all_ready() -> bool:
            return self.kubectl("get", "nodes", "-o", ready, check=False).split() == ["True"] * len(self._nodes)

        space = NodeSpace(self.home, self._registry, self._nodes[-1])
        self._until(all_ready, "the nodes to be Ready", space, "kubelet")

    def _start_dns(self) -> None:
        text = (Path(__file__).parent / "coredns.yaml").read_text()
        text = text.replace("image: IMAGE", f"image: {config.COREDNS_IMAGE}")
        self.kubectl("apply", "-f", "-", stdin=text.replace("ADDRESS", str(network.DNS_SERVICE)))
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s")

    def _until(self, condition: Any, what: str, space: NodeSpace, program: str) -> None:
        """Wait for a condition. If the program ends meanwhile, fail at once with the end of its log."""
        name = f"{space.node.name}.{program}"

        def reached() -> bool:
            if condition():
                return True
            if self._registry.ended(name):
                raise ClusterError(f"{name} ended:\n{self._registry.log(name)}")
            return False

        try:
            until(reached, what, _PATIENCE_S, every_s=0.2)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{name}:\n{self._registry.log(name)}") from None

    # State

    def _state(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(self.home.state.read_text()))
        return {}

    def _save(self, state: dict[str, Any]) -> None:
        self.home.state.write_text(json.dumps(state))
