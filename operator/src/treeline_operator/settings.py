"""The operator's settings, from flags of `treeline operate`. Settings that plans depend on are in `world.Platform`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treeline_wire.logs import FORMAT_HELP, FORMATS, LEVELS
from treeline_wire.settings import namespace, port_setting, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of the process, from the command line."""

    namespaces: tuple[str, ...] = setting(
        (),
        flag="--namespace",
        metavar="NS",
        parse=namespace,
        repeated=True,
        help="only this namespace; may be repeated",
    )
    kubeconfig: Path | None = setting(None, help="kubeconfig to use")
    context: str | None = setting(None, help="kubeconfig context, in place of its current one")
    leader_elect: bool = setting(
        True,
        group="leader election",
        either=True,
        help="act only while holding the Lease; without it run a single replica (default: yes)",
    )
    lease_name: str = setting("treeline-operator", group="leader election", help="default: %(default)s")
    host: str = setting("127.0.0.1", group="pages", help="address of both ports (default: %(default)s)")
    health_port: int = port_setting(8081, group="pages", metavar="P", help="/healthz and /readyz (%(default)s)")
    metrics_port: int = port_setting(9090, group="pages", metavar="P", help="/metrics (%(default)s)")
    resync_s: float = setting(
        300.0,
        group="work",
        flag="--resync-seconds",
        metavar="S",
        above=0,
        help="interval of checking everything (%(default)g)",
    )
    log_level: str = setting("info", group="logs", choices=LEVELS, help="default: %(default)s")
    log_format: str | None = setting(None, group="logs", choices=FORMATS, help=FORMAT_HELP)
