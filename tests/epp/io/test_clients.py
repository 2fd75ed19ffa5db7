"""The picker's bounds for each client."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.epp_io import data_plane, engines, equal, so, until
from treeline_epp.extproc.clients import BODIES, LOST_S, Clients, Present, TooMuch, client_of

KEYED, LARGEST = "x-treeline-client", 1000


class Crowd(RuleBasedStateMachine):
    """Requests of clients with and without keys come, arrive and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.clients = Clients(3, LARGEST, clock=lambda: self.now)
        self.lost: list[tuple[float, str]] = []
        self.here: list[tuple[Present, str, str]] = []
        self.coming: list[int] = []

    @rule(
        header=st.sampled_from([KEYED, "x-forwarded-for"]),
        name=st.sampled_from("ab"),
        length=st.sampled_from(["", "0", "10", "900", "1000", "5000", "-1", "\u0663", "9" * 5000]),
    )
    def come(self, header: str, name: str, length: str) -> None:
        size = int(length) if length in ("0", "10", "900") else LARGEST
        size = size if header == KEYED else 0
        own = [i for i, (_, *who) in enumerate(self.here) if who[1] == name]
        self.lost = [(until, who) for until, who in self.lost if until > self.now]
        fits = (
            len(own) + [who for _, who in self.lost].count(name) < 3
            and sum(self.coming[i] for i in own) + size <= BODIES * LARGEST
        )
        present: Present | None = None
        with contextlib.suppress(TooMuch):
            present = self.clients.enter({header: name, "content-length": length})
        assert fits == (present is not None)
        if present is not None:
            assert present.keyed == (header == KEYED)
            self.here.append((present, header, name))
            self.coming.append(size)

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0, 9), goes=st.booleans())
    def leave(self, which: int, goes: bool) -> None:
        which %= len(self.here)
        present = self.here[which][0]
        for _ in range(2):
            present.close() if goes else present.arrived()
        self.coming[which] = 0
        if goes:
            del self.here[which], self.coming[which]

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        which %= len(self.here)
        present, header, name = self.here.pop(which)
        del self.coming[which]
        present.lose()
        present.close()
        if header == KEYED:
            self.lost.append((self.now + LOST_S, name))

    @rule(seconds=st.sampled_from([1.0, LOST_S / 2, LOST_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def none_is_remembered_without_a_request(self) -> None:
        here = {name for *_, name in self.here}
        assert len(here) <= len(self.clients) <= len(here | {name for _, name in self.lost})


def test_no_client_has_more_than_its_share() -> None:
    run_state_machine_as_test(Crowd, settings=settings(max_examples=60, deadline=None, derandomize=True))


def test_bodies_of_a_client_are_bounded_together() -> None:
    clients = Clients(100, LARGEST)
    sending = [clients.enter({KEYED: "ada"}) for _ in range(BODIES)]
    with pytest.raises(TooMuch, match="8000 bytes"):
        clients.enter({KEYED: "ada", "content-length": "1"})
    clients.enter({KEYED: "ada"}, has_body=False)
    clients.enter({KEYED: "bob"})
    sending[0].arrived()
    clients.enter({KEYED: "ada", "content-length": "1000"})


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ({"x-treeline-client": "ada", "x-forwarded-for": "10.0.0.1"}, "ada"),
        ({"x-forwarded-for": "10.0.0.1"}, "10.0.0.1"),
        ({"x-forwarded-for": "6.6.6.6, 10.0.0.1"}, "10.0.0.1"),
        ({"x-forwarded-for": "6.6.6.6,2001:db8::1"}, "2001:db8::1"),
        ({}, ""),
    ],
)
def test_a_client_is_its_name_else_the_address_that_the_proxy_saw(headers: dict[str, str], client: str) -> None:
    assert client_of(headers) == client


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_client_with_its_share_of_half_sent_requests_is_429_at_once_and_others_are_served(
    tmp_path: Path, mode: str
) -> None:
    settings = {"api_keys": {"ada": "sk-ada", "bob": "sk-bob"}, "request_body_mode": mode, "fail_open": False}
    head = b"POST /v1/completions HTTP/1.1\r\nhost: edge\r\nx-api-key: sk-ada\r\ncontent-length: 30000000\r\n\r\n{"
    async with (
        engines(1) as fakes,
        data_plane(tmp_path, fakes, "--max-client-requests", "3", **settings) as plane,
    ):
        port = plane.envoy.config.listen_port
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
        for writer in writers:
            writer.write(head)
        ada, bob = ({"x-api-key": f"sk-{name}"} for name in ("ada", "bob"))
        await until(
            lambda: equal(plane.picker.metric("treeline_epp_extproc_streams"), 3), "the picker has heard of all three"
        )
        # Its name counts, and nothing that it says of itself.
        lies = {**ada, "x-treeline-client": "eve", "x-forwarded-for": "6.6.6.6"}
        for headers in (ada, lies):
            answer = await plane.complete(headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "too_many_requests"
        assert (await plane.complete(headers=bob)).status_code == 200
        for writer in writers:
            writer.close()
        await until(lambda: equal(plane.status(headers=ada), 200), "the client may ask again")
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_refusals_total{code="too_many_requests"}'] >= 2


@pytest.mark.integration
async def test_a_request_of_a_key_counts_until_its_answer_has_ended(tmp_path: Path) -> None:
    keys = {"api_keys": {"ada": "sk-ada", "bob": "sk-bob"}}
    ada, bob = ({"x-api-key": f"sk-{name}"} for name in ("ada", "bob"))
    async with engines(1) as fakes, data_plane(tmp_path, fakes, "--max-client-requests", "3", **keys) as plane:
        fakes[0].hold_body = asyncio.Event()
        running = [asyncio.create_task(plane.complete(headers=ada)) for _ in range(3)]

        stats = "cluster.pods.upstream_rq_2xx$"
        await until(
            lambda: so(plane.envoy.stats(stats), lambda now: 3 in now.values()), "the answers to all three have begun"
        )
        refused = await plane.complete(headers=ada)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        running.append(asyncio.create_task(plane.complete(headers=bob)))
        await until(lambda: len(fakes[0].served) == 4, "another key is served")
        fakes[0].hold_body.set()
        assert {(await answer).status_code for answer in running} == {200}
        await until(lambda: equal(plane.status(headers=ada), 200), "the client may ask again")

        await until(lambda: equal(plane.picker.metric("treeline_epp_extproc_streams"), 0), "no stream is left")


@pytest.mark.integration
async def test_a_picker_that_stops_waits_for_no_answer_of_a_key(tmp_path: Path) -> None:
    keys = {"api_keys": {"ada": "sk-ada"}}
    async with engines(1) as fakes:
        fakes[0].hold_body = asyncio.Event()
        flags = ("--max-client-requests", "3", "--drain-timeout", "600")
        async with data_plane(tmp_path, fakes, *flags, **keys) as plane:
            running = asyncio.create_task(plane.complete(headers={"x-api-key": "sk-ada"}))
            await until(
                lambda: so(plane.envoy.stats("cluster.pods.upstream_rq_2xx$"), lambda now: 1 in now.values()),
                "the answer has begun",
            )
            await asyncio.wait_for(plane.picker.stop(), 60)
            fakes[0].hold_body.set()
            assert (await running).status_code == 200
