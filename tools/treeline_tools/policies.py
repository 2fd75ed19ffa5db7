"""The ValidatingAdmissionPolicies: checks across objects, which rules of a CRD cannot make."""

from __future__ import annotations

import json
from typing import Any, Final

from treeline_operator.api.gateway import EndpointPicker, Standalone
from treeline_operator.api.parts import API_VERSION, GROUP, VERSION

from treeline_tools import GENERATED
from treeline_tools.crds import as_yaml

ALLOW_PRIVILEGED: Final = f"{GROUP}/allow-privileged"
"""Label of a namespace whose pools may go beyond Pod Security level baseline, with the value "true"."""

CONFINED_SELINUX: Final = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
SAFE_SYSCTLS: Final = (
    "kernel.shm_rmid_forced",
    *(f"net.ipv4.ip_{name}" for name in ("local_port_range", "local_reserved_ports", "unprivileged_port_start")),
    "net.ipv4.ping_group_range",
    *(f"net.ipv4.tcp_{name}" for name in ("fin_timeout", "keepalive_intvl", "keepalive_probes", "keepalive_time")),
    *(f"net.ipv4.tcp_{name}" for name in ("rmem", "syncookies", "wmem")),
)
"""The sysctls that Pod Security level baseline allows."""
_HARMLESS_CAPABILITIES: Final = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
_EXCEPTION: Final = f"or label the namespace {ALLOW_PRIVILEGED}=true if its pools may"


def _policy(
    name: str,
    resource: str,
    validations: list[dict[str, str]],
    *,
    why: str,
    failure: str,
    variables: dict[str, str],
    conditions: dict[str, str],
    param: str = "",
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "failurePolicy": failure,
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [GROUP],
                    "apiVersions": [VERSION],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [resource],
                }
            ]
        },
    }
    if param:
        spec["paramKind"] = {"apiVersion": API_VERSION, "kind": param}
    spec["matchConditions"] = [{"name": key, "expression": cel} for key, cel in conditions.items()]
    spec["variables"] = [{"name": key, "expression": cel} for key, cel in variables.items()]
    spec["validations"] = validations
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": f"{name}.{GROUP}", "annotations": {f"{GROUP}/why": why}},
        "spec": spec,
    }


def _binding(policy: dict[str, Any], actions: list[str], **spec: Any) -> dict[str, Any]:
    name = policy["metadata"]["name"]
    return {
        "apiVersion": policy["apiVersion"],
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": actions, **spec},
    }


def _selinux(context: str) -> str:
    options = f"{context}.?seLinuxOptions"
    return (
        f"{options}.?type.orValue('') in {['', *CONFINED_SELINUX]}"
        f" && {options}.?user.orValue('') == '' && {options}.?role.orValue('') == ''"
    )


def _confinement() -> dict[str, str]:
    """The rules of Pod Security level baseline: message of a violation → CEL."""
    each = "(pod.?containers.orValue([]) + pod.?initContainers.orValue([])).all(c, "
    context = "c.?securityContext"
    profiles = " && ".join(
        f"{where}.?{profile}.?type.orValue('') != 'Unconfined'"
        for where in ("pod.?securityContext",)
        for profile in ("seccompProfile", "appArmorProfile")
    )
    own = " && ".join(
        f"{context}.?{profile}.?type.orValue('') != 'Unconfined'" for profile in ("seccompProfile", "appArmorProfile")
    )
    capabilities = f"{context}.?capabilities.?add.orValue([])"
    host_process = "{}.?windowsOptions.?hostProcess.orValue(false)"
    return {
        "hostNetwork, hostPID and hostIPC open the node to the pod": " && ".join(
            f"!pod.?{field}.orValue(false)" for field in ("hostNetwork", "hostPID", "hostIPC")
        ),
        "hostPath volumes open the node's disk to the pod": "pod.?volumes.orValue([]).all(v, !has(v.hostPath))",
        "privileged containers own the node": f"{each}!{context}.?privileged.orValue(false))",
        "added capabilities reach beyond the pod": (
            f"{each}{capabilities}.all(k, k in {list(_HARMLESS_CAPABILITIES)}))"
        ),
        "host ports listen on the node": f"{each}c.?ports.orValue([]).all(p, p.?hostPort.orValue(0) == 0))",
        "SELinux types of their own, users and roles step out of the container": (
            f"{_selinux('pod.?securityContext')} && {each}{_selinux(context)})"
        ),
        "unsafe sysctls change the node's kernel": (
            f"pod.?securityContext.?sysctls.orValue([]).all(s, s.?name.orValue('') in {list(SAFE_SYSCTLS)})"
        ),
        "host processes of Windows own the node": (
            f"!{host_process.format('pod.?securityContext')} && {each}!{host_process.format(context)})"
        ),
        "procMount Unmasked shows the node's kernel": f"{each}{context}.?procMount.orValue('Default') == 'Default')",
        "Unconfined profiles switch the kernel's filters off": f"{profiles} && {each}{own})",
    }


_TEMPLATES: Final = ("template", "endpointPicker.?template", "gateway.?standalone.?template")


def _of(pool: str, place: str) -> str:
    """CEL: the optional template at a place of a pool's spec."""
    return f"{pool}.spec.?{place}"


def _privileged() -> list[dict[str, Any]]:
    policy = _policy(
        "privileged-templates",
        "inferencepools",
        [
            {
                "expression": f"variables.pods.all(pod, {cel})",
                "message": f"{what}: remove them from the template, {_EXCEPTION}",
                "reason": "Forbidden",
            }
            for what, cel in _confinement().items()
        ],
        why="Users who may create pools get no pods that control the node, except in namespaces with the label"
        f" {ALLOW_PRIVILEGED}=true.",
        failure="Fail",
        variables={
            "pods": " + ".join(
                f"({_of('object', place)}.?spec.hasValue() ? [dyn({_of('object', place)}.?spec.value())] : [])"
                for place in _TEMPLATES
            )
        },
        conditions={
            # An existing pool may still be labelled, scaled and deleted.
            "template-is-new": "oldObject == null || "
            + " || ".join(f"{_of('object', place)} != {_of('oldObject', place)}" for place in _TEMPLATES),
        },
    )
    unless_allowed = {
        "namespaceSelector": {"matchExpressions": [{"key": ALLOW_PRIVILEGED, "operator": "NotIn", "values": ["true"]}]}
    }
    return [policy, _binding(policy, ["Deny"], matchResources=unless_allowed)]


_IS_ANOTHER: Final = "params.metadata.name == object.metadata.name || has(params.metadata.deletionTimestamp)"
_EVERY_OTHER: Final = {"selector": {}, "parameterNotFoundAction": "Allow"}
"""Every object of the parameter's kind in the namespace of the object that is judged: one look at each pair."""


def _model_names() -> list[dict[str, Any]]:
    policy = _policy(
        "model-names",
        "inferencemodels",
        [
            {
                "expression": f"{_IS_ANOTHER} || params.spec.modelName != object.spec.modelName"
                " || params.spec.poolRef.name != object.spec.poolRef.name",
                "messageExpression": "'InferenceModel ' + params.metadata.name + ' of the same pool has modelName '"
                " + object.spec.modelName + ': the older of the two holds it; choose another name'",
            }
        ],
        why="An older InferenceModel has the name.",
        failure="Ignore",
        variables={},
        conditions={"name-is-new": "oldObject == null || object.spec != oldObject.spec"},
        param="InferenceModel",
    )
    return [policy, _binding(policy, ["Warn"], paramRef=_EVERY_OTHER)]


def _gateway_settings() -> list[dict[str, Any]]:
    scalars = Standalone().model_dump(by_alias=True, exclude_none=True, exclude={"annotations"})
    defaults = ", ".join(f"'{name}': dyn({json.dumps(value)})" for name, value in scalars.items())

    def edge(pool: str) -> str:
        return f"{pool}.spec.gateway.?standalone.orValue({{{defaults}}})"

    def own(pool: str) -> str:
        return f"size({pool}.spec.gateway.?parentRefs.orValue([])) == 0"

    def picker(pool: str, name: str) -> str:
        return f"{pool}.spec.endpointPicker.?{name}"

    shared = [str(field.alias) for name, field in EndpointPicker.model_fields.items() if not name.startswith("policy")]

    def isolation(pool: str) -> str:
        return f"{pool}.spec.gateway.?isolation.orValue('')"

    policy = _policy(
        "gateway-settings",
        "inferencepools",
        [
            {
                "expression": f"{_IS_ANOTHER} || params.spec.gateway.name != object.spec.gateway.name"
                " || (variables.samePicker && variables.sameEdge)",
                "messageExpression": "'InferencePool ' + params.metadata.name"
                " + ' shares gateway ' + object.spec.gateway.name"
                " + ' and asks for other settings (endpointPicker, gateway.standalone or gateway.parentRefs):"
                " those of the older pool hold; make them equal or choose another gateway.name'",
            }
        ],
        why="An older pool of the gateway has other settings.",
        failure="Ignore",
        variables={
            "samePicker": " && ".join(f"{picker('params', name)} == {picker('object', name)}" for name in shared),
            "sameEdge": f"({own('params')}) == ({own('object')})"
            f" && (!({own('object')}) || {edge('params')} == {edge('object')})"
            f" && {isolation('params')} == {isolation('object')}",
        },
        conditions={
            "settings-are-new": "oldObject == null || object.spec.gateway != oldObject.spec.gateway"
            " || object.spec.endpointPicker != oldObject.spec.endpointPicker"
        },
        param="InferencePool",
    )
    return [policy, _binding(policy, ["Warn"], paramRef=_EVERY_OTHER)]


def _open_gateways() -> list[dict[str, Any]]:
    standalone = "object.spec.gateway.?standalone"
    balancer = f"{standalone}.?serviceType.orValue('ClusterIP') == 'LoadBalancer'"
    keys = f"{standalone}.?apiKeysSecretRef.hasValue()"
    apart = f"object.spec.gateway.?isolation.orValue('PerKey') == 'PerKey' && {keys}"
    lacks = {
        "apiKeysSecretRef: everybody who reaches the load balancer is served": f"!({balancer}) || {keys}",
        "tls: prompts and API keys cross the load balancer unencrypted": (
            f"!({balancer}) || {standalone}.?tls.hasValue()"
        ),
    }
    warnings = {f"gateway.standalone has no {what}": cel for what, cel in lacks.items()}
    warnings[
        "without a picker requests are refused (failureMode FailClose): with engines other than treeline only"
        " the picker isolates clients; set FailClose, or gateway.isolation Shared"
    ] = f"!({apart}) || object.spec.engine.type == 'treeline' || object.spec.endpointPicker.failureMode == 'FailClose'"
    warnings[
        "engine custom isolates clients only if it reads cache_salt from bodies: make sure that it does, or set"
        " gateway.isolation Shared"
    ] = f"!({apart}) || object.spec.engine.type != 'custom'"
    policy = _policy(
        "open-gateways",
        "inferencepools",
        [{"expression": cel, "message": message} for message, cel in warnings.items()],
        why="A gateway is open to everybody, or isolates clients less than it seems.",
        failure="Ignore",
        variables={},
        conditions={
            "gateway-is-new": "oldObject == null || object.spec.gateway != oldObject.spec.gateway"
            " || object.spec.endpointPicker != oldObject.spec.endpointPicker"
            " || object.spec.engine.type != oldObject.spec.engine.type"
        },
    )
    return [policy, _binding(policy, ["Warn"])]


def all_policies() -> list[dict[str, Any]]:
    """Every policy, each followed by its binding."""
    return [*_privileged(), *_model_names(), *_gateway_settings(), *_open_gateways()]


def chart_template() -> str:
    """The policies as a template of the chart, behind `policies.install`."""
    body = "---\n".join(as_yaml(document) for document in all_policies())
    if "{{" in body:
        raise ValueError("the text of a policy would be taken for a template: it has '{{' in it")
    return f"{GENERATED}{{{{- if .Values.policies.install }}}}\n{body}{{{{- end }}}}\n"
