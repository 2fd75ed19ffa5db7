"""Judges how each endpoint's cached prefixes are found, by its own facts and by the events that arrive.

The address that an engine names for its events is not enough: `kvevents.hearing` shows whether they arrive. Until that
is known, an endpoint without other obstacles gets no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from treeline_epp.endpoints.adapters.base import EngineInfo, KvSource
from treeline_epp.endpoints.kv_endpoints import why_not_listening
from treeline_epp.endpoints.watcher import EngineState
from treeline_epp.kvevents.connection import KvStats
from treeline_epp.kvevents.hearing import HearingState, Prefills, Readings
from treeline_epp.kvevents.states import SubscriptionState
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.member import Member
from treeline_epp.picking.picker import Picker
from treeline_epp.requests.routing_ways import RoutingWays, Unheard, Way, WayReason, way_of
from treeline_epp.tokenizers.engine_keyers import EngineKeyers

_EVERY_S = 1.0
"""Seconds between two looks at endpoints whose state is known."""


class WayJudge:
    """Judges all endpoints; see the module. `has_curve`: the picker has keys for publishers that encrypt."""

    def __init__(self, picker: Picker, keyers: EngineKeyers, stats: KvStats, *, has_curve: bool) -> None:
        self.ways = RoutingWays()
        self._picker = picker
        self._keyers = keyers
        self._stats = stats
        self._has_curve = has_curve
        self._due_at = float("-inf")

    def judge(self, member: Member, info: EngineInfo) -> None:
        """Judge an endpoint again after a change."""
        spec = member.registered
        assert spec is not None
        routing = way_of(
            publishes=info.publishes,
            keys_missing=info.encrypted and not self._has_curve,
            tokenizer=self._keyers.facts(spec, info, member.keyer, member.keyer_problem),
            no_events=info.no_events,
            unheard=self._unheard(member, info),
        )
        if routing.way is Way.HISTORY or member.hearing.state is not HearingState.UNKNOWN:
            self.ways.set(spec.name, spec.pool, routing)

    def due(self, now: float) -> bool:
        """Return whether it is time to look at endpoints with a known state, too; about every second."""
        due = now >= self._due_at
        if due:
            self._due_at = now + _EVERY_S
        return due

    def look(self, members: Iterable[Member], now: float, *, due: bool) -> None:
        """Look at endpoints whose state is unknown, or at all if `due`. O(publishers)."""
        for member in members:
            if not due and member.hearing.state is not HearingState.UNKNOWN:
                continue
            info = member.watcher.info
            if info is None or not member.follows or not member.subscriptions or member.registered is None:
                continue
            if member.state is not EngineState.READY:
                member.hearing.rest()
            elif self._look_at(member, info, now):
                if member.hearing.state in (HearingState.UNREACHED, HearingState.UNREADABLE):
                    self._rely_on_history(member)
                self.judge(member, info)

    def _look_at(self, member: Member, info: EngineInfo, now: float) -> bool:
        followed = _followed(member, info)
        endpoints = self._picker.present(member.ranks)
        if not endpoints or not followed:
            return False
        subscriptions = [one for _, one in followed]
        return member.hearing.look(
            now,
            connected=not any(one.state is SubscriptionState.DISCONNECTED for one in subscriptions),
            breaks=sum(one.counts["disconnects"] for one in subscriptions),
            batches=sum(one.counts["applied"] + one.counts[SubscriptionState.SNAPSHOT] for one in subscriptions),
            served=Prefills(sum(one.keyed_prompts for one in endpoints), sum(one.new_tokens for one in endpoints)),
            readings=Readings(
                sum(one.counts["understood"] for one in subscriptions),
                sum(one.applied.unread.total() for one in subscriptions),
            ),
        )

    def _rely_on_history(self, member: Member) -> None:
        """Give an endpoint's predictions a long life, until its next event: none will confirm them."""
        for endpoint in self._picker.present(member.ranks):
            for pod in endpoint.pods:
                pod.precise = False

    def _unheard(self, member: Member, info: EngineInfo) -> Unheard | None:
        """Return why no events arrive, and what to do; None if they do, or before that is known."""
        if member.hearing.state is HearingState.UNREACHED:
            return Unheard(WayReason.EVENTS_UNREACHABLE, self._why_unreached(member, info))
        if member.hearing.state is HearingState.UNREADABLE:
            followed = _followed(member, info)
            unread = sum((one.applied.unread for _, one in followed), Counter[str]())
            reasons = ", ".join(f"{reason} {count}" for reason, count in unread.most_common(3))
            message = f"most events of {_places(source for source, _ in followed)} are not understood ({reasons})"
            return Unheard(WayReason.EVENTS_UNREADABLE, f"{message}: is the engine newer than this picker?")
        if member.hearing.state is HearingState.NOTHING:
            places = _places(source for source, _ in _followed(member, info))
            topics = ", ".join(sorted({repr(source.topic[:100]) for source in info.sources if source.topic}))
            asked = f"its prefix cache on, and its topic {topics}" if topics else "its prefix cache on"
            message = f"connected to {places}, but no events came while prompts were served: is {asked}?"
            return Unheard(WayReason.NOTHING_HEARD, message)
        return None

    def _why_unreached(self, member: Member, info: EngineInfo) -> str:
        followed = _followed(member, info)
        lost = [source for source, one in followed if one.state is SubscriptionState.DISCONNECTED]
        pods = {str(one.pod) for _, one in followed}
        if pods & self._stats.unfollowed:
            why = "the picker has no sockets left for it: give it more file descriptors"
        elif pods & self._stats.refused:
            why = "its sockets refuse the keys of --curve-dir: give both the same"
        elif info.dials:
            why = why_not_listening(info.dials)
        else:
            why = "nothing listens there, or a NetworkPolicy closes the port"
        return f"cannot connect to {_places(lost or [source for source, _ in followed])}: {why}"


def _followed(member: Member, info: EngineInfo) -> list[tuple[KvSource, KvSubscription]]:
    """Return its publishers of events; some ranks may send only their load."""
    found = ((source, member.subscriptions.get(source.rank)) for source in info.sources)
    return [(source, one) for source, one in found if one is not None and source.events_port is not None]


def _places(sources: Iterable[KvSource]) -> str:
    """Return the first of the places, with the number of the others."""
    places = []
    for source in sources:
        host = f"[{source.host}]" if ":" in source.host else source.host
        places.append(f"tcp://{host}:{source.events_port}")
    if not places:
        return "its publishers"
    return f"{places[0]} and {len(places) - 1} more" if len(places) > 1 else places[0]
