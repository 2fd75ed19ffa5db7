"""A real etcd and kube-apiserver (and controller manager) on free ports of 127.0.0.1, for tests.

Nothing of it outlives the test process. The programs come from `scripts/control_plane.sh`. There is no scheduler and no
kubelet: pods exist, nobody runs them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.children import die_with_parent
from support.pki import Authority, context_of
from support.ports import free_ports

ROOT = Path(__file__).parents[2]
BUILD = "scripts/control_plane.sh"
START_TIMEOUT_S = 60.0

CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "namespace-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "validatingadmissionpolicy-status-controller",
)
"""The controllers that run unless a test asks for others."""

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:kube-controller-manager", "system:apiserver"]},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata"},
    ],
}

_STARTER = ThreadPoolExecutor(1, "starter")
"""The thread that starts processes, because they end with it: it lasts as long as this process does."""


class Missing(Exception):
    """The programs are not built; the message says how they are."""


@cache
def programs(*names: str) -> dict[str, Path]:
    """Component (``kubernetes``, ``etcd``, ``helm``) → the folder with its programs."""
    done = subprocess.run(
        [str(ROOT / BUILD), "--check", *names], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise Missing(f"{done.stderr.strip()}\nrun: {BUILD} {' '.join(names)}   (minutes, once)")
    return dict(zip(names, map(Path, done.stdout.split()), strict=True))


class ControlPlane:
    """Owns etcd, the API server and the controller manager; ``start()`` returns when the API server answers.

    ``controllers`` empty: no controller manager. ``apiserver_args`` are added to the API server's.
    """

    def __init__(
        self,
        *,
        controllers: Sequence[str] = CONTROLLERS,
        audit: bool = True,
        apiserver_args: Sequence[str] = (),
    ) -> None:
        found = programs("kubernetes", "etcd")
        self._bin, self._etcd = found["kubernetes"], found["etcd"] / "etcd"
        self.folder = Path(tempfile.mkdtemp(prefix="treeline-control-plane-"))
        self._controllers = tuple(controllers)
        self._audit = audit
        self._extra = tuple(apiserver_args)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port, self._peer_port, self._port = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self._authority = Authority(self.folder / "pki", "treeline-test")
        self._identities: dict[tuple[str, tuple[str, ...]], Path] = {}
        self._write_files()
        self.admin = self.kubeconfig("admin", ("system:masters",))
        self._http = self.http("admin", ("system:masters",))

    # Life of the processes

    def start(self, *, crds: bool = False) -> ControlPlane:
        """Start everything; with ``crds`` ours are there before the controllers look for kinds to collect."""
        try:
            self._spawn("etcd", [str(self._etcd), *self._etcd_args()])
            self.start_apiserver()
            if crds:
                self.install_crds()
            if self._controllers:
                self.start_controllers()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill all and remove the folder."""
        self._http.close()
        for name in reversed(list(self._processes)):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_apiserver(self) -> None:
        """Start the API server and wait until it is ready."""
        self._spawn("apiserver", [str(self._bin / "kube-apiserver"), *self._apiserver_args()])
        self._await_ready()

    def restart_apiserver(self) -> None:
        """Kill the API server, start it again on the same port, wait until it is ready."""
        self.kill("apiserver")
        self.start_apiserver()

    def start_controllers(self) -> None:
        """Start the controller manager."""
        self._spawn(
            "controllers",
            [str(self._bin / "kube-controller-manager"), *self._controller_args(self._controllers)],
        )

    def kill(self, name: str) -> None:
        """Kill ``etcd``, ``apiserver`` or ``controllers`` and reap it."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(30)

    def pause(self, name: str) -> None:
        """Stop a process: connections stay open and nothing answers."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused process go on."""
        self._processes[name].send_signal(signal.SIGCONT)

    def log(self, name: str, lines: int = 40) -> str:
        """The end of a process's log."""
        path = self.folder / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    # Identities

    def kubeconfig(self, user: str, groups: Sequence[str] = (), namespace: str = "default") -> Path:
        """A kubeconfig of an identity, by a certificate: RBAC knows it as the user ``user`` in ``groups``."""
        key = (user, tuple(groups))
        if key not in self._identities:
            cert = self._authority.issue(f"user-{len(self._identities)}", user, groups)
            self._identities[key] = self._write_kubeconfig(
                f"kubeconfig-{len(self._identities)}",
                namespace,
                {"client-certificate": str(cert.cert), "client-key": str(cert.key)},
            )
        return self._identities[key]

    def service_account(self, namespace: str, name: str, audiences: Sequence[str] = ()) -> Path:
        """A kubeconfig with a fresh token of an existing ServiceAccount, as a pod has it."""
        token = self.service_account_token(namespace, name, audiences)
        return self._write_kubeconfig(f"sa-{namespace}-{name}", namespace, {"token": token})

    def service_account_token(self, namespace: str, name: str, audiences: Sequence[str] = ()) -> str:
        """A fresh token of an existing ServiceAccount."""
        spec = {"audiences": list(audiences)} if audiences else {}
        reply = self.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(reply["status"]["token"])

    # Requests

    def http(self, user: str = "admin", groups: Sequence[str] = ("system:masters",)) -> httpx.Client:
        """A client of the API server with an identity of ours; the caller closes it."""
        self.kubeconfig(user, groups)
        number = list(self._identities).index((user, tuple(groups)))
        tls = context_of(self._authority, self._authority.existing(f"user-{number}"))
        return httpx.Client(base_url=self.url, verify=tls, timeout=30, trust_env=False)

    def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json"
    ) -> Any:
        """A request as the administrator; the decoded answer. A refusal fails with the server's words."""
        content = None if body is None else json.dumps(body)
        reply = self._http.request(method, path, content=content, headers={"Content-Type": content_type})
        if reply.is_error:
            raise AssertionError(f"{method} {path}: {reply.status_code} {reply.text}")
        return reply.json()

    def kubectl(
        self, *args: str, kubeconfig: Path | None = None, stdin: str | None = None, check: bool = True
    ) -> str:
        """What kubectl printed; a failure fails with what it said, or returns that where it is not ``check``ed."""
        command = [str(self._bin / "kubectl"), "--kubeconfig", str(kubeconfig or self.admin), *args]
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "KUBECACHEDIR": str(self.folder / "kubectl-cache"),
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, input=stdin, env=environment, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def install_crds(self, *folders_or_files: Path) -> list[str]:
        """Apply CustomResourceDefinitions (default: ours, ``crds/*.yaml``), wait until they serve; their names."""
        import yaml

        files = [
            file
            for path in (folders_or_files or (ROOT / "crds",))
            for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])
        ]
        objects = [o for file in files for o in yaml.safe_load_all(file.read_text()) if o]
        names = [o["metadata"]["name"] for o in objects if o["kind"] == "CustomResourceDefinition"]
        base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for item in objects:
            self.request(
                "PATCH",
                f"{base}/{item['metadata']['name']}?fieldManager=tests&force=true",
                item,
                content_type="application/apply-patch+yaml",
            )
        for item in objects:
            versions = [v["name"] for v in item["spec"]["versions"] if v["served"]]
            plural, group = item["spec"]["names"]["plural"], item["spec"]["group"]
            for version in versions:
                self._until(
                    lambda path=f"/apis/{group}/{version}/{plural}": self._http.get(path).status_code == 200,
                    f"{plural}.{group}/{version} to be served",
                )
        return names

    def audit_events(self, user: str | None = None) -> list[dict[str, Any]]:
        """What the API server has answered so far (metadata only), in order; those of one user, if named.

        Not recorded: the controllers and the API server itself.
        """
        lines = (self.folder / "audit.log").read_bytes().splitlines()
        events = [json.loads(line) for line in lines if line.endswith(b"}")]
        return [e for e in events if user is None or e["user"].get("username") == user]

    # Within

    def _write_files(self) -> None:
        pki = self._authority
        addresses = ("127.0.0.1", "10.96.0.1")
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        self._serving = pki.issue("apiserver", "kube-apiserver", addresses=addresses, names=names)
        self._front_proxy = pki.issue("front-proxy", "front-proxy-client")
        self._signing = pki.key("service-account")
        (self.folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
        (self.folder / "audit.log").touch()

    def _write_kubeconfig(self, name: str, namespace: str, user: dict[str, str]) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority": str(self._authority.cert)},
                }
            ],
            "users": [{"name": "test", "user": user}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
            ],
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        return path

    def _etcd_args(self) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver_args(self) -> list[str]:
        pki, front = self._authority, self._front_proxy
        audit = (
            [
                f"--audit-policy-file={self.folder / 'audit-policy.json'}",
                f"--audit-log-path={self.folder / 'audit.log'}",
                "--audit-log-mode=blocking-strict",
                "--audit-log-maxsize=10000",
            ]
            if self._audit
            else []
        )
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            # nobody connects there, and it must not be loopback: an address for documentation
            "--advertise-address=192.0.2.1",
            "--endpoint-reconciler-type=none",
            f"--tls-cert-file={self._serving.cert}",
            f"--tls-private-key-file={self._serving.key}",
            f"--client-ca-file={pki.cert}",
            f"--requestheader-client-ca-file={pki.cert}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={front.cert}",
            f"--proxy-client-key-file={front.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._signing}",
            f"--service-account-signing-key-file={self._signing}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--shutdown-delay-duration=0s",
            "--profiling=false",
            *audit,
            *self._extra,
        ]

    def _controller_args(self, controllers: Sequence[str]) -> list[str]:
        config = self.kubeconfig("system:kube-controller-manager", ("system:masters",))
        return [
            f"--kubeconfig={config}",
            f"--service-account-private-key-file={self._signing}",
            f"--root-ca-file={self._authority.cert}",
            f"--controllers={','.join(controllers)}",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--profiling=false",
        ]

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = _STARTER.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=die_with_parent,
            ).result()

    def _await_ready(self) -> None:
        process = self._processes["apiserver"]

        def ready() -> bool:
            if process.poll() is not None:
                raise AssertionError(
                    f"kube-apiserver ended with {process.returncode}:\n{self.log('apiserver')}"
                )
            try:
                return self._http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        self._until(ready, "the API server to be ready")

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {START_TIMEOUT_S} s for {what}:\n{self.log('apiserver')}")
            time.sleep(0.05)


def control_plane_or_skip(**options: Any) -> ControlPlane:
    """A control plane, not started yet; where the programs are missing, the test is skipped and told how to build them.

    With the variable CI set they must be there.
    """
    try:
        return ControlPlane(**options)
    except Missing as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane with our CRDs and the controllers, shared by all tests of the process that take it."""
    plane = control_plane_or_skip()
    plane.start(crds=(ROOT / "crds").is_dir())
    yield plane
    plane.stop()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace; it is deleted afterwards, without waiting."""
    created = control_plane.request(
        "POST",
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"generateName": "test-"}},
    )
    name = str(created["metadata"]["name"])
    yield name
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}")
