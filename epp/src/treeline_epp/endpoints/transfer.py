"""How computed prompts get from one engine to another, and which two engines fit together (docs/disaggregation.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Self

BOOTSTRAP_PORT = 8998
"""Port of SGLang's bootstrap servers where nothing else is said."""
_LONGEST_FACT = 256


class Role(StrEnum):
    """What an endpoint computes of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    """Prompts, for endpoints that decode. It serves no request alone."""
    DECODE = "decode"
    """Answers to prompts from prefill endpoints, and whole requests where its engine can."""


class Protocol(StrEnum):
    """The ways by which a prompt that one engine has computed gets to another."""

    NIXL = "nixl"
    """vLLM's NixlConnector: the prefill engine's answer says where the decode engine finds the prompt's cache."""
    SGLANG = "sglang"
    """Both engines get the request at once, and meet at a bootstrap server. Decode engines compute no prompts."""
    LLM_D = "llm-d"
    """A sidecar before the decode engine calls the prefill engine that a header names."""
    TREELINE = "treeline"
    """Our own runtime: both engines get the request at once, and the decode engine pulls pages, from where a header
    says, as the prefill engine computes them.
    """


@dataclass(frozen=True, slots=True)
class Transfer:
    """How an engine hands over prompts. `port` is that of its bootstrap server, or where our runtime gives pages to
    others (0: it does not). `alike` are the facts that it must share with the engine at the other end, by what they are
    called, as far as it tells them.
    """

    protocol: Protocol
    port: int = BOOTSTRAP_PORT
    alike: tuple[tuple[str, str], ...] = ()

    @classmethod
    def told(cls, protocol: Protocol, facts: Mapping[str, object], port: int = BOOTSTRAP_PORT) -> Self:
        """Make one of the facts that an engine tells; None where it does not. It does not choose how long they are."""
        alike = ((name, str(value)[:_LONGEST_FACT]) for name, value in facts.items() if value is not None)
        return cls(protocol, port, tuple(alike))


@lru_cache(maxsize=4096)
def why_not(prefill: Transfer | None, decode: Transfer | None) -> str:
    """Return why a prefill engine cannot compute prompts for a decode engine; empty if it can."""
    if decode is None:
        return "the decode endpoint does not say how it gets prompts: name it (kv_transfer)"
    if decode.protocol is not Protocol.LLM_D:  # a sidecar knows how its engine and the other one speak
        if prefill is None:
            return "the prefill endpoint does not say how it hands over prompts: name it (kv_transfer)"
        if prefill.protocol is not decode.protocol:
            return f"{prefill.protocol} at the prefill endpoint and {decode.protocol} at the decode endpoint"
        if not prefill.port:
            return "the prefill endpoint gives its pages to nobody: start it with --kv-transfer-port"
    there = dict(decode.alike)
    for name, value in prefill.alike if prefill is not None else ():
        if there.get(name, value) != value:
            return f"the {name} is {value} at the prefill endpoint and {there[name]} at the decode endpoint"
    return ""
