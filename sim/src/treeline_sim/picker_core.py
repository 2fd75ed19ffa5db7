"""The endpoint picker's own core as a router: `Picker`, its index and its subscriptions, in simulated time.

This is the only module of the benchmarks that imports another room, so that the simulation runs the picker's own code.
It is a driver like `treeline_epp.fleet`, `kvevents/connection.py` and `peers/driver.py`, without their sockets.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from treeline_epp.endpoints.spec import EndpointSpec
from treeline_epp.endpoints.transfer import Protocol, Role, Transfer
from treeline_epp.index.items import Content, Items
from treeline_epp.kvevents.item_events import ItemEvents
from treeline_epp.kvevents.reading import answer_of
from treeline_epp.kvevents.subscription import KvSubscription
from treeline_epp.peers.gossip import Gossip, Outgoing
from treeline_epp.peers.seal import peer_key
from treeline_epp.picking.decision import Lease, NoEndpoints, Outcome, Saturated
from treeline_epp.picking.picker import Picker, PickerConfig
from treeline_epp.picking.policies import POLICIES, create_policy
from treeline_epp.picking.request import Request as PickRequest
from treeline_wire.events import EventBatch
from treeline_wire.frames import Reply, Request
from treeline_wire.keys import PrefixKeys, escape
from treeline_wire.load import TreelineLoad
from treeline_wire.media import MediaSpec

from treeline_sim.model.images import PAD, PicturedText
from treeline_sim.model.text import token_bytes
from treeline_sim.routers import Answer, Asks, NoRoute, Others, Route, Router, TraceRequest
from treeline_sim.simulation import Sharing

MODEL = "sim"
_KEY = peer_key(b"of simulated pickers")
_GOSSIP_S = 0.05
"""The tick of `peers/driver.py`."""
DEFAULT_POLICY = PickerConfig().policy


def policies() -> list[str]:
    """Return the names of the picker's policies, its default first."""
    return sorted(POLICIES, key=lambda name: (name != DEFAULT_POLICY, name))


def check_policy(text: str) -> None:
    """Check a policy. Raises ValueError where the picker's `--policy` would refuse it."""
    create_policy(text, random.Random(0))


class _Keys:
    """The part of `PrefixKeys` that index and images need: the bytes of each token; any text is the placeholder."""

    def __init__(self) -> None:
        self.token_bytes = token_bytes()

    def prompt_key(self, _text: str, _add_special_tokens: bool) -> bytes:
        return escape(PAD)

    def block_key(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.token_bytes[i] for i in ids])


class PickerCore(Router):
    """A picker with a fixed number of endpoints."""

    deaf = False

    def __init__(self, policy: str, endpoints: int, seed: int, sharing: Sharing | None = None) -> None:
        """Make a picker. Raises ValueError for an unknown policy; the message lists the known ones."""
        self.picker = Picker(PickerConfig(policy=policy, seed=seed))
        keys = cast(PrefixKeys, _Keys())
        self._items = Items(keys, MediaSpec({"image": ""}, ""))
        self._names = [f"e{number:04}" for number in range(endpoints)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self.subscriptions: list[KvSubscription] = []
        self._ids = count()
        self.gossip: Gossip | None = None
        self._others: Others | None = None
        prefill, transfer = 0, None
        if sharing is not None:  # SGLang's decode endpoints compute no prompts
            prefill, transfer = sharing.prefill, Transfer(Protocol.SGLANG if sharing.always else Protocol.TREELINE)
        others = Role.DECODE if prefill else Role.BOTH
        for number, name in enumerate(self._names):
            address, role = f"10.0.{number >> 8}.{number & 255}:8000", Role.PREFILL if number < prefill else others
            spec = EndpointSpec(name, address, models=(MODEL,), role=role, transfer=transfer)
            endpoint = self.picker.add_endpoint(spec)
            subscription = KvSubscription(self.picker.index, endpoint.pod, keys)
            subscription.applied.reader = ItemEvents(self._items, name)
            self.subscriptions.append(subscription)

    def route(self, request: TraceRequest, now: float) -> Route:
        """Pick and reserve an endpoint, or two."""
        prompt, placed = request.prompt, None
        if isinstance(prompt, PicturedText):
            placed = self._items.placed(prompt.key, [Content("image", image.sha256) for _, image in prompt.images])
        asked = PickRequest(
            str(next(self._ids)),
            model=MODEL,
            key=prompt.key if placed is None else placed.key,
            prompt_tokens_estimate=request.prompt.tokens,
            max_output_tokens=request.output_tokens,
            apart=True,
        )
        try:
            lease = self.picker.reserve(self.picker.pick(asked, now), now)
        except (NoEndpoints, Saturated) as refusal:
            raise NoRoute(str(refusal)) from None
        if placed is not None:
            self._items.expect(placed.expected, lease.endpoint.spec.name, now)
        decision, source = lease.decision, lease.decision.source
        number = -1 if source is None else self._numbers[source.name]
        return Route(self._numbers[decision.endpoint.name], lease, decision.form, number)

    def on_prefilled(self, ticket: object, took_s: float | None, now: float) -> None:
        """End the lease's part at the endpoint that computed the prompt."""
        outcome = Outcome.ERROR if took_s is None else Outcome.HEADERS
        self.picker.parts.prefilled(cast(Lease, ticket), outcome, now, took_s or 0.0)

    def on_answer(self, ticket: object, answer: Answer, now: float) -> None:
        """Close the lease with the response headers, which come with the first token."""
        lease = cast(Lease, ticket)
        self.picker.close(
            lease,
            now,
            Outcome.HEADERS,
            served=lease.endpoint.spec.address,
            ttft_s=now - lease.opened_at,
            cached_tokens=answer.cached_tokens,
            prompt_tokens=answer.prompt_tokens,
        )

    def on_failure(self, ticket: object, overloaded: bool, now: float) -> None:
        """Close the lease with a failure, which the endpoint's breaker counts."""
        self.picker.close(cast(Lease, ticket), now, Outcome.OVERLOADED if overloaded else Outcome.ERROR)

    def on_connected(self, endpoint: int, connected: bool, now: float) -> Asks:
        """Report a connection or its loss, as the connection and the watcher of an engine do."""
        self.picker.set_ready(self._names[endpoint], connected)
        subscription = self.subscriptions[endpoint]
        if not connected:
            subscription.on_disconnected(now)
            return ()
        return self._settled(subscription, subscription.on_connected(now), now)

    def on_batch(self, endpoint: int, seq: int, batch: EventBatch, now: float) -> Asks:
        """Pass a batch to the subscription."""
        subscription = self.subscriptions[endpoint]
        return self._settled(subscription, subscription.on_live(seq, batch, now), now)

    def on_replies(self, endpoint: int, replies: Sequence[Reply], now: float) -> Asks:
        """Pass replies to the subscription."""
        subscription = self.subscriptions[endpoint]
        asks: list[Request] = []
        for reply in replies:
            asks += self._settled(subscription, subscription.on_reply(answer_of(reply), now), now)
        return asks

    def on_load(self, endpoint: int, load: TreelineLoad, now: float) -> Asks:
        """Pass a report to the picker, and as a heartbeat to the subscription."""
        self.picker.on_load(self._names[endpoint], load, now)
        subscription = self.subscriptions[endpoint]
        return self._settled(subscription, subscription.on_heartbeat(load.epoch, None, now), now)

    def on_tick(self, now: float) -> Mapping[int, Asks]:
        """Tick the picker and the subscriptions."""
        self.picker.on_tick(now)
        asked: dict[int, Asks] = {}
        for number, subscription in enumerate(self.subscriptions):
            asks = self._settled(subscription, subscription.on_tick(now), now)
            if asks:
                asked[number] = asks
        return asked

    def join(self, others: Others) -> None:
        """Exchange requests in flight with the others from now on."""
        gossip = self.gossip = Gossip(self.picker, _KEY)
        self._others = others
        self.picker.elsewhere = gossip.own
        due: list[object] = []  # only the newest wake-up counts, as with a timer that is reset

        def wake(urgent: bool) -> None:
            due[:] = [token := object()]
            others.after(gossip.due_in(others.now(), urgent=urgent), lambda: flush(token))

        def flush(token: object) -> None:
            if due == [token]:
                self._tell(gossip.flush(others.now()))

        def tick() -> None:
            self._tell(gossip.tick(others.now()))
            others.after(_GOSSIP_S, tick)

        gossip.own.wake = wake
        others.after(0.0, tick)

    def on_told(self, datagram: bytes, source: int) -> None:
        """Pass a datagram to the gossip, which may answer."""
        if self.gossip is not None and self._others is not None:
            self._tell(self.gossip.on_datagram(datagram, _address(source), self._others.now()))

    def _tell(self, outgoing: Sequence[Outgoing]) -> None:
        assert self._others is not None
        for datagram, address in outgoing:
            self._others.tell(datagram, None if address is None else address[1])

    def _settled(self, subscription: KvSubscription, asks: Sequence[Request], now: float) -> list[Request]:
        asked = list(asks)
        while subscription.busy:
            asked += subscription.on_turn(now)
        return asked


def _address(router: int) -> tuple[str, int]:
    return "router", router
