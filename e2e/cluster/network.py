"""The addresses of a cluster, and the commands that wire its nodes. Pure.

One cable leads from this machine into the first node, which is also the switch for the others. So everything but that
cable lives in the nodes' network namespaces and goes with them: bridge, routes, iptables chains, pods' interfaces.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass

CABLE = "treeline-e2e"
"""The interface on this machine (15 characters at most)."""
SWITCH = "switch"
UPLINK = "uplink"

NODES = ipaddress.IPv4Network("10.250.0.0/24")
HOST = NODES[1]
PODS = ipaddress.IPv4Network("10.244.0.0/16")
SERVICES = ipaddress.IPv4Network("10.96.0.0/16")
API_SERVICE = SERVICES[1]
DNS_SERVICE = SERVICES[10]


@dataclass(frozen=True)
class Node:
    """A node by its number, from 0."""

    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number + 1}"

    @property
    def address(self) -> ipaddress.IPv4Address:
        return NODES[11 + self.number]

    @property
    def pods(self) -> ipaddress.IPv4Network:
        return list(PODS.subnets(new_prefix=24))[self.number]

    @property
    def mac(self) -> str:
        return f"02:e2:e2:00:00:{11 + self.number:02x}"


def clashes(routes: str) -> list[str]:
    """Return the destinations of this machine's routes (`ip -json route`) that overlap with ours, except those of our
    own cable."""
    found = []
    for route in json.loads(routes or "[]"):
        if route["dst"] == "default" or route.get("dev") == CABLE:
            continue
        there = ipaddress.IPv4Network(route["dst"], strict=False)
        if any(there.overlaps(ours) for ours in (NODES, PODS, SERVICES)):
            found.append(str(route["dst"]))
    return found


def plug_first(first: Node, init: int) -> list[str]:
    """On this machine: the cable into the first node, whose init process is ``init``, and the routes through it."""
    return [
        f"ip link add {CABLE} type veth peer name {UPLINK} netns {init}",
        f"ip address add {HOST}/{NODES.prefixlen} dev {CABLE}",
        f"ip link set {CABLE} up",
        f"ip route add {SERVICES} via {first.address} dev {CABLE}",
    ]


def route_to(node: Node) -> str:
    """On this machine: the route to a node's pods."""
    return f"ip route add {node.pods} via {node.address} dev {CABLE}"


def in_first(node: Node) -> list[str]:
    """Inside the first node: the switch, with the cable in it and the node's address on it."""
    return [
        "ip link set lo up",
        f"ip link add {SWITCH} address {node.mac} type bridge",
        f"ip link set {UPLINK} master {SWITCH} up",
        f"ip address add {node.address}/{NODES.prefixlen} dev {SWITCH}",
        f"ip link set {SWITCH} up",
        _services(node, SWITCH),
        "sysctl -q -w net.ipv4.ip_forward=1",
        # frames between other nodes pass through the switch, not through this node's firewall
        "sysctl -q -w -e net.bridge.bridge-nf-call-iptables=0",
    ]


def plug_other(node: Node, init: int) -> list[str]:
    """Inside the first node: a cable from the switch to another node."""
    port = f"to-{node.name}"
    return [
        f"ip link add {port} type veth peer name {UPLINK} netns {init}",
        f"ip link set {port} master {SWITCH} up",
    ]


def in_other(node: Node) -> list[str]:
    """Inside another node: its address."""
    return [
        "ip link set lo up",
        f"ip address add {node.address}/{NODES.prefixlen} dev {UPLINK}",
        f"ip link set {UPLINK} up",
        _services(node, UPLINK),
        "sysctl -q -w net.ipv4.ip_forward=1",
    ]


def _services(node: Node, device: str) -> str:
    """Inside a node: a route to Services, for packets of the node itself (the API server's calls of webhooks). No
    packet takes it, since kube-proxy rewrites the address to a pod's. But the kernel sends no packet without a
    route."""
    return f"ip route add {SERVICES} dev {device} src {node.address}"


def neighbours(node: Node, all_nodes: list[Node]) -> list[str]:
    """Inside a node: the routes to the other nodes' pods."""
    return [f"ip route add {other.pods} via {other.address}" for other in all_nodes if other != node]
