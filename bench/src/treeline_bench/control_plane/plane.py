"""etcd, the API server and the controller manager as processes on free ports of 127.0.0.1, and identities for them.

None of them outlives this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import yaml

from treeline_bench.context import ROOT, BenchmarkError
from treeline_bench.control_plane import flags
from treeline_bench.control_plane.pki import Authority, context_of
from treeline_bench.control_plane.programs import programs
from treeline_bench.processes import before_exec, free_ports

START_TIMEOUT_S = 60.0
ADMIN = ("admin", ("system:masters",))

_STARTER = ThreadPoolExecutor(1, "starter")
"""The thread that starts processes: they end with it, so it must last as long as this process."""


class ControlPlaneFailed(BenchmarkError):
    """A program ended, something took too long, or the API server refused a request; the message has its words."""


class ControlPlane:
    """Owns etcd, the API server and the controller manager; ``start()`` returns when the API server answers.

    ``controllers`` empty: no controller manager. ``apiserver_args`` are added to the API server's. ``ports`` are three
    free ones (etcd's two, the API server's). ``parent``: where its folder is made.
    """

    def __init__(
        self,
        *,
        controllers: Sequence[str] = flags.CONTROLLERS,
        audit: bool = True,
        apiserver_args: Sequence[str] = (),
        ports: Sequence[int] | None = None,
        parent: Path | None = None,
    ) -> None:
        found = programs("kubernetes", "etcd")
        self._bin, self._etcd = found["kubernetes"], found["etcd"] / "etcd"
        self.folder = Path(tempfile.mkdtemp(prefix="treeline-control-plane-", dir=parent))
        self._controllers = tuple(controllers)
        self._audit = audit
        self._extra = tuple(apiserver_args)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port, self._peer_port, self._port = ports or free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self._authority = Authority(self.folder / "pki", "treeline-control-plane")
        self._identities: dict[tuple[str, tuple[str, ...]], Path] = {}
        self._files = self._write_files()
        self.admin = self.kubeconfig(*ADMIN)
        self._http = self.http(*ADMIN)

    # Life of the processes

    def start(self, *, crds: bool = False) -> ControlPlane:
        """Starts everything; with ``crds`` ours exist before the controllers look for kinds."""
        try:
            self._spawn(
                "etcd",
                [str(self._etcd), *flags.etcd(self.folder / "etcd", self._etcd_port, self._peer_port)],
            )
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
        """Kills everything and removes the folder."""
        self._http.close()
        for name in reversed(list(self._processes)):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_apiserver(self) -> None:
        """Starts the API server and waits until it is ready."""
        command = flags.apiserver(self._files, self._etcd_port, self._port, audit=self._audit)
        self._spawn("apiserver", [str(self._bin / "kube-apiserver"), *command, *self._extra])
        self._await_ready()

    def restart_apiserver(self) -> None:
        """Kills the API server, starts it on the same port, waits until it is ready."""
        self.kill("apiserver")
        self.start_apiserver()

    def start_controllers(self) -> None:
        """Starts the controller manager."""
        config = self.kubeconfig("system:kube-controller-manager", ("system:masters",))
        command = flags.controller_manager(config, self._files.ca, self._files.signing, self._controllers)
        self._spawn("controllers", [str(self._bin / "kube-controller-manager"), *command])

    def kill(self, name: str) -> None:
        """Kills ``etcd``, ``apiserver`` or ``controllers`` and reaps it."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(30)

    def pause(self, name: str) -> None:
        """Stops a process: connections stay open and nothing answers."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Continues a paused process."""
        self._processes[name].send_signal(signal.SIGCONT)

    def check(self) -> None:
        """Raises ControlPlaneFailed if a process has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise ControlPlaneFailed(f"{name} ended with {process.returncode}:\n{self.log(name)}")

    def log(self, name: str, lines: int = 40) -> str:
        """The end of a process's log."""
        path = self.folder / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    # Identities

    def kubeconfig(self, user: str, groups: Sequence[str] = (), namespace: str = "default") -> Path:
        """A kubeconfig with a certificate: RBAC sees the user ``user`` in ``groups``."""
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
        """A kubeconfig with a new token of an existing ServiceAccount."""
        token = self.service_account_token(namespace, name, audiences)
        return self._write_kubeconfig(f"sa-{namespace}-{name}", namespace, {"token": token})

    def service_account_token(self, namespace: str, name: str, audiences: Sequence[str] = ()) -> str:
        """A new token of an existing ServiceAccount."""
        spec = {"audiences": list(audiences)} if audiences else {}
        reply = self.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(reply["status"]["token"])

    def tls(self, user: str = ADMIN[0], groups: Sequence[str] = ADMIN[1]) -> ssl.SSLContext:
        """TLS to the API server with one of our identities."""
        self.kubeconfig(user, groups)
        number = list(self._identities).index((user, tuple(groups)))
        return context_of(self._authority, self._authority.existing(f"user-{number}"))

    # Requests

    def http(self, user: str = ADMIN[0], groups: Sequence[str] = ADMIN[1]) -> httpx.Client:
        """A client of the API server with one of our identities; the caller closes it."""
        return httpx.Client(base_url=self.url, verify=self.tls(user, groups), timeout=30, trust_env=False)

    def request(self, method: str, path: str, body: Any = None, *, content_type: str = "application/json") -> Any:
        """A request as administrator; returns the decoded answer. Fails with the server's words."""
        content = None if body is None else json.dumps(body)
        reply = self._http.request(method, path, content=content, headers={"Content-Type": content_type})
        if reply.is_error:
            raise ControlPlaneFailed(f"{method} {path}: {reply.status_code} {reply.text}")
        return reply.json()

    def kubectl(self, *args: str, kubeconfig: Path | None = None, stdin: str | None = None, check: bool = True) -> str:
        """kubectl's output; a failure raises with its output, or returns it if not ``check``."""
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
            raise ControlPlaneFailed(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def install_crds(self, *folders_or_files: Path) -> list[str]:
        """Applies CustomResourceDefinitions (default: ours, ``crds/*.yaml``), waits until they serve; returns their
        names."""
        files = [
            file
            for path in (folders_or_files or (ROOT / "crds",))
            for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])
        ]
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
        objects = [o for file in files for o in yaml.load_all(file.read_text(), loader) if o]
        names = [o["metadata"]["name"] for o in objects if o["kind"] == "CustomResourceDefinition"]
        base = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for item in objects:
            self.request(
                "PATCH",
                f"{base}/{item['metadata']['name']}?fieldManager=setup&force=true",
                item,
                content_type="application/apply-patch+yaml",
            )
        for item in objects:
            versions = [v["name"] for v in item["spec"]["versions"] if v["served"]]
            plural, group = item["spec"]["names"]["plural"], item["spec"]["group"]
            for version in versions:
                path = f"/apis/{group}/{version}/{plural}"
                self._until(
                    lambda path=path: self._http.get(path).status_code == 200,  # type: ignore[misc]
                    f"{plural}.{group}/{version} to be served",
                )
        return names

    def audit_events(self, user: str | None = None) -> list[dict[str, Any]]:
        """The audit events of the API server so far (metadata only), in order; of one user, if named. Requests of the
        controllers and of the API server itself are not among them.
        """
        lines = self._files.audit_log.read_bytes().splitlines()
        events = [json.loads(line) for line in lines if line.endswith(b"}")]
        return [e for e in events if user is None or e["user"].get("username") == user]

    # Within

    def _write_files(self) -> flags.Files:
        pki = self._authority
        addresses = ("127.0.0.1", "10.96.0.1")
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        files = flags.Files(
            ca=pki.cert,
            serving=pki.issue("apiserver", "kube-apiserver", addresses=addresses, names=names),
            front_proxy=pki.issue("front-proxy", "front-proxy-client"),
            signing=pki.key("service-account"),
            audit_policy=self.folder / "audit-policy.json",
            audit_log=self.folder / "audit.log",
        )
        files.audit_policy.write_text(json.dumps(flags.AUDIT_POLICY))
        files.audit_log.touch()
        return files

    def _write_kubeconfig(self, name: str, namespace: str, user: dict[str, str]) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self._authority.cert)}
        context = {"cluster": "own", "user": "own", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "own",
            "clusters": [{"name": "own", "cluster": cluster}],
            "users": [{"name": "own", "user": user}],
            "contexts": [{"name": "own", "context": context}],
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        return path

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = _STARTER.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C reaches only us, and we stop them in order
                preexec_fn=before_exec(ending=signal.SIGKILL),
            ).result()

    def _await_ready(self) -> None:
        def ready() -> bool:
            self.check()
            try:
                return self._http.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        self._until(ready, "the API server to be ready")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise ControlPlaneFailed(f"waited {START_TIMEOUT_S} s for {what}:\n{self.log('apiserver')}")
            time.sleep(0.05)
