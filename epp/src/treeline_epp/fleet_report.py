"""What the fleet says of its endpoints: to Prometheus, to the operator, and to people who look for a fault."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from treeline_epp.endpoints.scraper import Failure
from treeline_epp.endpoints.watcher import EngineState
from treeline_epp.fleet import Fleet
from treeline_epp.index.event_filter import Skip
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.member import Member
from treeline_epp.metrics import Sample
from treeline_epp.xds.eds import EdsState


def samples(fleet: Fleet) -> Iterator[Sample]:
    """Gauges and counters for the metrics page."""
    states = Counter(member.state for member in fleet.members.values())
    for state in EngineState:
        yield "gauge", "endpoints", "Endpoints by state.", {"state": state.value}, states[state]
    subscriptions = [one for member in fleet.members.values() for one in member.subscriptions.values()]
    phases = Counter(subscription.state for subscription in subscriptions)
    text = "Subscriptions to KV events by state; live and checking ones have applied all that is published."
    for phase in SubscriptionState:
        yield "gauge", "kv_subscriptions", text, {"state": phase.value}, phases[phase]
    infos = [member.watcher.info for member in fleet.members.values()]
    foreign = sum(info is not None and info.foreign_host is not None for info in infos)
    text = "Endpoints that name another host than their own for their KV sockets; it is not connected to."
    yield "gauge", "endpoints_naming_others", text, {}, foreign
    yield from _engines(fleet)
    text = "Publishers whose events and load cannot be followed: no file descriptors or sockets are left."
    yield "gauge", "endpoints_unfollowed", text, {}, len(fleet.stats.unfollowed)
    failing = sum(e.breaker.tripped for e in fleet.picker.endpoints.values())
    yield "gauge", "endpoints_failing", "Endpoints left out because they answer errors alone.", {}, failing
    yield from _scraping(fleet)
    renderers = [keyer.renderer for keyer in fleet.registry.keyers if keyer.renderer is not None]
    text = "Chats whose prompts were joined from what was learnt of their template, instead of rendered."
    yield "counter", "chats_joined", text, {}, sum(renderer.joined for renderer in renderers)
    text = (
        "Chat templates of which something wrong was learnt: a chat that was rendered to check it came out differently."
    )
    yield "counter", "chat_templates_unlearnt", text, {}, sum(renderer.differed for renderer in renderers)
    stats = fleet.stats
    events = Counter(fleet.past)
    for subscription in subscriptions:
        events.update(subscription.counts)
    text = "What subscriptions to KV events went through, by event."
    for event, count in events.items():
        yield "counter", "kv_subscription_events", text, {"event": event}, count
    text = "Endpoints by pool, by the way in which prefixes are found, and by why it is not a better one."
    for (pool, way, reason), count in fleet.ways.counts().items():
        yield "gauge", "endpoints_routed", text, {"pool": pool, "way": way, "reason": reason}, count
    skipped = Counter(fleet.picker.index.skipped)
    for endpoint in fleet.picker.endpoints.values():
        for pod in endpoint.pods:
            skipped.update(pod.skipped)
    text = "Blocks of KV events that are not in the prefix index, by reason."
    for reason in Skip:
        yield "counter", "blocks_skipped", text, {"reason": reason.value}, skipped[reason]
    for what, size in fleet.picker.index.totals().items():
        yield "gauge", f"tree_{what}", "Size of the prefix index.", {}, size
    yield "counter", "events", "KV events received.", {}, stats.events
    yield "counter", "event_batches", "KV event batches received.", {}, stats.batches
    yield "counter", "load_reports", "Load reports received.", {}, stats.loads
    text = "Connections to publishers of KV events that ended."
    yield "counter", "kv_disconnects", text, {}, stats.disconnects
    for reason, count in stats.rejected.items():
        yield "counter", "rejected", "Messages and events refused, by reason.", {"reason": reason}, count
    yield from eds_samples(fleet.eds.state)


def _scraping(fleet: Fleet) -> Iterator[Sample]:
    """Of engines that push no load."""
    now, scraping = time.monotonic(), fleet.scraping
    looked_at = [member.scraper for member in fleet.members.values() if member.scraper.following]
    failing = Counter(scraper.failing for scraper in looked_at if scraper.failing is not None)
    text = "Endpoints that push no load, and whose metrics page is read for it."
    yield "gauge", "scraped_endpoints", text, {}, len(looked_at)
    text = "Of these, endpoints whose load could not be read the last time, by reason."
    for reason in Failure:
        yield "gauge", "scraped_endpoints_failing", text, {"reason": reason.value}, failing[reason]
    ages = [now - scraper.scraped_at for scraper in looked_at if scraper.scraped_at is not None]
    text = "Age of the oldest load that was read from metrics; after 3 s it counts no more."
    yield "gauge", "scrape_age_seconds", text, {}, max(ages, default=0.0)
    yield "counter", "scrapes", "Reads of engines' metrics pages.", {}, scraping.scrapes
    text = "Reads of engines' metrics pages that gave no load, by reason."
    for reason in Failure:
        yield "counter", "scrape_failures", text, {"reason": reason.value}, scraping.failures[reason]


def eds_samples(eds: EdsState) -> Iterator[Sample]:
    """What Envoys know of the endpoints."""
    yield "gauge", "eds_connected", "Envoys subscribed to endpoints.", {}, eds.connected()
    yield "gauge", "eds_pending", "Envoys that have not acknowledged the newest list.", {}, eds.pending()
    yield "counter", "eds_acks", "Acknowledged endpoint lists.", {}, eds.acks
    yield "counter", "eds_rejections", "Endpoint lists that an Envoy rejected.", {}, eds.rejections


def listing(fleet: Fleet) -> dict[str, object]:
    """Pools with their models and endpoints, as the operator reads them: what could be picked now.

    `in_flight` is null where it is not known; `cached_tokens` is what the tree knows of. `routing` is null until an
    engine has been asked. `policy` is the pool's, with its parameters.
    """
    now = time.monotonic()
    endpoints: dict[str, list[dict[str, object]]] = {}
    for name, member in sorted(fleet.members.items()):
        known = fleet.picker.endpoints.get(name)
        endpoints.setdefault(member.spec.pool, []).append(
            {
                "name": name,
                "address": member.spec.address,
                "ready": known is not None and known.eligible,
                "draining": member.state is EngineState.DRAINING or member.draining,
                "in_flight": known.load.in_flight(now) if known is not None else None,
                "cached_tokens": known.held_tokens if known is not None else 0,
            }
        )
    models, ways = fleet.registry.models_by_pool(), fleet.ways.pools()
    pools = {
        pool: {
            "models": models.get(pool, []),
            "policy": fleet.picker.policies.name_of(pool),
            "endpoints": endpoints.get(pool, []),
            "routing": ways[pool]._asdict() if pool in ways else None,
        }
        for pool in dict.fromkeys([*models, *endpoints])
    }
    return {"synced": fleet.discovered.is_set(), "pools": pools}


def describe(fleet: Fleet, most: int | None = None) -> list[dict[str, object]]:
    """The members by name, for the debug pages; no more than `most` of them."""
    return [_describe(fleet, name, member) for name, member in sorted(fleet.members.items())[:most]]


def _describe(fleet: Fleet, name: str, member: Member) -> dict[str, object]:
    endpoint = fleet.picker.endpoints.get(name)
    info = member.watcher.info
    publishers = [_publisher(fleet, rank, one) for rank, one in sorted(member.subscriptions.items())]
    behind = [one for one in publishers if not one["live"]]
    out: dict[str, object] = {
        "name": name,
        "address": member.spec.address,
        "pool": member.spec.pool,
        "state": member.state.value,
        "models": member.registered.models if member.registered is not None else (),
        "engine": info.engine if info is not None else None,
        "no_events": (info.no_events or None) if info is not None else None,
        # Of several, one that is behind, if any.
        "subscription": (behind or publishers)[0]["state"] if publishers else None,
        "unfollowed": any(one["unfollowed"] for one in publishers),
        "publishers": publishers,
    }
    if endpoint is not None:
        out["selectable"] = endpoint.eligible
        out["failing"] = endpoint.breaker.tripped
        out["silent"] = endpoint.load.silent(time.monotonic())
        out["load"] = "scraped" if member.scraper.following else "pushed"
        out["load_failing"] = member.scraper.failing
        out["reservations"] = len(endpoint.load.reservations)
        out["skipped_blocks"] = dict(sum((pod.skipped for pod in endpoint.pods), Counter()))
        out["reserved_tokens"] = endpoint.load.reservations.tokens
    return out


def _publisher(fleet: Fleet, rank: int, subscription: KvSubscription) -> dict[str, object]:
    pod = subscription.pod
    return {
        "rank": rank,
        "state": subscription.state.value,
        "live": subscription.live,
        "peer": subscription.peer.value,
        "next_seq": subscription.next_seq,
        "partial": subscription.applied.partial,
        "blocks": pod.blocks,
        "block_size": pod.block_size,
        "skipped": dict(pod.skipped),
        "unfollowed": str(pod) in fleet.stats.unfollowed,
    }


def _engines(fleet: Fleet) -> Iterator[Sample]:
    """Which engines there are, and whether what their caches hold is known."""
    found: Counter[tuple[str, str]] = Counter()
    for member in fleet.members.values():
        info = member.watcher.info
        if info is not None and info.engine:
            found[info.engine, "followed" if member.follows else "none"] += 1
    text = "Endpoints by engine, and by whether they publish KV events that are followed."
    for (engine, events), count in sorted(found.items()):
        yield "gauge", "engines", text, {"engine": engine, "events": events}, count
