"""Values as Go's flags spell them."""

from __future__ import annotations

import argparse
import re
import ssl

_DURATION = re.compile(r"(?:(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TLS_VERSIONS = {
    "VersionTLS10": ssl.TLSVersion.TLSv1_2,  # nothing older than 1.2 is spoken here
    "VersionTLS11": ssl.TLSVersion.TLSv1_2,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
"""Suites of TLS 1.2 as Go calls them, and as OpenSSL does: those of Go that HTTP/2 allows (RFC 9113, appendix A)."""
_FORMER_NAMES = {name.removesuffix("_SHA256"): name for name in _SUITES if "CHACHA20" in name}
TLS_1_3_SUITES = frozenset({"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"})
"""Go and OpenSSL call them alike."""


def go_bool(text: str) -> bool:
    """As Go's `strconv.ParseBool` reads it. Raises ValueError."""
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def flag_bool(text: str) -> bool:
    """The same as a type of argparse."""
    try:
        return go_bool(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tls_version(text: str) -> ssl.TLSVersion:
    """A version as Go's `crypto/tls` calls it, as a type of argparse."""
    if text not in _TLS_VERSIONS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_TLS_VERSIONS)}")
    return _TLS_VERSIONS[text]


def cipher_suites(text: str) -> tuple[str, ...]:
    """OpenSSL's names of the suites in a list of Go's, as a type of argparse."""
    given = [_FORMER_NAMES.get(name, name) for word in text.split(",") if (name := word.strip())]
    if unknown := [name for name in given if name not in _SUITES and name not in TLS_1_3_SUITES]:
        raise argparse.ArgumentTypeError(f"HTTP/2 is not spoken with {', '.join(unknown)}: use {', '.join(_SUITES)}")
    return tuple(dict.fromkeys(_SUITES.get(name, name) for name in given))


def seconds(text: str) -> float:
    """A number of seconds, or a duration as Go's `time.ParseDuration` reads it: `30s`, `1m30s`, `500ms`. Not negative.

    Raises ValueError.
    """
    try:
        value = float(text)
    except ValueError:
        parts = _DURATION.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{text!r} is no duration like 30s, 1m30s or 500ms") from None
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is no duration: it must not be negative, nor endless")
    return value
