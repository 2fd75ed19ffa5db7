"""A prompt computed on one engine and answered by another, behind a real Envoy: the client notices nothing but time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.epp_io import FakeEngine, Plane, data_plane, until
from support.pairs import HANDED_OVER, new_prompt, sglang, started, vllm

pytestmark = [pytest.mark.integration, pytest.mark.deep]

MANY = 1_000_000
"""So many requests run that none should wait for a prompt, though the stand-ins look very fast."""


@contextlib.asynccontextmanager
async def pair(
    folder: Path, prefill: FakeEngine, decode: FakeEngine, *flags: str, **settings: Any
) -> AsyncIterator[Plane]:
    """Run both behind Envoy and a picker that has read their pages."""
    async with started(prefill, decode), data_plane(folder, [prefill, decode], *flags, **settings) as plane:

        async def paired() -> bool:
            listed = (await plane.picker.get("/endpoints")).json()["pools"]["default"]["endpoints"]
            return all(one["ready"] and one["in_flight"] is not None for one in listed)

        await until(paired, "both are ready, and their load is known")
        yield plane


def body_of(engine: FakeEngine, at: int = -1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.served[at].body)
    return found


async def whole(plane: Plane, decode: FakeEngine, **request: Any) -> None:
    """Check that a request went to the decode engine as the client sent it."""
    prompt = new_prompt()
    answer = await plane.complete(prompt, **request)
    assert answer.status_code == 200
    assert answer.json()["engine"] == decode.name
    assert body_of(decode) == {"model": "tiny", "prompt": prompt, **request}


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_vllm_computes_on_one_and_answers_on_the_other(tmp_path: Path, mode: str) -> None:
    prefill, decode = vllm("p", "prefill"), vllm("d", "decode", running=MANY)
    decode.reply_headers = {"content-type": "text/event-stream"}
    settings = {"request_body_mode": mode, "message_timeout_s": 0.2, "fail_open": False}
    async with pair(tmp_path, prefill, decode, **settings) as plane:
        prefill.hold = asyncio.Event()
        wanted = {"max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s"}
        prompt = new_prompt()
        answer = asyncio.create_task(plane.complete(prompt, headers={"x-request-id": "mine"}, **wanted))
        await until(lambda: prefill.served, "the prefill engine is asked")
        await asyncio.wait([answer], timeout=0.5)  # Envoy's own patience is over long ago
        assert not decode.served
        prefill.hold.set()
        assert (await answer).headers["content-type"] == "text/event-stream"
        asked, sent = body_of(prefill), body_of(decode)
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        params = {"do_remote_decode": True, "do_remote_prefill": False, **unknown}
        one = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stream": False, "stream_options": None}
        common = {"model": "tiny", "prompt": prompt, "cache_salt": "s"}
        assert asked == {**common, **one, "kv_transfer_params": params}
        assert sent == {**common, **wanted, "kv_transfer_params": HANDED_OVER}
        assert prefill.served[0].headers["x-request-id"] == decode.served[0].headers["x-request-id"]
        metrics = await plane.picker.metrics()
        assert metrics['treeline_epp_forms_total{form="apart"}'] == 1
        assert metrics['treeline_epp_prefills_total{outcome="headers"}'] == 1
        assert (await plane.complete("short")).status_code == 200
        assert len(prefill.served) == 1, "a short prompt stays whole"


async def test_a_large_body_is_handed_over_too(tmp_path: Path) -> None:
    prefill, decode = vllm("p", "prefill"), vllm("d", "decode", running=MANY)
    async with pair(tmp_path, prefill, decode) as plane:
        prompt = new_prompt(40_000)
        assert (await plane.complete(prompt)).status_code == 200
        assert body_of(prefill)["prompt"] == body_of(decode)["prompt"] == prompt
        assert body_of(decode)["kv_transfer_params"] == HANDED_OVER


def refuses(prefill: FakeEngine) -> None:
    prefill.reply_status = 503


def answers_nonsense(prefill: FakeEngine) -> None:
    prefill.reply_body = b"[1, 2"


def says_nothing_of_the_prompt(prefill: FakeEngine) -> None:
    prefill.reply_body = b'{"kv_transfer_params": null}'


def answers_ten_megabytes(prefill: FakeEngine) -> None:
    prefill.reply_body = b'{"kv_transfer_params": {}, "x": "' + b"x" * 10_000_000 + b'"}'


def speaks_no_http(prefill: FakeEngine) -> None:
    prefill.last_words = b"\x00\x01\x02"


def hangs_up(prefill: FakeEngine) -> None:
    prefill.last_words = b""


def is_silent(prefill: FakeEngine) -> None:
    prefill.hold = asyncio.Event()


FAULTS = (
    refuses,
    answers_nonsense,
    says_nothing_of_the_prompt,
    answers_ten_megabytes,
    speaks_no_http,
    hangs_up,
    is_silent,
)


async def test_whatever_the_prefill_engine_does_the_request_is_answered(tmp_path: Path) -> None:
    prefill, decode = vllm("p", "prefill"), vllm("d", "decode", running=MANY)
    async with pair(tmp_path, prefill, decode) as plane:
        for fault in FAULTS:
            prefill.reply_status, prefill.last_words, prefill.hold = 200, None, None
            prefill.reply_body = json.dumps({"kv_transfer_params": HANDED_OVER}).encode()

            async def heals() -> bool:
                before = len(prefill.served)
                assert (await plane.complete(new_prompt())).status_code == 200
                return len(prefill.served) > before and "kv_transfer_params" in body_of(decode)

            await until(heals, "the breaker lets a request try it")
            fault(prefill)
            before = len(prefill.served)
            await whole(plane, decode, max_tokens=5, stream=False)
            assert len(prefill.served) > before, fault
        await prefill.stop()
        await whole(plane, decode, max_tokens=5)
        state = (await plane.picker.get("/debug/endpoints")).json()
        assert all(one["reservations"] == 0 for one in state["endpoints"] if one["name"] == "p")


async def test_a_client_that_leaves_ends_the_call_at_once(tmp_path: Path) -> None:
    prefill, decode = vllm("p", "prefill"), vllm("d", "decode", running=MANY)
    async with pair(tmp_path, prefill, decode) as plane:
        prefill.hold = asyncio.Event()
        before = prefill.hung_up
        answer = asyncio.create_task(plane.complete(new_prompt()))
        await until(lambda: prefill.served, "the prefill engine is asked")
        answer.cancel()
        await until(lambda: prefill.hung_up > before, "the prefill engine sees that its client has gone")

        async def forgotten() -> bool:
            found = await plane.picker.metrics()
            return found['treeline_epp_prefills_total{outcome="cancelled"}'] == 1

        await until(forgotten, "nothing of it is left")
        state = (await plane.picker.get("/debug/endpoints")).json()
        assert [one["reservations"] for one in state["endpoints"]] == [0, 0]
        assert not decode.served
        prefill.hold = None
        await plane.complete(new_prompt())
        assert body_of(decode)["kv_transfer_params"] == HANDED_OVER, "that was no fault of the prefill engine"


async def test_clients_name_no_engine(tmp_path: Path) -> None:
    decode, prefill = vllm("d", "decode"), vllm("p", "prefill")
    async with pair(tmp_path, prefill, decode) as plane:
        names = ("x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
        answer = await plane.complete("hello", headers=dict.fromkeys(names, "10.9.9.9:80"), kv_transfer_params=None)
        assert answer.status_code == 200
        assert not set(names) & set(decode.served[-1].headers)
        for member in ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
            for path in ("/v1/completions", "/v1/embeddings"):
                request = {"model": "tiny", "prompt": "hello", "input": "hello", member: {"remote_host": "10.9.9.9"}}
                answer = await plane.http.post(path, json=request)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, member)
        assert len(decode.served) == 1


async def test_a_pair_that_cannot_be_is_listed_with_the_reason(tmp_path: Path) -> None:
    prefill, decode = vllm("p", "prefill", block_size=32), vllm("d", "decode", running=MANY)
    async with started(prefill, decode), data_plane(tmp_path, [prefill, decode]) as plane:

        async def problems() -> dict[str, tuple[bool, str | None]]:
            found = (await plane.picker.get("/endpoints")).json()["pools"]["default"]["endpoints"]
            return {one["name"]: (one["ready"], one["problem"]) for one in found}

        sides = "the block size is 32 at the prefill endpoint and 16 at the decode endpoint"
        expected = {
            "p": (False, f"it cannot be paired with d: {sides}"),
            "d": (True, f"it cannot be paired with p: {sides}"),
        }

        async def as_expected() -> bool:
            return await problems() == expected

        await until(as_expected, "both are registered", state=lambda: expected)
        await whole(plane, decode)
        assert not prefill.served


# -- SGLang


async def test_sglang_gets_both_requests_at_once(tmp_path: Path) -> None:
    prefill, decode = sglang("p", "prefill"), sglang("d", "decode")
    prefill.hold = asyncio.Event()
    async with started(prefill, decode), data_plane(tmp_path, [prefill, decode]) as plane:

        async def answered() -> bool:
            return (await plane.complete("hello", max_tokens=7, stream=False)).status_code == 200

        await until(answered, "both are known")  # while the prefill engine has not answered
        first, second = body_of(prefill, 0), body_of(decode, 0)
        assert first == {**second, "stream": False}
        assert (second["bootstrap_host"], second["bootstrap_port"], second["max_tokens"]) == ("127.0.0.1", 9876, 7)
        assert 0 <= second["bootstrap_room"] < 2**63
        await plane.complete("hello")
        rooms = [body_of(engine, at)["bootstrap_room"] for at in (0, 1) for engine in (prefill, decode)]
        assert rooms[0] == rooms[1] != rooms[2] == rooms[3]
        prefill.hold.set()


async def test_an_sglang_without_its_partner_gets_no_request(tmp_path: Path) -> None:
    prefill, decode = sglang("p", "prefill"), sglang("d", "decode")
    async with started(prefill, decode), data_plane(tmp_path, [prefill, decode]) as plane:

        async def answered(status: int) -> bool:
            return (await plane.complete("hello")).status_code == status

        await until(lambda: answered(200), "both are known")
        await prefill.stop()
        before = len(decode.served)
        assert await answered(503), "not even the first request after its death waits for a prompt"
        assert len(decode.served) == before
        await prefill.start()
        await until(lambda: answered(200), "it is back")


async def test_an_sglang_that_waits_in_vain_is_told(tmp_path: Path) -> None:
    prefill, decode = sglang("p", "prefill"), sglang("d", "decode")
    async with started(prefill, decode), data_plane(tmp_path, [prefill, decode]) as plane:

        async def answered() -> bool:
            return (await plane.complete("hello")).status_code == 200

        await until(answered, "both are known")
        prefill.reply_status = 503
        decode.hold_body = asyncio.Event()  # it sends headers, and waits for the prompt
        answer = asyncio.create_task(plane.complete("hello"))

        def told() -> bool:
            return decode.served[-1].path == "/abort_request"

        await until(told, "the decode engine is told to abort")
        assert body_of(decode) == {"rid": body_of(decode, -2)["rid"]}
        decode.hold_body.set()
        assert (await answer).status_code == 200


# -- llm-d


async def test_llm_ds_sidecar_gets_a_header(tmp_path: Path) -> None:
    prefill, decode = vllm("p", "prefill"), vllm("d", "decode", running=MANY)
    async with started(prefill, decode):
        file = tmp_path / "endpoints.yaml"
        entries = (
            f"{{name: {e.name}, address: '{e.address}', role: {e.role}, kv_transfer: llm-d}}" for e in (prefill, decode)
        )
        file.write_text(f"endpoints: [{', '.join(entries)}]")
        async with data_plane(tmp_path, [], "--endpoints-file", str(file)) as plane:
            prompts: list[str] = []

            async def apart() -> bool:
                prompts.append(new_prompt())
                await plane.complete(prompts[-1], headers={"x-prefiller-host-port": "10.9.9.9:80"})
                return decode.served[-1].headers.get("x-prefiller-host-port") == prefill.address

            await until(apart, "both are known")
            assert body_of(decode) == {"model": "tiny", "prompt": prompts[-1]}
            assert not prefill.served, "the sidecar asks it"
            await plane.complete("short")
            assert "x-prefiller-host-port" not in decode.served[-1].headers
