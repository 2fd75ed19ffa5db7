"""HTTP for tests: clients of servers on this machine, which speak no TLS."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def client(**options: Any) -> httpx.AsyncClient:
    """Return a client without trusted authorities: loading the public ones takes 80 ms for every client."""
    return httpx.AsyncClient(**{"verify": _NO_AUTHORITIES, "timeout": 60, **options})
