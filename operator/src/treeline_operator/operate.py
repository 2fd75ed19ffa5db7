"""The command line of the operator: `treeline operate`, and `treeline operate plan` which asks no cluster."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Final

from treeline_wire.command_line import Parser
from treeline_wire.logs import set_up
from treeline_wire.settings import add_flags, values

from treeline_operator.settings import Settings
from treeline_operator.world import Images, Platform

log = logging.getLogger("treeline_operator")

_EXAMPLES: Final = """\
needs: the CRDs of treeline.dev and the rights of the Helm chart. Without --kubeconfig it uses
$KUBECONFIG, the pod's ServiceAccount, or ~/.kube/config, in this order.

examples:
  treeline operate                                   all namespaces, one of several replicas
  treeline operate --namespace ml --namespace dev    two namespaces; Roles are enough
  treeline operate --no-leader-elect --log-level debug --kubeconfig ~/.kube/config
  treeline operate plan -f pool.yaml                 preview of a file, without a cluster
"""


def parser() -> argparse.ArgumentParser:
    """The flags of the running operator."""
    p = Parser(
        prog="treeline operate",
        usage="treeline operate [OPTIONS]\n       treeline operate plan -f FILE... [OPTIONS]",
        description="Treeline's operator: creates pods, pickers and gateways for InferencePools and InferenceModels, "
        "and reports their status.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scope = p.add_argument_group("scope")
    add_flags(scope, Settings)
    add_flags(scope, Platform)
    add_flags(p.add_argument_group("leader election"), Settings, "leader election")
    add_flags(p.add_argument_group("pages"), Settings, "pages")
    add_flags(p.add_argument_group("images for pools that name none"), Images)
    work = p.add_argument_group("work")
    add_flags(work, Settings, "work")
    add_flags(work, Platform, "work")
    add_flags(p.add_argument_group("logs"), Settings, "logs")
    return p


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
    from treeline_operator.controller.lease import identity_of
    from treeline_operator.controller.run import Options, operate

    identity, pod = identity_of(os.environ, socket.gethostname(), uuid.uuid4().hex[:8])
    platform = Platform(images=Images(**values(Images, given)), **values(Platform, given))
    options = Options(identity=identity, pod=pod, platform=platform, **values(Settings, given))
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
