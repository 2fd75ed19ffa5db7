"""Quotas of clients: buckets, counting and refunds, the file, and the answers to clients."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flow_world import MODES, Caller, FlowWorld
from treeline_epp.files import read_file
from treeline_epp.flow import quotas as quotas_module
from treeline_epp.flow.assembly import quota_samples
from treeline_epp.flow.quotas import (
    MOST_BYTES,
    MOST_CLIENTS,
    Limits,
    QuotaFile,
    QuotaFileError,
    Quotas,
    QuotaTable,
)
from treeline_epp.flow.settings import FlowSettings
from treeline_epp.picking.decision import FlowRefused
from treeline_wire import headers as names


def gauges(file: QuotaFile) -> dict[str, float]:
    return {name: value for _, name, _, _, value in quota_samples(file)}


def quotas(**limits: int) -> Quotas:
    return Quotas(QuotaTable({"a": Limits(**limits)}))


def test_a_client_gets_its_tokens_and_then_a_retry_time() -> None:
    of = quotas(tokens_per_minute=600, requests_per_minute=10)
    assert of.spend("a", 400, 0.0) is not None
    with pytest.raises(FlowRefused) as caught:
        of.spend("a", 400, 0.0)
    error = caught.value
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 20.0)
    assert str(error) == "Rate limit reached for a: 600 tokens per minute."
    assert dict(error.headers) == {
        "x-ratelimit-limit-requests": b"10",
        "x-ratelimit-remaining-requests": b"9",
        "x-ratelimit-reset-requests": b"6s",
        "x-ratelimit-limit-tokens": b"600",
        "x-ratelimit-remaining-tokens": b"200",
        "x-ratelimit-reset-tokens": b"40s",
    }
    assert of.spend("a", 400, 20.0) is not None
    assert of.exceeded == 1


def test_a_client_without_limits_is_not_counted() -> None:
    of = quotas(tokens_per_day=1)
    assert of.spend("b", 10**9, 0.0) is None
    assert len(of) == 0


def test_the_default_quota_holds_for_each_client_separately() -> None:
    of = Quotas(QuotaTable({"free": Limits()}, default=Limits(requests_per_minute=1)))
    for client in ("x", "y"):
        assert of.spend(client, 5, 0.0) is not None
        with pytest.raises(FlowRefused):
            of.spend(client, 5, 0.0)
    for _ in range(5):
        of.spend("free", 5, 0.0)


def test_unused_tokens_are_refunded_and_excess_tokens_become_a_debt() -> None:
    of = quotas(tokens_per_minute=600, requests_per_minute=600)
    spend = of.spend("a", 500, 0.0)
    assert spend is not None
    spend.took(900, 0.0)
    with pytest.raises(FlowRefused) as caught:
        of.spend("a", 1, 0.0)
    assert caught.value.retry_after_s == pytest.approx(30.1)
    spend.give_back(0.0)
    assert dict(spend.account.headers(0.0))["x-ratelimit-remaining-tokens"] == b"600"
    assert dict(spend.account.headers(0.0))["x-ratelimit-remaining-requests"] == b"600"


def test_a_request_larger_than_the_bound_passes_when_the_bucket_is_full() -> None:
    of = quotas(tokens_per_minute=60)
    assert of.spend("a", 200, 0.0) is not None
    with pytest.raises(FlowRefused) as caught:
        of.spend("a", 200, 0.0)
    assert caught.value.retry_after_s == 200.0
    assert of.spend("a", 200, 200.0) is not None


def test_changed_limits_reset_the_bucket_and_equal_ones_keep_it() -> None:
    of = Quotas(QuotaTable({"a": Limits(requests_per_day=1), "b": Limits(requests_per_day=1)}))
    of.spend("a", 1, 0.0)
    of.spend("b", 1, 0.0)
    of.set(QuotaTable({"a": Limits(requests_per_day=1), "b": Limits(requests_per_day=2)}))
    with pytest.raises(FlowRefused):
        of.spend("a", 1, 0.0)
    assert of.spend("b", 1, 0.0) is not None


def test_clients_without_number_do_not_fill_the_memory() -> None:
    of = Quotas(QuotaTable(default=Limits(requests_per_day=5)))
    for number in range(MOST_CLIENTS + 50):
        of.spend(str(number), 1, 0.0)
    assert len(of) == MOST_CLIENTS


def test_a_client_with_its_own_limits_keeps_its_count_among_many_others() -> None:
    own, day = Limits(requests_per_day=1), Limits(requests_per_day=5)
    clients = {str(number): own for number in range(MOST_CLIENTS + 50)}
    of = Quotas(QuotaTable(clients, default=day))
    for number in range(2 * MOST_CLIENTS + 50):
        of.spend(str(number), 1, 0.0)
    of.spend("default", 1, 0.0)
    of.set(QuotaTable({**clients, "default": day}, default=day))
    for client in clients:
        with pytest.raises(FlowRefused):
            of.spend(client, 1, 1.0)
    for number in range(3 * MOST_CLIENTS, 4 * MOST_CLIENTS):
        of.spend(str(number), 1, 1.0)
    for _ in range(4):
        of.spend("default", 1, 1.0)
    with pytest.raises(FlowRefused):
        of.spend("default", 1, 1.0)
    assert len(of) == 2 * MOST_CLIENTS + 51


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 900), st.floats(0, 2)), max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_client_exceeds_its_bound_over_any_period(asked: list[tuple[float, int, float]]) -> None:
    of, now, got = quotas(tokens_per_minute=600), 0.0, list[tuple[float, float]]()
    for later, tokens, took in asked:
        now += later
        try:
            spend = of.spend("a", tokens, now)
        except FlowRefused as error:
            now += error.retry_after_s + 1e-6
            spend = of.spend("a", tokens, now)
        assert spend is not None
        spend.took(tokens * took, now)
        got.append((now, tokens * took))
    most = 2 * 900  # one request more than the bucket holds
    for at, (since, _) in enumerate(got):
        for until, _ in got[at:]:
            taken = sum(tokens for when, tokens in got[at:] if when <= until)
            assert taken <= 600 + (until - since) * 10 + most + 1


async def test_the_file_is_read_again_and_a_broken_one_is_reported_and_ignored(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("clients: {a: {requests_per_day: 1}}")
    file = QuotaFile(path)
    file.quotas.spend("a", 1, 0.0)
    new = tmp_path / "new.yaml"

    async def still_holds() -> None:
        await file.refresh()
        await file.refresh()
        with pytest.raises(FlowRefused):
            file.quotas.spend("a", 1, 0.0)
        assert file.error
        assert gauges(file)["flow_quota_file_usable"] == 0

    for text in ("clients: {a: {requests_per_week: 1}}", "clients: [", "\xff", f"# {'long' * (MOST_BYTES // 4)}"):
        new.write_text(text)
        os.replace(new, path)
        await still_holds()
    path.unlink()
    await still_holds()
    new.write_text("default: {requests_per_day: 3}")
    os.replace(new, path)
    await file.refresh()
    file.quotas.spend("a", 1, 0.0)
    assert (file.error, len(file.table.clients), gauges(file)["flow_quota_file_usable"]) == ("", 0, 1)
    assert caplog.text.count("the old quotas stay") == 5, "each once"


async def test_a_restored_file_is_used_and_keeps_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("default: {requests_per_day: 1}")
    file = QuotaFile(path)
    file.quotas.spend("a", 1, 0.0)
    path.rename(tmp_path / "away")
    await file.refresh()
    assert "No such file" in file.error
    (tmp_path / "away").rename(path)
    await file.refresh()
    assert (file.error, len(file.quotas)) == ("", 1)


async def test_an_unchanged_file_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed, decode = tmp_path / "quotas.yaml", list[bytes](), quotas_module.decode_yaml

    def counting(text: bytes, into: type[Any]) -> Any:
        parsed.append(text)
        return decode(text, into)

    monkeypatch.setattr(quotas_module, "decode_yaml", counting)
    path.write_text("default: {requests_per_day: 1}")
    file = QuotaFile(path)
    for text in ("default: {requests_per_day: 1}", "default: [", "default: {requests_per_day: 2}"):
        for _ in range(3):
            path.write_text(text)
            await file.refresh()
    assert len(parsed) == 3
    assert file.table.default == Limits(requests_per_day=2)


async def test_a_slow_file_delays_no_request(tmp_path: Path) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text("default: {requests_per_day: 1}")
    reading, go_on = threading.Event(), threading.Event()

    def slowly(file: Path, most: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            reading.set()
            assert go_on.wait(60)
        return read_file(file, most)

    file = QuotaFile(path, slowly)
    path.write_text("default: {requests_per_day: 25}")
    looking = asyncio.create_task(file.refresh())
    await asyncio.to_thread(reading.wait, 60)
    file.quotas.spend("a", 1, 0.0)
    with pytest.raises(FlowRefused):
        file.quotas.spend("a", 1, 0.0)
    assert not looking.done()
    go_on.set()
    await looking
    file.quotas.spend("a", 1, 0.0)


@pytest.mark.parametrize("text", ["clients: {a: {tokens_per_minute: 0}}", "keys: {}", "clients: {a: 5}", "- a"])
def test_an_invalid_file_is_refused_with_a_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "quotas.yaml"
    path.write_text(text)
    with pytest.raises(QuotaFileError, match=r"quotas\.yaml: "):
        QuotaFile(path)


# ---- through the picker ----------------------------------------------------------------------------------------------


def world(table: QuotaTable, flow: FlowSettings | None = None) -> tuple[FlowWorld, Quotas]:
    made = FlowWorld(flow or FlowSettings(), engines=1)
    if flow is None:
        made.router.flow = None
    of = Quotas(table)
    made.router.quotas = of
    return made, of


def left(world: FlowWorld, of: Quotas, client: str = "a") -> dict[str, bytes]:
    return dict(of._named[client].headers(world.now))


def test_a_client_beyond_its_quota_gets_429_with_a_retry_time() -> None:
    made, _ = world(QuotaTable({"a": Limits(tokens_per_minute=3000)}))
    first, second, third = (made.send("a", 1000) for _ in range(3))
    assert (first.destination, second.destination) == ("10.0.0.0:8000",) * 2
    assert third.refused == 429
    headers = third.headers
    assert headers["x-ratelimit-limit-tokens"] == "3000"
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert int(headers["retry-after"]) >= 1
    assert made.counted("refusals_total", code="rate_limit_exceeded") == 1
    assert made.send("b", 1000).destination


def test_engines_reports_count_and_clients_see_the_rest_of_their_quota() -> None:
    made, of = world(QuotaTable({"a": Limits(tokens_per_minute=60_000)}))
    caller = made.send("a", 1000, mode=MODES.FULL_DUPLEX_STREAMED)
    caller.answered(b'data: {"choices":[]}\n\ndata: {"usage":{"prompt_tokens":900,"completion_tokens":5000}}\n\n')
    (head,) = [reply for reply in caller.replies if reply.WhichOneof("response") == "response_headers"]
    told = {h.header.key: h.header.raw_value for h in head.response_headers.response.header_mutation.set_headers}
    assert told["x-ratelimit-limit-tokens"] == b"60000"
    assert int(told["x-ratelimit-remaining-tokens"]) in range(58_500, 59_100)
    assert left(made, of)["x-ratelimit-remaining-tokens"] == b"54100"


def test_without_a_body_the_count_of_the_headers_stays() -> None:
    made, of = world(QuotaTable({"a": Limits(tokens_per_minute=60_000)}))
    made.send("a", 1000).answered()
    assert left(made, of)["x-ratelimit-remaining-tokens"] == b"58999"


def test_a_failed_request_costs_no_tokens() -> None:
    made, of = world(QuotaTable({"a": Limits(tokens_per_minute=60_000)}))
    made.send("a", 1000).answered(status="500")
    assert left(made, of)["x-ratelimit-remaining-tokens"] == b"60000"


def gone(caller: Caller) -> None:
    caller.session.close()


def test_tokens_of_requests_that_reached_no_endpoint_are_refunded() -> None:
    limits = QuotaTable({"a": Limits(tokens_per_minute=60_000, requests_per_minute=100)})
    made, of = world(limits, FlowSettings(mode="wait", wait_seconds=0.5, ttl_seconds=0.3))
    for _ in range(5):
        made.send("b", 1000)
    full = {"x-ratelimit-remaining-tokens": b"60000", "x-ratelimit-remaining-requests": b"100"}
    waiting = made.send("a", 1000)
    assert waiting.ticket is not None
    assert left(made, of)["x-ratelimit-remaining-requests"] == b"99"
    gone(waiting)
    assert full.items() <= left(made, of).items()
    late = made.send("a", 30_000)
    made.flow.settings = FlowSettings(mode="wait", max_requests=1)
    assert made.send("a", 1000).refused == 429, "the queue is full"
    made.now += 0.4
    made.flow.pump()
    late.go_on()
    assert late.refused or late.destination
    if late.refused:
        assert full.items() <= left(made, of).items()


def test_without_an_endpoint_nothing_is_counted() -> None:
    made, of = world(QuotaTable({"a": Limits(requests_per_day=100)}))
    made.picker.remove_endpoint("e0")
    assert made.send("a").refused == 503
    assert left(made, of)["x-ratelimit-remaining-requests"] == b"100"


def test_a_proxy_that_asks_twice_for_one_request_counts_it_once() -> None:
    made, of = world(QuotaTable({"a": Limits(tokens_per_minute=60_000, requests_per_minute=100)}))
    first = made.send("a", 1000, mode=MODES.FULL_DUPLEX_STREAMED)
    made.sent -= 1
    again = made.send("a", 1000, **{names.DESTINATION: first.destination})
    assert left(made, of)["x-ratelimit-remaining-requests"] == b"99"
    first.answered(b'data: {"usage":{"prompt_tokens":900,"completion_tokens":5000}}\n\n')
    again.answered()
    assert left(made, of)["x-ratelimit-remaining-tokens"] == b"54100"
