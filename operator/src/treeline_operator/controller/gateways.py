"""Status of Gateways that are not ours: read one by one if allowed, never watched.

They may be in any namespace, and a watch would need a right to all of them. A Gateway that is not ready is read often,
others now and then; after a refusal the next read waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.errors import Forbidden, KubeError, NotFound

from treeline_operator.world import Observed, Ref

log = logging.getLogger(__name__)

AWAITED_S: Final = 10.0
SETTLED_S: Final = 60.0
_REFUSED_S: Final = 300.0
_PATIENCE_S: Final = 5.0


@dataclass(slots=True)
class Gateways:
    """Every Gateway that a pool is attached to, as it was when it was read last; shared by all pools."""

    source: Client
    clock: Callable[[], float] = now
    _known: dict[Ref, tuple[float, Observed | None]] = field(default_factory=dict)

    async def read(self, refs: Iterable[Ref], *, awaited: bool) -> tuple[Observed, ...]:
        """The readable Gateways. `awaited` says that a pool waits for a change of one."""
        found = []
        for ref in refs:
            read_at, gateway = self._known.get(ref, (-SETTLED_S, None))
            if self.clock() >= read_at + (AWAITED_S if awaited else SETTLED_S):
                gateway = await self._read(ref, gateway)
            if gateway is not None:
                found.append(gateway)
        return tuple(found)

    async def _read(self, ref: Ref, before: Observed | None) -> Observed | None:
        gateway, read_at = before, self.clock()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                gateway = Observed.of(await self.source.get(ref))
        except NotFound:
            gateway = None  # its route says that no controller has judged it
        except Forbidden as exc:
            log.info("%s %s/%s cannot be read: %s", ref.kind, ref.namespace, ref.name, exc)
            gateway, read_at = None, read_at + _REFUSED_S
        except (KubeError, TimeoutError) as exc:
            log.info("%s %s/%s: %s", ref.kind, ref.namespace, ref.name, str(exc) or "no answer in time")
        self._known[ref] = (read_at, gateway)
        return gateway
