"""Reports on the fleet's endpoints: for Prometheus, for the operator, and for people who look for a fault."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from treeline_epp.endpoints.scraper import Failure
from treeline_epp.endpoints.watcher import EngineState, Problem
from treeline_epp.fleet import Fleet
from treeline_epp.index.event_filter import Skip
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.member import Member
from treeline_epp.metrics import Sample
from treeline_epp.picking.pairs import problem_of
from treeline_epp.xds.eds import EdsState


def samples(fleet: Fleet) -> Iterator[Sample]:
    """Yield gauges and counters for the metrics page."""
    states = Counter(member.state for member in fleet.members.values())
    for state in EngineState:
        yield "gauge", "endpoints", "Endpoints by state.", {"state": state.value}, states[state]
    subscriptions = [one for member in fleet.members.values() for one in member.subscriptions.values()]
    phases = Counter(subscription.state for subscription in subscriptions)
    text = "Subscriptions to KV events, by state; those that are live or checking are up to date."
    for phase in SubscriptionState:
        yield "gauge", "kv_subscriptions", text, {"state": phase.value}, phases[phase]
    infos = [member.watcher.info for member in fleet.members.values()]
    foreign = sum(info is not None and info.foreign_host is not None for info in infos)
    text = "Endpoints whose KV sockets are on another host than the endpoint; the picker does not connect to them."
    yield "gauge", "endpoints_naming_others", text, {}, foreign
    yield from _engines(fleet)
    text = "Publishers that the picker cannot follow because it has no file descriptors or sockets left."
    yield "gauge", "endpoints_unfollowed", text, {}, len(fleet.stats.unfollowed)
    failing = len({e.spec.server for e in fleet.picker.endpoints.values() if e.breaker.tripped})
    text = "Endpoints that get no requests because they answered with errors only."
    yield "gauge", "endpoints_failing", text, {}, failing
    yield from _scraping(fleet)
    renderers = [keyer.renderer for keyer in fleet.registry.keyers if keyer.renderer is not None]
    text = "Chats whose prompt was put together by a shortcut instead of rendering the chat template."
    yield "counter", "chats_joined", text, {}, sum(renderer.joined for renderer in renderers)
    text = "Chat templates whose shortcut was dropped because a full rendering gave another prompt."
    yield "counter", "chat_templates_unlearnt", text, {}, sum(renderer.differed for renderer in renderers)
    stats = fleet.stats
    events = Counter(fleet.past)
    for subscription in subscriptions:
        events.update(subscription.counts)
    text = "Events of subscriptions to KV events: batches applied, batches lost, disconnects and so on."
    for event, count in events.items():
        yield "counter", "kv_subscription_events", text, {"event": event}, count
    text = "Endpoints by pool, by the way their cached prefixes are known, and by the reason why no better way is used."
    for (pool, way, reason), count in fleet.ways.counts().items():
        yield "gauge", "endpoints_routed", text, {"pool": pool, "way": way, "reason": reason}, count
    yield from _index(fleet)
    yield "counter", "events", "KV events received.", {}, stats.events
    yield "counter", "event_batches", "Batches of KV events received.", {}, stats.batches
    yield "counter", "load_reports", "Load reports received from endpoints.", {}, stats.loads
    text = "Connections to publishers of KV events that were lost."
    yield "counter", "kv_disconnects", text, {}, stats.disconnects
    for reason, count in stats.rejected.items():
        text = "Messages and events of endpoints that the picker refused, by reason."
        yield "counter", "rejected", text, {"reason": reason}, count
    yield from eds_samples(fleet.eds.state)


def _index(fleet: Fleet) -> Iterator[Sample]:
    """Yield the size of the prefix index, and the blocks that it left out."""
    skipped = Counter(fleet.picker.index.skipped)
    for endpoint in fleet.picker.endpoints.values():
        for pod in endpoint.pods:
            skipped.update(pod.skipped)
    text = "Blocks named in KV events that the prefix index left out, by reason."
    for reason in Skip:
        yield "counter", "blocks_skipped", text, {"reason": reason.value}, skipped[reason]
    sizes = fleet.picker.index.totals()
    for what, text in (
        ("blocks", "Blocks in the prefix index."),
        ("text_bytes", "Bytes of text in the prefix index."),
        ("nodes", "Nodes of the radix trees in the prefix index."),
        ("namespaces", "Namespaces in the prefix index, each with a tree of its own."),
        ("orphan_blocks", "Blocks kept aside because their parent block is not in the prefix index."),
        ("orphan_blocks_dropped", "Blocks dropped because too many were kept aside."),
    ):
        yield "gauge", f"tree_{what}", text, {}, sizes[what]


def _scraping(fleet: Fleet) -> Iterator[Sample]:
    """Yield figures of engines whose load is scraped."""
    now, scraping = time.monotonic(), fleet.scraping
    looked_at = [member.scraper for member in fleet.members.values() if member.scraper.following]
    failing = Counter(scraper.failing for scraper in looked_at if scraper.failing is not None)
    text = "Endpoints whose load the picker reads from their metrics page because they do not push it."
    yield "gauge", "scraped_endpoints", text, {}, len(looked_at)
    text = "Endpoints whose metrics page could not be read the last time, by reason."
    for reason in Failure:
        yield "gauge", "scraped_endpoints_failing", text, {"reason": reason.value}, failing[reason]
    ages = [now - scraper.scraped_at for scraper in looked_at if scraper.scraped_at is not None]
    text = "Seconds since the oldest load was read from an engine's metrics page; a load is used for 3 s."
    yield "gauge", "scrape_age_seconds", text, {}, max(ages, default=0.0)
    yield "counter", "scrapes", "Reads of engines' metrics pages.", {}, scraping.scrapes
    text = "Reads of engines' metrics pages that failed, by reason."
    for reason in Failure:
        yield "counter", "scrape_failures", text, {"reason": reason.value}, scraping.failures[reason]


def eds_samples(eds: EdsState) -> Iterator[Sample]:
    """Yield figures of the Envoys that subscribe to the list of endpoints."""
    yield "gauge", "eds_connected", "Envoys that subscribe to the list of endpoints.", {}, eds.connected()
    text = "Envoys that have not yet acknowledged the newest list of endpoints."
    yield "gauge", "eds_pending", text, {}, eds.pending()
    yield "counter", "eds_acks", "Endpoint lists that an Envoy acknowledged.", {}, eds.acks
    yield "counter", "eds_rejections", "Endpoint lists that an Envoy rejected.", {}, eds.rejections


def listing(fleet: Fleet) -> dict[str, object]:
    """Return the pools with their models and present endpoints, as the operator reads them.

    `in_flight` is null where it is not known; `cached_tokens` is what the tree knows of. `routing` is null until an
    engine has been asked. `policy` is the pool's, with its parameters. `problem` is why an endpoint is not ready, null
    where that is not known; it is `lasting` where waiting is in vain. An endpoint with a role that no other fits has a
    problem even if it serves whole requests.
    """
    now = time.monotonic()
    endpoints: dict[str, list[dict[str, object]]] = {}
    for name, member in sorted(fleet.members.items()):
        ranks, problem = fleet.picker.present(member.ranks), member.watcher.problem
        unpaired = ""
        if problem is None and ranks:
            unpaired, in_vain = problem_of(ranks[0].spec, (one.spec for one in fleet.picker.endpoints.values()))
            problem = Problem(unpaired, in_vain) if unpaired else None
        usable = not unpaired or ranks[0].spec.alone
        flights = [one.load.in_flight(now) for one in ranks]
        info = member.watcher.info
        endpoints.setdefault(member.spec.pool, []).append(
            {
                "name": name,
                "address": member.spec.address,
                "ready": (ready := usable and any(one.eligible for one in ranks)),
                "draining": member.state is EngineState.DRAINING or member.draining,
                "in_flight": sum(filter(None, flights)) if ranks and None not in flights else None,
                "cached_tokens": sum(one.held_tokens for one in ranks),
                "cache_sources_off": info.cache_sources_off if info is not None else (),
                "problem": problem.text if problem is not None and (unpaired or not ready) else None,
                "lasting": not ready and problem is not None and problem.lasting,
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
    """Return the members by name, for the debug pages; at most `most` of them."""
    return [_describe(fleet, name, member) for name, member in sorted(fleet.members.items())[:most]]


def _describe(fleet: Fleet, name: str, member: Member) -> dict[str, object]:
    ranks = fleet.picker.present(member.ranks)
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
        # With several publishers, one that is behind, if any.
        "subscription": (behind or publishers)[0]["state"] if publishers else None,
        "unfollowed": any(one["unfollowed"] for one in publishers),
        "publishers": publishers,
    }
    if ranks:
        now = time.monotonic()
        out["selectable"] = any(one.eligible for one in ranks)
        out["failing"] = any(one.breaker.tripped for one in ranks)
        out["silent"] = any(one.load.silent(now) for one in ranks)
        out["load"] = "scraped" if member.scraper.following else "pushed"
        out["load_failing"] = member.scraper.failing
        out["reservations"] = sum(len(one.load.reservations) for one in ranks)
        out["skipped_blocks"] = dict(sum((pod.skipped for one in ranks for pod in one.pods), Counter()))
        out["reserved_tokens"] = sum(one.load.reservations.tokens for one in ranks)
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
        "tiers": {tier.value: lower.blocks for tier, lower in pod.lower.items()},
        "skipped": dict(pod.skipped),
        "unfollowed": str(pod) in fleet.stats.unfollowed,
    }


def _engines(fleet: Fleet) -> Iterator[Sample]:
    """Yield the endpoints by engine, and by whether their cached prefixes are known."""
    found: Counter[tuple[str, str]] = Counter()
    for member in fleet.members.values():
        info = member.watcher.info
        if info is not None and info.engine:
            found[info.engine, "followed" if member.follows else "none"] += 1
    text = "Endpoints by engine, and by whether the picker follows their KV events."
    for (engine, events), count in sorted(found.items()):
        yield "gauge", "engines", text, {"engine": engine, "events": events}, count
