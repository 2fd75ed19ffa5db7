"""What the edge tells of its clients: to runtimes and the picker whose cache a request uses, to the log who asked."""

from __future__ import annotations

from typing import Final

from treeline_wire import headers

from treeline_operator.envoy.config import EnvoyConfig

LOG_FIELDS: Final = {"api_client": f"%REQ({headers.CLIENT.upper()})%"}
"""What the access log says besides: the client whom the API key belongs to."""


def isolation_header(config: EnvoyConfig) -> str | None:
    """The value of the header that the edge sets on every request; None where it sets none.

    Without API keys there is nobody to tell apart. Clients that share a cache are kept from learning of each other, but
    not where everybody is to see the routing.
    """
    if not config.knows_clients:
        return None
    if config.isolation == "PerKey":
        return headers.PER_KEY
    return None if config.expose_cached_tokens else headers.SHARED
