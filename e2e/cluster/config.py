"""Command lines and configuration files of a cluster's programs. Pure.

Paths are those inside a node: its own folder is INSIDE, the certificates are in PKI.
"""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

from e2e.cluster.network import API_SERVICE, DNS_SERVICE, PODS, SERVICES, Node
from e2e.cluster.node import CGROUP, INSIDE, PKI

DOMAIN = "cluster.local"
CONTAINERD_SOCKET = INSIDE / "containerd.sock"
PAUSE_IMAGE = "localhost/treeline-e2e-pause:v1"
COREDNS_IMAGE = "localhost/treeline-e2e-coredns:v1"
API_PORT = 6443
CNI_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin")


def server(first: Node) -> str:
    """Return the API server's address, as in kubeconfigs."""
    return f"https://{first.address}:{API_PORT}"


def etcd() -> list[str]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        f"--data-dir={INSIDE}/etcd",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_names(first: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the addresses and names in the API server's certificate."""
    services = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
    addresses = ("127.0.0.1", str(first.address), str(API_SERVICE))
    return addresses, ("localhost", *services, f"kubernetes.default.svc.{DOMAIN}")


def apiserver(first: Node) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        f"--secure-port={API_PORT}",
        f"--advertise-address={first.address}",
        f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--client-ca-file={PKI}/ca.crt",
        f"--requestheader-client-ca-file={PKI}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={PKI}/front-proxy.crt",
        f"--proxy-client-key-file={PKI}/front-proxy.key",
        # without these two, logs and exec are refused by the kubelet; by name it would not be found
        f"--kubelet-client-certificate={PKI}/apiserver-kubelet.crt",
        f"--kubelet-client-key={PKI}/apiserver-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
        f"--service-account-key-file={PKI}/service-account.key",
        f"--service-account-signing-key-file={PKI}/service-account.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={SERVICES}",
        f"--audit-policy-file={PKI}/audit-policy.json",
        f"--audit-log-path={INSIDE}/audit.log",
        "--audit-log-maxsize=10000",
        "--allow-privileged",
        "--profiling=false",
    ]


AUDIT_POLICY: dict[str, Any] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {
            "level": "None",
            "users": ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler"],
        },
        {"level": "Metadata"},
    ],
}
"""Who asked for what: what the operator, the pickers and people do, not what the cluster does by itself."""


def controller_manager() -> list[str]:
    return [
        f"--kubeconfig={PKI}/controller-manager.kubeconfig",
        f"--service-account-private-key-file={PKI}/service-account.key",
        f"--root-ca-file={PKI}/ca.crt",
        f"--flex-volume-plugin-dir={INSIDE}/flexvolumes",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--profiling=false",
    ]


def scheduler() -> list[str]:
    return [f"--kubeconfig={PKI}/scheduler.kubeconfig", "--leader-elect=false", "--profiling=false"]


def kube_proxy(node: Node) -> list[str]:
    return [
        f"--kubeconfig={PKI}/proxy.kubeconfig",
        "--proxy-mode=iptables",
        f"--cluster-cidr={PODS}",
        f"--hostname-override={node.name}",
        # these two belong to the whole machine and cannot be set from a network namespace
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
    ]


def kubelet_flags(node: Node) -> list[str]:
    return [
        f"--config={INSIDE}/kubelet.json",
        f"--kubeconfig={PKI}/{node.name}.kubeconfig",
        f"--root-dir={INSIDE}/kubelet",
        f"--cert-dir={INSIDE}/kubelet-pki",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]


def kubelet(node: Node) -> dict[str, Any]:
    """Return the kubelet's configuration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{node.name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [str(DNS_SERVICE)],
        "clusterDomain": DOMAIN,
        "resolvConf": f"{INSIDE}/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "volumePluginDir": f"{INSIDE}/flexvolumes",
        # images cannot be pulled again, and the disk is shared with other work on this machine
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "5s",
        "shutdownGracePeriod": "0s",
        "protectKernelDefaults": False,
        "enableDebuggingHandlers": True,
    }


def containerd(folder: Path, state: Path, cni_plugins: str) -> str:
    """Return containerd's configuration: its socket, network and root (``containerd``) are in ``folder``."""
    text = json.dumps  # a JSON string is a TOML string
    return f"""version = 2
root = {text(f"{folder}/containerd")}
state = {text(str(state))}
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
  address = {text(f"{folder}/containerd.sock")}

[plugins."io.containerd.internal.v1.opt"]
  path = {text(f"{folder}/opt")}

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = {text(PAUSE_IMAGE)}
  # where we may not lower a process's OOM score, runc would fail to start any pod
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = {text(cni_plugins)}
    conf_dir = {text(f"{folder}/cni")}
"""


def cni(node: Node) -> dict[str, Any]:
    """Return the configuration of the pods' network: a cable from each pod to its node, which routes. A bridge would
    need the kernel module br_netfilter for Services between its pods."""
    return {
        "cniVersion": "0.4.0",
        "name": "treeline-e2e",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": str(node.pods)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": f"{INSIDE}/addresses",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubeconfig(address: str, name: str, ca: bytes, cert: bytes, key: bytes) -> dict[str, Any]:
    """Return a kubeconfig that holds its certificates."""
    cluster = {"server": address, "certificate-authority-data": b64encode(ca).decode()}
    user = {"client-certificate-data": b64encode(cert).decode(), "client-key-data": b64encode(key).decode()}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
