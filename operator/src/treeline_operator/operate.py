"""The command line of the operator: `treeline operate`, and `treeline operate plan` which asks no cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from treeline_wire.logs import LEVELS, set_up

from treeline_operator.settings import add_flags, port, values
from treeline_operator.world import Images, Platform

log = logging.getLogger("treeline_operator")

_EXAMPLES: Final = """\
what it needs: the CRDs of treeline.dev and the rights that the Helm chart grants. Without --kubeconfig it uses
$KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config, in this order.

examples:
  treeline operate                                   all namespaces, one of several replicas
  treeline operate --namespace ml --namespace dev    two namespaces; Roles are enough
  treeline operate --no-leader-elect --log-format text --log-level debug --kubeconfig ~/.kube/config
  treeline operate plan -f pool.yaml                 what it would make of a file; no cluster is asked
"""


def parser() -> argparse.ArgumentParser:
    """The flags of the running operator."""
    p = argparse.ArgumentParser(
        prog="treeline operate",
        usage="treeline operate [OPTIONS]\n       treeline operate plan -f FILE... [OPTIONS]",
        description="Treeline's operator: makes InferencePools and InferenceModels into running pods, pickers and "
        "gateways, and says in their status how far that is.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scope = p.add_argument_group("scope")
    scope.add_argument(
        "--namespace",
        action="append",
        default=[],
        type=_namespace,
        metavar="NS",
        help="look after this one only; may be repeated",
    )
    scope.add_argument("--kubeconfig", type=Path, help="connect by this file")
    scope.add_argument("--context", help="the context of the kubeconfig, instead of its current one")
    add_flags(scope, Platform)
    _add_leader_election(p.add_argument_group("leader election"))
    pages = p.add_argument_group("pages")
    pages.add_argument("--host", default="127.0.0.1", help="address of both ports (default: %(default)s)")
    pages.add_argument(
        "--health-port", type=_listening, default=8081, metavar="P", help="/healthz and /readyz (%(default)s)"
    )
    pages.add_argument(
        "--metrics-port", type=_listening, default=9090, metavar="P", help="/metrics (%(default)s)"
    )
    add_flags(p.add_argument_group("images, where a pool names none"), Images)
    _add_work(p.add_argument_group("work"))
    out = p.add_argument_group("logs")
    out.add_argument("--log-level", choices=LEVELS, default="info", help="default: %(default)s")
    out.add_argument("--log-format", choices=("json", "text"), default="json", help="default: %(default)s")
    return p


def _add_leader_election(lead: argparse._ArgumentGroup) -> None:
    lead.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="act only while holding the Lease; without it there must be one replica (default: yes)",
    )
    lead.add_argument("--lease-name", default="treeline-operator", help="default: %(default)s")
    for name, seconds, text in (
        ("duration", 15.0, "others take over after so many seconds without a renewal"),
        ("renew", 10.0, "we give up after so many seconds without a renewal"),
        ("retry", 2.0, "seconds between tries"),
    ):
        lead.add_argument(
            f"--lease-{name}-seconds",
            type=_seconds,
            default=seconds,
            metavar="S",
            help=f"{text} (%(default)g)",
        )


def _add_work(work: argparse._ArgumentGroup) -> None:
    work.add_argument(
        "--resync-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="look at everything so often (%(default)g)",
    )
    work.add_argument(
        "--workers", type=_workers, default=8, metavar="N", help="reconciliations at once (%(default)s)"
    )
    work.add_argument(
        "--picker-probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the pickers which pods they list; without it pools are Ready without that proof (default: yes)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator or one of its subcommands; the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["plan"]:
        from treeline_operator.plan_command import main as plan

        return plan(argv[1:])
    given = parser().parse_args(argv)
    set_up(given.log_level, "treeline_operator", "treeline_kube", form=given.log_format)
    return asyncio.run(_serve(given))


async def _serve(given: argparse.Namespace) -> int:
    from treeline_kube.errors import KubeError

    from treeline_operator.controller.health import PortInUse
    from treeline_operator.controller.lease import LeaseTiming, identity_of
    from treeline_operator.controller.run import Options, operate

    try:
        lease = LeaseTiming(
            given.lease_duration_seconds, given.lease_renew_seconds, given.lease_retry_seconds
        )
    except ValueError as exc:
        log.error("%s", exc)
        return 2
    platform = Platform(**values(Platform, given))
    identity, pod = identity_of(os.environ, socket.gethostname(), uuid.uuid4().hex[:8])
    options = Options(
        identity=identity,
        pod=pod,
        namespaces=tuple(dict.fromkeys(given.namespace)),
        leader_elect=given.leader_elect,
        lease_name=given.lease_name,
        lease_namespace=platform.operator_namespace,
        lease=lease,
        host=given.host,
        health_port=given.health_port,
        metrics_port=given.metrics_port,
        images=Images(**values(Images, given)),
        resync_s=given.resync_seconds,
        workers=given.workers,
        cluster_domain=platform.cluster_domain,
        api_server_ports=platform.api_server_ports,
        metrics_from=platform.metrics_from,
        scrape_api_ports=platform.scrape_api_ports,
        picker_probe=given.picker_probe,
        kubeconfig=given.kubeconfig,
        context=given.context,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _signalled, stop, number)
    try:
        return await operate(options, stop)
    except (PortInUse, KubeError) as exc:
        log.error("%s", exc)
    return 1


def _signalled(stop: asyncio.Event, number: signal.Signals) -> None:
    """The first asks for an orderly end, the second gets an immediate one."""
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _listening(text: str) -> int:
    return port(text, least=0)


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of workers: at least 1")
    return int(text)


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a namespace; without the flag it is all")
    return text
