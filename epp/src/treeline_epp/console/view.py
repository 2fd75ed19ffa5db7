"""What the console shows: endpoints with their load, the hottest prefixes, the last decisions. As JSON values.

Prompts are in it only where `texts` says so; without it their length alone is.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from treeline_epp import fleet_report
from treeline_epp.console.prefixes import Holders, Prefix, hot_prefixes
from treeline_epp.fleet import Fleet
from treeline_epp.requests.decision_log import DecisionLog, Noted

MOST_ENDPOINTS = 200
MOST_PREFIXES = 30
MOST_SHOWN = 100
"""Decisions in one answer."""
_LONGEST_TEXT = 300
_SHOWN = ("name", "pool", "state", "engine", "no_events", "selectable", "failing", "silent", "subscription")
"""Of what the debug page says of an endpoint; an engine may list thousands of models."""


def endpoints(fleet: Fleet, now: float) -> dict[str, Any]:
    """The endpoints by name, no more than `MOST_ENDPOINTS`, and how many there are."""
    shown = [_endpoint(fleet, one, now) for one in fleet_report.describe(fleet, MOST_ENDPOINTS)]
    return {"count": len(fleet.members), "shown": shown}


def _endpoint(fleet: Fleet, described: dict[str, object], now: float) -> dict[str, Any]:
    out: dict[str, Any] = {key: described[key] for key in _SHOWN if key in described}
    known = fleet.picker.endpoints.get(str(described["name"]))
    if known is not None:
        load, report = known.load, known.load.report
        tokens, requests = load.queue(now)
        out |= {
            "in_flight": load.in_flight(now),
            "queued_tokens": tokens,
            "queued_requests": requests,
            "prefill_tokens_per_s": load.own_rate() or None,
            "cached_tokens": known.held_tokens,
        }
        if report is not None:
            out["report_age_s"] = now - report.at
            out["running"] = report.running
            out["memory_used"] = report.tokens_held / report.tokens_total if report.tokens_total else None
    return out


def decisions(log: DecisionLog, after: int, *, texts: bool) -> list[dict[str, Any]]:
    """Those after a number, the newest first."""
    return [_decision(kept, texts=texts) for kept in log.since(after, MOST_SHOWN)]


def _decision(kept: Noted, *, texts: bool) -> dict[str, Any]:
    out = {"number": kept.number, "at": kept.at, **kept.told, "prompt_bytes": kept.key_bytes}
    if texts:
        out["text"] = _text(kept.key)
    return out


def prefixes(log: DecisionLog, fleet: Fleet, now: float, *, texts: bool) -> list[dict[str, Any]]:
    """The beginnings that prompts of the last decisions share, by model and namespace, and who holds them."""
    groups: defaultdict[tuple[str, str | None], list[Noted]] = defaultdict(list)
    for kept in log.all():
        if kept.key:
            groups[str(kept.told["model"] or ""), kept.namespace].append(kept)
    names = {endpoint.pod.row: name for name, endpoint in fleet.picker.endpoints.items()}
    left, out = MOST_PREFIXES, []
    for (model, namespace), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        found = hot_prefixes([kept.key for kept in group], left)
        if not found:
            continue
        left -= sum(1 for _ in _every(found))
        holders = Holders(fleet.picker.index, _scope(fleet, group), namespace, names, now)
        shown = [_prefix(one, holders, texts=texts) for one in found]
        space = _space(namespace)
        out.append({"model": model, "namespace": space, "requests": len(group), "prefixes": shown})
    return out


def _every(prefixes: Iterable[Prefix]) -> Iterator[Prefix]:
    for one in prefixes:
        yield one
        yield from _every(one.children)


def _prefix(one: Prefix, holders: Holders, *, texts: bool) -> dict[str, Any]:
    count, held_by = holders.of(one.key[: one.end])
    out: dict[str, Any] = {
        "bytes": one.end,
        "requests": one.count,
        "holders": count,
        "held_by": [{"name": name, "bytes": end} for name, end in held_by],
        "children": [_prefix(child, holders, texts=texts) for child in one.children],
    }
    if texts:
        out["text"] = _text(one.key[one.start : one.end])
    return out


def _scope(fleet: Fleet, group: list[Noted]) -> str:
    """Where in the index their prompts are: as the newest endpoint says that is still there."""
    for kept in reversed(group):
        endpoint = fleet.picker.endpoints.get(str(kept.told["endpoint"]))
        if endpoint is not None:
            return endpoint.pod.scope
    return ""


def _space(namespace: str | None) -> str:
    """A name for a namespace that gives away neither salt nor client."""
    return "" if namespace is None else hashlib.blake2b(namespace.encode(), digest_size=4).hexdigest()


def _text(key: bytes) -> str:
    """The beginning and the end of a key, which may be cut within a character."""
    text = key.decode("utf-8", "replace")
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"
