"""All that the picker knows of one endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from treeline_epp.endpoints.breaker import Breaker
from treeline_epp.endpoints.load import EndpointLoad
from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.index.pods import Pod
from treeline_epp.picking.audit import Audit


@dataclass(eq=False, slots=True)
class Endpoint:
    """An endpoint, its load, and its place in the index (`pod`)."""

    spec: EndpointSpec
    pod: Pod
    load: EndpointLoad = field(default_factory=EndpointLoad)
    audit: Audit = field(default_factory=Audit)
    breaker: Breaker = field(default_factory=Breaker)
    ready: bool = True
    draining: bool = False

    @property
    def eligible(self) -> bool:
        """May new requests go there?"""
        report = self.load.report
        return self.ready and not self.draining and not (report is not None and report.draining)
