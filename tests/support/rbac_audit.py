"""Compares an identity's requests to an API server, from its audit log, with the rights of the declared features."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from treeline_operator.controller.kinds import OPTIONAL
from treeline_tools import rbac

from support.control_plane import ControlPlane

Right = tuple[str, str, str]
"""(API group, resource or resource/subresource, verb), as in ``rbac.granted``."""

RBAC = "/apis/rbac.authorization.k8s.io/v1"
READS = frozenset({"list", "watch"})
LEASE_NAME = "treeline-operator"


def rules_of(features: Iterable[rbac.Feature]) -> list[dict[str, Any]]:
    """Return the rules of the chart's Role for these features."""
    rules = [need.rule() for feature in features for need in feature.needs]
    for rule in rules:
        if "resourceNames" in rule:
            rule["resourceNames"] = [LEASE_NAME if n == rbac.LEASE else n for n in rule["resourceNames"]]
    return rules


def used(events: Iterable[dict[str, Any]]) -> set[Right]:
    """Return the rights that these requests needed and had. Discovery needs none."""
    found: set[Right] = set()
    for event in events:
        ref = event.get("objectRef", {})
        if "resource" not in ref or event.get("responseStatus", {}).get("code") in (401, 403):
            continue
        group = ref.get("apiGroup", "")
        resource = "/".join(filter(None, (ref["resource"], ref.get("subresource"))))
        found.add((group, resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            # A server-side apply that made the object.
            found.add((group, resource, "create"))
    return found


def refused(events: Iterable[dict[str, Any]]) -> list[str]:
    """Return the requests that were refused for want of a right, except lists of optional kinds: a refusal there tells
    the operator not to use the kind."""
    optional = {(watched.resource.group, watched.resource.plural) for watched in OPTIONAL}
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in events
        if event.get("responseStatus", {}).get("code") in (401, 403)
        and not (event["verb"] == "list" and _kind(event) in optional)
    ]


def _kind(event: dict[str, Any]) -> tuple[str, str]:
    about = event.get("objectRef", {})
    return about.get("apiGroup", ""), about.get("resource", "")


def asked_for(features: Iterable[rbac.Feature]) -> set[Right]:
    """Return the rights that these features use by requests of their own."""
    own = [rbac.Feature(f.name, tuple(need for need in f.needs if need.asked)) for f in features]
    return rbac.granted(own)


@dataclass
class Witness:
    """An identity whose requests are audited."""

    plane: ControlPlane
    user: str
    features: tuple[rbac.Feature, ...]

    def events(self) -> list[dict[str, Any]]:
        """Return the audit events of the identity so far."""
        return self.plane.audit_events(self.user)

    def feature(self, name: str) -> rbac.Feature:
        """Return one of its features."""
        (found,) = (feature for feature in self.features if feature.name == name)
        return found

    async def uses_all_of(self, *names: str) -> None:
        """Wait until all rights of these features have been used."""
        wanted = asked_for(self.feature(name) for name in names)
        deadline = time.monotonic() + 60
        while missing := wanted - used(await asyncio.to_thread(self.events)):
            assert time.monotonic() < deadline, f"granted to {', '.join(names)} and never used: {missing}"
            await asyncio.sleep(0.25)

    async def has_only_read(self, *names: str) -> None:
        """Check that rights of these features alone were used only to list and watch."""
        now = used(await asyncio.to_thread(self.events))
        theirs = {r for name in names for r in now if name in rbac.feature_of(*r) and r[2] not in READS}
        assert theirs == set(), f"used before anybody asked for {names}: {theirs}"

    def conclude(self, exceptions: Iterable[Right] = ()) -> None:
        """Check that no request was refused, that each was granted, and that each grant was used."""
        events = self.events()
        assert not (said_no := refused(events)), f"refused: {said_no}"
        granted, asked = rbac.granted(self.features), used(events)
        assert asked <= granted, f"requested, and allowed by another grant: {asked - granted}"
        assert granted - asked == set(exceptions), f"granted, and never used: {granted - asked}"


@dataclass(frozen=True)
class Grants:
    """Grants rights to identities, and waits until the API server applies them."""

    plane: ControlPlane

    def bind(self, user: str, rules: Sequence[dict[str, Any]], namespace: str = "") -> None:
        """Bind a Role (without a namespace a ClusterRole) with these rules to a user."""
        base, kind = (f"{RBAC}/namespaces/{namespace}", "Role") if namespace else (RBAC, "ClusterRole")
        metadata = {"name": user}
        plural = f"{kind.lower()}s"
        self.plane.request("POST", f"{base}/{plural}", {"metadata": metadata, "rules": list(rules)})
        body = {
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": user},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }
        self.plane.request("POST", f"{base}/{plural.removesuffix('s')}bindings", body)
        self.heard(user, rules[-1], namespace)

    def heard(self, user: str, rule: dict[str, Any], namespace: str = "") -> None:
        """Wait until the API server applies a user's rule."""
        resource, _, subresource = str(rule["resources"][0]).partition("/")
        attributes = {
            "namespace": namespace,
            "group": rule["apiGroups"][0],
            "resource": resource,
            "subresource": subresource,
            "verb": rule["verbs"][0],
            "name": (rule.get("resourceNames") or [""])[0],
        }
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        deadline = time.monotonic() + 60
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        while not self.plane.request("POST", path, review)["status"]["allowed"]:
            assert time.monotonic() < deadline, f"{user} was not given {rule}"
            time.sleep(0.05)
