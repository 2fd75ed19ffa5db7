"""Flags of other pickers that have a meaning here."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treeline_wire.settings import setting

from treeline_epp.compat.values import TLS_1_3_SUITES, cipher_suites, flag_bool, tls_version

GROUP = "flags of other endpoint pickers"


@dataclass(frozen=True)
class CompatSettings:
    """Each is a flag of the same name."""

    disable_endpoint_subset_filter: bool = setting(
        False,
        group=GROUP,
        metavar="BOOL",
        parse=flag_bool,
        help="choose among all endpoints, whatever the proxy's metadata x-gateway-destination-endpoint-subset allows",
    )
    emit_endpoint_scores: bool = setting(
        False,
        group=GROUP,
        metavar="BOOL",
        parse=flag_bool,
        help="tell the proxy a score of each of the best 64 endpoints, from 0 to 1, in dynamic metadata: key "
        "x-gateway-destination-endpoint-scores of envoy.lb, a struct from address to number. Here it is 1 / (1 + c), "
        "where c is the cost in seconds that /debug/decisions explains",
    )
    tls_min_version: ssl.TLSVersion = setting(
        ssl.TLSVersion.TLSv1_2,
        group=GROUP,
        metavar="VERSION",
        parse=tls_version,
        help="the oldest TLS that the ext_proc port speaks: VersionTLS12 or VersionTLS13; 1.0 and 1.1 are never spoken "
        "(default VersionTLS12)",
    )
    tls_cipher_suites: tuple[str, ...] = setting(
        (),
        group=GROUP,
        metavar="NAME,…",
        parse=cipher_suites,
        help="the suites with which it speaks TLS 1.2, as Go calls them; 1.3 is always spoken with all of its own "
        "(default: OpenSSL's)",
    )

    @property
    def tls_1_2_suites(self) -> tuple[str, ...]:
        """Of the suites those that can be chosen; empty for OpenSSL's default."""
        return tuple(name for name in self.tls_cipher_suites if name not in TLS_1_3_SUITES)


def tls_faults(found: Mapping[str, Any]) -> Iterator[str]:
    """What is asked of TLS and cannot be done with the other settings."""
    strict, suites = found["tls_min_version"] is not ssl.TLSVersion.TLSv1_2, found["tls_cipher_suites"]
    if not strict and not suites:
        return
    flag = "--tls-min-version VersionTLS13" if strict else "--tls-cipher-suites"
    if not found["secure_serving"]:
        yield f"{flag} needs --secure-serving"
    if found["require_client_certificates"]:
        yield f"{flag} does not go with --require-client-certificates: the EDS port is grpc.aio's, which cannot be told"
    if not strict and TLS_1_3_SUITES.issuperset(suites):
        yield f"{flag} names none of TLS 1.2: for 1.3 alone give --tls-min-version VersionTLS13"
