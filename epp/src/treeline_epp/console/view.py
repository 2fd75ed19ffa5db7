"""What the console shows: endpoints with their load, the hottest prefixes, the last decisions. As JSON values.

Prompts are in it only where `texts` says so; without it their length alone is.

The hottest prefixes of some keys, as trees: the beginnings that they have in common, how many have each, and who
holds it.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeline_epp import fleet_report
from treeline_epp.fleet import Fleet
from treeline_epp.index.index import Index
from treeline_epp.index.matching import GUARD_BYTES
from treeline_epp.index.node import common_prefix
from treeline_epp.requests.decision_log import KEPT, DecisionLog, Noted

MOST_HOLDERS = 5


@dataclass(slots=True)
class Prefix:
    """A beginning that `count` keys share: the first `end` bytes of `key`, the parent the first `start`."""

    key: bytes
    start: int
    end: int
    count: int
    children: list[Prefix] = field(default_factory=list)


def hot_prefixes(keys: Sequence[bytes], most: int) -> list[Prefix]:
    """The beginnings that two or more keys share, nested, at most so many of them: those of the most keys.

    A parent is shared by at least as many keys as its children, and comes before them where they are equal: so whatever
    is shown, its ancestors are. Children come in order of their counts. O(n log n) comparisons of keys.
    """
    ordered = sorted(keys)
    roots: list[Prefix] = []
    found: list[tuple[Prefix, list[Prefix]]] = []
    todo = [(span, 0, roots) for span in _split(ordered, 0, len(ordered), 0)]
    while todo:
        (first, last), start, siblings = todo.pop()
        end = common_prefix(ordered[first], 0, ordered[last - 1], 0)
        prefix = Prefix(ordered[first], start, end, last - first)
        found.append((prefix, siblings))
        todo += [(span, end, prefix.children) for span in _split(ordered, first, last, end)]
    found.sort(key=lambda one: (-one[0].count, one[0].end, one[0].key))
    for prefix, siblings in found[:most]:
        siblings.append(prefix)
    return roots


def _split(ordered: Sequence[bytes], first: int, last: int, at: int) -> list[tuple[int, int]]:
    """The spans of two keys or more that are equal in the byte `at`; they are equal before it."""
    spans = []
    while first < last and len(ordered[first]) == at:
        first += 1
    while first < last:
        end = first + 1
        while end < last and ordered[end][at] == ordered[first][at]:
            end += 1
        if end - first > 1:
            spans.append((first, end))
        first = end
    return spans


@dataclass(frozen=True, slots=True)
class Holders:
    """Says which endpoints hold a prefix of one model and namespace, without asking thousands of them one by one.
    `names` of endpoints are by their rows."""

    index: Index
    scope: str
    namespace: str | None
    names: Mapping[int, str]
    now: float

    def of(self, key: bytes) -> tuple[int, list[tuple[str, int]]]:
        """How many hold some of it, and those that hold most, each with how many bytes of it."""
        match = self.index.match(self.scope, self.namespace, key, self.now)
        # What is predicted ends a few bytes before the end of what is asked for.
        reach = {pod.row: min(len(key), hit.reach + GUARD_BYTES) for pod, hit in match.special.items() if hit.reach}
        known = [np.fromiter(reach, np.int32, len(reach))]
        ends = [(min(len(key), one.reach + GUARD_BYTES) if one.reach else one.end, one.pods) for one in match.levels]
        for end, pods in sorted(ends, reverse=True):
            if end:
                rows = self.index.holders(pods)
                known.append(rows)
                for row in rows[: MOST_HOLDERS + len(match.special)].tolist():
                    reach.setdefault(row, end)
        best = sorted(((end, self.names[row]) for row, end in reach.items() if row in self.names), reverse=True)
        return len(np.unique(np.concatenate(known))), [(name, end) for end, name in best[:MOST_HOLDERS]]


MOST_ENDPOINTS = 200
MOST_PREFIXES = 30
_LONGEST_TEXT = 300
_SHOWN = ("name", "address", "pool", "state", "engine", "no_events", "selectable", "failing", "silent", "subscription")
"""Of what the debug page says of an endpoint; an engine may list thousands of models."""


def endpoints(fleet: Fleet, now: float) -> dict[str, Any]:
    """The endpoints by name, no more than `MOST_ENDPOINTS`, and how many there are."""
    shown = [_endpoint(fleet, one, now) for one in fleet_report.describe(fleet, MOST_ENDPOINTS)]
    return {"count": len(fleet.members), "shown": shown}


def _endpoint(fleet: Fleet, described: dict[str, object], now: float) -> dict[str, Any]:
    out: dict[str, Any] = {key: described[key] for key in _SHOWN if key in described}
    if ranks := fleet.picker.present(fleet.members[str(described["name"])].ranks):
        loads = [one.load for one in ranks]
        flights = [load.in_flight(now) for load in loads]
        queues = [load.queue(now) for load in loads]
        out |= {
            "in_flight": None if None in flights else sum(filter(None, flights)),
            "queued_tokens": sum(tokens for tokens, _ in queues),
            "queued_requests": sum(requests for _, requests in queues),
            "prefill_tokens_per_s": sum(load.own_rate() for load in loads) or None,
            "cached_tokens": sum(one.held_tokens for one in ranks),
        }
        if reports := [load.report for load in loads if load.report is not None]:
            out["report_age_s"] = now - min(report.at for report in reports)
            out["running"] = sum(report.running for report in reports)
            if rates := [one.running / one.token_s for one in reports if now <= one.fresh_until and one.decode_step_s]:
                out["tokens_per_s"] = sum(rates)
            total = sum(report.tokens_total for report in reports)
            out["memory_used"] = sum(report.tokens_held for report in reports) / total if total else None
    return out


def decisions(log: DecisionLog, after: int, *, texts: bool) -> list[dict[str, Any]]:
    """Those after a number, the newest first."""
    return [_decision(kept, texts=texts) for kept in log.since(after, KEPT)]


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
    """The beginning and the end of a key, which may be cut within a character. A diamond is a special token."""
    text = _SPECIAL.sub("◆".encode(), key).decode("utf-8", "replace")
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


_SPECIAL = re.compile(rb"\xff.{0,4}", re.DOTALL)
"""As `treeline_wire.keys.escape` writes one."""
