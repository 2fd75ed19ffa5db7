"""Command lines of etcd, the API server and the controller manager, and the audit policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treeline_bench.control_plane.pki import Issued

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
"""Controllers that run by default."""

AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:kube-controller-manager", "system:apiserver"]},
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata"},
    ],
}
"""Records everything except requests of the controllers and the API server itself."""


class Files(NamedTuple):
    """The API server's files."""

    ca: Path
    serving: Issued
    front_proxy: Issued
    signing: Path
    audit_policy: Path
    audit_log: Path


def etcd(data: Path, client_port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    return [
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver(files: Files, etcd_port: int, port: int, *, audit: bool) -> list[str]:
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        # not connected to, and it must not be loopback: an address for documentation
        "--advertise-address=192.0.2.1",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={files.serving.cert}",
        f"--tls-private-key-file={files.serving.key}",
        f"--client-ca-file={files.ca}",
        f"--requestheader-client-ca-file={files.ca}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={files.front_proxy.cert}",
        f"--proxy-client-key-file={files.front_proxy.key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={files.signing}",
        f"--service-account-signing-key-file={files.signing}",
        "--authorization-mode=Node,RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--shutdown-delay-duration=0s",
        "--profiling=false",
        *(_audit(files) if audit else ()),
    ]


def _audit(files: Files) -> list[str]:
    return [
        f"--audit-policy-file={files.audit_policy}",
        f"--audit-log-path={files.audit_log}",
        "--audit-log-mode=blocking-strict",
        "--audit-log-maxsize=10000",
    ]


def controller_manager(kubeconfig: Path, ca: Path, signing: Path, controllers: Sequence[str]) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={signing}",
        f"--root-ca-file={ca}",
        f"--controllers={','.join(controllers)}",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--horizontal-pod-autoscaler-sync-period=1s",
        "--profiling=false",
    ]
