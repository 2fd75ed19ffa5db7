"""The flags that say what holds for a whole cluster; the running operator and `operate plan` share them."""

from __future__ import annotations

import argparse
import os
from typing import Final

from treeline_operator.world import Images, Platform

DEFAULT_NAMESPACE: Final = "treeline-system"


def add_images(parser: argparse.ArgumentParser) -> None:
    """The images, in a group of their own."""
    default = Images()
    group = parser.add_argument_group("images, where a pool names none")
    for flag, image, what in (
        ("--image-runtime", default.runtime, "on CPUs"),
        ("--image-runtime-cuda", default.runtime_cuda, "on NVIDIA devices"),
        ("--image-epp", default.epp, "the picker"),
        ("--image-edge", default.edge, "Envoy"),
    ):
        group.add_argument(flag, default=image, metavar="IMAGE", help=f"{what} (%(default)s)")
    group.add_argument(
        "--image-pull-policy",
        choices=("Always", "IfNotPresent", "Never"),
        default=default.pull_policy,
        help="default: %(default)s",
    )
    group.add_argument(
        "--image-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret with a registry's credentials, in the namespace of each pool; may be repeated",
    )


def add_surroundings(parser: argparse._ActionsContainer) -> None:
    """Where the operator and its cluster are."""
    parser.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", DEFAULT_NAMESPACE),
        metavar="NS",
        help=f"the operator's own namespace (default: $POD_NAMESPACE, else {DEFAULT_NAMESPACE})",
    )
    parser.add_argument(
        "--cluster-domain",
        default=Platform().cluster_domain,
        metavar="DOMAIN",
        help="of the cluster's DNS (default: %(default)s)",
    )
    parser.add_argument(
        "--api-server-port",
        action="append",
        type=port,
        default=[],
        metavar="P",
        help="on which pods reach the API server, its Service's port and its own: NetworkPolicies let pickers out to "
        f"them; may be repeated (default: {' and '.join(map(str, Platform().api_server_ports))})",
    )


def port(text: str, least: int = 1) -> int:
    """A port, or argparse's complaint. ``least`` is 0 where any free one will do."""
    if not text.isdecimal() or not least <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def api_server_ports_of(given: argparse.Namespace) -> tuple[int, ...]:
    """What :func:`add_surroundings` was given."""
    return tuple(dict.fromkeys(given.api_server_port)) or Platform().api_server_ports


def images_of(given: argparse.Namespace) -> Images:
    """What :func:`add_images` was given."""
    return Images(
        given.image_runtime,
        given.image_runtime_cuda,
        given.image_epp,
        given.image_edge,
        given.image_pull_policy,
        tuple(dict.fromkeys(given.image_pull_secret)),
    )
