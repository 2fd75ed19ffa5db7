"""One page of the workers' pages, as pure functions: from what each worker says to what the picker says.

What describes engines each worker knows of all, and it is shown once: the most that any of them knows (their trees and
counts differ by what is under way), and trouble where any of them has it. What each worker has of its own, such as its
decisions and its subscriptions, is shown with the worker's number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treeline_wire.signals import Signals, merged

from treeline_epp.console.view import MOST_ENDPOINTS, MOST_SHOWN
from treeline_epp.workers.team import Place

Said = Sequence[tuple[Place, Any]]
"""Of each worker that answers, what its page has, as JSON values; at least one."""
_MOST = ("cached_tokens", "in_flight", "queued_requests", "queued_tokens", "reservations", "reserved_tokens")
_ANY = ("draining", "failing", "ready", "selectable", "unfollowed")
_ALL = ("silent",)  # one that hears an endpoint is enough


def listing(said: Said) -> dict[str, Any]:
    """`/endpoints`."""
    pools: dict[str, list[Mapping[str, Any]]] = {}
    for _, page in said:
        for name, pool in page["pools"].items():
            pools.setdefault(name, []).append(pool)
    return {
        "synced": any(page["synced"] for _, page in said),
        "pools": {
            name: {
                **told[0],
                "models": sorted({model for pool in told for model in pool["models"]}),
                "endpoints": _endpoints(pool["endpoints"] for pool in told),
            }
            for name, told in pools.items()
        },
        "detail": said[0][1]["detail"],
    }


def described(said: Said) -> dict[str, Any]:
    """`/debug/endpoints`: the publishers as each worker follows them."""
    numbered = (
        [{**one, "publishers": _numbered(place, one.get("publishers", ()))} for one in page["endpoints"]]
        for place, page in said
    )
    return {"endpoints": _endpoints(numbered)}


def tree(said: Said) -> dict[str, Any]:
    """`/debug/tree`: what any of them has, and how much each."""
    if "blocks" in said[0][1]:
        blocks = {block for _, page in said for block in page["blocks"]}
        sizes = {str(place.index): len(page["blocks"]) for place, page in said}
        return {"pod": said[0][1]["pod"], "blocks": sorted(blocks, key=int), "workers": sizes}
    totals = [page["totals"] for _, page in said]
    return {
        "totals": {what: max(one.get(what, 0) for one in totals) for what in totals[0]},
        "pods": sorted({pod for _, page in said for pod in page["pods"]}),
        "workers": {str(place.index): page["totals"] for place, page in said},
    }


def decisions(said: Said, last: int) -> dict[str, Any]:
    """`/debug/decisions`: the last of all, the newest first."""
    return {"decisions": _newest(((place, page["decisions"]) for place, page in said), last)}


def explained(said: Said) -> dict[str, Any]:
    """`/debug/explain`: what most of them would decide, in the words of the first of these; and what each would."""
    chosen = {place.index: _choice(page) for place, page in said}
    ((most, _),) = Counter(chosen.values()).most_common(1)
    words = next(page for _, page in said if _choice(page) == most)
    return {**words, "workers": {str(index): choice for index, choice in chosen.items()}}


def console(said: Said) -> dict[str, Any]:
    """The data of the console. `decisions.next` says how far each worker's have been shown: see `console_query`."""
    pages = [page for _, page in said]
    told = {place.pid: page["decisions"]["next"] for place, page in said}
    out: dict[str, Any] = {
        "ready": any(page["ready"] for page in pages),
        "texts_allowed": all(page["texts_allowed"] for page in pages),
        "decisions": {
            "count": sum(page["decisions"]["count"] for page in pages),
            "next": ",".join(f"{pid}.{number}" for pid, number in told.items()),
            "shown": _newest(((place, page["decisions"]["shown"]) for place, page in said), MOST_SHOWN),
        },
        "endpoints": {
            "count": max(page["endpoints"]["count"] for page in pages),
            "shown": _endpoints(page["endpoints"]["shown"] for page in pages)[:MOST_ENDPOINTS],
        },
    }
    if any("prefixes" in page for page in pages):
        out["prefixes"] = [one for place, page in said for one in _numbered(place, page.get("prefixes", ()))]
    return out


def console_query(query: Mapping[str, str], place: Place) -> dict[str, str]:
    """What a worker is asked for: its decisions from where they were shown on. Those of one that is new, from the
    first. What makes no sense is for the worker to refuse."""
    after = query.get("after", "0")
    pairs = [one.partition(".") for one in after.split(",")]
    if all(dot for _, dot, _ in pairs):
        after = next((number for pid, _, number in pairs if pid == str(place.pid)), "0")
    return {**query, "after": after}


def demand(said: Sequence[Signals], *, partial: bool) -> Signals:
    """`/signals`: of pools as several pickers of one pool are merged. `partial`: some workers say nothing."""
    pools = dict.fromkeys(name for one in said for name in one.pools)
    return Signals(
        any(one.synced for one in said),
        {name: merged(one.pools[name] for one in said if name in one.pools) for name in pools},
        partial=partial or any(one.partial for one in said),
    )


def _endpoints(told: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Each once, by name: as the first has it that knows it, but for what another knows better."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for endpoints in told:
        for one in endpoints:
            by_name.setdefault(one["name"], []).append(one)
    return [_endpoint(by_name[name]) for name in sorted(by_name)]


def _endpoint(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out = dict(told[0])
    for one in told[1:]:
        heard = {key: value for key, value in out.items() if value is not None}
        out = {**one, **heard}  # what the first has not heard of it yet
    for key in out:
        values = [one[key] for one in told if one.get(key) is not None]
        if key in _MOST and values:
            out[key] = max(values)
        elif key in _ANY and values:
            out[key] = any(values)
        elif key in _ALL and values:
            out[key] = all(values)
    if "publishers" in out:
        publishers = [one for page in told for one in page.get("publishers", ())]
        behind = [one for one in publishers if not one["live"]]
        out["publishers"] = publishers
        out["subscription"] = (behind or publishers)[0]["state"] if publishers else None
    return out


def _newest(told: Iterable[tuple[Place, Sequence[Mapping[str, Any]]]], most: int) -> list[dict[str, Any]]:
    every = [one for place, some in told for one in _numbered(place, some)]
    return sorted(every, key=lambda one: -one["at"])[:most]


def _numbered(place: Place, some: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"worker": place.index, **one} for one in some]


def _choice(page: Mapping[str, Any]) -> str:
    """The endpoint that it would be, or why none."""
    first = next((one["endpoint"] for one in page.get("endpoints", ()) if one.get("rank") == 1), "")
    return str(first or page.get("refusal", ""))
