"""What pods say of their adapters: the last report that the container beside each engine has logged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from treeline_kube.client import Client
from treeline_kube.errors import KubeError
from treeline_wire.live_adapters import AdapterReport

from treeline_operator.controller.log_lines import last_line
from treeline_operator.plan.adapters import AdapterPod
from treeline_operator.plan.facts import ADAPTERS
from treeline_operator.world import Observed

_PATIENCE_S: Final = 3.0
"""For the log of a pod whose node is gone; others are read meanwhile."""
_AT_ONCE: Final = 16
"""Half of the operator's connections: pods that are silent leave the others for all else."""
_TAILS: Final = (2, 64)
"""Lines that are read: few, and where they have no whole report, more."""
_decode = msgspec.json.Decoder(AdapterReport).decode


async def heard(source: Client, pods: Mapping[str, Iterable[Observed]]) -> dict[str, list[AdapterPod]]:
    """The pods, by pool, with what they say."""
    turns = asyncio.Semaphore(_AT_ONCE)
    own = (asyncio.gather(*(_heard(source, pod, turns) for pod in there)) for there in pods.values())
    return dict(zip(pods, await asyncio.gather(*own), strict=True))


async def _heard(source: Client, pod: Observed, turns: asyncio.Semaphore) -> AdapterPod:
    try:
        async with turns, asyncio.timeout(_PATIENCE_S):
            for lines in _TAILS:
                text = await source.logs(pod.ref.namespace, pod.ref.name, ADAPTERS, tail_lines=lines)
                if (report := parse(text)) is not None:
                    return AdapterPod.of(pod, report)
    except (KubeError, TimeoutError):
        return AdapterPod.of(pod, AdapterReport(errors={"": "it does not answer"}))
    return AdapterPod.of(pod, AdapterReport())


def parse(text: str) -> AdapterReport | None:
    """The last line that is a report."""
    return last_line(text, _decode)
