"""How many requests of each client the picker lets in."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.epp_io import data_plane, engines, until
from treeline_epp.extproc.clients import Clients, client_of
from treeline_epp.options import options_of


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=60), st.integers(1, 4))
def test_no_client_has_more_than_its_share_and_none_is_remembered_without_a_request(
    steps: list[tuple[bool, str]], limit: int
) -> None:
    clients, inside = Clients(limit), Counter[str]()
    for enters, name in steps:
        if enters:
            let_in = clients.enter({"x-treeline-client": name})
            assert (let_in == name) == (inside[name] < limit)
            inside[name] += let_in is not None
        elif inside[name]:
            clients.leave(name)
            inside[name] -= 1
        assert len(clients) == len(+inside)


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


def test_a_share_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--endpoint", "a=127.0.0.1:8000", "--max-client-requests", "0"])
    assert "at least 1" in capsys.readouterr().err


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

        async def at_the_picker() -> bool:
            return (await plane.picker.metrics())["treeline_epp_extproc_streams"] == 3

        await until(at_the_picker, "the picker has heard of all three")
        # Its name counts, and nothing that it says of itself.
        lies = {**ada, "x-treeline-client": "eve", "x-forwarded-for": "6.6.6.6"}
        for headers in (ada, lies):
            answer = await plane.complete(headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "too_many_requests"
        assert (await plane.complete(headers=bob)).status_code == 200
        for writer in writers:
            writer.close()

        async def served() -> bool:
            return (await plane.complete(headers=ada)).status_code == 200

        await until(served, "the client may ask again")
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_refusals_total{code="too_many_requests"}'] >= 2
