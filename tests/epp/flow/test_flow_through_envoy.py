"""Waiting requests behind a real Envoy: it knows that they wait, and a client that leaves frees everything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.epp_io import FakeEngine, Plane, data_plane, engines, running_picker, until
from treeline_epp.main import StartError


async def held(plane: Plane) -> float:
    metrics = await plane.picker.metrics()
    return sum(value for name, value in metrics.items() if name.startswith("treeline_epp_flow_held_requests"))


@pytest.mark.integration
@pytest.mark.deep
@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_request_is_held_until_the_first_engine_is_up(tmp_path: Path, mode: str) -> None:
    engine = FakeEngine(ready=False)
    await engine.start()
    flags = ("--flow-control", "off:hold_empty_pool_seconds=30")
    settings = {"request_body_mode": mode, "fail_open": False, "message_timeout_s": 0.2}
    try:
        async with data_plane(tmp_path, [engine], *flags, **settings) as plane:
            answers = [asyncio.create_task(plane.complete(f"hello {number}")) for number in range(3)]
            await until(lambda: held_is(plane, 3), "three that wait")
            await asyncio.wait(answers, timeout=0.5)  # Envoy's own patience is over long ago
            assert not any(answer.done() for answer in answers)
            engine.ready = True
            assert [(await answer).status_code for answer in answers] == [200] * 3
            assert len(engine.served) == 3
            assert await held(plane) == 0
    finally:
        await engine.stop()


@pytest.mark.integration
@pytest.mark.deep
async def test_a_request_is_held_until_there_is_an_endpoint_at_all(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text("endpoints: []")
    flags = ("--endpoints-file", str(file), "--flow-control", "off:hold_empty_pool_seconds=30")
    async with engines(count=1) as fakes, data_plane(tmp_path, [], *flags, fail_open=False) as plane:
        answers = [asyncio.create_task(plane.complete("hello")) for _ in range(2)]
        answers.append(asyncio.create_task(plane.complete("hello", model="unknown")))
        await until(lambda: held_is(plane, 3), "three that wait")
        new = tmp_path / "new.yaml"
        new.write_text(f"endpoints: [{{name: e0, address: '{fakes[0].address}'}}]")
        new.replace(file)
        assert [(await answer).status_code for answer in answers] == [200, 200, 404]
        assert [seen.path for seen in fakes[0].served] == ["/v1/completions"] * 2


async def held_is(plane: Plane, count: int) -> bool:
    return await held(plane) == count


@pytest.mark.integration
@pytest.mark.deep
async def test_clients_that_leave_are_forgotten_and_others_learn_of_the_shutdown(tmp_path: Path) -> None:
    engine = FakeEngine(ready=False)
    await engine.start()
    flags = ("--flow-control", "off:hold_empty_pool_seconds=30")
    try:
        async with data_plane(tmp_path, [engine], *flags, fail_open=False) as plane:
            going, staying = (asyncio.create_task(plane.complete(word)) for word in ("going", "staying"))
            await until(lambda: held_is(plane, 2), "two that wait")
            going.cancel()
            await until(lambda: held_is(plane, 1), "one that waits")
            plane.picker.stopping.set()
            answer = await staying
            assert answer.status_code == 503
            assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-shutting-down"
            assert answer.json()["error"]["code"] == "shutting_down"
    finally:
        await engine.stop()


@pytest.mark.integration
@pytest.mark.deep
async def test_engines_stay_within_their_bound_and_all_requests_are_served(tmp_path: Path) -> None:
    flags = ("--flow-control", "requests:endpoint_requests=2")
    async with engines(count=2, hold=asyncio.Event()) as fakes, data_plane(tmp_path, fakes, *flags) as plane:
        answers = [asyncio.create_task(plane.complete(f"hello {number}")) for number in range(10)]
        await until(lambda: held_is(plane, 6), "six that wait")
        await until(lambda: sum(len(fake.served) for fake in fakes) == 4, "four at the engines")
        for fake in fakes:
            assert fake.hold is not None
            fake.hold.set()
        assert [(await answer).status_code for answer in answers] == [200] * 10
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_flow_outcomes_total{outcome="dispatched"}'] == 6
        assert metrics["treeline_epp_flow_wait_seconds_count"] == 6


@pytest.mark.integration
@pytest.mark.deep
async def test_every_answer_carries_the_clients_quota(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("default: {requests_per_minute: 2, tokens_per_minute: 60000}")
    async with engines(count=1) as fakes, data_plane(tmp_path, fakes, "--quotas-file", str(file)) as plane:
        answers = [await plane.complete(["hello", "again"], n=5, max_tokens=1000) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        left_tokens = int(answers[0].headers["x-ratelimit-remaining-tokens"])
        assert left_tokens in range(49_000, 54_000), "of ten outputs; a thousand tokens come back a second"
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["1", "0", "0"]
        assert {answer.headers["x-ratelimit-limit-tokens"] for answer in answers} == {"60000"}
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        metrics = await plane.picker.metrics()
        assert metrics["treeline_epp_flow_quota_exceeded_total"] == 1


@pytest.mark.integration
@pytest.mark.deep
async def test_an_output_of_any_length_counts_where_envoy_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("default: {tokens_per_day: 1000000}")
    flags = ("--quotas-file", str(file))
    usage = {"prompt_tokens": 9, "completion_tokens": 2_000_000}
    async with (
        engines(count=1) as fakes,
        data_plane(tmp_path, fakes, *flags, response_body_mode="STREAMED") as plane,
    ):
        fakes[0].reply_body = json.dumps({"choices": [], "usage": usage}).encode()
        assert (await plane.complete("hello")).json()["usage"] == usage
        await until(lambda: refused(plane), "the debt is known")


async def refused(plane: Plane) -> bool:
    return (await plane.complete("hello")).status_code == 429


@pytest.mark.integration
@pytest.mark.deep
async def test_clients_are_distinguished_by_the_configured_header(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("clients: {batch: {requests_per_minute: 1}}")
    flags = ("--quotas-file", str(file), "--fairness-header", "X-Team")
    async with engines(count=1) as fakes, data_plane(tmp_path, fakes, *flags) as plane:
        for team, statuses in (("batch", [200, 429]), ("chat", [200, 200])):
            answers = [await plane.complete("hello", headers={"x-team": team}) for _ in range(2)]
            assert [answer.status_code for answer in answers] == statuses


@pytest.mark.integration
@pytest.mark.deep
async def test_a_running_picker_reports_a_broken_quota_file_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "quotas.yaml"
    file.write_text("default: {requests_per_minute: 2}")
    flags = ("--endpoint", "a=127.0.0.1:1", "--quotas-file", str(file))
    async with running_picker(*flags, debug=True) as picker:

        async def told(usable: bool) -> bool:
            return (await picker.metrics())["treeline_epp_flow_quota_file_usable"] == usable

        assert await told(True)
        file.write_text("default: {requests_per_minuet: 2}")
        await until(lambda: told(False), "the fault is reported")
        file.write_text("default: {requests_per_minute: 3}")
        await until(lambda: told(True), "it is mended")


async def test_an_unreadable_quota_file_prevents_the_start_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--quotas-file .*no-such: "):
        async with running_picker("--endpoint", "a=127.0.0.1:1", "--quotas-file", str(tmp_path / "no-such")):
            pass
