"""The operator's settings, but for those that plans depend on (`world.Platform`): flags of `treeline operate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from treeline_wire.logs import LEVELS
from treeline_wire.settings import namespace, port_setting, setting

JITTER: Final = 0.2


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Seconds: others may take over after `duration_s`; we give up after `renew_s`; tries are `retry_s` apart."""

    duration_s: float = setting(
        15.0,
        flag="--lease-duration-seconds",
        metavar="S",
        above=0,
        help="others take over after so many seconds without a renewal (%(default)g)",
    )
    renew_s: float = setting(
        10.0,
        flag="--lease-renew-seconds",
        metavar="S",
        above=0,
        help="we give up after so many seconds without a renewal (%(default)g)",
    )
    retry_s: float = setting(
        2.0, flag="--lease-retry-seconds", metavar="S", above=0, help="seconds between tries (%(default)g)"
    )

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_s > self.retry_s * (1 + JITTER) > 0:
            raise ValueError(f"a lease needs duration > renew deadline > retry period > 0, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says of the process."""

    namespaces: tuple[str, ...] = setting(
        (),
        flag="--namespace",
        metavar="NS",
        parse=namespace,
        repeated=True,
        help="look after this one only; may be repeated",
    )
    kubeconfig: Path | None = setting(None, help="connect by this file")
    context: str | None = setting(None, help="the context of the kubeconfig, instead of its current one")
    leader_elect: bool = setting(
        True,
        group="leader election",
        either=True,
        help="act only while holding the Lease; without it there must be one replica (default: yes)",
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
        help="look at everything so often (%(default)g)",
    )
    workers: int = setting(8, group="work", metavar="N", at_least=1, help="reconciliations at once (%(default)s)")
    log_level: str = setting("info", group="logs", choices=LEVELS, help="default: %(default)s")
    log_format: Literal["json", "text"] = setting("json", group="logs", help="default: %(default)s")
