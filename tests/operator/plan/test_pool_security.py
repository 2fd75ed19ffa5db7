"""Where a pod goes beyond the restricted Pod Security Standard."""

from __future__ import annotations

from typing import Any

import pytest
from support.pool_world import template
from treeline_operator.plan.security import exceptions


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"hostNetwork": True}, "hostNetwork is on"),
        ({"hostIPC": True}, "hostIPC is on"),
        ({"automountServiceAccountToken": True}, "the service account's token is mounted"),
        (
            {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
            "sysctl kernel.msgmax is set",
        ),
        (
            {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]},
            "volume t has the service account's token",
        ),
        (
            {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
            "container runtime: SELinux options take it out of its confinement",
        ),
        ({"volumes": [{"name": "ib", "hostPath": {"path": "/dev"}}]}, "volume ib is a hostPath"),
        ({"securityContext": {"runAsNonRoot": False}}, "container runtime: may run as root"),
        ({"securityContext": {"seccompProfile": None}}, "container runtime: seccomp profile is unset"),
        (
            {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
            "container runtime: AppArmor is off",
        ),
    ],
)
def test_an_exception_of_the_pod_is_found(spec: dict[str, Any], found: str) -> None:
    assert found in exceptions(template(template={"spec": spec})["spec"])


@pytest.mark.parametrize(
    ("security", "found"),
    [
        ({"privileged": True}, "privileged"),
        ({"runAsUser": 0}, "runs as root"),
        ({"allowPrivilegeEscalation": True}, "may gain privileges"),
        ({"readOnlyRootFilesystem": False}, "root filesystem is writable"),
        ({"capabilities": {"drop": []}}, "keeps the default capabilities"),
        ({"capabilities": {"add": ["IPC_LOCK", "NET_BIND_SERVICE"]}}, "adds the capabilities IPC_LOCK"),
        ({"procMount": "Unmasked"}, "procMount is Unmasked"),
        ({"seLinuxOptions": {"user": "system_u"}}, "SELinux options take it out of its confinement"),
        ({"windowsOptions": {"hostProcess": True}}, "is a host process"),
    ],
)
def test_an_exception_of_a_container_is_found(security: dict[str, Any], found: str) -> None:
    fragment = {"spec": {"containers": [{"name": "runtime", "securityContext": security}]}}
    assert exceptions(template(template=fragment)["spec"]) == (f"container runtime: {found}",)


def test_a_host_port_is_an_exception() -> None:
    ports = [{"name": "debug", "containerPort": 9, "hostPort": 9}]
    fragment = {"spec": {"containers": [{"name": "runtime", "ports": ports}]}}
    assert exceptions(template(template=fragment)["spec"]) == ("container runtime: host port 9",)
