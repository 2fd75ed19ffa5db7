"""Flags of other pickers that have a meaning here, and their configuration."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from treeline_wire.settings import setting

from treeline_epp.compat.config import decode
from treeline_epp.compat.flow_plan import Plan
from treeline_epp.compat.plan import plan
from treeline_epp.compat.values import flag_bool

GROUP = "flags of other endpoint pickers"


@dataclass(frozen=True)
class CompatSettings:
    """Each is a flag of the same name."""

    config_file: Path | None = setting(
        None,
        group=GROUP,
        metavar="FILE",
        help="an EndpointPickerConfig of GIE or llm-d, read at start: what it asks for holds where no flag says "
        "otherwise; what has no meaning here is told or refused (docs/migrating.md)",
    )
    config_text: str = setting("", group=GROUP, metavar="YAML", help="the same as text")
    disable_endpoint_subset_filter: bool = setting(
        False,
        group=GROUP,
        metavar="BOOL",
        parse=flag_bool,
        help="choose among all endpoints, whatever the proxy's metadata x-gateway-destination-endpoint-subset allows",
    )


def planned(p: argparse.ArgumentParser, given: argparse.Namespace, policies: Collection[str], *, flow: bool) -> Plan:
    """What --config-file or --config-text asks for (see `plan`); exits with status 2 where it cannot be used."""
    if given.config_file is not None and given.config_text:
        p.error("--config-file and --config-text: give one of them")
    where = f"--config-file {given.config_file}" if given.config_file is not None else "--config-text"
    try:
        text = given.config_text
        if given.config_file is not None:
            text = given.config_file.read_text(encoding="utf-8")
        if not text and given.config_file is None:
            return Plan()
        return plan(decode(text), policies, flow=flow)
    except (OSError, ValueError) as error:
        p.error(f"{where}: {error}")
