"""Lists, in words, how a pod's template exceeds the restricted Pod Security Standard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from treeline_tools.policies import CONFINED_SELINUX, SAFE_SYSCTLS

_VOLUME_TYPES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
        "image",
    }
)
_SECCOMP: Final = ("RuntimeDefault", "Localhost")


def exceptions(pod_spec: dict[str, Any], *, gpu: bool = False, token: bool = False) -> tuple[str, ...]:
    """Return every way in which pods of this spec are less confined than the operator makes them, in a fixed order.
    Pods with a `gpu` get a writable root filesystem, those of pickers with a `token` the API server's token."""
    return (*_of_pod(pod_spec, token), *_of_volumes(pod_spec), *_of_containers(pod_spec, gpu))


def _of_pod(spec: dict[str, Any], token: bool) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield f"{field} is on"
    if spec.get("automountServiceAccountToken") is not False and not token:
        yield "the service account's token is mounted"
    for sysctl in (spec.get("securityContext") or {}).get("sysctls", ()):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']} is set"


def _of_volumes(spec: dict[str, Any]) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        for kind in sorted(volume.keys() - {"name"} - _VOLUME_TYPES):
            yield f"volume {volume['name']} is a {kind}"
        if any("serviceAccountToken" in one for one in (volume.get("projected") or {}).get("sources") or ()):
            yield f"volume {volume['name']} has the service account's token"


def _of_containers(spec: dict[str, Any], gpu: bool) -> Iterator[str]:
    pod = spec.get("securityContext") or {}
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        own = container.get("securityContext") or {}
        for found in (*_of_user(pod, own), *_of_confinement(pod, own, gpu)):
            yield f"container {container['name']}: {found}"
        for port in container.get("ports", ()):
            if port.get("hostPort"):
                yield f"container {container['name']}: host port {port['hostPort']}"


def _of_user(pod: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "may run as root"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runs as root"


def _of_confinement(pod: dict[str, Any], own: dict[str, Any], gpu: bool) -> Iterator[str]:
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if own.get("readOnlyRootFilesystem") is not True and not gpu:
        yield "root filesystem is writable"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in capabilities.get("drop", ()):
        yield "keeps the default capabilities"
    added = [name for name in capabilities.get("add", ()) if name != "NET_BIND_SERVICE"]
    if added:
        yield f"adds the capabilities {', '.join(added)}"
    if own.get("procMount", "Default") != "Default":
        yield f"procMount is {own['procMount']}"
    seccomp = (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type")
    if seccomp not in _SECCOMP:
        yield f"seccomp profile is {seccomp or 'unset'}"
    for one in (own, pod):
        selinux = one.get("seLinuxOptions") or {}
        if selinux.get("type", "") not in ("", *CONFINED_SELINUX) or selinux.get("user") or selinux.get("role"):
            yield "SELinux options take it out of its confinement"
        if (one.get("windowsOptions") or {}).get("hostProcess"):
            yield "is a host process"
    for profile in (own.get("appArmorProfile"), pod.get("appArmorProfile")):
        if profile and profile.get("type") == "Unconfined":
            yield "AppArmor is off"
